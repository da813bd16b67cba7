"""`cramming prepare`: text to a corpus folder. Streaming, resumable, and a no-op when the corpus is already there.

    tokenizer.json -> a part for each task -> duplicates, hold-out -> shards -> orders, card -> manifest.json (last)

The source is cut into tasks of fixed size. Each one reads, filters and tokenizes its documents and writes its own part
(data_prep/stages.py); an interrupted run resumes with the tasks whose part is missing (data_prep/task_grid.py). What
depends on all documents is decided when all parts are there (data_prep/selection.py). The result is byte for byte the
same for any number of workers, interrupted or not.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from cramming.config import UserError
from cramming.data.corpus import SPLITS, TASKS, Corpus
from cramming.data.manifest import (
    LARGEST_VOCABULARY,
    MANIFEST,
    TOKENIZER,
    Manifest,
    SpecialIds,
    TokenizerInfo,
    token_dtype,
)
from cramming.files import explain_os_error, lock, overwrite_atomically, release, write_atomically
from cramming.invocation import Invocation
from cramming.process_pool import process_pool
from cramming.progress import Progress, format_count, say
from data_prep import corpus_card
from data_prep.corpus_card import Result
from data_prep.dedup.near import Signer
from data_prep.dropped import write_dropped
from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.parts import Part
from data_prep.prepare_config import Preparation, parse
from data_prep.readers.demo import EmbeddedConfig
from data_prep.readers.source import Source, Task, limited
from data_prep.repeated_lines import LineSample
from data_prep.selection import Rows, Selector
from data_prep.shard_writer import CorpusWriter
from data_prep.stages import Stages
from data_prep.stats import StageStats, text_bytes
from data_prep.task_grid import TaskGrid, UnusableTextError, finish, map_tasks, open_grid
from data_prep.tokenizer import train as training
from data_prep.tokenizer.load import TokenizerConfig, describe, load
from data_prep.tokenizer.train import Sample, Sampled

TRAINED_HERE = 2_000_000  # characters: seconds
LONG_WORD = 20  # characters for each word, on average: a script without spaces
TRAINER_DIED = (
    "the process that trains the tokenizer died (out of memory?). Set a smaller tokenizer.sample_mb and run the command"
    " again."
)
MAX_UNKNOWN_SHARE = 0.2  # above it, the tokenizer is for another language
ENOUGH_TOKENS = 100_000  # to judge that share


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
        try:
            with open_grid(preparation) as grid:
                prepare(preparation, grid)
        except UserError as error:
            remark = preparation.source.remark()  # which part ended a mix
            if remark:
                error.args = (f"{error}; {remark}",)
            raise
        except OSError as error:
            raise explain_os_error(error, folder, "run the same command again") from None


def check(recipe: Mapping[str, Any], invocation: Invocation) -> list[str]:
    """Return the corpus to prepare; UserError for what `main` would refuse before it writes anything."""
    preparation = parse(recipe, invocation.corpora)
    folder = preparation.folder
    if not (folder / MANIFEST).is_file():
        return [f"prepare: {folder}"]
    _require_same(preparation, Corpus.open(folder).manifest)
    return [f"prepare: {folder}, which is prepared already"]


def confirm(preparation: Preparation) -> None:
    """Check that the corpus has these settings and that its sources have not changed; write nothing."""
    folder = preparation.folder
    manifest = Corpus.open(folder, verify=True).manifest
    _require_same(preparation, manifest)
    finish(folder)
    rules = ""
    if manifest.settings_hash != preparation.settings_hash:
        rules = ", by an earlier version's rules for text (delete it to prepare anew by today's)"
    say(f"{folder}: already prepared with these settings{rules}, nothing to do")


def _require_same(preparation: Preparation, manifest: Manifest) -> None:
    """Raise UserError for a corpus of other settings, or whose sources have changed."""
    folder = preparation.folder
    old, new = _flat(manifest.settings), _flat(preparation.settings)
    different = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if different:
        raise UserError(
            f"{folder}: holds a corpus of other settings ({', '.join(different)}). Delete it, or name another"
            " data.corpus."
        )
    changed = preparation.changed(manifest.sources, manifest.decontamination.get("files", []))
    if changed:
        raise UserError(
            f"{folder}: its sources have changed since ({changed}). Delete it to prepare anew."
        )


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, section in settings.items():
        flat |= {f"{name}.{key}": value for key, value in section.items()}
    return flat


def prepare(preparation: Preparation, grid: TaskGrid) -> None:
    """Make everything from the source to the manifest."""
    folder, data = preparation.folder, preparation.data
    # Loaded as every later run has it: what is written loses the last bits of some scores.
    tokenizer = load(grid.tokenizer(partial(_tokenizer, preparation)))
    info = describe(tokenizer, folder / TOKENIZER)
    parts = _make_parts(preparation, grid, tokenizer, info)
    sources = preparation.source.parts() or [entry["name"] for entry in grid.sources]
    result = _select(preparation, parts, Rows(parts, sources), tokenizer, info.vocab_size)
    changed = preparation.changed(grid.sources, grid.compared)
    if changed:
        raise UserError(f"{changed}: changed while it was being read; run `cramming prepare` again")
    if isinstance(data, EmbeddedConfig):  # its fine-tuning tasks are made from the same world
        from data_prep.synthetic import tasks

        overwrite_atomically(folder / TASKS, lambda path: tasks.write_tasks(path, data.seed))
    manifest = corpus_card.complete(preparation, grid.sources, tokenizer, info, result)
    write_atomically(folder / MANIFEST, manifest.to_json())
    finish(folder)
    _report(preparation, manifest)


def _tokenizer(preparation: Preparation) -> str:
    """Return the text of an existing tokenizer.json, or of one that is trained now."""
    existing = preparation.tokenizer_path
    model = load(existing) if existing else _trained_tokenizer(preparation)
    text: str = model.to_str(pretty=True)
    return text


def _trained_tokenizer(preparation: Preparation) -> Tokenizer:
    config, damage = preparation.tokenizer, Counter[str]()
    sample, share = sample_texts(preparation, damage)
    characters = sum(map(len, sample))
    say(f"training a {config.kind} tokenizer on {characters:,} characters")
    if config.kind == "unigram" and _has_few_spaces(sample):
        say(
            "tokenizer=unigram: text with few spaces takes long to train on, 2 MB took 3 minutes."
            " A smaller tokenizer.sample_mb or tokenizer=bpe is faster"
        )
    try:
        model = _train(sample, config, share)
    except UserError as error:
        if not damage:
            raise
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(damage.items()))
        raise UserError(f"{error}; left out as damaged: {left_out}") from None
    entries = model.get_vocab_size()
    if config.vocab_size == "auto" and entries >= training.SMALLEST_VOCABULARY:
        rule = f"95% of them occur {training.OCCURRENCES} times in the text"
        bounds = f"at least {training.SMALLEST_VOCABULARY:,}, at most {LARGEST_VOCABULARY:,}"
        say(f"tokenizer.vocab_size=auto: {entries:,} entries. The rule: {rule}, {bounds}")
    elif config.vocab_size == "auto" or entries < config.vocab_size:
        limit = f"no more pairs reach tokenizer.min_frequency={config.min_frequency}"
        if config.kind == "unigram":
            limit = "the text gives no more pieces"
        say(f"tokenizer.vocab_size={config.vocab_size}: {entries:,} entries, {limit}")
    return model


def _train(sample: list[str], config: TokenizerConfig, share: float) -> Tokenizer:
    """Train, long work in a process of its own: the libraries answer no Ctrl-C, and abort for want of memory."""
    if config.kind != "unigram" and sum(map(len, sample)) < TRAINED_HERE:
        return training.train(sample, config, share)
    started = time.monotonic()
    with (
        process_pool(1, TRAINER_DIED) as submit,
        Progress("train the tokenizer", None, "s") as bar,
    ):
        trained = submit(training.train, sample, config, share)
        while not wait([trained], timeout=1.0).done:
            bar.update(time.monotonic() - started)
        model: Tokenizer = trained.result()
    return model


def _has_few_spaces(sample: list[str]) -> bool:
    words = sum(len(text.split()) for text in sample)
    return sum(map(len, sample)) > LONG_WORD * words


def sample_texts(preparation: Preparation, damage: Counter[str]) -> tuple[list[str], float]:
    """Return the texts to train the tokenizer on, and which share of the whole text they are.

    What is left out as damaged is counted in `damage` by its reason. Of a source that is costly to read, no more is
    read than the sample needs: its share is then 0, which stands for an unknown small one.
    """
    data, source, config = preparation.data, preparation.source, preparation.tokenizer
    sample = Sample(config.sample_mb, data.seed)
    clean = partial(normalize, config=data.clean)
    title = "read a sample for the tokenizer"
    is_cut = False
    if source.costly:
        wanted = config.sample_mb * 1e6  # characters
        with _progress(title, source) as update:
            for document in limited(source.sample_documents(), source):
                update(source.position, text_bytes(document.text))
                if document.damage:
                    damage[document.damage.reason] += document.part == 0
                    continue
                sample.add(document.text, 0, clean)
                wanted -= len(document.text)
                is_cut = wanted <= 0
                if is_cut:
                    break
    else:
        work = _SampleTask(config.sample_mb, data.seed, data.clean)
        # What is far above the threshold by now is not sent.
        items = ((task, number, sample.threshold) for number, task in enumerate(source.tasks()))
        with _progress(title, source) as update:
            for (task, _, _), part in map_tasks(work, items, data.processes, data.ray):
                for sampled in part.sampled:
                    sample.take(sampled)
                damage.update(part.damage)
                update(task.position, part.size)
    share = 0.0 if is_cut else sample.threshold / training.LARGEST_NUMBER
    return [sampled.data.decode() for sampled in sample.sampled()], share


@dataclass(frozen=True)
class _TaskSample:
    """Share of a task in the sample, the damage in it by reason, and the bytes of its text."""

    sampled: list[Sampled]
    damage: Counter[str]
    size: int


@dataclass(frozen=True)
class _SampleTask:
    """Draws a task's share of a sample: all that may be among the smallest numbers of the whole text."""

    megabytes: float
    seed: int
    clean: CleanConfig

    def __call__(self, item: tuple[Task, int, int]) -> _TaskSample:
        task, number, threshold = item
        sample, damage, size = Sample(self.megabytes, self.seed, threshold), Counter[str](), 0
        for document in task.documents():
            if document.damage:
                damage[document.damage.reason] += document.part == 0
                continue
            size += text_bytes(document.text)
            sample.add(document.text, number, partial(normalize, config=self.clean))
        return _TaskSample(sample.sampled(), damage, size)


