"""Cramming: train the best BERT-style language model that one GPU can train from scratch in one day.

`cramming` is the library and the timed part; `data_prep` makes corpora, `eval` scores models. Start reading at
`cramming/cli.py` (the verbs) and `cramming/pretrain.py` (the experiment).
"""

import getpass
import os
import sys

__version__ = "0.1.0"

# Where the user lets compiled code be kept. Parts of torch set the first variable when they are imported, so it is read
# before anything else is.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
GIVEN_CACHES = {name: os.environ[name] for name in CACHE_VARIABLES if name in os.environ}
# torch's compiler asks for the user's name when it is imported. In a container the user's number may have none.
try:
    getpass.getuser()
except (KeyError, OSError):
    os.environ["USER"] = f"user{os.getuid()}"
# Segments of GPU memory that grow leave no gaps between micro-batches of several sizes, compilation and validation.
# Only on Linux, and not in WSL, where drivers before R615 fail with them (pytorch/pytorch#192330). torch reads the
# variable when it first needs memory of a GPU; processes that this one starts inherit it.
if (
    sys.platform == "linux"
    and "microsoft" not in os.uname().release.lower()
    and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
):
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# libgomp's threads wait for each other by spinning, by default for milliseconds: beside one other busy process training
# then takes many times as long (benchmarks/results/spinning_cpu_2026-11-25.md). Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
