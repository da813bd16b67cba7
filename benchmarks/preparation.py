"""The whole preparation against bare `tokenizers`: throughput on the same text and cores, and peak memory by size.

    python benchmarks/preparation.py throughput --text wiki_core.0*.txt.xz --tasks <GLUE> --out <file>.md
    python benchmarks/preparation.py memory     --text wiki_core.0*.txt.xz --tasks <GLUE> --gigabytes 1 4 --out <file>

Throughput. The bare side holds the texts in memory (unpacked beforehand), calls `encode_batch_fast` in groups of a
thousand documents and drops the result; `RAYON_NUM_THREADS` gives it as many threads as `prepare` has workers. The
other sides are `prepare` from the files to the finished corpus, with that tokenizer: *tokenization* with every optional
stage off, *pipeline* with all filters, exact deduplication and decontamination, *with near-duplicates* with those too.
Each measurement is a process of its own, the sides take turns, medians are compared. Rates are bytes of the unpacked
text over wall time, and for a shared machine also over processor time; the start of the first interpreter is left out
on all sides, that of `prepare`'s workers is not. With as many workers as cores its main process has no core of its own.
The main process's share of the processor time says how many cores it can feed: the workers' time over its own.

Memory. A text of so many gigabytes is made from the files, again and again, with seeded edits (every other word is
replaced, so that neither exact nor near-deduplication shrinks it away), prepared with everything on, and the peak
resident memory is taken (of the main process, and as often as there are workers that of the largest one: more than what
they had at one time), together with the size of the MinHash index as the manifest states it.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from cramming.overrides import compose
from data_prep.readers import plain_text

BARE = """
import json, sys, time
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
text = Path(sys.argv[2]).read_text(encoding="utf-8")
documents = [document for document in text.split("\\n\\n") if document.strip()]
del text
start, cpu = time.perf_counter(), time.process_time()
for at in range(0, len(documents), 1000):
    tokenizer.encode_batch_fast(documents[at : at + 1000], add_special_tokens=False)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}))
"""
PREPARE = """
import contextlib, json, resource, sys, time
from pathlib import Path
from cramming.invocation import Invocation
from data_prep.prepare import main
config = json.loads(sys.argv[1])
start, cpu = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(sys.stderr):
    main(config, Invocation())
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
workers = resource.getrusage(resource.RUSAGE_CHILDREN)  # the largest one's memory, the time of all
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + config["data"]["workers"] * workers.ru_maxrss
folder = Path(config["data"]["corpus"])
manifest = json.loads((folder / "manifest.json").read_text())
size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
notes = {stage["name"]: stage["notes"] for stage in manifest["stages"]}
print(json.dumps({
    "seconds": round(seconds, 2), "cpu_seconds": round(cpu + workers.ru_utime + workers.ru_stime, 2),
    "main_cpu_seconds": round(cpu, 2),
    "peak_bytes": 1024 * peak,
    "index_bytes": notes["near deduplication"].get("index_bytes", 0), "removed": manifest["removed"],
    "bytes_per_token": round(size / manifest["statistics"]["tokens"], 4), "documents": manifest["counts"]["documents"],
}))
"""
SIDES = ("bare", "tokenization", "pipeline", "with near-duplicates")


def settings(
    text: list[Path], folder: Path, side: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The configuration of `prepare` for one side."""
    data: dict[str, Any] = {"name": "benchmark", "source": "text", "paths": list(map(str, text))}
    data |= {"workers": arguments.threads, "corpus": str(folder / "corpus")}
    if side == "tokenization":
        data["deduplicate"] = False
    else:
        data["filters"] = compose(["data/filters=strict"])["data"]["filters"]
        data["decontaminate"] = {"tasks": arguments.tasks and str(arguments.tasks)}
        data["near_duplicates"] = {"enabled": side == "with near-duplicates"}
    tokenizer = {"vocab_size": arguments.vocab_size, "path": str(arguments.tokenizer)}
    return {"data": data, "tokenizer": tokenizer}


def measure(code: str, *words: str, threads: int) -> dict[str, Any]:
    """Run it in a process of its own; the last line it prints."""
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
    }
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def unpacked(texts: list[Path], target: Path) -> Path:
    """All texts as one plain file, for the bare side."""
    with target.open("w", encoding="utf-8") as handle:
        for document in documents_of(texts):
            handle.write(document.strip() + "\n\n")
    return target


def documents_of(texts: list[Path]) -> Iterator[str]:
    """The blocks between blank lines."""
    for path in texts:
        cut = plain_text.Cut("block", None, 4_000_000)
        blocks = plain_text.documents_of(plain_text.TextFile(path), cut)
        yield from (text for text, _ in blocks)


def train_tokenizer(texts: list[Path], arguments: argparse.Namespace) -> Path:
    """A WordPiece of the first text, for all sides."""
    from data_prep.tokenizer import load as tokenizer
    from data_prep.tokenizer import train as vocabulary

    sample = [document for _, document in zip(range(2000), documents_of(texts[:1]))]
    model = vocabulary.train(sample, tokenizer.TokenizerConfig(vocab_size=arguments.vocab_size))
    path = Path(arguments.scratch) / "tokenizer.json"
    model.save(str(path))
    return path


