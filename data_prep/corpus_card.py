"""The end of a preparation: statistics of the finished corpus, its manifest, and `corpus_card.md` for people.

For each reason to drop documents the card shows examples: what was measured, the limit, and the passage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from cramming import __version__
from cramming.config import file_sha256
from cramming.data.corpus import TASKS, TokenStream
from cramming.data.manifest import (
    FORMAT_VERSION,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    TokenizerInfo,
)
from cramming.files import write_atomically
from data_prep.filters import quality
from data_prep.prepare_config import Preparation
from data_prep.readers.source import DataConfig
from data_prep.selection import TOO_MANY_TOKENS, Selection
from data_prep.stats import StageStats, write_orders
from data_prep.task_grid import CARD
from data_prep.tokenizer.load import (
    TOKENIZER_CONFIG,
    characters_by_entry,
    describe_for_transformers,
)

MUCH = 0.2  # of the text's bytes, taken by filters
FEW_WORDS = 20  # of a tiny document, on average, and 6 characters for each: scripts without spaces have few words
MUCH_UNKNOWN = 0.005  # of the tokens, or of the characters
LARGE_HOLD_OUT = 0.1  # of the tokens
# Reason -> the setting that is behind it.
_SETTINGS = {
    "too_short": "data.clean.min_characters",
    TOO_MANY_TOKENS: "data.filters.max_tokens_per_character",
} | {rule.reason: f"data.filters.{setting}" for setting, rule in quality.RULES.items()}


@dataclass(frozen=True)
class Result:
    """Outcome of a preparation: selected and written documents, and the counts of the stages.

    `token_use` [V] is how often each entry occurs.
    """

    stats: StageStats
    selection: Selection
    shards: dict[Split, list[Shard]]
    token_use: np.ndarray
    dtype: np.dtype[Any]

    def documents(self) -> np.ndarray:
        """Return the rows of the corpus's documents, in the order of the source."""
        rows: np.ndarray = self.selection.rows.rows_N[self.selection.keep_N]
        return rows


def complete(
    preparation: Preparation,
    sources: list[dict[str, Any]],
    tokenizer: Tokenizer,
    info: TokenizerInfo,
    result: Result,
) -> Manifest:
    """Write orders, card and the tokenizer's description, all but the manifest, which is returned."""
    folder, data, stats = preparation.folder, preparation.data, result.stats
    train_D = result.selection.rows.rows_N[result.selection.of_split("train")]
    stream = TokenStream(folder, result.shards["train"], result.dtype)
    orders = write_orders(folder, data.orders, train_D, stream, result.token_use)
    statistics = _statistics(preparation, tokenizer, info, result)
    for name in ("tokenizer", "order", "shards"):
        stats.pass_on(name)
    path = preparation.tokenizer_path
    origin = path.name if path else f"trained on at most {preparation.tokenizer.sample_mb:g} MB"
    stats["tokenizer"].notes |= {"kind": info.kind, "entries": info.vocab_size, "origin": origin}
    counts = {name: statistics[name] for name in ("tokens", "unknown_rate")}
    stats["tokens"].notes |= counts
    stats["order"].notes["files"] = ", ".join(orders) or "none"
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=data.name,
        suite_version=__version__,
        settings_hash=preparation.settings_hash,
        settings=preparation.settings,
        dtype="uint16" if result.dtype.itemsize == 2 else "uint32",
        tokenizer=info,
        sources=sources,
        counts={
            "documents_read": stats["source"].documents_in,
            "documents": stats["tokens"].documents_out,
            "long_documents_cut": stats["normalise"].notes.get("long_documents_cut", 0),
            "text_bytes": statistics["bytes"],
            "unknown_tokens": int(result.token_use[info.special_ids["unk"]]),
        },
        removed=stats.removed(),
        splits=result.shards,
        stages=[stage.line(name) for name, stage in stats.items()],
        statistics=statistics,
        decontamination=_decontamination(preparation, stats),
        orders=orders,
    )
    # Names of files may be no UTF-8.
    card = _card(manifest).encode(errors="backslashreplace").decode()
    write_atomically(folder / CARD, card)
    transformers_settings = describe_for_transformers(info, folder / TOKENIZER)
    write_atomically(folder / TOKENIZER_CONFIG, transformers_settings)
    files = [folder / name for name in (CARD, TOKENIZER_CONFIG, *orders.values())]
    files += [path for path in (folder / TASKS).rglob("*") if path.is_file()]
    hashes = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
    return replace(manifest, files=hashes)


