"""`cramming prepare`: text to a corpus folder. Streaming, resumable, and a no-op when the corpus is already there.

    [search near-duplicates] -> tokenizer.json -> select and tokenize -> shards -> orders, card -> manifest.json (last)

Until the manifest is written the folder holds `unfinished.json`: what the run was about to make and which shards it
has finished. An interrupted run (Ctrl-C, kill -9, power cut, lost network) goes on from there: the text is read again,
which is cheap, but what was decided about its documents is remembered (data_prep/decisions.py), those that lie in
finished shards are not tokenized again, and the result is byte for byte that of an unbroken run. A mistake in settings
or text, in contrast, leaves nothing behind.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cramming.config import UserError
from cramming.data import corpus
from cramming.data.corpus import Corpus, Manifest, Shard, ShardWriter, Split
from cramming.files import explained, lock, overwrite_atomically, release, write_atomically
from cramming.process_pool import WorkerDiedError, process_pool
from cramming.progress import say
from data_prep import shard_writer, summary
from data_prep.advice import advice
from data_prep.decisions import Fates
from data_prep.dedup.near import SIGN, NearDuplicates, Signer, find_near_duplicates
from data_prep.filters.normalise import normalize
from data_prep.meter import Meter
from data_prep.pipeline import Selection, judges
from data_prep.prepare_config import SOURCES, Job, parse
from data_prep.resume_state import FATES, NEAR, UNFINISHED, Unfinished, discard, finish
from data_prep.sources.generated import EmbeddedConfig
from data_prep.sources.hub import ConnectionLostError
from data_prep.sources.source import TextSource, limited
from data_prep.stage_stats import Ledger
from data_prep.text_measures import TextMeasures
from data_prep.tokenizer import load as tokenizer
from data_prep.tokenizer import train as vocabulary
from data_prep.tokenizer.encode import text_encoder
from data_prep.tokenizer.load import TokenizerConfig
from data_prep.workers import Workers

__all__ = ["SOURCES", "UNFINISHED", "Job", "Unfinished", "main", "parse", "prepare"]

TRAINED_HERE = 2_000_000  # characters: about a second
TRAINER_DIED = (
    "the process that trains the tokenizer died (out of memory?); set a smaller tokenizer.sample_mb and run the command"
    " again"
)
BOTH: tuple[Split, Split] = ("train", "validation")


def main(config: Mapping[str, Any]) -> None:
    """Prepare the corpus that the sections `data` and `tokenizer` describe, in `corpus_folder(config)`."""
    job = parse(config)
    if (job.folder / corpus.MANIFEST).is_file():  # it may lie where nothing, not even a lock, can be written
        confirm(job)
        release(job.folder)
        return
    with lock(job.folder, "preparing this corpus"):
        if (job.folder / corpus.MANIFEST).is_file():  # another process has finished it meanwhile
            confirm(job)
            return
        try:
            prepare(job)
        except (ConnectionLostError, WorkerDiedError):
            raise
        except UserError:
            discard(job.folder)
            raise
        except OSError as error:
            raise explained(error, job.folder, "run the same command again") from None


def check(config: Mapping[str, Any]) -> None:
    """UserError for settings or a source that `main` would refuse before it writes anything."""
    parse(config)


def confirm(job: Job) -> None:
    """The corpus is there: check that it is the one asked for and that its sources have not changed; write nothing."""
    manifest = Corpus.open(job.folder, verify=True).manifest
    earlier = manifest.settings_hash != job.settings_hash
    if earlier and (different := ", ".join(_differences(manifest.settings, job.settings))):
        raise UserError(
            f"{job.folder}: holds a corpus of other settings ({different}); delete it, or name another data.corpus"
        )
    if changed := job.changed(manifest.sources, manifest.decontamination.get("files", [])):
        raise UserError(f"{job.folder}: its sources have changed since ({changed}); delete it to prepare anew")
    finish(job.folder)
    by = ", by an earlier version's rules for text (delete it to prepare anew by today's)" if earlier else ""
    say(f"{job.folder}: already prepared with these settings{by}, nothing to do")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = {(section, key) for node in (old, new) for section in node for key in node[section]}
    return sorted(f"{s}.{k}" for s, k in keys if old.get(s, {}).get(k) != new.get(s, {}).get(k))


def prepare(job: Job) -> None:
    """Make the corpus, or go on making it."""
    state = _begin(job)
    ledger, fates = Ledger(job.data.seed), Fates(job.folder / FATES, state.reasons)
    near = _near_duplicates(job, state, fates)
    model = _tokenizer(job)
    info = tokenizer.describe(model, job.folder / corpus.TOKENIZER)
    encoder = _encoder(job, model, info)
    judge = judges(job.data, job.decontaminator)
    with Workers(job.data.processes, judge | {shard_writer.ENCODE: encoder}) as workers:
        selection = Selection(job.data, ledger, fates, workers, near, job.decontaminator)
        packing = _pack(job, encoder, state, selection)
    _require_documents(job, ledger, packing.shards())
    if changed := job.changed(state.sources, state.compared):
        raise UserError(f"{changed}: changed while it was being read; run `cramming prepare` again")
    if isinstance(job.data, EmbeddedConfig):
        _write_tasks(job)
    manifest = summary.complete(job, state.sources, info, selection, packing)
    write_atomically(job.folder / corpus.MANIFEST, manifest.to_json())
    finish(job.folder)
    _report(job, manifest)


def _begin(job: Job) -> Unfinished:
    """The state of an interrupted run of the same settings and sources, or a new one."""
    state = Unfinished.load(job.folder)
    if state is not None:
        same_settings = state.settings_hash == job.settings_hash
        changed = job.changed(state.sources, state.compared) if same_settings else "settings, or the rules for text"
        if changed is None:
            finished = sum(map(len, state.shards.values()))
            say(f"{job.folder}: going on with an interrupted run, {finished} shards are finished")
            state.keep_only_finished(job.folder)
            return state
        say(f"{job.folder}: an interrupted run was here, but since then has changed: {changed}; starting over")
        discard(job.folder)
    state = Unfinished(job.settings_hash, job.inventory(), {split: [] for split in BOTH}, compared=job.compared)
    state.save(job.folder)
    return state


def _tokenizer(job: Job) -> Tokenizer:
    """The corpus's tokenizer: of an earlier, interrupted run, an existing one, or trained now."""
    target = job.folder / corpus.TOKENIZER
    if not target.is_file():
        existing = job.tokenizer_path
        model = tokenizer.load(existing) if existing else _train_tokenizer(job)
        overwrite_atomically(target, lambda path: model.save(str(path)))
    return tokenizer.load(target)  # as every later run has it: what is written loses the last bits of some scores


