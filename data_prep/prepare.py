"""`cramming prepare`: text to a corpus folder. Streaming, resumable, and a no-op when the corpus is already there.

    [search near-duplicates] -> tokenizer.json -> pipeline -> tokens -> shards -> orders, card -> manifest.json (last)

Until the manifest is written the folder holds `unfinished.json`: what the run was about to make and which shards it
has finished. An interrupted run (Ctrl-C, kill -9, power cut, lost network) goes on from there: the text is read again,
but finished shards are not, their documents are not tokenized again, and decisions on documents are remembered
(data_prep/resume_state.py). The result is byte for byte that of an unbroken run. No error costs finished work:
shards, or the search for near-duplicates. A first run that meets a mistake in settings or text before it has finished
either leaves nothing behind.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from cramming.config import UserError, file_sha256
from cramming.data.corpus import SPLITS, TASKS, Corpus
from cramming.data.manifest import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    SpecialIds,
    Split,
    token_dtype,
)
from cramming.files import explain_os_error, lock, overwrite_atomically, release, write_atomically
from cramming.invocation import Invocation
from cramming.process_pool import WorkerDiedError, process_pool
from cramming.progress import Progress, format_count, say
from data_prep import corpus_card
from data_prep.dedup.near import SIGN, NearDuplicates, Signer, find_near_duplicates
from data_prep.filters.normalise import normalize
from data_prep.normaliser import READ, read, through_workers
from data_prep.pipeline import Pipeline, judges
from data_prep.prepare_config import Preparation, parse
from data_prep.resume_state import (
    DECISIONS,
    NEAR,
    UNFINISHED,
    Decisions,
    Unfinished,
    discard,
    finish,
    has_finished,
)
from data_prep.shard_writer import ENCODE, CorpusWriter, Encoder
from data_prep.sources.embedded import EmbeddedConfig
from data_prep.sources.hub import ConnectionLostError
from data_prep.sources.source import Source, limited
from data_prep.sources.text import TextSource
from data_prep.stage_stats import StageStats, text_bytes
from data_prep.tokenizer import train as training
from data_prep.tokenizer.encode import text_encoder
from data_prep.tokenizer.load import describe, load
from data_prep.workers import Workers

__all__ = ["UNFINISHED", "Unfinished", "main", "parse", "prepare"]

TRAINED_HERE = 2_000_000  # characters: about a second
TRAINER_DIED = (
    "the process that trains the tokenizer died (out of memory?); set a smaller tokenizer.sample_mb and run the command"
    " again"
)
EVERY_SECONDS = 0.5
EVERY_BYTES = 2**18  # of text, between two looks at the clock

Item = TypeVar("Item")


def main(recipe: Mapping[str, Any], invocation: Invocation) -> None:
    """Prepare the corpus that the sections `data` and `tokenizer` describe, in its folder."""
    preparation = parse(recipe, invocation.corpora)
    folder = preparation.folder
    if (folder / MANIFEST).is_file():  # it may lie where nothing, not even a lock, can be written
        confirm(preparation)
        release(folder)
        return
    with lock(folder, "preparing this corpus"):
        if (folder / MANIFEST).is_file():  # another process has finished it meanwhile
            confirm(preparation)
            return
        interrupted = Unfinished.load(folder)  # what cannot be read is the user's to delete
        try:
            prepare(preparation, interrupted)
        except (ConnectionLostError, WorkerDiedError):
            raise
        except UserError as error:
            remarks = [preparation.source.remark()]  # which part ended a mix may be the cause
            if has_finished(folder):
                remarks.append(f"what is finished stays in {folder}")
            elif not interrupted:
                discard(folder)
            error.args = ("; ".join(filter(None, [str(error), *remarks])),)
            raise
        except OSError as error:
            raise explain_os_error(error, folder, "run the same command again") from None


def check(recipe: Mapping[str, Any], invocation: Invocation) -> list[str]:
    """Return the corpus to prepare; UserError for what `main` would refuse before it writes anything."""
    folder = parse(recipe, invocation.corpora).folder
    is_done = (folder / MANIFEST).is_file()
    return [f"prepare: {folder}{', which is prepared already' if is_done else ''}"]


def confirm(preparation: Preparation) -> None:
    """The corpus is there: check that its settings are these and that its sources have not changed; write nothing."""
    folder = preparation.folder
    manifest = Corpus.open(folder, verify=True).manifest
    earlier = manifest.settings_hash != preparation.settings_hash
    old, new = (
        {
            f"{section}.{key}": value
            for section in settings
            for key, value in settings[section].items()
        }
        for settings in (manifest.settings, preparation.settings)
    )
    if different := [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]:
        raise UserError(
            f"{folder}: holds a corpus of other settings ({', '.join(different)}); delete it, or name another"
            " data.corpus"
        )
    if changed := preparation.changed(manifest.sources, manifest.decontamination.get("files", [])):
        raise UserError(
            f"{folder}: its sources have changed since ({changed}); delete it to prepare anew"
        )
    finish(folder)
    by = (
        ", by an earlier version's rules for text (delete it to prepare anew by today's)"
        if earlier
        else ""
    )
    say(f"{folder}: already prepared with these settings{by}, nothing to do")


def prepare(preparation: Preparation, interrupted: Unfinished | None) -> None:
    """From the source to the manifest, or on from where an interrupted run stopped."""
    folder, data, source = preparation.folder, preparation.data, preparation.source
    state = _begin(preparation, interrupted)
    stats, decisions = StageStats(data.seed), Decisions(folder / DECISIONS, state.reasons)
    near = _near_duplicates(preparation, state, decisions) if data.near_duplicates.enabled else None
    tokenizer = _tokenizer(preparation)
    state = dataclasses.replace(state, tokenizer_sha256=file_sha256(folder / TOKENIZER))
    _save(folder, state, decisions)
    info = describe(tokenizer, folder / TOKENIZER)
    dtype, ids = token_dtype(info.vocab_size), SpecialIds(**info.special_ids)
    encoder = Encoder(text_encoder(tokenizer, dtype), ids, info.vocab_size, dtype, data.filters)
    writer = CorpusWriter(
        folder,
        state.shards,
        state.token_use,
        data.shard_tokens,
        encoder,
        stats["tokens"],
        decisions,
        source.parts() or [entry["name"] for entry in state.sources],
    )
    functions = judges(data, preparation.decontaminator) | {ENCODE: encoder}
    with (
        Workers(data.processes, functions, data.ray, source.large) as workers,
        _progress("tokenize", source) as update,
    ):
        pipeline = Pipeline(data, stats, decisions, workers, near, preparation.decontaminator)
        selected = pipeline.run(source.chunks())
        for position, shard_finished in writer.write(selected, workers, lambda: source.position):
            update(position, writer.stage.bytes_out)
            if shard_finished:
                finished_use = writer.finished_use.tolist()
                _save(
                    folder,
                    dataclasses.replace(state, shards=writer.shards, token_use=finished_use),
                    decisions,
                )
    _require_documents(preparation, stats, writer)
    if changed := preparation.changed(state.sources, state.compared):
        raise UserError(f"{changed}: changed while it was being read; run `cramming prepare` again")
    if isinstance(
        data, EmbeddedConfig
    ):  # it comes with its fine-tuning tasks, made from the same world
        from data_prep.synthetic import tasks

        overwrite_atomically(folder / TASKS, lambda path: tasks.write_tasks(path, data.seed))
    manifest = corpus_card.complete(preparation, state.sources, tokenizer, info, pipeline, writer)
    write_atomically(folder / MANIFEST, manifest.to_json())
    finish(folder)
    _report(preparation, manifest)


def _begin(preparation: Preparation, state: Unfinished | None) -> Unfinished:
    """The interrupted run's `state`, if it was of the same settings and sources, or a new one."""
    folder = preparation.folder
    if state:
        finished = sum(map(len, state.shards.values()))
        problem: str | None = "since then has changed: settings, or the rules for text"
        if state.settings_hash == preparation.settings_hash:
            changed = preparation.changed(state.sources, state.compared)
            problem = f"since then has changed: {changed}" if changed else state.damaged(folder)
        if problem is None:
            say(f"{folder}: going on with an interrupted run, {finished} shards are finished")
            state.keep_only_finished(folder)
            return state
        say(
            f"{folder}: an interrupted run was here and cannot go on ({problem}); starting over: {finished} finished"
            " shards go (a run goes on only with the settings and sources that it began with)"
        )
        discard(folder)
    shards: dict[Split, list[Shard]] = {split: [] for split in SPLITS}
    state = Unfinished(
        preparation.settings_hash,
        preparation.inventory(),
        shards,
        [],
        compared=preparation.compared,
    )
    state.save(folder)
    return state


