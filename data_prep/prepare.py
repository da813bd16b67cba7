"""`cramming prepare`: text to a corpus folder. Streaming, resumable, and a no-op when the corpus is already there.

    read -> normalise, filter, deduplicate, hold out -> tokenizer.json -> shards -> manifest.json (last)

Until the manifest is written the folder holds `unfinished.json`: what the run was about to make and which shards it
has finished. An interrupted run (Ctrl-C, kill -9, power cut, lost network) goes on from there: the text is read again,
which is cheap, but documents that lie in finished shards are not tokenized again, and the result is byte for byte that
of an unbroken run. A mistake in settings or text, in contrast, leaves nothing behind.
"""

import dataclasses
import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cramming import __version__
from cramming.config import UserError, build, file_sha256, overwrite_atomically, write_atomically
from cramming.data import shards
from cramming.data.shards import Corpus, Manifest, Shard, ShardWriter, Split
from cramming.progress import Progress, say
from data_prep import pack, tokenizer
from data_prep.clean import normalize
from data_prep.folder import UNFINISHED, Unfinished, discard, lock
from data_prep.generated import EmbeddedConfig, EmbeddedSource
from data_prep.hub import ConnectionLostError, HubConfig, HubSource
from data_prep.selection import Tally, select
from data_prep.sources import DataConfig, Source, TextSource, limited
from data_prep.tokenizer import TokenizerConfig

SOURCES: dict[str, Any] = {"embedded": EmbeddedSource, "text": TextSource, "hub": HubSource}
BOTH: tuple[Split, Split] = ("train", "validation")


@dataclass(frozen=True)
class Job:
    """One call of `prepare`: the validated settings, the opened source and the folder to fill."""

    folder: Path
    data: DataConfig
    tokenizer: TokenizerConfig
    source: Source
    settings: dict[str, Any]
    settings_hash: str

    @property
    def tokenizer_path(self) -> Path | None:
        """An existing tokenizer to use instead of training one: the source's own, or the user's."""
        own = self.source.tokenizer_file()
        if own is None and self.tokenizer.path:
            return Path(self.tokenizer.path).expanduser()
        return own

    def inventory(self) -> list[dict[str, Any]]:
        """What the corpus is made from: the source's parts, and the user's tokenizer."""
        return self.source.inventory() + self._tokenizer_entry()

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """What differs from the inventory of an earlier run, in words; None if nothing does."""
        source = [entry for entry in inventory if entry["kind"] != "tokenizer"]
        if changed := self.source.changed(source):
            return changed
        return None if inventory[len(source) :] == self._tokenizer_entry() else self.tokenizer.path

    def _tokenizer_entry(self) -> list[dict[str, Any]]:
        if not self.tokenizer.path:
            return []
        sha256 = file_sha256(Path(self.tokenizer.path).expanduser())
        return [
            {
                "name": self.tokenizer.path,
                "kind": "tokenizer",
                "license": None,
                "sha256": sha256,
            }
        ]


def main(config: Mapping[str, Any]) -> None:
    """Prepare the corpus that the sections `data` and `tokenizer` describe, in `corpus_folder(config)`."""
    job = parse(config)
    with lock(job.folder):
        if (job.folder / shards.MANIFEST).is_file():
            confirm(job)
            return
        try:
            prepare(job)
        except ConnectionLostError:
            raise
        except UserError:
            discard(job.folder)
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(f"{job.folder}: the disk is full; make room and run the same command again") from None


def parse(config: Mapping[str, Any]) -> Job:
    """Validate the settings and look at the source, before anything is written."""
    kind = config["data"].get("source")
    if kind not in SOURCES:
        raise UserError(f"data.source={kind!r}: choose one of {', '.join(SOURCES)}")
    data = build(SOURCES[kind].config_class, config["data"], "data")
    job = Job(
        folder=shards.corpus_folder(config),
        data=data,
        tokenizer=build(TokenizerConfig, config["tokenizer"], "tokenizer"),
        source=SOURCES[kind](data),
        settings=shards.content_settings(config),
        settings_hash=shards.corpus_hash(config),
    )
    if job.tokenizer.path:
        if isinstance(data, HubConfig) and data.ids_field:
            raise UserError("tokenizer.path: data.ids_field comes with its own tokenizer; set tokenizer.path=null")
        tokenizer.load(Path(job.tokenizer.path).expanduser())
    return job


def confirm(job: Job) -> None:
    """The corpus is there: check that it is the one asked for and that its sources have not changed; write nothing."""
    manifest = Corpus.open(job.folder, verify=True).manifest
    if manifest.settings_hash != job.settings_hash:
        different = ", ".join(_differences(manifest.settings, job.settings))
        raise UserError(
            f"{job.folder}: holds a corpus of other settings ({different}); delete it, or name another data.corpus"
        )
    if changed := job.changed(manifest.sources):
        raise UserError(f"{job.folder}: its sources have changed since ({changed}); delete it to prepare anew")
    (job.folder / UNFINISHED).unlink(missing_ok=True)
    say(f"{job.folder}: already prepared with these settings, nothing to do")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = {(section, key) for node in (old, new) for section in node for key in node[section]}
    return sorted(f"{s}.{k}" for s, k in keys if old.get(s, {}).get(k) != new.get(s, {}).get(k))


