"""The end of a preparation: statistics of the finished corpus, and the manifest that names all its files."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cramming import __version__
from cramming.config import file_sha256
from cramming.data.corpus import TASKS, TokenStream
from cramming.data.manifest import FORMAT_VERSION, TOKENIZER, Manifest, Split, TokenizerInfo
from cramming.files import write_atomically
from data_prep import corpus_card
from data_prep.document_stats import token_lengths, write_orders
from data_prep.pipeline import Pipeline
from data_prep.prepare_config import Preparation
from data_prep.shard_writer import CorpusWriter
from data_prep.tokenizer.load import TOKENIZER_CONFIG, characters_by_entry, describe_for_transformers


def complete(
    preparation: Preparation,
    sources: list[dict[str, Any]],
    tokenizer: Tokenizer,
    info: TokenizerInfo,
    pipeline: Pipeline,
    writer: CorpusWriter,
) -> Manifest:
    """Write all but the manifest, which is returned."""
    folder, data, stats = preparation.folder, preparation.data, pipeline.stats
    streams = {split: TokenStream(folder, shards, writer.encoder.dtype) for split, shards in writer.shards.items()}
    orders = write_orders(folder, data.orders, writer.documents["train"], streams["train"], writer.token_use)
    found = _statistics(preparation, streams, [*orders.values(), TOKENIZER], tokenizer, writer)
    for name in ("tokenizer", "order", "shards"):
        stats.pass_on(name)
    for name, notes in _late_notes(preparation, pipeline, info, found, orders).items():
        stats[name].notes |= notes
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=data.name,
        suite_version=__version__,
        settings_hash=preparation.settings_hash,
        settings=preparation.settings,
        dtype="uint16" if writer.encoder.dtype.itemsize == 2 else "uint32",
        tokenizer=info,
        sources=sources,
        counts=_counts(pipeline, found["bytes"], int(writer.token_use[info.special_ids["unk"]])),
        removed=stats.removed(),
        splits=writer.shards,
        stages=[stage.line() for stage in stats.values()],
        statistics=found,
        decontamination=_decontamination(pipeline),
        orders=orders,
    )
    files = [*corpus_card.write(folder, manifest), folder / TOKENIZER_CONFIG, *(folder / o for o in orders.values())]
    write_atomically(folder / TOKENIZER_CONFIG, describe_for_transformers(info.special))
    files += [path for path in (folder / TASKS).rglob("*") if path.is_file()]
    return replace(manifest, files={path.relative_to(folder).as_posix(): file_sha256(path) for path in files})


def _counts(pipeline: Pipeline, text_bytes: int, unknown_tokens: int) -> dict[str, int]:
    stats = pipeline.stats
    return {
        "documents_read": stats["source"].documents_in,
        "documents": stats["tokens"].documents_out,
        "long_documents_cut": stats["normalise"].notes["long_documents_cut"],
        "text_bytes": text_bytes,
        "unknown_tokens": unknown_tokens,
    }


def _statistics(
    preparation: Preparation,
    streams: dict[Split, TokenStream],
    further: list[str],
    tokenizer: Tokenizer,
    writer: CorpusWriter,
) -> dict[str, Any]:
    """What the card shows; `further` files count as the folder's bytes."""
    folder, use_V = preparation.folder, writer.token_use
    lengths = {split: token_lengths(stream) for split, stream in streams.items()}
    by_source = _by_source(writer, lengths)
    characters, words, count = (
        sum(getattr(documents, key) for documents in writer.documents.values())
        for key in ("characters", "words", "documents")
    )
    tokens, size = int(use_V.sum()), sum(row["bytes"] for row in by_source.values())
    shards = [shard for finished in writer.shards.values() for shard in finished]
    shard_bytes = sum((folder / shard.file).stat().st_size for shard in shards)
    rest = sum((folder / name).stat().st_size for name in (*further, *(shard.index_file for shard in shards)))
    remark = preparation.source.remark()
    return {
        "tokens": tokens,
        "bytes": size,
        "characters": characters,
        "words": words,
        "tokens_per_byte": _ratio(tokens, size),
        "tokens_per_character": _ratio(tokens, characters),
        "tokens_per_word": _ratio(tokens, words),
        "unknown_rate": round(int(use_V[writer.encoder.ids.unk]) / tokens, 8),
        "characters_lost": _characters_lost(tokenizer, use_V, characters, words, count),
        "by_source": by_source,
        "tokens_per_byte_by_source": {
            name: round(row["tokens"] / row["bytes"], 6) for name, row in by_source.items() if row["bytes"]
        },
        "bytes_per_token": round(shard_bytes / tokens, 4),
        "folder_bytes_per_token": round((shard_bytes + rest) / tokens, 4),
        **_distributions(np.concatenate(list(lengths.values())), use_V),
        **({"remark": remark} if remark else {}),
    }


