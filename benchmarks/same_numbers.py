"""Whether two commits compute the same: losses of short runs bit for bit, prepared corpora byte for byte.

    python benchmarks/same_numbers.py --program <before>/.venv/bin/cramming --text <file> --out before.json
    (the same with <now>, --out now.json --against before.json)

Each run trains on a CPU in fp32, is stopped by SIGTERM in the middle and resumed. All runs of one call read the corpus
that the call has prepared from the text, so they compare where the corpora are equal.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, STOP_AFTER = 50, 20
SMALL = [f"model.{name}" for name in ("hidden_size=64", "num_heads=4", "intermediate_size=96")]
RUNS = {
    "tiny": [],
    "crammed-bert": [
        "model=crammed-bert",
        *SMALL,
        "model.num_layers=3",
        "optim=adamw",
        "objective=mlm",
    ],
    "modern": [
        "model=modern",
        *SMALL,
        "model.num_layers=4",
        "train.packing=documents",
        "objective=mlm-allmask",
    ],
}
PREPARATIONS = {
    "plain": [],
    "everything": [
        "data/filters=strict",
        "data.near_duplicates.enabled=true",
        "data.validation_fraction=0.05",
        "tokenizer=bpe",
        "tokenizer.vocab_size=2048",
    ],
}


def train(
    program: str, name: str, overrides: list[str], common: list[str], folder: Path
) -> list[list[float]]:
    """Step, loss and gradient norm of every step of a run that was stopped once and resumed."""
    size = [
        "train.batch_size=8",
        "train.micro_batch=4",
        "train.log_every=1",
        "precision=fp32",
    ]
    command = [
        program,
        "pretrain",
        "--name",
        name,
        "--device",
        "cpu",
        *common,
        f"budget.steps={STEPS}",
        *size,
        *overrides,
    ]
    log = folder / "runs" / name / "run.jsonl"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.02)
            if log.exists() and log.read_text().count('"event":"steps"') >= STOP_AFTER:
                process.send_signal(signal.SIGTERM)
                break
    subprocess.run([*command, "--resume"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    steps = {
        event["step"]: [event["step"], event["loss"], event["grad_norm"]]
        for event in events
        if event["event"] == "steps"
    }
    validations = [[e["step"], e["loss"]] for e in events if e["event"] == "validation"]
    return [steps[step] for step in sorted(steps)] + validations[-1:]


def prepare(program: str, overrides: list[str], text: Path, folder: Path) -> dict[str, str]:
    """SHA-256 of each token shard and of the tokenizer."""
    corpora = folder / "corpora"
    command = [
        program,
        "prepare",
        "data=text",
        f"data.paths=[{text}]",
        "data.documents=line",
        *overrides,
    ]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    files = sorted(
        p for p in corpora.rglob("*") if p.suffix == ".bin" or p.name == "tokenizer.json"
    )
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def main() -> None:
    """Compute, write, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--program", type=lambda path: str(Path(path).absolute()), required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    measured: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, text = Path(place), arguments.text.resolve()
        for name, overrides in PREPARATIONS.items():
            shutil.rmtree(folder / "corpora", ignore_errors=True)
            measured[f"prepare {name}"] = prepare(arguments.program, overrides, text, folder)
        common = [
            "data=text",
            f"data.paths=[{text}]",
            "data.documents=line",
            *PREPARATIONS["everything"],
        ]
        for name, overrides in RUNS.items():
            measured[f"train {name}"] = train(arguments.program, name, overrides, common, folder)
    arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        differing = [name for name in before if before[name] != measured.get(name)]
        sys.exit(f"differs: {', '.join(differing)}" if differing else None)


if __name__ == "__main__":
    main()
