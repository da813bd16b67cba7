"""The option `cramming export --test`: every client loads the folder in a process of its own.

The reference is computed by the suite's engine on packed tokens.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cramming.model.attention import Packing
from cramming.model.classifier import POOLINGS
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM
from cramming.progress import say
from eval import export_clients
from eval.export_clients import CLIENTS
from eval.finetune.encode import load_encoder

TIMEOUT_SECONDS = 600
RESULT_BEGINS = ('{"version": ', '{"text": ')
TEXTS = [  # of different lengths, so that all but the longest are padded
    "The museum opens at nine, and the last visitors leave the building a little before the evening.",
    "A cat sleeps on the sofa.",
    "Rain!",
    "She wrote 3 long letters to her brother, who lived far away (in Rome).",
    "Is the train late?",
]


ClientResult = tuple[str, str, str]  # client, version, result


def check_clients(
    model: MaskedLM | Encoder, folder: Path, pooling: str, max_length: int, python: str | None
) -> list[ClientResult]:
    """Return what each client made of the folder.

    `python` is the interpreter of the environment with the clients, None for this one.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python:
        python = str(Path(python).absolute())  # the clients have a working directory of their own
        environment.pop("PYTHONPATH", None)  # that of this environment
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        environment["HF_HOME"] = str(scratch / "cache")
        # a copy: beside the original lie modules of this suite, which would hide others of their names
        program = str(shutil.copy(export_clients.__file__, scratch))
        torch.save(compute_reference(model, folder, pooling, max_length), scratch / "reference.pt")
        (scratch / "model").symlink_to(folder)
        for name in CLIENTS:
            command = [python or sys.executable, program, name, "model", "reference.pt"]
            result = _run(name, command, scratch, environment)
            say(f"tested: {' '.join(filter(None, result[:2]))}: {result[2]}")
            results.append(result)
    return results


def _run(name: str, command: list[str], scratch: Path, environment: dict[str, str]) -> ClientResult:
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return name, "", f"not done after {TIMEOUT_SECONDS} seconds"
    # a client may print, too, and after the result
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT_BEGINS)]
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines() or [""]
        problem = f"not loadable: ended with code {done.returncode} ({errors[-1][:200]})"
        return name, "", problem
    result = json.loads(lines[-1])
    return name, result.get("version", ""), result["text"]


@torch.no_grad()
def compute_reference(
    model: MaskedLM | Encoder, folder: Path, pooling: str, max_length: int
) -> dict[str, Any]:
    """Return token ids of `TEXTS` and what the engine computes for them (`export_clients.Exported`).

    Texts that the tokenizer turns into the same ids are left out.
    """
    vocab_size = model.config.vocab_size
    assert vocab_size is not None
    sequences, _ = load_encoder(folder, True, max_length, vocab_size)((TEXTS,))
    distinct = {tuple(ids): text for ids, text in zip(sequences, TEXTS)}
    lengths = [len(ids) for ids in distinct]
    bounds_S = torch.tensor([0, *lengths]).cumsum(0).int()
    ids_T = torch.cat([torch.tensor(ids) for ids in distinct])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packing = Packing(bounds_S, None, max(lengths))
    model = model.eval()
    encoder = model.encoder if isinstance(model, MaskedLM) else model
    hidden_TD = encoder(ids_T, positions_T, packing)
    states = {"hidden": hidden_TD}
    if isinstance(model, MaskedLM):
        all_T = torch.arange(len(ids_T))
        states["logits"] = model.logits(ids_T, positions_T, packing, all_T)
    reference: dict[str, Any] = {"texts": list(distinct.values()), "max_length": max_length}
    reference["pooled"] = POOLINGS[pooling](hidden_TD, bounds_S)
    reference["mask"] = mask_BL.long()
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    reference["ids"] = torch.full(mask_BL.shape, pad_id).masked_scatter(mask_BL, ids_T)
    for name, state_TX in states.items():
        padded_BLX = state_TX.new_zeros(*mask_BL.shape, state_TX.shape[1])
        padded_BLX[mask_BL] = state_TX
        reference[name] = padded_BLX
    return reference
