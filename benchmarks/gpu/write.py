"""Tables of a measured card: a result file, and a section of docs/results/tricks.md.

    python benchmarks/gpu/write.py measured --docs docs/results/tricks.md

The section replaces this card's earlier one. Without `--docs` only the result file is written; its end has the lines.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import ROOT
from record import FILE, Record, lines_of
from run import WORK, outcome

sys.path += [str(ROOT), str(WORK / "site")]  # a checkout works without an installation

from cramming.bench.tables import replace_section, slug

GB = 1e9
SHARES = ("products", "attention", "elementwise", "optimizer and copies", "idle")
Result = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Write the result file and the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, help="run.py's --out")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, help="page whose section of this card is replaced")
    args = parser.parse_args(arguments)
    record = Record(args.measured)
    if not (about := record.about()):
        raise SystemExit(f"measured={args.measured}: no rows. Name run.py's --out.")
    text = [without_places(line) for line in report(record)]
    theme = "gpu" if about["scale"] == "full" else "gpu_tryout"
    file = args.results / f"{theme}_{slug(about['name'])}_{about['date'][:10]}.md"
    lines = [line for line in lines_of(args.measured / FILE) if "begun" not in line]
    raw = [without_places(json.dumps(line)) for line in lines]
    content = [f"# {about['name']}", "", *text, "", "## Raw", "", "```json", *raw, "```", ""]
    try:
        args.results.mkdir(parents=True, exist_ok=True)
        if file.exists() and raw[0] not in file.read_text(encoding="utf-8"):
            raise SystemExit(f"{file}: another measurement is there. Rename it, or name --results.")
        file.write_text("\n".join(content), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}. Name other --results.") from None
    print(file)
    if args.docs:
        replace_section(args.docs, f"A GPU, measured: {about['name']}", text)
        print(args.docs)


def report(record: Record) -> list[str]:
    """Return the section's lines."""
    about, rows = record.about(), record.rows()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    date, commit = about["date"][:10], about["commit"]
    call = f"{date}, commit {commit}: Python {about['python']}, {versions}"
    text = ["`python3 benchmarks/gpu/run.py`", "", call, ""]
    if about["scale"] != "full":
        text += ["Sizes of a try-out: no number of it says how fast anything is.", ""]
    measured = {}
    for name, row in rows.items():
        if "result" in row and "refused" not in row["result"]:
            measured[name] = record.result(name)
    for name, result in measured.items():
        is_in_table = name.startswith("ours ") or "ratio" in result
        text += [] if is_in_table else told(name, rows[name])
    for title, lines in (("Our steps", speeds(measured)), ("Comparisons", pairs(measured))):
        text += ["", f"### {title}", "", *lines] if lines else []
    missing = [name for name in record.names() if name not in measured]
    reasons = [f"- {name}: {outcome(rows.get(name, {})).splitlines()[0]}" for name in missing]
    return [*text, "", "### Not measured", "", *reasons] if reasons else text


def told(name: str, row: Result) -> list[str]:
    """Return a row's own line and details as a list."""
    line, *details = outcome(row).splitlines()
    return [f"- {name}: {line}", *(f"    - {detail}" for detail in details)]


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table; nothing where there is no row."""
    lines = [headers, ["---"] * len(headers), *rows] if rows else []
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]


def share(part: float, whole: float | None) -> str:
    """Return a share in per cent, a dash where the whole is unknown."""
    return f"{part / whole:.0%}" if whole else "–"


def speeds(measured: dict[str, Result]) -> list[str]:
    """Return the table of our steps."""
    lines = []
    for name, row in measured.items():
        if not name.startswith("ours "):
            continue
        tflops = row["tokens_per_second"] * row["flops_per_token"] / 1e12
        plan, clocks = row.get("plan", {}), row.get("clocks", {})
        mark = " FAILED: loss" if row.get("failed") else ""
        cells = [name.removeprefix("ours ") + mark, f"{row['tokens_per_second']:,.0f}"]
        for ceiling in (*row["ceilings"].values(), row["peak_tflops"]):
            cells.append(share(tflops, ceiling))
        slow_fast = plan.get("tokens_per_second", [])
        cells.append(" to ".join(f"{rate:,.0f}" for rate in slow_fast) or "–")
        for size in (row["peak_bytes"], row["eager"].get("peak_bytes"), plan.get("peak_bytes")):
            cells.append(f"{size / GB:.2f}" if size else "–")
        cells.append(f"{row['first']['seconds']:.0f}")
        shares = row.get("shares", {})
        for kind in SHARES:
            cells.append(f"{shares[kind]:.0%}" if kind in shares else "–")
        cells.append(f"{clocks['mhz']:.0f} MHz, {clocks['watts']:.0f} W" if clocks else "–")
        lines.append(cells)
    headers = ["model, length", "tokens/s", "of a burst", "of products under load"]
    headers += ["of the data sheet", "plan's tokens/s", "peak, GB", "eager", "plan's"]
    headers += ["first step, s", *SHARES, "clock, power"]
    return table(headers, lines)


def pairs(measured: dict[str, Result]) -> list[str]:
    """Return the table of comparisons."""
    lines = []
    for name, row in measured.items():
        if "ratio" not in row:
            continue
        cells = [name]
        for side in (row["base"], row["other"]):
            cells += [f"{side['tokens_per_second']:,.0f}", f"{side['peak_bytes'] / GB:.2f}"]
        lines.append([*cells, f"{row['ratio']:.2f}x"])
    headers = ["row", "tokens/s of the other, or without", "peak, GB", "ours, or with", "peak, GB"]
    return table([*headers, "ratio"], lines)


def without_places(line: str) -> str:
    """Remove the folders in which a checkout and its packages lie, and what UTF-8 cannot write."""
    folders = r"site-packages/|(?=(tests|benchmarks|build|cramming|eval)/)"
    line = re.sub(rf"(?<![\w.])/[^\s\"']*/({folders})", "", line)
    return line.encode(errors="replace").decode()


if __name__ == "__main__":
    main()