def _make_parts(
    preparation: Preparation, grid: TaskGrid, tokenizer: Tokenizer, info: TokenizerInfo
) -> list[Part]:
    """Have all tasks done, and return their parts. UserError when too many tokens are unknown."""
    data, source, near = preparation.data, preparation.source, preparation.data.near_duplicates
    dtype = token_dtype(info.vocab_size)
    special_ids, signer = SpecialIds(**info.special_ids), Signer(near) if near.enabled else None
    stages = Stages(
        data,
        tokenizer,
        special_ids,
        info.vocab_size,
        dtype,
        preparation.decontaminator,
        signer,
    )
    parts, before = list[Part](), Counter[str]()
    tokens = unknown = 0
    made = grid.parts(
        source.tasks(),
        stages,
        lambda folder, name: Part(folder, dtype).is_whole(name),
        data.processes,
        data.ray,
    )
    with _progress("tokenize", source) as update:
        for folder, position in made:
            part = Part(folder, dtype)
            part.before = {origin: before[origin] for origin in part.node["begun"]}
            if part.node["relative"]:
                before.update(part.node["begun"])
            parts.append(part)
            token_use = part.array("token_use")
            tokens, unknown = (
                tokens + int(token_use.sum()),
                unknown + int(token_use[special_ids.unk]),
            )
            if tokens >= ENOUGH_TOKENS:
                _require_fit(unknown, tokens, preparation)
            update(position, part.node["stages"]["source"]["bytes_out"])
    _require_fit(unknown, tokens, preparation)
    return parts


