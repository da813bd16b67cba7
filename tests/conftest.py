"""What all tests share: one thread, a small corpus made here, and composed settings.

The thread count is set before torch is imported: the suite must not fight for cores, and sums in one thread have one
order, which the tests of bit-for-bit equality need.
"""

# ruff: noqa: E402

import os

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import copy
import functools
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from cramming import CACHE_VARIABLES, progress
from cramming.config import config_folder
from cramming.overrides import compose as hydra_compose
from cramming.overrides import with_implied

torch.set_num_threads(1)

VOCABULARY = 300
_CACHES = {name: os.environ[name] for name in CACHE_VARIABLES if name in os.environ}


def pytest_configure() -> None:
    """Forget what torch has set while other conftests were imported: pytest's workers would take it for the user's."""
    _restore_caches()


def _restore_caches() -> None:
    for name in CACHE_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(_CACHES)


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    """Random state, signal handlers, matmul precision, the place of compiled code and where messages go belong to the
    process: no test may reach another by them."""
    console = progress._console
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    progress._console = console
    torch.set_rng_state(state)
    torch.set_float32_matmul_precision(precision)
    _restore_caches()


def write_corpus(
    folder: Path,
    *,
    documents: int = 400,
    shard_tokens: int = 4_000,
    seed: int = 0,
    spelling: str = "[PAD]",
) -> Path:
    """A corpus in the real format: random documents of `a b c ...` runs, learnable, in several shards.

    `spelling` shows how its special tokens are written, for example `<pad>`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    from cramming.config import file_sha256
    from cramming.data.manifest import FORMAT_VERSION, TOKENIZER, Manifest, TokenizerInfo
    from data_prep.shard_writer import ShardWriter

    folder.mkdir(parents=True)
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {name: spelling.replace("PAD", name.upper()).replace("pad", name) for name in names}
    words = [*special.values(), *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=special["unk"])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / TOKENIZER))

    rng = np.random.default_rng(seed)
    splits = {}
    for split, count in (("train", documents), ("validation", documents // 5)):
        writer = ShardWriter(folder, split, np.dtype("<u2"), shard_tokens)
        for _ in range(count):
            length, first = int(rng.integers(3, 90)), int(rng.integers(5, VOCABULARY))
            body = (first - 5 + np.arange(length)) % (VOCABULARY - 5) + 5
            writer.append(np.concatenate([[2], body, [3]]), np.array([0]))
        writer.close()
        splits[split] = writer.shards
    info = TokenizerInfo(
        "wordlevel",
        VOCABULARY,
        True,
        file_sha256(folder / TOKENIZER),
        special,
        {k: i for i, k in enumerate(special)},
    )
    manifest = Manifest(
        FORMAT_VERSION,
        "test",
        "0",
        "0" * 12,
        {"seed": seed},
        "uint16",
        info,
        [{"name": "test", "license": "none"}],
        {"documents": documents},
        {},
        splits,
    )
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus folder of about 19,000 training tokens over 300 words in five shards. Read-only: shared by all tests."""
    return write_corpus(tmp_path_factory.mktemp("corpora") / "tiny")


@pytest.fixture(scope="session")
def make_corpus() -> Callable[..., Path]:
    """`write_corpus`, for a test that needs a corpus of its own."""
    return write_corpus


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """The folder of a random masked language model for the small corpus, of an architecture that transformers lacks."""
    from cramming.model.config import ModelConfig
    from cramming.model.export import save_pretrained
    from cramming.model.heads import MaskedLM

    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=320,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        max_length=64,
        norm_order="pre",
        positions="scaled_sinusoidal",
        mlp="glu",
        head_transform=False,
        logit_softcap=5.0,
        init_std=0.2,
    )
    folder = tmp_path_factory.mktemp("teacher") / "final"
    save_pretrained(MaskedLM(config), folder, tiny_corpus / "tokenizer.json")
    return folder


# A model and a batch so small that a training step takes milliseconds.
TINY_RUN = [
    "precision=fp32",
    "model=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch=4",
    "train.log_every=1",
    "train.validations=2",
    "train.validation_tokens=512",
    "budget.steps=12",
    "checkpoint.keep_at=[]",
]


@pytest.fixture(scope="session")
def tiny_overrides(tiny_corpus: Path) -> list[str]:
    """Overrides of a run that takes a second: 12 steps of two micro-batches of four sequences."""
    return [f"data.corpus={tiny_corpus}", *TINY_RUN]


def before_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do `action` before the step of this number, counted from 1 from now on."""
    from cramming.engine import (
        Engine,
    )  # torch sets variables of the environment, which pytest's workers would inherit

    original, calls = Engine.forward_backward, [0]

    def counted(self: Engine, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            action()
        return original(self, *arguments, **named)

    patch.setattr(Engine, "forward_backward", counted)


@functools.cache
def _composed(*groups: str) -> dict[str, Any]:
    return hydra_compose(groups)


def compose_settings(*overrides: str) -> dict[str, Any]:
    """Return the recipe as every verb's `main` gets it.

    Hydra composes the groups (`model=tiny`), once per choice, since that takes a second; values are set here.
    """
    pairs = [override.split("=", 1) for override in with_implied(overrides)]
    groups = [key for key, _ in pairs if (config_folder() / key).is_dir()]
    settings = copy.deepcopy(_composed(*(f"{k}={v}" for k, v in pairs if k in groups)))
    for key, text in pairs:
        *sections, name = key.split(".")
        node = settings
        for section in sections:
            node = node[section]
        if key not in groups:
            assert name in node, f"no setting {key}"
            node[name] = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]
    return settings


@pytest.fixture(scope="session")
def compose() -> Callable[..., dict[str, Any]]:
    """`compose("seed=1", "model=tiny")` -> plain settings."""
    return compose_settings


@pytest.fixture
def rng() -> random.Random:
    """A seeded generator for tests over random cases."""
    return random.Random(1234)


@pytest.fixture(scope="session")
def tiny_source(tiny_corpus: Path) -> Any:
    """Batches of rows of 16 tokens from the small corpus."""
    from cramming.data.batches import BatchSource
    from cramming.data.corpus import Corpus
    from cramming.objectives.masking import MaskedTargets, Masker

    corpus = Corpus.open(tiny_corpus)
    masker = Masker(
        MaskedTargets(0.25, 0.8, 0.1),
        corpus.vocab_size,
        corpus.special_ids.mask,
        (0, 1, 2, 3, 4),
        0,
    )
    return BatchSource(corpus.stream("train"), masker, 16, "rows", 0)


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """`make_model(seed=0, **model settings)`: a masked language model of some 10,000 parameters."""
    from cramming.model.config import ModelConfig
    from cramming.model.heads import MaskedLM

    def make(seed: int = 0, **changes: Any) -> MaskedLM:
        torch.manual_seed(seed)
        values = {
            "vocab_size": 320,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 24,
        }
        return MaskedLM(ModelConfig(**{**values, "max_length": 32, **changes}))

    return make
