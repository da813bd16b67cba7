"""The end of a preparation: order files, statistics, the corpus card, and the manifest that names them all."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cramming import __version__
from cramming.config import file_sha256
from cramming.data import corpus
from cramming.data.manifest import Manifest, TokenizerInfo
from cramming.files import write_atomically
from data_prep import corpus_card, orders
from data_prep.pipeline import Selection
from data_prep.prepare_config import Job
from data_prep.shard_writer import Packing
from data_prep.tokenizer.load import TOKENIZER_CONFIG, characters_by_entry, describe_for_transformers, load


def complete(
    job: Job, sources: list[dict[str, Any]], info: TokenizerInfo, selection: Selection, packing: Packing
) -> Manifest:
    """Write the last files beside the shards; the manifest, which is left to write."""
    splits = packing.shards()
    documents = {
        split: orders.Documents(job.folder, part, packing.encoder.dtype, packing.texts[split], packing.token_use)
        for split, part in splits.items()
    }
    order_files = orders.write(documents["train"], job.data.orders)
    found = _statistics(job.folder, list(documents.values()), order_files, packing)
    found |= {"remark": remark} if (remark := job.source.remark()) else {}
    _late_stages(job, selection, found, order_files, info)
    ledger = selection.ledger
    manifest = Manifest(
        format=corpus.FORMAT_VERSION,
        name=job.data.name,
        suite_version=__version__,
        settings_hash=job.settings_hash,
        settings=job.settings,
        dtype="uint16" if packing.encoder.dtype.itemsize == 2 else "uint32",
        tokenizer=info,
        sources=sources,
        counts={
            "documents_read": ledger["source"].documents_in,
            "documents": ledger["tokens"].documents_out,
            "long_documents_cut": ledger["normalise"].notes["long_documents_cut"],
            "text_bytes": found["bytes"],
            "unknown_tokens": int(packing.token_use[packing.encoder.ids.unk]),
        },
        removed=ledger.removed(),
        splits=splits,
        stages=ledger.lines(),
        statistics=found,
        decontamination=_decontamination(selection),
        orders=order_files,
    )
    written = [*corpus_card.write(job.folder, manifest), job.folder / TOKENIZER_CONFIG]
    write_atomically(written[-1], describe_for_transformers(info.special))
    further = [*written, *(job.folder / name for name in order_files.values())]
    further += [path for path in (job.folder / corpus.TASKS).rglob("*") if path.is_file()]
    return manifest.with_files({path.relative_to(job.folder).as_posix(): file_sha256(path) for path in further})


def _statistics(
    folder: Path, documents: list[orders.Documents], order_files: dict[str, str], packing: Packing
) -> dict[str, Any]:
    lengths = [part.lengths() for part in documents]
    by_source: dict[str, dict[str, int]] = {}
    for part, lengths_D in zip(documents, lengths):
        for name, row in part.texts.by_source(lengths_D).items():
            before = by_source.get(name, {})
            by_source[name] = {key: value + before.get(key, 0) for key, value in row.items()}
    tokens = int(packing.token_use.sum())
    sums = {key: sum(getattr(part.texts, key) for part in documents) for key in ("characters", "words")}
    sums |= {"tokens": tokens, "bytes": sum(row["bytes"] for row in by_source.values())}
    written = [shard for part in documents for shard in part.shards]
    files = [shard.index_file for shard in written] + [*order_files.values(), corpus.TOKENIZER]
    rest = sum((folder / name).stat().st_size for name in files)
    shard_bytes = sum((folder / shard.file).stat().st_size for shard in written)
    return {
        **corpus_card.statistics(np.concatenate(lengths), packing.token_use, sums),
        "unknown_rate": round(int(packing.token_use[packing.encoder.ids.unk]) / tokens, 8),
        "characters_lost": _characters_lost(folder, documents, sums, packing.token_use),
        "by_source": by_source,
        "tokens_per_byte_by_source": {
            name: round(row["tokens"] / row["bytes"], 6) for name, row in by_source.items() if row["bytes"]
        },
        "bytes_per_token": round(shard_bytes / tokens, 4),
        "folder_bytes_per_token": round((shard_bytes + rest) / tokens, 4),
    }


def _characters_lost(
    folder: Path, documents: list[orders.Documents], sums: dict[str, int], token_use: np.ndarray
) -> float | None:
    """Share of the text's characters, white space aside, that no token stands for: they are in unknown tokens, or the
    tokenizer's normaliser drops them. None where it is not known: ready-made ids, other kinds than WordPiece."""
    characters_V = characters_by_entry(load(folder / corpus.TOKENIZER))
    if characters_V is None or not sums["characters"]:
        return None
    written = sums["characters"] - sums["words"] + sum(part.texts.documents for part in documents)
    return round(max(0.0, 1 - int(token_use @ characters_V) / written), 6)


def _late_stages(
    job: Job, selection: Selection, found: dict[str, Any], order_files: dict[str, str], info: TokenizerInfo
) -> None:
    """The lines of the stages that drop nothing, and what is only known at the end."""
    ledger = selection.ledger
    for name in ("tokenizer", "order", "shards"):
        ledger.pass_on(name)
    origin = job.tokenizer_path
    if selection.near is not None:
        near = {"clusters": selection.near.clusters, "index_bytes": selection.near.memory_bytes}
        ledger["near deduplication"].notes |= near
    ledger["tokenizer"].notes |= {
        "kind": info.kind,
        "entries": info.vocab_size,
        "origin": origin.name if origin else f"trained on at most {job.tokenizer.sample_mb:g} MB",
    }
    ledger["tokens"].notes |= {"tokens": found["tokens"], "unknown_rate": found["unknown_rate"]}
    ledger["order"].notes |= {"files": ", ".join(order_files) or "none"}
    ledger["shards"].notes |= {"bytes_per_token": found["bytes_per_token"]}


def _decontamination(selection: Selection) -> dict[str, Any]:
    """The tasks' files that were searched for, and their development texts; of each task how many texts can be found,
    were found, and removed."""
    config, search = selection.config.decontaminate, selection.decontaminator
    if search is None:
        return {}
    notes = selection.ledger["decontamination"].notes
    return {
        **asdict(config),
        "examples": search.examples,
        "searchable": search.searchable,
        "found": notes["texts_found"],
        "removed": {task: notes["documents_by_task"].get(task, 0) for task in search.tasks},
        "files": search.files,
        "development": search.development,
    }