def prepare(job: Job) -> None:
    """Make the corpus, or go on making it."""
    state = _begin(job)
    model = _tokenizer(job)
    info = tokenizer.describe(model, job.folder / shards.TOKENIZER)
    tally = Tally()
    finished = _pack(job, model, info, state, tally)
    _require_documents(job, tally, finished)
    if changed := job.changed(state.sources):
        raise UserError(f"{changed}: changed while it was being read; run `cramming prepare` again")
    if isinstance(job.data, EmbeddedConfig):
        _write_tasks(job)
    manifest = Manifest(
        format=shards.FORMAT_VERSION,
        name=job.data.name,
        suite_version=__version__,
        settings_hash=job.settings_hash,
        settings=job.settings,
        dtype="uint16" if shards.token_dtype(info.vocab_size).itemsize == 2 else "uint32",
        tokenizer=info,
        sources=state.sources,
        counts=dict(sorted(tally.counts.items())),
        removed=dict(sorted(tally.removed.items())),
        splits=finished,
    )
    write_atomically(job.folder / shards.MANIFEST, manifest.to_json())
    (job.folder / UNFINISHED).unlink()
    _report(job, manifest)


def _begin(job: Job) -> Unfinished:
    """The state of an interrupted run of the same settings and sources, or a new one."""
    state = Unfinished.load(job.folder)
    if state is not None:
        changed = "settings" if state.settings_hash != job.settings_hash else job.changed(state.sources)
        if changed is None:
            finished = sum(map(len, state.shards.values()))
            say(f"{job.folder}: going on with an interrupted run, {finished} shards are finished")
            state.keep_only_finished(job.folder)
            return state
        say(f"{job.folder}: an interrupted run was here, but since then has changed: {changed}; starting over")
        discard(job.folder)
    state = Unfinished(job.settings_hash, job.inventory(), {split: [] for split in BOTH})
    state.save(job.folder)
    return state


def _tokenizer(job: Job) -> Tokenizer:
    """The corpus's tokenizer: of an earlier, interrupted run, an existing one, or trained now."""
    target = job.folder / shards.TOKENIZER
    if target.is_file():
        return tokenizer.load(target)
    if existing := job.tokenizer_path:
        model = tokenizer.load(existing)
    else:
        model = _train_tokenizer(job)
    overwrite_atomically(target, lambda path: model.save(str(path)))
    return model


def _train_tokenizer(job: Job) -> Tokenizer:
    config, source = job.tokenizer, job.source
    with Progress("read a sample for the tokenizer", source.total, source.unit) as bar:
        sample = tokenizer.sample_text(
            _ticking(
                limited(source.sample_documents(config.sample_mb * 1e6), job.data),
                lambda: bar.update(source.position),
            ),
            lambda text: normalize(text, job.data.clean),
            config.sample_mb,
            job.data.seed,
        )
    say(f"training a {config.kind} tokenizer on {sum(map(len, sample)) / 1e6:.1f} M characters")
    model = tokenizer.train(sample, config)
    if model.get_vocab_size() < config.vocab_size:
        say(f"the text supports {model.get_vocab_size()} vocabulary entries of the {config.vocab_size} asked for")
    return model


def _ticking(documents: Iterator[Any], tick: Callable[[], None]) -> Iterator[Any]:
    for index, document in enumerate(documents):
        yield document
        if index % 256 == 0:
            tick()


def _pack(
    job: Job,
    model: Tokenizer,
    info: shards.TokenizerInfo,
    state: Unfinished,
    tally: Tally,
) -> dict[str, list[Shard]]:
    dtype = shards.token_dtype(info.vocab_size)
    writers = {s: ShardWriter(job.folder, s, dtype, job.data.shard_tokens, state.shards[s]) for s in BOTH}
    done = {split: shards.resume_point(job.folder, state.shards[split]) for split in BOTH}
    encoder = pack.Encoder(model, shards.SpecialIds(**info.special_ids), info.vocab_size, dtype)
    with Progress("tokenize", job.source.total, job.source.unit) as bar:

        def on_batch(position: float, finished: bool) -> None:
            bar.update(position)
            if finished:
                dataclasses.replace(state, shards={s: w.shards for s, w in writers.items()}).save(job.folder)

        selected = select(limited(job.source.documents(), job.data), job.data, tally)
        counts = pack.pack(selected, encoder, writers, done, job.data.threads, lambda: job.source.position, on_batch)
    before = sum(shards.count_token(job.folder, state.shards[s], dtype, encoder.ids.unk) for s in BOTH)
    tally.counts["unknown_tokens"] = before + counts["unknown_tokens"]
    return {split: writer.shards for split, writer in writers.items()}


def _require_documents(job: Job, tally: Tally, finished: dict[str, list[Shard]]) -> None:
    if all(finished.values()):
        return
    removed = ", ".join(f"{count} {reason}" for reason, count in tally.removed.items()) or "none"
    hint = "; data.documents says how plain text is cut into documents" if job.data.source == "text" else ""
    raise UserError(
        f"too little text: {tally.counts['documents']} of {tally.counts['documents_read']} documents remain (removed:"
        f" {removed}), at least 2 are needed, one of them for validation{hint}"
    )


def _write_tasks(job: Job) -> None:
    """The embedded corpus comes with its fine-tuning tasks, made from the same world."""
    from data_prep import embedded

    def write(folder: Path) -> None:
        folder.mkdir()
        embedded.write_tasks(folder, job.data.seed)

    overwrite_atomically(job.folder / shards.TASKS, write)


def _report(job: Job, manifest: Manifest) -> None:
    train, validation = (sum(shard.tokens for shard in manifest.splits[split]) for split in BOTH)
    say(
        f"{job.folder}: {train:,} training tokens, {validation:,} for validation, from {manifest.counts['documents']:,}"
        f" documents; vocabulary {manifest.tokenizer.vocab_size:,}; removed: {manifest.removed or 'nothing'}"
    )
