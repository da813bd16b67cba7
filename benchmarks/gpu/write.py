"""From the stages' lines to a file in benchmarks/results and a section of docs/tricks.md.

    python benchmarks/gpu/write.py measured --docs docs/tricks.md

The section is this device's: it takes the place of its earlier one, all others stay. Without `--docs` only the result
file is written, with the lines themselves at its end.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_tests
from run import ROOT, WORK, rows_of

sys.path += [
    str(ROOT),
    str(WORK / "site"),
]  # a checkout works without an installation, and with the bundle's packages

from cramming.bench.gate import NoiseFloor
from cramming.bench.tables import floor_line, replace_section, slug, tricks_table

Result = dict[str, Any]
GB = 1e9


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Nothing where there is no row."""
    lines = [headers, ["---"] * len(headers), *rows] if rows else []
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]


def correctness(found: dict[str, Result]) -> list[str]:
    if "tests" not in found:
        return []
    tests = found["tests"]
    lines = [
        f"{tests.get('passed', 0)} of {tests['tests']} tests passed, {tests.get('failed', 0)} failed,"
        f" {tests.get('skipped', 0)} were skipped."
    ]
    return [
        *lines,
        *(
            f"- {name}: {text.strip().splitlines()[-1]}"
            for name, text in tests["texts"]["failed"].items()
        ),
    ]


def ceilings(found: dict[str, Result]) -> list[str]:
    if "ceilings" not in found:
        return []
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in found["ceilings"]["tflops"].items())
    copied = found["ceilings"]["copy_gb_per_second"]
    return [f"Large products, TFLOP/s: {rates}. A copy moves {copied:.0f} GB/s, read and written."]


def speeds(found: dict[str, Result]) -> list[str]:
    ceiling = max(
        (v for k, v in found.get("ceilings", {}).get("tflops", {}).items() if "fp8" not in k),
        default=None,
    )
    lines = []
    for name, row in picked(found, "ours "):
        flops, plan = row["flops_per_token"] * row["tokens_per_second"] / 1e12, row["plan"]
        lines.append(
            [
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{flops / ceiling:.0%}" if ceiling else "–",
                f"{flops / row['peak_tflops']:.0%}" if row["peak_tflops"] else "–",
                f"{plan['tokens_per_second']:,.0f}",
                f"{row['peak_bytes'] / GB:.2f}",
                f"{plan['peak_bytes'] / GB:.2f}",
                f"{row['first_steps_seconds'][0]:.0f}",
            ]
        )
    headers = [
        "model, length",
        "tokens/s",
        "of large products",
        "of the data sheet",
        "plan's tokens/s",
        "peak memory, GB",
        "plan's",
        "first step, s",
    ]
    return table(headers, lines)


def others(found: dict[str, Result]) -> list[str]:
    lines = [
        [
            name.removesuffix(" against Hugging Face"),
            f"{row['base_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['base_peak_bytes'] / GB:.2f}",
            f"{row['peak_bytes'] / GB:.2f}",
        ]
        for name, row in found.items()
        if "against Hugging Face" in name and "speedup" in row
    ]
    return table(
        [
            "model, length",
            "Hugging Face's compiled loop, tokens/s",
            "ours",
            "ratio",
            "its peak, GB",
            "ours",
        ],
        lines,
    )


def small_cards(found: dict[str, Result]) -> list[str]:
    lines = [
        [
            name,
            f"{row['tokens_per_second']:,.0f}",
            row["tokens_per_step"],
            row["micro_batches"],
            f"{row['peak_bytes'] / GB:.2f}",
        ]
        for name, row in found.items()
        if " GiB" in name and "peak_bytes" in row
    ]
    return table(
        ["model", "tokens/s", "tokens a step", "micro-batches, found by itself", "peak memory, GB"],
        lines,
    )


def levers(found: dict[str, Result]) -> list[str]:
    lines = [
        [
            name,
            f"{row['base_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['peak_bytes'] / row['base_peak_bytes']:.2f}x",
            f"{row['first_steps_seconds']:.0f}",
        ]
        for name, row in picked(found, "lever: ")
        if "speedup" in row
    ]
    return table(["lever", "tokens/s without", "with", "ratio", "memory", "first steps, s"], lines)


def run_of_minutes(found: dict[str, Result]) -> list[str]:
    if "run killed and resumed" not in found:
        return []
    row = found["run killed and resumed"]
    record, ended = row["record"], ", ".join(str(process["ended"]) for process in row["processes"])
    rate = f", {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
    return [
        f"BERT-base on a corpus, killed behind a checkpoint and resumed: {record['status']}, {record['steps']} steps,"
        f" {record['tokens']:,} tokens{rate}; its processes ended {ended}; loss {row['losses'][0][1]:.2f} to"
        f" {row['losses'][-1][1]:.2f}."
    ]


def fine_tuning(found: dict[str, Result]) -> list[str]:
    if "fine-tuning against Trainer" not in found:
        return []
    row, lines = found["fine-tuning against Trainer"], []
    for side in ("trainer", "cramming"):
        scores = ", ".join(f"{run['task']} {run['score']:.1f}" for run in row[side]["runs"])
        lines.append(
            [
                side,
                row[side]["seconds"],
                f"{row[side]['examples_per_second']:.0f}",
                f"{row[side]['examples_per_second_of_training']:.0f}",
                scores,
            ]
        )
    headers = [
        "side",
        "seconds in all",
        "examples/s",
        "examples/s of one run, without start",
        "scores",
    ]
    return [*table(headers, lines), "", f"Ratio of examples per second in all: {row['ratio']:.2f}."]


