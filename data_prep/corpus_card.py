"""The end of a preparation: statistics of the finished corpus, its manifest, and `corpus_card.md` for people.

For each reason to drop documents the card shows examples: what was measured, the limit, and the passage.
"""

import json
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
from data_prep.readers.files import TextSource
from data_prep.readers.source import Source
from data_prep.repeated_lines import LARGE_SHARE
from data_prep.selection import OTHERS, SENTENCES_CUT, TOO_MANY_TOKENS, Selection
from data_prep.stages import END_OF_TEXT, STRIPPED, TEMPLATES_LOST
from data_prep.stats import StageStats, write_orders
from data_prep.task_grid import CARD, DROPPED
from data_prep.tokenizer.load import (
    TOKENIZER_CONFIG,
    characters_by_entry,
    describe_for_transformers,
)

MUCH = 0.05  # of the text's bytes, taken by one filter
FEW_WORDS = 20  # of a tiny document, on average, and 6 characters for each: scripts without spaces have few words
MUCH_UNKNOWN = 0.005  # of the tokens, or of the characters
LONGEST_MARKER = 40  # characters
SHOWN_TEMPLATES = 20  # of Wikipedia's without text, by name
FEW_CONTAMINATED = 5  # documents: of fewer nothing is said
MUCH_STRIPPED = 0.002  # of the characters; 0.0004 in English Wikipedia
LARGE_HOLD_OUT = 0.1  # of the tokens
_FILTERS = {rule.reason: f"data.filters.{setting}" for setting, rule in quality.RULES.items()}
# Stage -> reason -> the setting that governs it; none can be switched off without one.
SETTINGS = {
    "source": dict.fromkeys(("empty_file", "binary_file", "binary", "not_utf8"), "data.damaged")
    | {"null": "data.text_field"},
    "filters": {"too_short": "data.clean.min_characters", "no_letters": ""} | _FILTERS,
    "exact deduplication": {"duplicate": "data.deduplicate"},
    "near deduplication": {"near_duplicate": "data.near_duplicates.threshold"},
    "decontamination": {
        "contaminated": "data.decontaminate.tasks",
        SENTENCES_CUT: "data.decontaminate.action",
    },
    "tokens": {TOO_MANY_TOKENS: "data.filters.max_tokens_per_character"},
}


@dataclass(frozen=True)
class Result:
    """Outcome of a preparation: selected and written documents, and the counts of the stages.

    `token_use` [V] is how often each entry occurs; `repeated_lines` those that make up much of the text.
    """

    stats: StageStats
    selection: Selection
    shards: dict[Split, list[Shard]]
    token_use: np.ndarray
    dtype: np.dtype[Any]
    repeated_lines: list[dict[str, Any]]

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
    folder, stats = preparation.folder, result.stats
    train_D = result.selection.rows.rows_N[result.selection.of_split("train")]
    stream = TokenStream(folder, result.shards["train"], result.dtype)
    orders = write_orders(folder, preparation.data.orders, train_D, stream, result.token_use)
    statistics = _statistics(preparation, tokenizer, info, result)
    _add_notes(stats, preparation, info, statistics, orders)
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=preparation.data.name,
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
    card = _card(manifest, list(advice(manifest, preparation)))
    card_bytes = card.encode(errors="backslashreplace")  # names of files may be no UTF-8
    write_atomically(folder / CARD, card_bytes.decode())
    transformers_settings = describe_for_transformers(info, folder / TOKENIZER)
    write_atomically(folder / TOKENIZER_CONFIG, transformers_settings)
    return replace(manifest, files=_hashes(preparation, orders))


def _add_notes(
    stats: StageStats,
    preparation: Preparation,
    info: TokenizerInfo,
    statistics: dict[str, Any],
    orders: dict[str, str],
) -> None:
    """Add the stages that drop nothing, and what the card says about each stage."""
    for name in ("tokenizer", "order", "shards"):
        stats.pass_on(name)
    path = preparation.tokenizer_path
    origin = path.name if path else f"trained on at most {preparation.tokenizer.sample_mb:g} MB"
    stats["tokenizer"].notes |= {"kind": info.kind, "entries": info.vocab_size, "origin": origin}
    stats["tokens"].notes |= {name: statistics[name] for name in ("tokens", "unknown_rate")}
    stats["order"].notes["files"] = ", ".join(orders) or "none"
    lost = stats["source"].notes.get(TEMPLATES_LOST)
    if lost:
        stats["source"].notes[TEMPLATES_LOST] = _largest(lost)


