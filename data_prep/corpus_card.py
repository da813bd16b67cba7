"""`corpus_card.md`: what a person wants to know about a corpus, with plots, and advice at the end of `prepare`.

All of it comes from the manifest. For each reason to drop documents the card shows examples: what was measured, the
limit, and the passage. The plots are SVG written here: bars need no plotting library, and the same corpus gives the
same bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from cramming.data.manifest import Manifest, StageLine
from cramming.files import write_atomically
from cramming.progress import compact
from data_prep.filters import quality
from data_prep.filters.quality import FilterConfig
from data_prep.sources.source import DataConfig

CARD = "corpus_card.md"
PLOTS = "card"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 60, 36, 60

MUCH = 0.2  # of the text's bytes, taken by filters
FEW_WORDS = 20  # of a document, on average
MUCH_UNKNOWN = 0.005  # of the tokens, or of the characters
LARGE_HOLD_OUT = 0.1  # of the tokens
# Reason -> the setting that is behind it.
_SETTINGS = {
    "too_short": "data.clean.min_characters",
    "too_many_tokens": "data.filters.max_tokens_per_character",
} | {filter.reason: f"data.filters.{filter.setting}" for filter in quality.all_filters(FilterConfig())}


def write(folder: Path, manifest: Manifest) -> list[Path]:
    """Write the card and its plots; the files."""
    plots = {name: svg for name, svg in _plots(manifest).items() if svg}
    files = [folder / CARD, *(folder / PLOTS / f"{name}.svg" for name in plots)]
    for path, text in zip(files, [_card(manifest, list(plots)), *plots.values()]):
        write_atomically(path, text)
    return files


def _plots(manifest: Manifest) -> dict[str, str]:
    found = manifest.statistics
    ranks = [f"{2**i:,}" for i in range(len(found["vocabulary_counts"]))]
    by_source = {k: v for k, v in found["tokens_per_byte_by_source"].items() if v}
    return {
        "lengths": bars(
            "Documents by length in tokens", [f"< {e:,}" for e in found["length_edges"]], found["length_counts"]
        ),
        "vocabulary": bars("Count of the token at each rank", ranks, found["vocabulary_counts"], logarithmic=True),
        "tokens_per_byte": bars("Tokens per byte of text, by source", list(by_source), list(by_source.values())),
        "dropped": bars("Documents dropped, by reason", list(manifest.removed), list(manifest.removed.values())),
    }


def bars(title: str, names: Sequence[str], values: Sequence[float], logarithmic: bool = False) -> str:
    """A bar chart as SVG; empty without values."""
    if not values:
        return ""
    heights = np.log10(np.maximum(values, 1)) if logarithmic else np.asarray(values, dtype=float)
    scale = (HEIGHT - TOP - BOTTOM) / max(float(heights.max()), 1e-9)
    step = (WIDTH - LEFT - 10) / len(values)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"',
        ' font-family="sans-serif" font-size="9">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}{" (logarithmic)" if logarithmic else ""}</text>',
    ]
    for i, (name, value, height) in enumerate(zip(names, values, heights)):
        x, tall = LEFT + i * step, float(height) * scale
        middle, bottom = x + step / 2, HEIGHT - BOTTOM
        lines += [
            f'<rect fill="#4477aa" x="{x + step * 0.1:.1f}" y="{bottom - tall:.1f}" width="{step * 0.8:.1f}"'
            f' height="{tall:.1f}"/>',
            f'<text x="{middle:.1f}" y="{bottom - tall - 3:.1f}" text-anchor="middle">{compact(value)}</text>',
            f'<text x="{middle:.1f}" y="{bottom + 10}" text-anchor="end"'
            f' transform="rotate(-35 {middle:.1f} {bottom + 10})">{escape(name[-28:])}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _card(manifest: Manifest, plots: list[str]) -> str:
    licenses = sorted({str(source.get("license")) for source in manifest.sources if source["kind"] != "tokenizer"})
    lines = [
        f"# Corpus {manifest.name}",
        "",
        f"Made by `cramming prepare` {manifest.suite_version}; settings {manifest.settings_hash}; format"
        f" {manifest.format}. License of the text: {', '.join(licenses)}. `manifest.json` holds all numbers of this"
        " page, the settings and the sources; `cramming verify` checks every file against it.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_number(value)} |" for name, value in _overview(manifest).items()),
        *("", "## Stages", ""),
        *_table("stage|documents in|out|bytes in|out|dropped|notes", map(_stage_row, manifest.stages)),
    ]
    for stage in manifest.stages:
        for reason, entry in stage.dropped.items():
            lines += [f"Dropped by {stage.name}, {reason}, for example:", ""]
            lines += [f"- `{example.replace('`', ' ')}`" for example in entry.examples] + [""]
    lines += ["## Decontamination", "", *_decontamination(manifest.decontamination)]
    by_source = manifest.statistics["by_source"]
    total = max(1, sum(row["bytes"] for row in by_source.values()))
    rows = (
        [name, row["documents"], row["bytes"], f"{100 * row['bytes'] / total:.2f} %"] for name, row in by_source.items()
    )
    lines += ["## Sources", "", *_table("source|documents|bytes|share of the bytes", rows)]
    if remark := manifest.statistics.get("remark"):
        lines += [f"{remark[0].upper()}{remark[1:]}.", ""]
    lines += ["## Plots", "", *(f"![{name}]({PLOTS}/{name}.svg)" for name in plots), ""]
    return "\n".join(lines)


def _overview(manifest: Manifest) -> dict[str, Any]:
    found, info, lost = manifest.statistics, manifest.tokenizer, manifest.statistics["characters_lost"]
    return {
        **{f"{split} tokens": sum(s.tokens for s in shards) for split, shards in manifest.splits.items()},
        "documents": manifest.counts["documents"],
        "median tokens per document": found["median_length"],
        "text": f"{found['bytes']:,} bytes, {found['characters']:,} characters, {found['words']:,} words",
        "tokenizer": f"{info.kind}, {info.vocab_size:,} entries, of which {found['vocabulary_used']:,} occur",
        "tokens per byte": found["tokens_per_byte"],
        "tokens per character": found["tokens_per_character"],
        "tokens per word": found["tokens_per_word"],
        "unknown tokens": f"{manifest.counts['unknown_tokens']:,} ({100 * found['unknown_rate']:.4f} %)",
        "characters that no token stands for": "not known" if lost is None else f"{100 * lost:.4f} %",
        "bytes on disk per token": f"{found['bytes_per_token']}, with offsets, orders and tokenizer"
        f" {found['folder_bytes_per_token']}",
        "orders": ", ".join(("shuffled", "source", *manifest.orders)) + " (`train.order`)",
    }


def _table(columns: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown with an empty one behind; `columns` are separated by `|`."""
    names = columns.split("|")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(map(_number, row))} |" for row in rows), ""]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _stage_row(stage: StageLine) -> list[Any]:
    dropped = (f"{entry.documents:,} {reason} ({entry.bytes:,} B)" for reason, entry in stage.dropped.items())
    notes = (f"{key} {_note(value)}" for key, value in stage.notes.items() if value or value == 0)
    counts = [stage.documents_in, stage.documents_out, stage.bytes_in, stage.bytes_out]
    return [stage.name, *counts, "; ".join(dropped), "; ".join(notes)]