def contest(found: dict[str, Result]) -> list[str]:
    lines = []
    for side, row in picked(found, "minutes: "):
        record, scores = row["record"], found.get(f"scores: {side}", {}).get("scores", {})
        validation = record["validation"] or {}
        told = ", ".join(
            f"{name} {'–' if score is None else f'{score:.1f}'}" for name, score in scores.items()
        )
        size, seen, rate = record["parameters"], record["tokens"], record["tokens_per_second"]
        loss = validation.get("loss")
        lines.append(
            [
                side,
                f"{size / 1e6:.0f}M",
                f"{seen / 1e6:,.0f}M",
                record["steps"],
                f"{rate:,.0f}" if rate else "–",
                f"{loss:.3f}" if loss else "–",
                told,
            ]
        )
    headers = [
        "recipe",
        "parameters",
        "tokens",
        "steps",
        "tokens/s",
        "pinned validation loss",
        "scores",
    ]
    return table(headers, lines)


def tricks(found: dict[str, Result]) -> list[str]:
    rows = [row["trick"] for _, row in picked(found, "trick: ")]
    floors = {
        f["rounding"]: NoiseFloor(**f) for _, row in picked(found, "trick: ") for f in row["floors"]
    }
    lines = [line for floor in floors.values() for line in ("", floor_line(floor))]
    return [*tricks_table(rows), *lines] if rows else []


PARTS: dict[str, Callable[[dict[str, Result]], list[str]]] = {
    "Is it right": correctness,
    "Ceilings": ceilings,
    "Our steps": speeds,
    "Against Hugging Face": others,
    "In the memory of a small card": small_cards,
    "Levers, with and without each": levers,
    "A run": run_of_minutes,
    "Fine-tuning against Trainer": fine_tuning,
    "Two recipes, one seed each": contest,
    "Every trick": tricks,
}


def picked(found: dict[str, Result], start: str) -> list[tuple[str, Result]]:
    """Rows that were measured, by the rest of their name."""
    return [
        (name.removeprefix(start), row)
        for name, row in found.items()
        if name.startswith(start) and len(row) > 1
    ]


def report(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Where it was measured, and the section's lines."""
    rows = {name: row for file in files_of(folder) for name, row in rows_of(file).items()}
    about = [json.loads(line) for line in lines_of(folder) if line.startswith('{"about"')][-1]
    found = {name: row["result"] for name, row in rows.items() if "result" in row}
    if (
        "tests" not in found and (folder / gpu_tests.FILE).exists()
    ):  # what has ended before the row did
        found["tests"] = gpu_tests.summary(folder / gpu_tests.FILE)
    text = ["`python benchmarks/gpu/run.py --stage 1|2|3|4`", "", *measured_with(folder)]
    text += ["", "Sizes of a try-out: no number of it says how fast anything is."] * (
        about["scale"] != "full"
    )
    for title, part in PARTS.items():
        if lines := part(found):
            text += ["", f"### {title}", "", *lines]
    missing = {name: reason(row) for name, row in rows.items() if reason(row)}
    if missing:
        text += ["", "### Not measured", "", *(f"- {name}: {why}" for name, why in missing.items())]
    return about, text


def measured_with(folder: Path) -> list[str]:
    """Dates, commits and versions of the calls of run.py."""
    calls = [
        call_of(json.loads(line)["about"])
        for line in lines_of(folder)
        if line.startswith('{"about"')
    ]
    return [f"- {call}" for call in dict.fromkeys(calls)]


def call_of(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['date'][:10]}, commit {where['commit']}: {where['name']}, Python {where['python']}, {versions}"


def files_of(folder: Path) -> list[Path]:
    return [file for stage in (1, 2, 3, 4) if (file := folder / f"stage{stage}.jsonl").exists()]


def lines_of(folder: Path) -> list[str]:
    return [
        line for file in files_of(folder) for line in file.read_text(encoding="utf-8").splitlines()
    ]


def without_places(line: str) -> str:
    """Where a checkout and its packages lie is no result."""
    return re.sub(
        r"(?<![\w.])/[^\s\"']*/(site-packages/|(?=(tests|benchmarks|build|cramming|eval)/))",
        "",
        line,
    )


def reason(row: dict[str, Any]) -> str | None:
    """Why a row has no numbers, in a line."""
    result = row.get("result", {})
    text = row.get("error") or row.get("skipped") or result.get("refused") or result.get("error")
    text = (
        text
        or result.get("trick", {}).get("error")
        or ("" if "result" in row else "under way when all ended")
    )
    return text.strip().splitlines()[-1] if text else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, help="run.py's --out")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--docs", type=Path, help="docs/tricks.md: this device's section is replaced"
    )
    args = parser.parse_args(arguments)
    about, text = report(args.measured)
    where = about["about"]
    theme = "gpu" if about["scale"] == "full" else "gpu_tryout"
    file = args.results / f"{theme}_{slug(where['name'])}_{where['date'][:10]}.md"
    args.results.mkdir(parents=True, exist_ok=True)
    raw = [line for line in lines_of(args.measured) if '"begun"' not in line]
    text = [without_places(line) for line in text]
    file.write_text(
        "\n".join(
            [
                f"# {where['name']}",
                "",
                *text,
                "",
                "## Raw",
                "",
                "```json",
                *map(without_places, raw),
                "```",
                "",
            ]
        )
    )
    print(file)
    if args.docs:
        replace_section(args.docs, f"A GPU, measured: {where['name']}", text)
        print(args.docs)


if __name__ == "__main__":
    main()