def _save(folder: Path, state: Unfinished, decisions: Decisions) -> None:
    """A later run goes on from here. Decisions first, as the state says how many of their reasons count."""
    decisions.save()
    dataclasses.replace(state, reasons=decisions.reasons).save(folder)


def _near_duplicates(
    preparation: Preparation, state: Unfinished, decisions: Decisions
) -> NearDuplicates:
    """A pass over the whole text in search of near-duplicates; an earlier run's result, if there is one."""
    data, source, path = preparation.data, preparation.source, preparation.folder / NEAR
    found = NearDuplicates.load(path)
    if found is None:
        functions = judges(data, None) | {SIGN: Signer(data.near_duplicates)}
        with Workers(data.processes, functions, data.ray, source.large) as workers:
            first_pass = Pipeline(data, StageStats(data.seed), decisions, workers)
            unique = first_pass.unique(source.chunks())
            groups = _counted(
                "search near-duplicates", source, unique, lambda group: int(group.sizes.sum())
            )
            texts = (
                (group.hashes["key"], group.texts)
                for group in groups
                if len(group) and not group.ids()
            )
            found = find_near_duplicates(texts, data.near_duplicates, workers)
        _save(preparation.folder, state, decisions)
        found.save(path)
    return found


def _tokenizer(preparation: Preparation) -> Tokenizer:
    """The corpus's tokenizer: of an earlier, interrupted run, an existing one, or trained now."""
    target = preparation.folder / TOKENIZER
    if not target.is_file():
        existing = preparation.tokenizer_path
        model = load(existing) if existing else _trained_tokenizer(preparation)
        write_atomically(target, model.to_str(pretty=True))
    return load(
        target
    )  # as every later run has it: what is written loses the last bits of some scores