def _hashes(preparation: Preparation, orders: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file beside shards and tokenizer, by its name in the corpus."""
    folder = preparation.folder
    files = [folder / name for name in (CARD, TOKENIZER_CONFIG, *orders.values())]
    files += [folder / DROPPED] if preparation.data.list_dropped else []
    files += [path for path in (folder / TASKS).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}


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
    stripped = sum(result.stats["tokens"].notes.get(STRIPPED, {}).values())
    read = int(result.selection.rows.rows_N["characters"].sum())
    return {
        "tokens": tokens,
        "bytes": size,
        "characters": characters,
        "words": words,
        "tokens_per_byte": round(tokens / size, 6) if size else None,
        "tokens_per_word": round(tokens / words, 6) if words else None,
        "unknown_rate": round(int(use_V[info.special_ids["unk"]]) / tokens, 8),
        "characters_lost": lost,
        "characters_stripped": round(stripped / read, 6) if read else None,
        "by_source": _by_source(rows_D, result.selection.rows.sources),
        "median_length": float(np.median(rows_D["tokens"])),
        "repeated_lines": result.repeated_lines,
        "vocabulary_used": int(np.count_nonzero(use_V)),
        **({"remark": remark} if remark else {}),
    }


def _largest(counts: dict[str, int]) -> dict[str, int]:
    """Return the `SHOWN_TEMPLATES` largest counts, and the sum of all others."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    largest = dict(ordered[:SHOWN_TEMPLATES])
    if len(ordered) > SHOWN_TEMPLATES:
        largest[OTHERS] = sum(counts.values()) - sum(largest.values())
    return largest


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
        "cut": {task: notes["documents_cut_by_task"].get(task, 0) for task in search.tasks},
        "by_words": notes["documents_by_words"],
        "files": search.files,
        "development": search.development,
    }


def _card(manifest: Manifest, warnings: list[str]) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"cell": _cell, "notes": _notes}
    sources = [source for source in manifest.sources if source["kind"] != "tokenizer"]
    return environment.get_template("corpus_card.md.j2").render(
        manifest=manifest,
        lists_dropped=manifest.settings["data"].get("list_dropped", False),
        warnings=warnings,
        settings=SETTINGS,
        info=manifest.tokenizer,
        found=manifest.statistics,
        overlap=manifest.decontamination,
        unknown=manifest.counts["unknown_tokens"],
        licenses=sorted({str(source.get("license")) for source in sources}),
        not_known="not known (ready-made ids)",
    )


def _separated_by(line: str) -> str:
    return f"data.documents=separator data.separator={json.dumps(line, ensure_ascii=False)!r}"


def reasons_table() -> str:
    """Return the table of the documentation: every reason to drop a document, its stage and its setting."""
    lines = ["| stage | reason | setting |", "|---|---|---|"]
    for stage, settings in SETTINGS.items():
        for reason, setting in settings.items():
            governed_by = f"`{setting}`" if setting else "always on"
            lines.append(f"| {stage} | `{reason}` | {governed_by} |")
    return "\n".join(lines)


def removed_by_setting(stats: StageStats) -> Iterator[str]:
    """Yield how many documents each reason removed, with the setting that governs it."""
    by_reason: dict[str, str] = {}
    for settings in SETTINGS.values():
        by_reason |= settings
    for reason, count in stats.removed().items():
        setting = by_reason.get(reason)
        yield f"{count} {reason} by {setting}" if setting else f"{count} {reason}"


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


def advice(manifest: Manifest, preparation: Preparation) -> Iterator[str]:
    """Yield a line for each sign that this is not the corpus that was meant."""
    documents = cut_by(preparation.source)
    hint = f" (data.documents={documents} cuts the text so)" if documents else ""
    yield from _text_taken(manifest, hint)
    yield from _repeated_lines(manifest, documents)
    yield from _separators(manifest, preparation.source)
    yield from _shared_passages(manifest, preparation.data.near_duplicates.threshold)
    yield from _short_matches(manifest)
    yield from _characters_lost(manifest, preparation)
    train = sum(shard.tokens for shard in manifest.splits["train"])
    validation = sum(shard.tokens for shard in manifest.splits["validation"])
    held_out, fraction = validation / (train + validation), preparation.data.validation_fraction
    if held_out > max(LARGE_HOLD_OUT, 2 * fraction):
        yield (
            f"{held_out:.0%} of the tokens are held out for validation, where data.validation_fraction={fraction:g}:"
            f" whole documents are, or parts of long ones, and there are {manifest.counts['documents']}{hint}"
        )


def cut_by(source: Source) -> str | None:
    """Return `data.documents` where there is plain text that it cuts."""
    return source.config.documents if isinstance(source, TextSource) and source.in_parts else None


def _text_taken(manifest: Manifest, hint: str) -> Iterator[str]:
    """Yield the filters that took much of the text; without one, that documents are tiny."""
    stages = {stage.name: stage for stage in manifest.stages}
    dropped = stages["filters"].dropped | stages["tokens"].dropped
    all_bytes = max(1, stages["normalise"].bytes_out)
    much = {reason: entry.bytes / all_bytes for reason, entry in dropped.items()}
    much = {reason: share for reason, share in much.items() if share > MUCH}
    for reason, share in much.items():
        setting = (SETTINGS["filters"] | SETTINGS["tokens"]).get(reason)
        cure = (
            f" Set a milder {setting}, or null, if that is text to learn from." if setting else ""
        )
        yield f"{reason} took {share:.0%} of the text; corpus_card.md has examples{hint}.{cure}"
    count, statistics = max(1, manifest.counts["documents"]), manifest.statistics
    words, characters = statistics["words"] / count, statistics["characters"] / count
    if not much and 0 < words < FEW_WORDS and characters < 6 * FEW_WORDS:
        yield f"documents are tiny: {words:.0f} words on average{hint}"