def throughput(texts: list[Path], arguments: argparse.Namespace) -> str:
    """All sides by turns; the report."""
    plain = unpacked(texts, Path(arguments.scratch) / "plain.txt")
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(arguments.rounds):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            if side == "bare":
                measured = measure(
                    BARE, str(arguments.tokenizer), str(plain), threads=arguments.threads
                )
            else:
                with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
                    config = settings(texts, Path(folder), side, arguments)
                    measured = measure(PREPARE, json.dumps(config), threads=arguments.threads)
            results[side].append(measured)
            print(turn, side, measured, file=sys.stderr)
    size = plain.stat().st_size
    median = {
        side: {
            key: statistics.median(row[key] for row in rows) for key in ("seconds", "cpu_seconds")
        }
        for side, rows in results.items()
    }
    for side, values in median.items():
        values["main"] = statistics.median(
            row.get("main_cpu_seconds", row["cpu_seconds"]) for row in results[side]
        )
    lines = [f"Text: {size / 1e6:.1f} MB unpacked, in {len(texts)} files.", ""]
    lines += [
        "| side (medians) | MB/s | of bare | MB per processor second | of bare | cores fed | seconds of each round |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for side, values in median.items():
        shares = [
            f"{size / 1e6 / values[key]:.2f} | {100 * median['bare'][key] / values[key]:.0f} %"
            for key in ("seconds", "cpu_seconds")
        ]
        fed = (values["cpu_seconds"] - values["main"]) / values["main"]
        seconds = ", ".join(str(row["seconds"]) for row in results[side])
        lines.append(f"| {side} | {' | '.join(shares)} | {fed:.1f} | {seconds} |")
    return "\n".join([*lines, "", "Raw:", "```json", json.dumps(results), "```", ""])


def memory(texts: list[Path], arguments: argparse.Namespace) -> str:
    """One text of each size with everything on; the report."""
    rows = []
    for gigabytes in arguments.gigabytes:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            made = edited_text(texts, Path(folder) / "made.txt", int(gigabytes * 1e9), seed=0)
            config = settings([made], Path(folder), "with near-duplicates", arguments)
            measured = measure(PREPARE, json.dumps(config), threads=arguments.threads)
        rows.append({"gigabytes": gigabytes, **measured})
        print(rows[-1], file=sys.stderr)
    lines = [
        "| input | peak memory | of it MinHash index | without index | bytes per token | seconds | documents |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        rest = row["peak_bytes"] - row["index_bytes"]
        cells = [
            f"{row['gigabytes']:g} GB",
            *(f"{row[k] / 1e6:.0f} MB" for k in ("peak_bytes", "index_bytes")),
        ]
        cells += [
            f"{rest / 1e6:.0f} MB",
            *(str(row[k]) for k in ("bytes_per_token", "seconds", "documents")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Raw:", "```json", json.dumps(rows), "```", ""])


def edited_text(texts: list[Path], target: Path, size: int, seed: int) -> Path:
    """About `size` bytes: the texts again and again, each time with other words in half of the places."""
    rng, written = random.Random(seed), 0
    stock = [
        word
        for _, document in zip(range(200), documents_of(texts[:1]))
        for word in document.split()
    ]
    with target.open("w", encoding="utf-8") as handle:
        while written < size:
            for document in documents_of(texts):
                if (
                    written := written + handle.write(edited(document.strip(), rng, stock) + "\n\n")
                ) >= size:
                    break
    return target


def edited(document: str, rng: random.Random, stock: list[str]) -> str:
    """The document with every other word replaced, its lines kept."""
    lines = []
    for line in document.split("\n"):
        words, start = line.split(" "), rng.randrange(2)
        words[start::2] = rng.choices(stock, k=len(words[start::2]))
        lines.append(" ".join(words))
    return "\n".join(lines)


MEASUREMENTS = {"throughput": throughput, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        required=True,
        help="text files, blank lines between documents",
    )
    parser.add_argument(
        "--tasks",
        type=Path,
        help="folder with CoLA/, SST-2/ ...: decontamination is part of it then",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1, 4])
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument(
        "--scratch", help="folder for what is made on the way; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    texts = [path.resolve() for path in arguments.text]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        arguments.scratch = scratch
        arguments.tokenizer = train_tokenizer(texts, arguments)
        measured = MEASUREMENTS[arguments.what](texts, arguments)
    head = [
        f"# Preparation: {arguments.what}",
        "",
        f"Command: `python benchmarks/preparation.py {' '.join(sys.argv[1:])}`",
        f"Versions: Python {platform.python_version()}, tokenizers {tokenizers.__version__}; {os.cpu_count()} cores,"
        f" {arguments.threads} threads against as many workers; WordPiece of {arguments.vocab_size} entries, uncased.",
        f"Load average at the end: {os.getloadavg()[0]:.1f}.",
        "",
    ]
    arguments.out.write_text("\n".join([*head, measured]), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