def _train_tokenizer(job: Job) -> Tokenizer:
    config, source = job.tokenizer, job.source
    with Meter("read a sample for the tokenizer", source) as meter:
        sample = vocabulary.sample_text(
            meter.watch(limited(source.sample_documents(config.sample_mb * 1e6), source)),
            lambda text: normalize(text, job.data.clean),
            config.sample_mb,
            job.data.seed,
        )
    say(f"training a {config.kind} tokenizer on {sum(map(len, sample)) / 1e6:.1f} M characters")
    model = _trained(sample, config)
    if model.get_vocab_size() < config.vocab_size:
        say(f"the text supports {model.get_vocab_size()} vocabulary entries of the {config.vocab_size} asked for")
    return model


def _trained(sample: list[str], config: TokenizerConfig) -> Tokenizer:
    """In a process of its own where it takes long: the libraries answer no Ctrl-C, and abort for want of memory."""
    if sum(map(len, sample)) < TRAINED_HERE:
        return vocabulary.train(sample, config)
    with process_pool(1, TRAINER_DIED) as submit:
        model: Tokenizer = submit(vocabulary.train, sample, config).result()
    return model


def _near_duplicates(job: Job, state: Unfinished, fates: Fates) -> NearDuplicates | None:
    """A pass over the whole text in search of near-duplicates; an earlier run's result, if there is one."""
    config = job.data.near_duplicates
    if not config.enabled:
        return None
    path, source = job.folder / NEAR, job.source
    if not path.is_file():
        functions = judges(job.data, None) | {SIGN: Signer(config)}
        with Workers(job.data.processes, functions) as workers, Meter("search near-duplicates", source) as meter:
            first_pass = Selection(job.data, Ledger(job.data.seed), fates, workers)
            unique = first_pass.unique(meter.watch(limited(source.documents(), source)))
            texts = ((c.key, c.document.text) for c in unique if c.document.ids is None)
            found = find_near_duplicates(texts, config, workers)
        _save(job, state, fates)
        found.save(path)
    return NearDuplicates.load(path)