def _by_source(writer: CorpusWriter, lengths: dict[Split, np.ndarray]) -> dict[str, dict[str, int]]:
    """Documents, bytes and tokens of each source, over both splits."""
    total: dict[str, dict[str, int]] = {}
    for split, documents in writer.documents.items():
        for name, row in documents.by_source(lengths[split]).items():
            before = total.get(name, {})
            total[name] = {key: value + before.get(key, 0) for key, value in row.items()}
    return total


def _ratio(number: int, by: int) -> float | None:
    return round(number / by, 6) if by else None


def _distributions(lengths_D: np.ndarray, use_V: np.ndarray) -> dict[str, Any]:
    """Of the documents' lengths in tokens, and of the tokens over the vocabulary."""
    edges = 2 ** np.arange(1, max(3, int(lengths_D.max(initial=1)).bit_length()) + 1)
    ranks_V = np.sort(use_V)[::-1]
    used = int(np.count_nonzero(ranks_V))
    tops = [n for n in (10, 100, 1000, 10_000) if n < used]
    return {
        "length_edges": edges.tolist(),
        "length_counts": np.histogram(lengths_D, bins=[0, *edges])[0].tolist(),
        "median_length": float(np.median(lengths_D)),
        "vocabulary_used": used,
        "vocabulary_share": {f"top_{n}": round(float(ranks_V[:n].sum() / ranks_V.sum()), 6) for n in tops},
        "vocabulary_counts": ranks_V[(2 ** np.arange(int(used).bit_length())) - 1].tolist(),  # of ranks 1, 2, 4, 8 ...
    }


def _characters_lost(
    tokenizer: Tokenizer, use_V: np.ndarray, characters: int, words: int, documents: int
) -> float | None:
    """Share of the text's characters, white space aside, that no token stands for: they are in unknown tokens, or the
    tokenizer's normaliser drops them. None where it is not known: ready-made ids, other kinds than WordPiece."""
    characters_V = characters_by_entry(tokenizer)
    if characters_V is None or not characters:
        return None
    return round(max(0.0, 1 - int(use_V @ characters_V) / (characters - words + documents)), 6)


def _late_notes(
    preparation: Preparation, pipeline: Pipeline, info: TokenizerInfo, found: dict[str, Any], orders: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """What is only known at the end, by stage."""
    near, path = pipeline.near, preparation.tokenizer_path
    origin = path.name if path else f"trained on at most {preparation.tokenizer.sample_mb:g} MB"
    return {
        "near deduplication": {"clusters": near.clusters, "index_bytes": near.memory_bytes} if near else {},
        "tokenizer": {"kind": info.kind, "entries": info.vocab_size, "origin": origin},
        "tokens": {"tokens": found["tokens"], "unknown_rate": found["unknown_rate"]},
        "order": {"files": ", ".join(orders) or "none"},
        "shards": {"bytes_per_token": found["bytes_per_token"]},
    }


def _decontamination(pipeline: Pipeline) -> dict[str, Any]:
    """The tasks' files that were searched for, and their development texts; of each task how many texts can be found,
    were found, and how many documents were removed."""
    search, notes = pipeline.decontaminator, pipeline.stats["decontamination"].notes
    if search is None:
        return {}
    return {
        **asdict(pipeline.config.decontaminate),
        "examples": search.examples,
        "searchable": search.searchable,
        "found": notes["texts_found"],
        "removed": {task: notes["documents_by_task"].get(task, 0) for task in search.tasks},
        "files": search.files,
        "development": search.development,
    }