def _trained_tokenizer(preparation: Preparation) -> Tokenizer:
    config, data, source, damage = (
        preparation.tokenizer,
        preparation.data,
        preparation.source,
        Counter[str](),
    )
    texts = _counted(
        "read a sample for the tokenizer", source, _sample_texts(preparation, damage), text_bytes
    )
    sample = training.sample_text(
        texts, lambda text: normalize(text, data.clean), config.sample_mb, data.seed
    )
    characters = sum(map(len, sample))
    say(f"training a {config.kind} tokenizer on {characters:,} characters")
    if characters < TRAINED_HERE:
        try:
            model = training.train(sample, config)
        except UserError as error:
            if not damage:
                raise
            left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(damage.items()))
            raise UserError(f"{error}; left out as damaged: {left_out}") from None
    else:  # in a process of its own: the libraries answer no Ctrl-C, and abort for want of memory
        with process_pool(1, TRAINER_DIED) as submit:
            model = submit(training.train, sample, config).result()
    if model.get_vocab_size() < config.vocab_size:
        say(
            f"the text supports {model.get_vocab_size()} vocabulary entries of the {config.vocab_size} set"
        )
    return model


def _sample_texts(preparation: Preparation, damage: Counter[str]) -> Iterator[str]:
    """The texts to draw the sample from, of files as workers read them. What is left out as damaged is counted by its
    reason in `damage`."""
    source, data = preparation.source, preparation.data
    if not isinstance(source, TextSource) or data.max_documents is not None:
        wanted = preparation.tokenizer.sample_mb * 1e6  # characters
        for document in limited(source.sample_documents(), source):
            if document.damage:
                damage[document.damage.reason] += document.part == 0
            else:
                yield document.text
            wanted -= len(document.text)
            if source.costly and wanted <= 0:
                return
        return
    with Workers(data.processes, {READ: read}, data.ray, source.large) as workers:
        for documents, found in through_workers(READ, source.chunks(), workers):
            damage.update(
                one.damage.reason
                for one in documents.others.values()
                if one.damage and one.part == 0
            )
            yield from (text for text in found.contents if text is not None)