def _require_fit(unknown: int, tokens: int, preparation: Preparation) -> None:
    if unknown > MAX_UNKNOWN_SHARE * tokens:
        cause = corpus_card.cause_of_unknown(preparation)
        raise UnusableTextError(
            f"the tokenizer does not fit this text: {100 * unknown / tokens:.0f} % of the tokens are unknown: {cause}"
        )


def _select(
    preparation: Preparation, parts: list[Part], rows: Rows, tokenizer: Tokenizer, vocab_size: int
) -> Result:
    """Decide which documents become the corpus, and write its shards."""
    data, stats, lines = preparation.data, StageStats(), LineSample()
    for part in parts:
        lines.merge(part.lines())
        for name, stage in part.stages().items():
            stats[name].merge(stage)
    selection = Selector(rows, stats, tokenizer.decode).select(data, preparation.decontaminator)
    _require_documents(preparation, stats, selection.held_out_N[selection.keep_N].tolist())
    dtype = token_dtype(vocab_size)
    writer = CorpusWriter(preparation.folder, dtype, data.shard_tokens, vocab_size)
    if data.list_dropped:
        write_dropped(preparation.folder, selection)
    with Progress("write shards", float(rows.rows_N["tokens"].sum()), "tokens") as bar:
        for tokens in writer.write(selection):
            bar.advance(tokens)
    return Result(stats, selection, writer.shards, writer.token_use, dtype, lines.repeated())


