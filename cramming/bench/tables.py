"""Table of `cramming bench`, one section per device in a Markdown file, and the raw numbers as JSON.

A call for some rows adds to the rows of earlier calls if their conditions are equal: device, settings, versions,
number of threads. The code is not compared; the raw numbers state the commit of each row.
"""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cramming.bench.gate import WINDOW, NoiseFloor
from cramming.device import DeviceInfo
from cramming.files import write_atomically
from cramming.progress import say

Row = dict[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "torchao", "triton")  # relevant for speed
MEASURED_SECTIONS = (
    "model",
    "train",
    "objective",
    "optim",
    "attention",
    "memory",
    "runtime",
    "precision",
    "parallel",
)
HEADER = [
    "| trick | what it is | tokens/s | relative to reference | MFU | peak memory, MB | relative to reference"
    " | gate, nats |",
    "|---|---|---|---|---|---|---|---|",
]
FORMULA = (
    "MFU is the floating-point operations of `cramming.model.config.flops_per_token` (matrix products of forward and"
    " backward pass, a multiply-add as 2; recomputation not counted) per second, over the rate of large square matrix"
    " products in the same number format (TF32 where fp32 products are TF32's) measured in the same run. In fp8, the"
    " format of only some of the model's products, the rate is that of bf16, as the cell states. A dash stands for more"
    " than 100 %: the square products were disturbed while they were measured, or run slower than the model's, as on a"
    " CPU without instructions for the format."
)


def line(row: Row) -> str:
    """Return the line of a row for the terminal."""
    if "error" in row:
        return f"{row['name']}: not run: {row['error']}"
    text = f"{row['name']}: {row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f}x"
    return text + (f", gate {gate_cell(row)}" if "gate" in row else "")


def gate_cell(row: Row) -> str:
    """Return the result of the gate.

    It is `passed (0.013 of 0.098 at step 180)`, `FAILED (...)`, or the fall of the loss for another algorithm.
    """
    if "learned" in row:
        return f"– (learned {row['learned']['fall']:.2f}, the reference {row['learned']['reference']:.2f})"
    verdict = row["gate"]
    distance = "not finite" if verdict["distance"] is None else f"{verdict['distance']:.1g}"
    result = "passed" if verdict["passed"] else "FAILED"
    return f"{result} ({distance} of {verdict['tolerance']:.2g} at step {verdict['at_step']})"


def utilisation_cell(row: Row) -> str:
    """Return the MFU: `62%`, `62% of bf16's` in mode fp8, or a dash above 100 %."""
    share = row["flops_per_token"] * row["tokens_per_second"] / row["ceiling_flops"]
    if row["precision"] == "fp8":
        return f"{share:.0%} of bf16's"
    return f"{share:.0%}" if share <= 1 else "–"


def floor_line(floor: NoiseFloor) -> str:
    """Return a sentence on the noise floor that the tolerance was computed from."""
    windows = [max(distances) for distances in zip(*floor.distances, strict=True)]
    allowed = floor.tolerance()
    steps = [round(share * (len(windows) - 1)) for share in (0.2, 0.4, 0.6, 0.8, 1)]
    listed = [f"{windows[i]:.1g} ({allowed[i]:.2g}) at step {(i + 1) * WINDOW}" for i in steps]
    return (
        f"Gate: {len(floor.distances)} repetitions of the reference with weights perturbed by {floor.rounding:.2g}"
        f" strayed by up to, in nats (allowed): {', '.join(listed)}."
    )


def tricks_table(rows: Sequence[Row]) -> list[str]:
    """Return the Markdown table, one row per trick."""
    lines = list(HEADER)
    for row in rows:
        if "error" in row:
            lines.append(
                f"| {row['name']} | {row['about']} | not run here: {row['error']} | | | | | |"
            )
            continue
        name = f"{row['name']} (small shape)" if row["shape"] == "small" else row["name"]
        lines.append(
            f"| {name} | {row['about']} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x"
            f" | {utilisation_cell(row)} | {row['peak_bytes'] / 1e6:.0f}"
            f" | {row['peak_bytes'] / row['base_peak_bytes']:.2f}x | {gate_cell(row)} |"
        )
    return [*lines, "", FORMULA]


def write(
    out: Path,
    raw: Path,
    rows: list[Row],
    device: DeviceInfo,
    settings: dict[str, Any],
    bench: Mapping[str, Any],
    floors: Sequence[NoiseFloor],
) -> Path:
    """Write this device's section into `out` and the raw numbers into a JSON file in `raw`; return that file.

    Sections of other devices stay.
    """
    train, model = settings["train"], settings["model"]
    now = f"{datetime.now(UTC):%Y-%m-%d}"
    packages = ", ".join(f"{package} {number}" for package, number in versions().items())
    about = (
        f"{device.name}, {torch.get_num_threads()} threads, {platform.system()}, Python {platform.python_version()},"
        f" {packages}; {now};"
        f" {bench['rounds']} rounds of {bench['steps']} steps, medians; precision {settings['precision']['mode']},"
        f" {settings['objective']['rate']:.0%} of tokens masked, sequences of {train['sequence_length']},"
        f" vocabulary {bench['vocab_size']}; model {model['hidden_size']}x{model['num_layers']},"
        f" {train['batch_size']} sequences per step"
    )
    section = [f"`cramming bench`: {about}.", "", *tricks_table(rows)]
    for floor in floors:
        section += ["", floor_line(floor)]
    replace_section(out, f"tricks: {device.name}", section)
    file = raw / f"tricks_{slug(device.name)}_{now}.json"
    content = {
        "about": about,
        "conditions": conditions(settings, bench),
        "settings": settings,
        "floors": [asdict(floor) for floor in floors],
        "rows": rows,
    }
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    return file


def replace_section(page: Path, title: str, lines: Sequence[str]) -> None:
    """Replace the section `## title` of a Markdown page by these lines, or append it."""
    old = page.read_text(encoding="utf-8") if page.exists() else "# Measured\n\n"
    text = "\n".join([f"## {title}", "", *lines]) + "\n\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    new = pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}"
    write_atomically(page, new.rstrip("\n") + "\n")


def read_earlier(
    raw: Path, device: DeviceInfo, settings: dict[str, Any], bench: Mapping[str, Any]
) -> tuple[list[Row], dict[float, NoiseFloor]]:
    """Return rows and noise floors, by rounding, of this device's newest raw file.

    Both are empty if the file was measured under other conditions.
    """
    files = sorted(raw.glob(f"tricks_{slug(device.name)}_????-??-??.json"))
    if not files:
        return [], {}
    content = json.loads(files[-1].read_text(encoding="utf-8"))
    if content["conditions"] != conditions(settings, bench):
        say(f"{files[-1]}: measured with other settings or versions. The table starts anew.")
        return [], {}
    floors = [NoiseFloor(**floor) for floor in content["floors"]]
    return content["rows"], {floor.rounding: floor for floor in floors}


def slug(device_name: str) -> str:
    """Return a device's name as used in file names."""
    return re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-").lower()


def conditions(settings: dict[str, Any], bench: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that a row's numbers depend on, apart from the device and the row, as JSON values."""
    sections = {name: settings[name] for name in MEASURED_SECTIONS}
    values = {
        **sections,
        "bench": dict(bench),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    return dict(json.loads(json.dumps(values)))


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter for speed."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