def _require_documents(preparation: Preparation, stats: StageStats, writer: CorpusWriter) -> None:
    empty = [split for split, shards in writer.shards.items() if not shards]
    if empty:
        removed = (
            ", ".join(f"{count} {reason}" for reason, count in stats.removed().items()) or "none"
        )
        kept, read = stats["tokens"].documents_out, stats["source"].documents_in
        how = (
            f"; data.documents={cut} cuts the text so"
            if (cut := _cut_by(preparation.source))
            else ""
        )
        raise UserError(
            f"too little text: {kept} of {read} documents remain (removed: {removed}), none of them for {empty[0]}; at"
            f" least 2 are needed, one of them for validation (by data.validation_fraction and data.seed){how}"
        )


def _cut_by(source: Source) -> str | None:
    """`data.documents` where there is plain text that it cuts."""
    return source.config.documents if isinstance(source, TextSource) and source.in_parts else None


def _report(preparation: Preparation, manifest: Manifest) -> None:
    overlap = manifest.decontamination
    for task, documents in overlap.get("removed", {}).items():
        texts, searchable, found = (
            overlap[key][task] for key in ("examples", "searchable", "found")
        )
        say(
            f"{task}: {searchable:,} of {texts:,} texts searchable, {found:,} found; {documents:,} documents removed"
        )
    train, validation = (sum(shard.tokens for shard in manifest.splits[split]) for split in SPLITS)
    say(
        f"{preparation.folder}: {train:,} training tokens, {validation:,} for validation, from"
        f" {manifest.counts['documents']:,} documents; vocabulary {manifest.tokenizer.vocab_size:,}; removed:"
        f" {manifest.removed or 'nothing'}"
    )
    if missing := [order for order in preparation.data.orders if order not in manifest.orders]:
        say(f"no order files for {', '.join(missing)}: ready-made ids have no text to measure")
    if remark := manifest.statistics.get("remark"):
        say(remark)
    for line in corpus_card.advice(manifest, preparation.data, _cut_by(preparation.source)):
        say(line)


def _counted(
    title: str, source: Source, items: Iterator[Item], size: Callable[[Item], int]
) -> Iterator[Item]:
    """These items of the source, of which each has a `size` in bytes, with a progress bar."""
    done = shown = 0
    with _progress(title, source) as update:
        for item in items:
            yield item
            done += size(item)
            if done - shown >= EVERY_BYTES:
                shown = done
                update(source.position, done)


@contextlib.contextmanager
def _progress(title: str, source: Source) -> Iterator[Callable[[float, float], None]]:
    """A bar with `update(position in the source, bytes of text done)`: how far and how fast."""
    started = last = time.monotonic()
    with Progress(title, source.total, source.unit) as bar:

        def update(position: float, text_done: float) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= EVERY_SECONDS:
                last = now
                bar.note(f"{format_count(text_done / (now - started), 'B')}/s of text")
            bar.update(position)

        yield update
