"""The end of a preparation: statistics of the finished corpus, its manifest, and `corpus_card.md` for people.

For each reason to drop documents the card shows examples: what was measured, the limit, and the passage.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cramming import __version__
from cramming.config import file_sha256
from cramming.data.corpus import TASKS, TokenStream
from cramming.data.manifest import FORMAT_VERSION, Manifest, StageLine, TokenizerInfo
from cramming.files import write_atomically
from data_prep.document_stats import token_lengths, write_orders
from data_prep.filters import quality
from data_prep.pipeline import Pipeline
from data_prep.prepare_config import Preparation
from data_prep.resume_state import CARD
from data_prep.shard_writer import TOO_MANY_TOKENS, CorpusWriter
from data_prep.sources.source import DataConfig
from data_prep.tokenizer.load import (
    TOKENIZER_CONFIG,
    characters_by_entry,
    describe_for_transformers,
)

MUCH = 0.2  # of the text's bytes, taken by filters
FEW_WORDS = 20  # of a tiny document, on average, and 6 characters for each: scripts without spaces have few words
MUCH_UNKNOWN = 0.005  # of the tokens, or of the characters
LARGE_HOLD_OUT = 0.1  # of the tokens
NOT_KNOWN = "not known (ready-made ids)"  # of their text
# Reason -> the setting that is behind it.
_SETTINGS = {
    "too_short": "data.clean.min_characters",
    TOO_MANY_TOKENS: "data.filters.max_tokens_per_character",
} | {rule.reason: f"data.filters.{setting}" for setting, rule in quality.RULES.items()}


def complete(
    preparation: Preparation,
    sources: list[dict[str, Any]],
    tokenizer: Tokenizer,
    info: TokenizerInfo,
    pipeline: Pipeline,
    writer: CorpusWriter,
) -> Manifest:
    """Write orders, card and the tokenizer's description, all but the manifest, which is returned."""
    folder, data, stats = preparation.folder, preparation.data, pipeline.stats
    streams = {
        split: TokenStream(folder, shards, writer.encoder.dtype)
        for split, shards in writer.shards.items()
    }
    orders = write_orders(
        folder, data.orders, writer.documents["train"], streams["train"], writer.token_use
    )
    found = _statistics(preparation, list(streams.values()), tokenizer, writer)
    for name in ("tokenizer", "order", "shards"):
        stats.pass_on(name)
    near, path = pipeline.near, preparation.tokenizer_path
    if near:
        stats["near deduplication"].notes |= {
            "clusters": near.clusters,
            "index_bytes": near.memory_bytes,
        }
    origin = path.name if path else f"trained on at most {preparation.tokenizer.sample_mb:g} MB"
    stats["tokenizer"].notes |= {"kind": info.kind, "entries": info.vocab_size, "origin": origin}
    stats["tokens"].notes |= {"tokens": found["tokens"], "unknown_rate": found["unknown_rate"]}
    stats["order"].notes["files"] = ", ".join(orders) or "none"
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=data.name,
        suite_version=__version__,
        settings_hash=preparation.settings_hash,
        settings=preparation.settings,
        dtype="uint16" if writer.encoder.dtype.itemsize == 2 else "uint32",
        tokenizer=info,
        sources=sources,
        counts={
            "documents_read": stats["source"].documents_in,
            "documents": stats["tokens"].documents_out,
            "long_documents_cut": stats["normalise"].notes["long_documents_cut"],
            "text_bytes": found["bytes"],
            "unknown_tokens": int(writer.token_use[info.special_ids["unk"]]),
        },
        removed=stats.removed(),
        splits=writer.shards,
        stages=[stage.line() for stage in stats.values()],
        statistics=found,
        decontamination=_decontamination(pipeline),
        orders=orders,
    )
    card = (
        _card(manifest).encode(errors="backslashreplace").decode()
    )  # names of files may be no UTF-8
    write_atomically(folder / CARD, card)
    write_atomically(folder / TOKENIZER_CONFIG, describe_for_transformers(info.special))
    files = [folder / name for name in (CARD, TOKENIZER_CONFIG, *orders.values())]
    files += [path for path in (folder / TASKS).rglob("*") if path.is_file()]
    return replace(
        manifest, files={path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
    )


def _statistics(
    preparation: Preparation, streams: list[TokenStream], tokenizer: Tokenizer, writer: CorpusWriter
) -> dict[str, Any]:
    use_V, splits = writer.token_use, list(writer.documents.values())
    lengths = [token_lengths(stream) for stream in streams]
    by_source: dict[str, dict[str, int]] = {}
    for documents, lengths_D in zip(splits, lengths):
        for name, row in documents.by_source(lengths_D).items():
            before = by_source.get(name, {})
            by_source[name] = {key: value + before.get(key, 0) for key, value in row.items()}
    characters, words, count = (
        sum(getattr(documents, key) for documents in splits)
        for key in ("characters", "words", "documents")
    )
    tokens, size = int(use_V.sum()), sum(row["bytes"] for row in by_source.values())
    # White space aside; None where it is not known: ready-made ids, and kinds of which entries do not tell.
    characters_V, lost = characters_by_entry(tokenizer), None
    if characters_V is not None and characters:
        lost = round(max(0.0, 1 - int(use_V @ characters_V) / (characters - words + count)), 6)
    remark = preparation.source.remark()
    return {
        "tokens": tokens,
        "bytes": size,
        "characters": characters,
        "words": words,
        "tokens_per_byte": round(tokens / size, 6) if size else None,
        "tokens_per_word": round(tokens / words, 6) if words else None,
        "unknown_rate": round(int(use_V[writer.encoder.ids.unk]) / tokens, 8),
        "characters_lost": lost,
        "by_source": by_source,
        "median_length": float(np.median(np.concatenate(lengths))),
        "vocabulary_used": int(np.count_nonzero(use_V)),
        **({"remark": remark} if remark else {}),
    }


def _decontamination(pipeline: Pipeline) -> dict[str, Any]:
    """The tasks' files that were searched for, and their development texts; of each task how many texts can be found,
    were found, and how many documents were removed."""
    search, notes = pipeline.decontaminator, pipeline.stats["decontamination"].notes
    if search is None:
        return {}
    return {
        **pipeline.config.decontaminate.model_dump(),
        "examples": search.examples,
        "searchable": search.searchable,
        "found": notes["texts_found"],
        "removed": {task: notes["documents_by_task"].get(task, 0) for task in search.tasks},
        "files": search.files,
        "development": search.development,
    }


def _card(manifest: Manifest) -> str:
    found, info = manifest.statistics, manifest.tokenizer
    licenses = sorted(
        {str(source.get("license")) for source in manifest.sources if source["kind"] != "tokenizer"}
    )
    total, text, per_token = found["bytes"], NOT_KNOWN, NOT_KNOWN
    if total:
        text = f"{total:,} bytes, {found['characters']:,} characters, {found['words']:,} words"
        text += " (normalised: single spaces, no indentation, no blank lines)"
        per_token = f"{found['tokens_per_byte']}, {found['tokens_per_word']}"
    rows = [
        *(
            [f"{split} tokens", sum(s.tokens for s in shards)]
            for split, shards in manifest.splits.items()
        ),
        ["documents", manifest.counts["documents"]],
        ["median tokens per document", found["median_length"]],
        ["text", text],
        [
            "tokenizer",
            f"{info.kind}, {info.vocab_size:,} entries, of which {found['vocabulary_used']:,} occur",
        ],
        ["tokens per byte, per word", per_token],
        [
            "unknown tokens",
            f"{manifest.counts['unknown_tokens']:,} ({100 * found['unknown_rate']:.4f} %)",
        ],
        ["characters that no token stands for", _lost(manifest)],
        ["orders", ", ".join(("shuffled", "source", *manifest.orders)) + " (`train.order`)"],
    ]
    lines = [
        f"# Corpus {manifest.name}",
        "",
        f"Made by `cramming prepare` {manifest.suite_version}; settings {manifest.settings_hash}; format"
        f" {manifest.format}. License of the text: {', '.join(licenses)}. `manifest.json` holds all numbers of this"
        " page, the settings and the sources; `cramming verify` checks every file against it.",
        "",
        *_table("|", rows),
        *("## Stages", ""),
        *_table(
            "stage|documents in|out|bytes in|out|dropped|notes", map(_stage_row, manifest.stages)
        ),
    ]
    if any(stage.dropped for stage in manifest.stages):
        lines += [
            "`file:n` is document n of that file, counted from 0; the first filter that removes is named.",
            "",
        ]
    for stage in manifest.stages:
        for reason, entry in stage.dropped.items():
            lines += [f"Dropped by {stage.name}, {reason}, for example:", ""]
            lines += [f"- `{example.replace('`', ' ')}`" for example in entry.examples] + [""]
    lines += ["## Decontamination", "", *_overlap(manifest.decontamination), "## Sources", ""]
    lines += _table(
        "source|documents|bytes|share of the bytes",
        (
            [name, row["documents"], row["bytes"], f"{100 * row['bytes'] / total:.2f} %"]
            if total
            else [name, row["documents"], NOT_KNOWN, NOT_KNOWN]
            for name, row in found["by_source"].items()
        ),
    )
    if remark := found.get("remark"):
        lines += [f"{remark[0].upper()}{remark[1:]}.", ""]
    return "\n".join(lines)


def _lost(manifest: Manifest) -> str:
    """The share of the characters that no token stands for; else how many at least, one for each unknown token."""
    found, unknown = manifest.statistics, manifest.counts["unknown_tokens"]
    if found["characters_lost"] is not None:
        return f"{100 * found['characters_lost']:.4f} %"
    return (
        f"at least {100 * unknown / found['characters']:.4f} %"
        if found["characters"]
        else NOT_KNOWN
    )


def _table(columns: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown with an empty one behind; `columns` are separated by `|`."""
    names = columns.split("|")
    cells = (
        [
            f"{value:,}" if isinstance(value, int) else str(value).replace("|", r"\|")
            for value in row
        ]
        for row in rows
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells), ""]


def _stage_row(stage: StageLine) -> list[Any]:
    dropped = (
        f"{entry.documents:,} {reason} ({entry.bytes:,} B)"
        for reason, entry in stage.dropped.items()
    )
    notes = []
    for key, note in stage.notes.items():
        if isinstance(note, dict):
            note = ", ".join(f"{count:,} {name}" for name, count in note.items())
        notes += [f"{key} {note}"] if note or note == 0 else []
    counts = [stage.documents_in, stage.documents_out, stage.bytes_in, stage.bytes_out]
    return [stage.name, *counts, "; ".join(dropped), "; ".join(notes)]


def _overlap(found: dict[str, Any]) -> list[str]:
    if not found:
        return ["Off: the corpus was not compared with any task (`data.decontaminate`).", ""]
    sets = "training, dev and test" if found["train_text"] else "dev and test"
    how = (
        f"runs of {found['ngram']} words;"
        " sentences of fewer from 6 words and 28 letters, standing alone from 4 and 20"
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
