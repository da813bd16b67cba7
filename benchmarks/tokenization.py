"""`prepare` against bare batch encoding with `tokenizers`: same text, same tokenizer, same number of threads.

The bare side has all texts in memory, calls `encode_batch_fast` and drops the result: no file is read, nothing is
cleaned, deduplicated, turned into arrays, hashed or written. It runs as the library itself would on this many threads
(RAYON_NUM_THREADS), in batches of a thousand documents. The other side is the whole of `prepare` from the text file
to the finished corpus, with the tokenizer given (tokenizer.path). A third column, `prepare` training its own tokenizer,
is for information. Every measurement is a process of its own, sides alternate, medians are compared, and the text is
the same at every call. Throughput is text bytes over wall time; start-up of the interpreter is left out on both sides.

    python benchmarks/tokenization.py --text <file> --out benchmarks/results/tokenization_cpu_<date>.md
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers

BARE = """
import json, sys, time
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
text = Path(sys.argv[2]).read_text(encoding="utf-8")
documents = [document for document in text.split("\\n\\n") if document.strip()]
size = len(text.encode())
start, cpu = time.perf_counter(), time.process_time()
for at in range(0, len(documents), 1000):
    tokenizer.encode_batch_fast(documents[at : at + 1000], add_special_tokens=False)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "bytes": size}))
"""
PREPARE = """
import contextlib, json, resource, sys, time
from data_prep.prepare import main
config = json.loads(sys.argv[1])
start, cpu = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(sys.stderr):
    main(config)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_bytes": peak}))
"""


def measure(code: str, *arguments: str, threads: int) -> dict[str, Any]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def settings(text: Path, corpora: str, threads: int, vocab_size: int, tokenizer: Path | None) -> dict[str, Any]:
    data = {"name": "benchmark", "source": "text", "paths": [str(text)], "workers": threads}
    return {
        "corpora": corpora,
        "data": data,
        "tokenizer": {"kind": "wordpiece", "vocab_size": vocab_size, "path": tokenizer and str(tokenizer)},
    }


def prepare(
    text: Path, threads: int, vocab_size: int, tokenizer: Path | None, keep: Path | None = None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as corpora:
        config = settings(text, corpora, threads, vocab_size, tokenizer)
        result = measure(PREPARE, json.dumps(config), threads=threads)
        if keep:
            shutil.copy(next(Path(corpora).glob("*/tokenizer.json")), keep)
    return result


def run(text: Path, threads: int, rounds: int, vocab_size: int) -> dict[str, list[dict[str, Any]]]:
    sides: dict[str, list[dict[str, Any]]] = {"bare": [], "prepare": [], "with training": []}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        sides["with training"].append(prepare(text, threads, vocab_size, None, keep=tokenizer))
        for index in range(rounds):
            for side in ("bare", "prepare") if index % 2 == 0 else ("prepare", "bare"):
                if side == "bare":
                    sides[side].append(measure(BARE, str(tokenizer), str(text), threads=threads))
                else:
                    sides[side].append(prepare(text, threads, vocab_size, tokenizer))
                print(side, sides[side][-1], file=sys.stderr)
    return sides


def report(text: Path, threads: int, vocab_size: int, sides: dict[str, list[dict[str, Any]]]) -> str:
    size = text.stat().st_size
    median = {
        key: {side: statistics.median(result[key] for result in results) for side, results in sides.items()}
        for key in ("seconds", "cpu_seconds")
    }
    peak = max(r["peak_bytes"] for side in ("prepare", "with training") for r in sides[side])
    lines = [
        "# Tokenization throughput",
        "",
        f"Command: `python benchmarks/tokenization.py --text {text.name} --threads {threads}"
        f" --vocab-size {vocab_size} --rounds {len(sides['bare'])}`",
        f"Versions: Python {platform.python_version()}, tokenizers {tokenizers.__version__}; {os.cpu_count()} cores,"
        f" {threads} threads on each side; text of {size / 1e6:.1f} MB, WordPiece of {vocab_size} entries, uncased.",
        f"Load average at the end: {os.getloadavg()[0]:.1f} (shared machine: the ratios count, not the rates).",
        "",
        "On a contended machine wall time depends on what else runs; the processor time of the same work does not.",
        "",
        "| side (medians) | MB/s | of bare | MB per processor second | of bare | seconds of each round |",
        "|---|---|---|---|---|---|",
    ]
    for side, title in (
        ("bare", "`tokenizers.encode_batch_fast` alone"),
        ("prepare", "`prepare`, text file to finished corpus, tokenizer given"),
        ("with training", "`prepare` with training of the tokenizer"),
    ):
        seconds = ", ".join(f"{r['seconds']:.1f}" for r in sides[side])
        cells = [title]
        for values in median.values():
            cells += [f"{size / 1e6 / values[side]:.2f}", f"{100 * values['bare'] / values[side]:.0f} %"]
        lines.append(f"| {' | '.join([*cells, seconds])} |")
    lines += ["", f"Peak memory of `prepare`: {peak / 1e6:.0f} MB.", ""]
    lines += ["Raw:", "```json", json.dumps(sides), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text, blank lines between documents")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    text = arguments.text.resolve()
    sides = run(text, arguments.threads, arguments.rounds, arguments.vocab_size)
    arguments.out.write_text(report(text, arguments.threads, arguments.vocab_size, sides), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
