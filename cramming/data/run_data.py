"""The text of a run: its corpus, the held-out text that it is validated on, and batches of both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cramming.config import UserError
from cramming.data.batches import BatchSource, HeldOut
from cramming.data.corpus import Corpus
from cramming.model.config import ModelConfig
from cramming.objectives.masking import Masker
from cramming.progress import say
from cramming.recipe import Config


@dataclass(frozen=True)
class RunData:
    """Data of a run. `validation_corpus` is `corpus` unless `train.validation_corpus` names another one."""

    corpus: Corpus
    validation_corpus: Corpus
    source: BatchSource
    held_out: HeldOut

    @classmethod
    def open(cls, folder: Path, config: Config, verify: bool) -> "RunData":
        """Open the corpus in a folder without writing anything; raise UserError if it cannot be used.

        With `verify` the shards are hashed, on the clock (seconds per gigabyte, docs/log.md): training on a damaged
        corpus would cost the day.
        """
        corpus = other = Corpus.open(folder, verify=verify)
        if config.train.validation_corpus is not None:
            other = Corpus.open(
                config.train.validation_corpus, verify="validation" if verify else False
            )
        if other.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
            raise UserError(
                f"train.validation_corpus={other.folder}: it has another tokenizer than {corpus.folder}, so token ids"
                f" differ. Prepare it with tokenizer.path={corpus.tokenizer_file}."
            )
        held_out = HeldOut(
            _batch_source(other, "validation", config), config.train.validation_tokens
        )
        return cls(corpus, other, _batch_source(corpus, "train", config), held_out)

    def describe(self) -> dict[str, Any]:
        """Return the section `corpus` of the record, with the corpus of the validation losses if it is another one."""
        other = self.validation_corpus
        if other is self.corpus:
            return self.corpus.describe()
        named = {"folder": str(other.folder), "manifest_sha256": other.manifest_sha256}
        return {**self.corpus.describe(), "validation": named}

    def changed_files(
        self, known: Mapping[str, bool | None], *, last: bool
    ) -> dict[str, bool | None]:
        """Return, and say, which files of the corpora were written to since this process checked them.

        By path, whether the file is as prepared, read again, if this is the `last` look; else None. Files are looked
        at before each checkpoint, so that a kill hides nothing of what is in the weights. Files that are `known` to
        have changed are left out before the end.
        """
        changed: dict[str, bool | None] = {}
        for corpus in dict.fromkeys((self.corpus, self.validation_corpus)):  # most runs have one
            for name in corpus.changed(last=last):
                path = str(corpus.folder / name)
                if last:
                    changed[path] = corpus.is_as_prepared(name)
                    _say_changed(path, changed[path])
                elif path not in known:
                    changed[path] = None
                    say(
                        f"warning: {path}: changed while training reads it, so the run breaks the rule on the corpus."
                        " Let nothing write there, nor change rights, owner or links."
                    )
        return changed


def _say_changed(path: str, as_prepared: bool | None) -> None:
    state = {True: "it is", False: "it is not", None: "it cannot be read, or is not"}[as_prepared]
    say(f"{path}: changed while training read it; now {state} as `prepare` wrote it")


def _batch_source(
    corpus: Corpus, split: Literal["train", "validation"], config: Config
) -> BatchSource:
    special, train, seed = corpus.special_ids, config.train, config.training_seed
    masker = Masker(config.objective.at(0.0), corpus.vocab_size, special.mask, tuple(special), seed)
    order = train.order if split == "train" else "shuffled"
    stream = corpus.stream(split, order)
    return BatchSource(
        stream, masker, train.sequence_length, train.packing, seed, shuffle=order == "shuffled"
    )


def fit_to_corpus(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """Fill in the vocabulary size (padded to a multiple of 64: whole tiles for matrix kernels), or check it."""
    first_positions = (0, corpus.special_ids.pad + 1)
    if model.position_offset not in first_positions:
        raise UserError(
            f"model.position_offset={model.position_offset}: expected 0, or 1 more than the padding's id,"
            f" {first_positions[1]}"
        )
    size = model.vocab_size or (corpus.vocab_size + 63) // 64 * 64
    if size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={size}: the tokenizer of {corpus.folder} has {corpus.vocab_size} entries."
            " Leave model.vocab_size=null."
        )
    return replace(model, vocab_size=size)
