"""What a run reads: its corpus, the text that it is validated on, and the batches made of both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cramming.checks import Config
from cramming.config import UserError
from cramming.data.batches import BatchSource
from cramming.data.corpus import Corpus, corpus_folder
from cramming.data.held_out import HeldOut
from cramming.data.masking import Masker
from cramming.model.config import ModelConfig
from cramming.progress import say
from cramming.record import load_record, write_record_section


@dataclass(frozen=True)
class RunData:
    """`validation_corpus` is `corpus` itself, unless `train.validation_corpus` names another."""

    corpus: Corpus
    validation_corpus: Corpus
    source: BatchSource
    held_out: HeldOut

    @classmethod
    def open(cls, settings: Mapping[str, Any], config: Config, verify: bool) -> "RunData":
        """UserError for what is wrong with a corpus; nothing is written.

        With `verify` the shards are hashed, on the clock (seconds per gigabyte, docs/log.md): training on a damaged
        corpus would cost the day.
        """
        corpus = Corpus.open(corpus_folder(settings), verify=verify)
        other = _validation_corpus(config.train.validation_corpus, corpus, verify)
        windows = _batch_source(other, "validation", config)
        held_out = HeldOut(windows, config.train.validation_tokens)
        return cls(corpus, other, _batch_source(corpus, "train", config), held_out)

    def describe(self) -> dict[str, Any]:
        """The record's section `corpus`; it names the text of the validation losses where that is another's."""
        if (other := self.validation_corpus) is self.corpus:
            return self.corpus.describe()
        named = {"folder": str(other.folder), "manifest_sha256": other.manifest_sha256}
        return {**self.corpus.describe(), "validation": named}

    def note_changed_files(self, folder: Path, again: bool = False) -> None:
        """Record, and say, which files of the corpora were written to since this process checked them.

        `corpus.changed`: by path, whether the file was as prepared when it was read `again`, after the end; null
        before, and where it could not be read. It is looked at before each checkpoint, so that a kill hides nothing of
        what is in the weights.
        """
        changed = {
            str(corpus.folder / name): corpus.is_as_prepared(name) if again else None
            for corpus in dict.fromkeys((self.corpus, self.validation_corpus))  # most runs have one
            for name in corpus.changed(last=again)
        }
        known = changed_before(folder) if changed else {}
        for path, as_prepared in changed.items():
            if again:
                now = {True: "it is", False: "it is not", None: "it cannot be read, or is not"}[as_prepared]
                say(f"{path}: changed while training read it; now {now} as `prepare` wrote it")
            elif path not in known:
                say(
                    f"warning: {path}: changed while training reads it, so the run breaks R15; let nothing write there,"
                    " nor change rights, owner or links: the system's time of a change is the same for all of these"
                )
        if changed:
            write_record_section(folder, corpus={"changed": {**known, **changed}})


def changed_before(folder: Path) -> dict[str, bool | None]:
    """What `note_changed_files` has recorded: no resume takes it back."""
    found: dict[str, bool | None] = load_record(folder).get("corpus", {}).get("changed", {})
    return found


def fit_to_corpus(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """Fill in the vocabulary size (padded to a multiple of 64: whole tiles for matrix kernels), or check it."""
    padded = (corpus.vocab_size + 63) // 64 * 64
    model = replace(model, vocab_size=model.vocab_size or padded)
    assert model.vocab_size
    if model.vocab_size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size}: the tokenizer of {corpus.folder} has {corpus.vocab_size} entries;"
            " leave model.vocab_size=null"
        )
    return model


def _validation_corpus(folder: Path | None, corpus: Corpus, verify: bool) -> Corpus:
    """UserError where the same text would be other tokens there."""
    if folder is None:
        return corpus
    other = Corpus.open(folder, verify="validation" if verify else False)
    if other.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
        raise UserError(
            f"train.validation_corpus={other.folder}: it has another tokenizer than {corpus.folder}, so its tokens mean"
            f" something else; prepare it with tokenizer.path={corpus.tokenizer_file}"
        )
    return other


def _batch_source(corpus: Corpus, split: Literal["train", "validation"], config: Config) -> BatchSource:
    special, train, seed = corpus.special_ids, config.train, config.seed
    masker = Masker(config.objective, corpus.vocab_size, special.mask, tuple(special), seed)
    order = train.order if split == "train" else "shuffled"
    stream = corpus.stream(split, order)
    return BatchSource(stream, masker, train.sequence_length, train.packing, seed, shuffle=order == "shuffled")
