"""The dry run's tables: what passed, and where a compiled step's time would go.

Times are a roofline's: operations at a stated share of the card's peak, bytes at a stated share of its bandwidth, a
kernel after the other. What a kernel really reaches is not known here.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from dry_run import compiled_pieces
from fake_card import CARDS

from cramming.bench.tables import replace_section
from cramming.plan import cards

# Of the data sheet; an H200 reached 790 of 989 TFLOP/s on large products. Assumed for others.
MATMUL_UTILISATION, BANDWIDTH_UTILISATION = 0.7, 0.8
LAUNCH_SECONDS = 6e-6  # of a kernel, from Python without a compiler
ATTENTION_SHARE = (
    0.35  # of the peak: FlashAttention 2 and cuDNN at head size 64 and short rows; assumed
)
SMALLEST_SECONDS = 2e-6  # of a kernel on the device, started without a wait
STEP_TOKENS = 2**20  # of an optimizer step: train=day
NOTE = "A step that is not compiled ran with 4 layers and 8 sequences of 128."
PLAIN = "bf16, residual stream in bf16"
SECTION = "A GPU, reckoned: the dry run"
GROUPS = (  # the first that a Triton kernel's name has is where it is counted
    ("loss", "softmax|gather|amax|argmax"),
    ("embedding", "embedding"),
    ("norm and residual", "layer_norm|rms|mean_|rsqrt"),
    ("activation function", "gelu|silu|relu"),
    ("bias gradients", "red_fused.*sum|per_fused_sum"),
    ("rest", ""),
)
CHANGES = """\
What one change makes of the bytes, in rows of 128 for sm_90; `blocks` is `runtime.compile=blocks`, whose uncompiled
operations are counted by the sizes of their tensors:"""
UNTRIED = """What remains untried until there is a card:

- whether any number is right, and how fast any kernel is: rooflines know no caches, no occupancy, no shapes;
- launching: what cubins need of the driver, memory (fragmentation, what really fits), streams that
  overlap, pinned memory;
- which configuration of a Triton kernel the autotuner takes: registers and spills are the first one's;
- autograd's threads beside each other: fake tensors allow one, so offloading ran in one;
- lengths that differ in `padded` (the host's reads are answered as if all were equal), and `PackedSplit` on the device;
- FlexAttention in eager execution; CUDA graphs; max-autotune; FlashAttention 3; several GPUs (NCCL);
- compiled steps that the tables lack: {missing};
- with a memory trick the kernels `auto`, `dense` and `padded` (the plain rows have them); steps of more than 4
  layers, uncompiled;
- the optimizer's own compiled kernels (torchao's 8-bit and 4-bit AdamW ran uncompiled)."""


def group_of(kernel: dict[str, Any]) -> str:
    """Return the group in which a kernel's time is counted."""
    if kernel["kind"] in ("product", "attention"):
        return {"product": "matrix products", "attention": "attention"}[kernel["kind"]]
    return next(name for name, pattern in GROUPS if re.search(pattern, kernel["name"]))


class Reckoning:
    """Seconds of a compiled micro-batch on a card, by group."""

    def __init__(self, row: dict[str, Any], sheet: str) -> None:
        self.row, self.sheet = row, sheet
        card = cards.find(sheet)
        assert card
        self.peak = card.tflops * 1e12
        self.bandwidth = card.bandwidth * 1e9 * BANDWIDTH_UTILISATION
        self.shares = {"product": MATMUL_UTILISATION, "attention": ATTENTION_SHARE}
        self.seconds, self.bytes = Counter[str](), Counter[str]()
        for kernel in row["kernels"]:
            self.seconds[group_of(kernel)] += kernel["launches"] * self.kernel_seconds(kernel)
            self.bytes[group_of(kernel)] += kernel["launches"] * kernel["bytes"]
        # Adding a micro-batch's gradients to the others: two reads and a write. Once a step norm and AdamW: 32 bytes.
        size = row["parameters"] * (12 + 32 * row["tokens"] / STEP_TOKENS)
        self.bytes["gradients, update"], self.seconds["gradients, update"] = (
            size,
            size / self.bandwidth,
        )

    def kernel_seconds(self, kernel: dict[str, Any]) -> float:
        """One launch."""
        products = kernel["flops"] / (self.peak * self.shares.get(kernel["kind"], 1))
        return max(products, kernel["bytes"] / self.bandwidth, SMALLEST_SECONDS)

    @property
    def launches(self) -> int:
        return sum(kernel["launches"] for kernel in self.row["kernels"])

    @property
    def total(self) -> float:
        """The device's time, or the host's if it needs longer to start the kernels."""
        return max(sum(self.seconds.values()), self.launches * LAUNCH_SECONDS)

    @property
    def tokens_per_second(self) -> float:
        return self.row["tokens"] / self.total