def _require_documents(preparation: Preparation, stats: StageStats, held_out: list[bool]) -> None:
    for split, is_there in zip(SPLITS, (not all(held_out), any(held_out))):
        if is_there:
            continue
        removed = ", ".join(corpus_card.removed_by_setting(stats))
        left, read = stats["tokens"].documents_out, stats["source"].documents_in
        cut = corpus_card.cut_by(preparation.source)
        hint = f"; data.documents={cut} cuts the text so" if cut else ""
        raise UnusableTextError(
            f"too little text: {left} of {read} documents remain (removed: {removed or 'none'}), none of them for"
            f" {split}; at least 2 are needed, one of them for validation (by data.validation_fraction and data.seed)"
            f"{hint}"
        )


def _report(preparation: Preparation, manifest: Manifest) -> None:
    overlap = manifest.decontamination
    for task, documents in overlap.get("removed", {}).items():
        texts, searchable = overlap["examples"][task], overlap["searchable"][task]
        say(
            f"{task}: {searchable:,} of {texts:,} texts searchable, {overlap['found'][task]:,} found;"
            f" {documents:,} documents removed, {overlap['cut'][task]:,} cut"
        )
    train = sum(shard.tokens for shard in manifest.splits["train"])
    validation = sum(shard.tokens for shard in manifest.splits["validation"])
    say(
        f"{preparation.folder}: {train:,} training tokens, {validation:,} for validation, from"
        f" {manifest.counts['documents']:,} documents; vocabulary {manifest.tokenizer.vocab_size:,}; removed:"
        f" {manifest.removed or 'nothing'}"
    )
    if missing := [order for order in preparation.data.orders if order not in manifest.orders]:
        say(f"no order files for {', '.join(missing)}: ready-made ids have no text to measure")
    if remark := manifest.statistics.get("remark"):
        say(remark)
    for line in corpus_card.advice(manifest, preparation):
        say(line)


@contextlib.contextmanager
def _progress(title: str, source: Source) -> Iterator[Callable[[float, int], None]]:
    """Show a bar, with `update(position in the source, bytes of text since the last update)`."""
    started, done = time.monotonic(), 0
    with Progress(title, source.total, source.unit) as bar:

        def update(position: float, size: int) -> None:
            nonlocal done
            done += size
            seconds = max(time.monotonic() - started, 1e-3)
            bar.note(f"{format_count(done / seconds, 'B')}/s of text")
            bar.update(position)

        yield update