def _save(job: Job, state: Unfinished, fates: Fates) -> None:
    """The safe point that a later run goes on from. First the verdicts, as the state says how many of them count."""
    fates.save()
    dataclasses.replace(state, reasons=fates.reasons).save(job.folder)


def _encoder(job: Job, model: Tokenizer, info: corpus.TokenizerInfo) -> shard_writer.Encoder:
    dtype = corpus.token_dtype(info.vocab_size)
    ids = corpus.SpecialIds(**info.special_ids)
    return shard_writer.Encoder(text_encoder(model, dtype), ids, info.vocab_size, dtype, job.data.filters)


def _pack(job: Job, encoder: shard_writer.Encoder, state: Unfinished, selection: Selection) -> shard_writer.Packing:
    dtype = encoder.dtype
    sources = job.sources(state.sources)
    finished = [shard for split in BOTH for shard in state.shards[split]]
    packing = shard_writer.Packing(
        encoder=encoder,
        writers={s: ShardWriter(job.folder, s, dtype, job.data.shard_tokens, state.shards[s]) for s in BOTH},
        done={split: corpus.resume_point(job.folder, state.shards[split]) for split in BOTH},
        token_use=corpus.token_use(job.folder, finished, dtype, encoder.vocab_size),
        stage=selection.ledger["tokens"],
        fates=selection.fates,
        texts={split: TextMeasures(sources) for split in BOTH},
    )
    with Meter("tokenize", job.source) as meter:

        def on_batch(position: float, shard_finished: bool) -> None:
            meter.update(position, packing.stage.bytes_out)
            if shard_finished:
                _save(job, dataclasses.replace(state, shards=dict(packing.shards())), selection.fates)

        selected = selection.run(limited(job.source.documents(), job.source))
        shard_writer.pack(selected, packing, selection.workers, lambda: job.source.position, on_batch)
    return packing


def _require_documents(job: Job, ledger: Ledger, finished: Mapping[Split, list[Shard]]) -> None:
    if all(finished.values()):
        return
    removed = ", ".join(f"{count} {reason}" for reason, count in ledger.removed().items()) or "none"
    hint = "; data.documents says how plain text is cut into documents" if _documents_setting(job) else ""
    kept, read = ledger["tokens"].documents_out, ledger["source"].documents_in
    if kept >= 2:
        raise UserError(
            f"{kept} of {read} documents remain (removed: {removed}), but none of those for"
            f" {next(split for split in BOTH if not finished[split])}; hold out another share by"
            " data.validation_fraction, others by data.seed, or raise data.filters.max_tokens_per_character"
        )
    raise UserError(
        f"too little text: {kept} of {read} documents remain (removed: {removed}), at least 2 are needed, one of them"
        f" for validation{hint}"
    )


def _documents_setting(job: Job) -> str | None:
    """`data.documents` where there is plain text that it cuts."""
    return job.source.config.documents if isinstance(job.source, TextSource) and job.source.in_parts else None


def _write_tasks(job: Job) -> None:
    """The embedded corpus comes with its fine-tuning tasks, made from the same world."""
    from data_prep import synthetic

    def write(folder: Path) -> None:
        folder.mkdir()
        synthetic.write_tasks(folder, job.data.seed)

    overwrite_atomically(job.folder / corpus.TASKS, write)


def _report(job: Job, manifest: Manifest) -> None:
    overlap = manifest.decontamination
    for task, documents in overlap.get("removed", {}).items():
        texts, searchable, found = (overlap[key][task] for key in ("examples", "searchable", "found"))
        say(f"{task}: {searchable:,} of {texts:,} texts searchable, {found:,} found; {documents:,} documents removed")
    train, validation = (sum(shard.tokens for shard in manifest.splits[split]) for split in BOTH)
    say(
        f"{job.folder}: {train:,} training tokens, {validation:,} for validation, from {manifest.counts['documents']:,}"
        f" documents; vocabulary {manifest.tokenizer.vocab_size:,}; removed: {manifest.removed or 'nothing'}"
    )
    for line in [
        *filter(None, [manifest.statistics.get("remark")]),
        *advice(manifest, job.data, _documents_setting(job)),
    ]:
        say(line)