def read(raw: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows by part; of two that are the same piece the later."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for line in raw.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        names = ("model", "mode", "memory", "optimizer", "architecture", "length", "name", "sheet")
        parts[row["part"]][str([row.get(name) for name in names])] = row
    return {part: list(rows.values()) for part, rows in parts.items()}


def _table(headers: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows)]


def on_cards(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return each step with its card, of sm_90 with an A100 too where sm_80 has none: bytes are alike."""
    on_ampere = {
        (row["model"], row["length"], row["name"]) for row in rows if row["architecture"] == "sm_80"
    }
    pairs = []
    for row in rows:
        pairs.append((row, CARDS[row["architecture"]].sheet))
        is_on_ampere = (row["model"], row["length"], "") in on_ampere
        if row["architecture"] == "sm_90" and not row["name"] and not is_on_ampere:
            pairs.append((row, "A100"))
    return pairs


def bytes_by_change(rows: list[dict[str, Any]]) -> list[str]:
    """Bytes a token of a micro-batch's kernels, in rows of 128 for sm_90: a line for each change of the plain step."""
    sizes_by_change: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["architecture"] == "sm_90" and row["length"] == 128:
            size = sum(kernel["launches"] * kernel["bytes"] for kernel in row["kernels"])
            sizes_by_change[row["name"] or PLAIN][row["model"]] = (
                f"{size / row['tokens'] / 1e3:,.0f}"
            )
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [
        [name, *(sizes.get(model, "–") for model in models)]
        for name, sizes in sizes_by_change.items()
    ]
    return _table(["kB a token", *models], lines)


def speeds(rows: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Predicted tokens/s of each compiled step on a card of the data sheets."""
    groups = ["matrix products", "attention", *(name for name, _ in GROUPS), "gradients, update"]
    lines = []
    for row, sheet in rows:
        reckoning = Reckoning(row, sheet)
        spilled = [k for k in row["kernels"] if k["spilled"]]
        spills = (
            f"{len(spilled)} (up to {max(k['spilled'] for k in spilled)} B)" if spilled else "0"
        )
        lines.append(
            [
                f"{row['model']} {row['length']}{', ' + row['name'] if row['name'] else ''}",
                f"{sheet} ({row['architecture']})",
                f"{reckoning.launches} ({sum(k['kind'] == 'triton' for k in row['kernels'])})",
                spills,
                f"{sum(reckoning.bytes.values()) / row['tokens'] / 1e6:.2f}",
                *(f"{reckoning.seconds[group] / reckoning.total:.0%}" for group in groups),
                f"{reckoning.tokens_per_second:,.0f}",
                f"{reckoning.tokens_per_second * row['flops_per_token'] / reckoning.peak:.0%}",
            ]
        )
    headers = [
        "model, length",
        "card (kernels for)",
        "launches (Triton kernels)",
        "with a stack (spills)",
        "MB a token",
    ]
    headers += [*groups, "predicted tokens/s", "MFU"]
    return _table(headers, lines)


def outcomes(rows: list[dict[str, Any]]) -> list[str]:
    """One line per engine (or fine-tuning, or plan): how each combination ended."""
    lines = []
    for row in rows:
        cases_by_outcome: dict[str, list[str]] = defaultdict(list)
        for case, outcome in (row.get("outcomes") or {"all": row.get("error", "?")}).items():
            cases_by_outcome[outcome].append(case)
        text = "; ".join(
            f"{'all' if len(cases_by_outcome) == 1 else ', '.join(v)}: {k}"
            for k, v in cases_by_outcome.items()
        )
        what = [row.get(key, "") for key in ("part", "model", "mode", "memory")]
        lines.append([*what, row.get("optimizer", ""), text.replace("|", "/")])
    return _table(
        ["part", "model", "number format", "memory", "optimizer", "packing and kernel: outcome"],
        lines,
    )


def count(rows: list[dict[str, Any]]) -> Counter[str]:
    """Return the number of combinations by outcome."""
    results = Counter[str]()
    for row in rows:
        for outcome in (row.get("outcomes") or {"all": "FAILED"}).values():
            passed = "passed" if "reads" not in outcome else "passed with reads by the host"
            results[passed if outcome.startswith("ok") else outcome.split(":")[0]] += 1
    return results


def missing_of(plain: list[dict[str, Any]]) -> str:
    """The compiled steps that are wanted and not there."""
    done = {(row["architecture"], row["model"], row["length"]) for row in plain}
    wanted = [
        (piece["architecture"], piece["model"], piece["length"])
        for piece in compiled_pieces()
        if not piece["name"]
    ]
    return ", ".join(" ".join(map(str, step)) for step in wanted if step not in done) or "none"


def is_whole(row: dict[str, Any]) -> bool:
    """Return whether a step was compiled without a break, whole where its settings say so, and once for its shapes."""
    in_parts = "runtime.compile=blocks" in row.get("overrides", [])
    return row["breaks"] == 0 and not row.get("recompiled") and (in_parts or row["graphs"] == 1)


def write(raw: Path, out: Path | None, docs: Path | None) -> None:
    """The result file, and the section of the documentation."""
    parts = read(raw)
    compiled = [row for row in parts.get("compiled", []) if "error" not in row]
    compiled.sort(key=lambda row: (row["name"] != "", -int(row["architecture"][3:]), row["length"]))
    failed = [row for row in parts.get("compiled", []) if "error" in row]
    plain = [row for row in compiled if not row["name"]]
    steps = [row for part in ("training", "finetuning", "plan") for row in parts.get(part, [])]
    counts = count(steps)
    about = (
        f"`benchmarks/gpu/dry_run.py`, torch 2.11.0+cu130, Triton 3.6, no GPU: {sum(counts.values())} combinations of a"
        f" whole step on fake `cuda` tensors ({', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}), and"
        f" {len(compiled)} steps compiled (`fullgraph=True`, no break, one graph but with `runtime.compile=blocks`"
        f"{'' if all(map(is_whole, compiled)) else ' BUT SEE THE RAW FILE'})."
    )
    about += (
        " Refused are `products`, which is for CPUs, and FlashAttention in fp32. Within a pass the host reads only with"
        " `padded`, which makes its groups there; after it, four numbers a step."
    )
    if out:
        about += f" Step by step: `benchmarks/results/{out.name}`."
    reckoning = (
        f"Reckoned, not measured: products at {MATMUL_UTILISATION:.0%} and attention at {ATTENTION_SHARE:.0%} of the"
        f" peak, bytes at {BANDWIDTH_UTILISATION:.0%} of the bandwidth, the host"
        f" {LAUNCH_SECONDS * 1e6:.0f} us a launch; {PLAIN} (2080 Ti: fp16 and fp32), AdamW, no checkpointing,"
        " micro-batches of 65,536 tokens (2080 Ti: 16,384), a quarter of them targets, vocabulary 32768."
        " MFU is of the data sheet's peak."
    )
    section = [about, "", reckoning, "", *speeds(on_cards(plain)), "", CHANGES, ""]
    section += [*bytes_by_change(compiled), ""]
    section += [UNTRIED.format(missing=missing_of(plain))]
    if out:
        text = [
            "# Dry run of the GPU's code",
            "",
            about,
            "",
            reckoning,
            "",
            *speeds(on_cards(compiled)),
            "",
            CHANGES,
            "",
            *bytes_by_change(compiled),
            "",
        ]
        text += [
            f"Not compiled: {row['model']} {row['length']} {row['architecture']} {row['name']}: {row['error']}\n"
            for row in failed
        ]
        text += [
            NOTE,
            "",
            "## Steps",
            "",
            *outcomes(steps),
            "",
            f"Raw: `{out.with_suffix('.jsonl').name}`.",
            "",
        ]
        out.write_text("\n".join(text), encoding="utf-8")
    if docs:
        replace_section(docs, SECTION, section)