def _characters_lost(manifest: Manifest, preparation: Preparation) -> Iterator[str]:
    """Yield how much text the tokenizer does not know, and how much it makes the same as other text."""
    statistics = manifest.statistics
    rate, lost, stripped = (
        statistics[name] or 0.0
        for name in ("unknown_rate", "characters_lost", "characters_stripped")
    )
    spaces = statistics["words"] - manifest.counts["documents"]
    marks = stripped * statistics["characters"] / max(1, statistics["characters"] - spaces)
    if max(rate, lost - marks) > MUCH_UNKNOWN:
        yield (
            f"{rate:.1%} of the tokens are unknown, and no token stands for {lost:.1%} of the characters:"
            f" {cause_of_unknown(preparation)}"
        )
    if stripped > MUCH_STRIPPED:
        notes = next(stage.notes for stage in manifest.stages if stage.name == "tokens")
        scripts = ", ".join(f"{count:,} {script}" for script, count in notes[STRIPPED].items())
        yield (
            f"the tokenizer takes accents, voicing marks or vowel signs from {stripped:.1%} of the characters"
            f" ({scripts}). tokenizer.strip_accents=false, tokenizer.lowercase=false or tokenizer=bpe keeps them"
        )


def cause_of_unknown(preparation: Preparation) -> str:
    """Return why a tokenizer does not know some of the text, and the cure."""
    if preparation.tokenizer_path:
        return "the tokenizer is for other text. Give one of this language, or train one (tokenizer.path=null)"
    size = f"tokenizer.vocab_size={preparation.tokenizer.vocab_size}"
    return (
        f"too many different characters for {size}, or runs of over 100 without a space. tokenizer=bpe knows every"
        " character"
    )


def _repeated_lines(manifest: Manifest, documents: str | None) -> Iterator[str]:
    """Yield the line that makes up most of the text."""
    for repeated in manifest.statistics["repeated_lines"][:1]:
        line, of_lines, of_bytes = repeated["line"], repeated["of_lines"], repeated["of_bytes"]
        is_marker = documents and len(line) <= LONGEST_MARKER
        separate = f"; for a marker between documents set {_separated_by(line)}"
        yield (
            f"{line!r} makes up {of_lines:.1%} of the lines and {of_bytes:.1%} of the text. Remove it if it says"
            f" nothing{separate if is_marker else ''}"
        )


def _separators(manifest: Manifest, source: Source) -> Iterator[str]:
    """Yield that markers between documents are in the text, or that the separator is not."""
    notes = next(stage.notes for stage in manifest.stages if stage.name == "normalise")
    markers, read = notes.get(END_OF_TEXT, 0), manifest.counts["documents_read"]
    named = [repeated["line"] for repeated in manifest.statistics["repeated_lines"][:1]]
    if markers > LARGE_SHARE * read and END_OF_TEXT not in named:
        cure = f"Set {_separated_by(END_OF_TEXT)}" if cut_by(source) else "Remove it from the text"
        yield f"{END_OF_TEXT!r} stands {markers:,} times in the text of {read:,} documents. {cure}"
    if isinstance(source, TextSource) and source.config.separator and read <= len(source.paths):
        yield f"data.separator={source.config.separator}: in none of the files. Each is a document"


def _shared_passages(manifest: Manifest, threshold: float) -> Iterator[str]:
    """Yield the passages that alone made documents near-duplicates."""
    notes = next(stage.notes for stage in manifest.stages if stage.name == "near deduplication")
    passages = notes.get("shared_passages", {})
    for passage, documents in passages.items():
        yield (
            f'{documents:,} documents were dropped as near-duplicates for one shared passage, "{passage} ...", although'
            f" the rest of each differs; cut it out of the text, or raise data.near_duplicates.threshold={threshold:g}"
        )


def _short_matches(manifest: Manifest) -> Iterator[str]:
    """Yield that short texts of the tasks took most of what decontamination dropped."""
    stage = next(stage for stage in manifest.stages if stage.name == "decontamination")
    dropped = stage.dropped.get("contaminated")
    if dropped is None or manifest.decontamination["action"] == "cut":
        return
    shortest, *longer = manifest.decontamination["by_words"].items()
    if shortest[1] >= FEW_CONTAMINATED and shortest[1] > sum(count for _, count in longer):
        yield (
            f"{shortest[1]:,} of {dropped.documents:,} documents that decontamination dropped ({dropped.bytes:,} bytes"
            f" together) have no longer match than {shortest[0]}; data.decontaminate.action=cut takes out the sentence,"
            " not the document"
        )
