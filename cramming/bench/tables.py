"""The tables of `cramming bench`, one section per device in a Markdown file, and the raw numbers as JSON beside it."""

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cramming.bench.gate import WINDOW, Floor
from cramming.device import DeviceInfo
from cramming.files import write_atomically

FORMULA = (
    "MFU is the floating-point operations of `cramming.model.config.flops_per_token` (matrix products of forward and"
    " backward pass, a multiply-add as 2; recomputation not counted) per second, over the rate of large square matrix"
    " products in the same number format (TF32 where fp32 products are TF32's) measured in the same run; beside fp8,"
    " which only a part of the model's products are in, bf16's, as the cell says. A dash: it came to more than 100 %,"
    " which is no utilisation. Those products were disturbed while they were measured, or the model's own run faster,"
    " as on a CPU without units for the format."
)


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    label = " ".join(str(row[k]) for k in ("shape", "peer", "name") if k in row)
    if "error" in row:
        return f"{label}: not run: {row['error']}"
    text = f"{label}: {row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f}x"
    return text + (f", gate {gate_cell(row)}" if "gate" in row else "")


def gate_cell(row: dict[str, Any]) -> str:
    """`passed (0.013 of 0.098 at step 180)`, `FAILED (...)`, or what another algorithm has learned."""
    if "learned" in row:
        return f"– (learned {row['learned']['fall']:.2f}, the reference {row['learned']['reference']:.2f})"
    if "gate" not in row:
        return "–"
    verdict = row["gate"]
    distance = "not finite" if verdict["distance"] is None else f"{verdict['distance']:.1g}"
    result = "passed" if verdict["passed"] else "FAILED"
    return f"{result} ({distance} of {verdict['tolerance']:.2g} at step {verdict['at_step']})"


def utilisation_cell(row: dict[str, Any]) -> str:
    """`62%`, `62% of bf16's` in mode fp8, or a dash where the ceiling it is measured by was none."""
    share = row["flops_per_token"] * row["tokens_per_second"] / row["ceiling_flops"]
    if row["precision"] == "fp8":
        return f"{share:.0%} of bf16's"
    return f"{share:.0%}" if share <= 1 else "–"


def floor_line(floor: Floor) -> str:
    """What the tolerance was made of."""
    windows = [max(twins) for twins in zip(*floor.strays, strict=True)]
    allowed = floor.allowed()
    steps = [round(share * (len(windows) - 1)) for share in (0.2, 0.4, 0.6, 0.8, 1)]
    found = ", ".join(f"{windows[i]:.1g} ({allowed[i]:.2g}) at step {(i + 1) * WINDOW}" for i in steps)
    return (
        f"Gate: {len(floor.strays)} twins of the reference with weights moved by {floor.rounding:.2g}"
        f" strayed by up to, in nats (allowed): {found}."
    )


def tricks_table(rows: list[dict[str, Any]]) -> list[str]:
    """One row per trick."""
    lines = [
        "| trick | what it is | tokens/s | beside reference | MFU | peak memory, MB | beside reference | gate, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | {row['about']} | not run here: {row['error']} | | | | | |")
            continue
        name = f"{row['name']} (small shape)" if row["shape"] == "small" else row["name"]
        lines.append(
            f"| {name} | {row['about']} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x"
            f" | {utilisation_cell(row)} | {row['peak_bytes'] / 1e6:.0f}"
            f" | {row['peak_bytes'] / row['base_peak_bytes']:.2f}x | {gate_cell(row)} |"
        )
    return [*lines, "", FORMULA, *made_by(rows)]


def made_by(rows: list[dict[str, Any]]) -> list[str]:
    """Which rows were measured when and with which commit of the code; nothing where one call made all."""
    names: dict[str, list[str]] = {}
    for row in rows:
        made = f"{row.get('date', 'on a day not known')}, commit {row.get('commit') or 'not known'}"
        names.setdefault(made, []).append(row["name"])
    return ["", *(f"- {made}: {', '.join(of)}" for made, of in names.items())] if len(names) > 1 else []


def peers_table(rows: list[dict[str, Any]]) -> list[str]:
    """One row per shape, peer and mode of ours."""
    lines = [
        "| shape | tokens/step | peer | peer tokens/s | ours | tokens/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['shape']} | | {row['peer']} | | {row['name']} | not run: {row['error']} | |")
            continue
        lines.append(
            f"| {row['shape']} | {row['tokens_per_step']} | {row['peer']} | {row['base_tokens_per_second']:.0f}"
            f" | {row['name']} | {row['tokens_per_second']:.0f} | **{row['speedup']:.2f}** |"
        )
    return lines


MEASURED_SECTIONS = ("model", "train", "objective", "optim", "attention", "memory", "runtime", "precision", "parallel")
NOT_CONDITIONS = ("what", "only", "shapes", "out", "raw")
TABLES = {"tricks": tricks_table, "peers": peers_table}


def write(
    out: Path,
    raw: Path,
    title: str,
    rows: list[dict[str, Any]],
    device: DeviceInfo,
    settings: dict[str, Any],
    floors: Sequence[Floor] = (),
) -> Path:
    """Put this device's section into `out` (others stay), everything raw into a JSON file in `raw`; returns that."""
    train, model, bench = settings["train"], settings["model"], settings["bench"]
    about = (
        f"{device.name}, {torch.get_num_threads()} threads, {platform.system()}, Python {platform.python_version()},"
        f" {', '.join(f'{p} {v}' for p, v in versions().items())}; {datetime.now(UTC):%Y-%m-%d};"
        f" {bench['rounds']} rounds of {bench['steps']} steps, medians; precision {settings['precision']['mode']},"
        f" {settings['objective']['rate']:.0%} of tokens masked, sequences of {train['sequence_length']},"
        f" vocabulary {bench['vocab_size']}"
    )
    if title == "tricks":
        about += f"; model {model['hidden_size']}x{model['num_layers']}, {train['batch_size']} sequences per step"
    section = [f"## {title}: {device.name}", "", f"`cramming bench {title}`: {about}.", "", *TABLES[title](rows), ""]
    for floor in floors:
        section += [floor_line(floor), ""]
    old = out.read_text(encoding="utf-8") if out.exists() else "# Measured\n\n"
    pattern = re.compile(rf"^## {title}: {re.escape(device.name)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    text = "\n".join(section) + "\n"
    new = pattern.sub(lambda _: text, old) if pattern.search(old) else old.rstrip("\n") + "\n\n" + text
    write_atomically(out, new.rstrip("\n") + "\n")
    file = raw / f"{title}_{slug(device)}_{datetime.now(UTC):%Y-%m-%d}.json"
    content = {"about": about, "conditions": conditions(settings), "settings": settings,
               "floors": [asdict(floor) for floor in floors], "rows": rows}  # fmt: skip
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    return file


def slug(device: DeviceInfo) -> str:
    """A device's name as it stands in names of files."""
    return re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-").lower()


def conditions(settings: dict[str, Any]) -> dict[str, Any]:
    """All that a row's numbers depend on, beside the device and the row itself, as JSON has it."""
    bench = {key: value for key, value in settings["bench"].items() if key not in NOT_CONDITIONS}
    sections = {name: settings[name] for name in MEASURED_SECTIONS}
    found = {**sections, "bench": bench, "threads": torch.get_num_threads(), "versions": versions()}
    return dict(json.loads(json.dumps(found)))


def versions() -> dict[str, str]:
    """Of the packages that matter for speed, those that are installed."""
    found = {}
    for package in ("torch", "transformers", "accelerate", "torchao", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