def _note(note: Any) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in note.items()) if isinstance(note, dict) else str(note)


def _decontamination(found: dict[str, Any]) -> list[str]:
    if not found:
        return ["Off: the corpus was not compared with any task (`data.decontaminate`).", ""]
    sets = "training, dev and test" if found["train_text"] else "dev and test"
    how = (
        f"runs of {found['ngram']} words; sentences of fewer from 6 words and 28 letters, standing alone from 4 and 20"
    )
    keys = ("examples", "searchable", "found", "removed")
    rows = ([task, *(found[key][task] for key in keys)] for task in found["removed"])
    table = _table("task|texts|searchable|found|documents dropped", rows)
    return [f"Compared with the {sets} texts in {found['tasks']}: {how}.", "", *table]


def advice(manifest: Manifest, config: DataConfig, documents: str | None = None) -> Iterator[str]:
    """At most three lines for a corpus that is perhaps not the one that was meant: text that filters took or documents
    that are tiny, unknown tokens, and a hold-out of many times its share. `documents` is the setting of this name where
    plain text was cut by it."""
    hint = f" (data.documents={documents} cuts the text so)" if documents else ""
    found, count = manifest.statistics, manifest.counts["documents"]
    words = found["words"] / max(1, count)
    tiny = f"documents are tiny: {words:.0f} words on average{hint}" if 0 < words < FEW_WORDS else ""
    stages = {stage.name: stage for stage in manifest.stages}
    dropped = stages["filters"].dropped | stages["tokens"].dropped
    taken = {reason: entry.bytes / max(1, stages["normalise"].bytes_out) for reason, entry in dropped.items()}
    total = sum(taken.values())
    if total > MUCH:
        reason, share = max(taken.items(), key=lambda item: item[1])
        setting = f" ({_SETTINGS[reason]})" if reason in _SETTINGS else ""
        yield (
            f"the filters took {total:.0%} of the text, {share:.0%} by {reason}{setting}; corpus_card.md has examples; "
            + (tiny or f"documents that are left have {words:.0f} words on average{hint}")
        )
    elif tiny:
        yield tiny
    rate, lost = found["unknown_rate"], found["characters_lost"]
    if max(rate, lost or 0) > MUCH_UNKNOWN:
        yield _unknown(rate, lost)
    train, validation = (sum(shard.tokens for shard in manifest.splits[split]) for split in ("train", "validation"))
    held_out = validation / (train + validation)
    if held_out > max(LARGE_HOLD_OUT, 2 * config.validation_fraction):
        yield (
            f"{held_out:.0%} of the tokens are held out for validation, where data.validation_fraction="
            f"{config.validation_fraction:g}: whole documents are, and there are {count}{hint}"
        )


def _unknown(rate: float, lost: float | None) -> str:
    tokens = f"{rate:.1%} of the tokens are unknown"
    if lost is None:
        return f"{tokens}; tokenizer=bpe knows every character"
    return (
        f"{tokens}, and no token stands for {lost:.1%} of the characters: WordPiece's unknown token is a whole word,"
        " in scripts without spaces a whole line, and in lower case it drops vowel signs; take tokenizer=bpe or unigram"
    )