def _statistics(
    preparation: Preparation, tokenizer: Tokenizer, info: TokenizerInfo, result: Result
) -> dict[str, Any]:
    use_V, rows_D = result.token_use, result.documents()
    characters, words = int(rows_D["characters"].sum()), int(rows_D["words"].sum())
    tokens, size = int(use_V.sum()), int(rows_D["bytes"].sum())
    # White space aside; None where it is not known: ready-made ids, and kinds of which entries do not tell.
    characters_V, lost = characters_by_entry(tokenizer), None
    if characters_V is not None and characters:
        written = characters - words + len(rows_D)
        lost = round(max(0.0, 1 - int(use_V @ characters_V) / written), 6)
    remark = preparation.source.remark()
    return {
        "tokens": tokens,
        "bytes": size,
        "characters": characters,
        "words": words,
        "tokens_per_byte": round(tokens / size, 6) if size else None,
        "tokens_per_word": round(tokens / words, 6) if words else None,
        "unknown_rate": round(int(use_V[info.special_ids["unk"]]) / tokens, 8),
        "characters_lost": lost,
        "by_source": _by_source(rows_D, result.selection.rows.sources),
        "median_length": float(np.median(rows_D["tokens"])),
        "vocabulary_used": int(np.count_nonzero(use_V)),
        **({"remark": remark} if remark else {}),
    }


def _by_source(rows_D: np.ndarray, sources: list[str]) -> dict[str, dict[str, int]]:
    """Return documents, bytes and tokens of each source that has any."""
    counts: dict[str, dict[str, int]] = {}
    for number, name in enumerate(sources):
        of_source = rows_D[rows_D["source"] == number]
        if len(of_source):
            size, tokens = int(of_source["bytes"].sum()), int(of_source["tokens"].sum())
            counts[name] = {"documents": len(of_source), "bytes": size, "tokens": tokens}
    return counts


def _decontamination(preparation: Preparation, stats: StageStats) -> dict[str, Any]:
    """Return the tasks' files that were searched for, and of each task how many texts were found, and where."""
    search, notes = preparation.decontaminator, stats["decontamination"].notes
    if search is None:
        return {}
    return {
        **preparation.data.decontaminate.model_dump(),
        "examples": search.examples,
        "searchable": search.searchable,
        "found": notes["texts_found"],
        "removed": {task: notes["documents_by_task"].get(task, 0) for task in search.tasks},
        "files": search.files,
        "development": search.development,
    }


def _card(manifest: Manifest) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"cell": _cell, "notes": _notes}
    sources = [source for source in manifest.sources if source["kind"] != "tokenizer"]
    return environment.get_template("corpus_card.md.j2").render(
        manifest=manifest,
        info=manifest.tokenizer,
        found=manifest.statistics,
        overlap=manifest.decontamination,
        unknown=manifest.counts["unknown_tokens"],
        licenses=sorted({str(source.get("license")) for source in sources}),
        not_known="not known (ready-made ids)",
    )


def _cell(value: Any) -> str:
    """Return what a cell of a table shows."""
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", r"\|")


def _notes(notes: dict[str, Any]) -> str:
    shown = []
    for key, note in notes.items():
        if isinstance(note, dict):
            note = ", ".join(f"{count:,} {name}" for name, count in note.items())
        if note or note == 0:
            shown.append(f"{key} {note}")
    return "; ".join(shown)


def advice(manifest: Manifest, config: DataConfig, documents: str | None = None) -> Iterator[str]:
    """At most three lines for a corpus that is perhaps not the one that was meant: text that filters took or documents
    that are tiny, unknown tokens, and a hold-out of many times its share. `documents` is the setting of this name where
    plain text was cut by it."""
    hint = f" (data.documents={documents} cuts the text so)" if documents else ""
    found, count = manifest.statistics, manifest.counts["documents"]
    stages = {stage.name: stage for stage in manifest.stages}
    dropped = stages["filters"].dropped | stages["tokens"].dropped
    taken = {
        reason: entry.bytes / max(1, stages["normalise"].bytes_out)
        for reason, entry in dropped.items()
    }
    if sum(taken.values()) > MUCH:
        reason, share = max(taken.items(), key=lambda item: item[1])
        setting = f" ({_SETTINGS[reason]})" if reason in _SETTINGS else ""
        yield (
            f"the filters took {sum(taken.values()):.0%} of the text, {share:.0%} by {reason}{setting}; corpus_card.md"
            f" has examples{hint}"
        )
    elif (
        0 < (words := found["words"] / max(1, count)) < FEW_WORDS
        and found["characters"] < 6 * FEW_WORDS * count
    ):
        yield f"documents are tiny: {words:.0f} words on average{hint}"
    rate, lost = found["unknown_rate"], found["characters_lost"]
    if max(rate, lost or 0) > MUCH_UNKNOWN:
        characters = (
            "" if lost is None else f", and no token stands for {lost:.1%} of the characters"
        )
        yield f"{rate:.1%} of the tokens are unknown{characters}; tokenizer=bpe knows every character"
    train, validation = (
        sum(shard.tokens for shard in manifest.splits[split]) for split in ("train", "validation")
    )
    held_out = validation / (train + validation)
    if held_out > max(LARGE_HOLD_OUT, 2 * config.validation_fraction):
        yield (
            f"{held_out:.0%} of the tokens are held out for validation, where data.validation_fraction="
            f"{config.validation_fraction:g}: whole documents are, or parts of long ones, and there are {count}{hint}"
        )
