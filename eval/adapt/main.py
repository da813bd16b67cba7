"""`cramming adapt`: prepare the text, train the checkpoint further on it, and compare the model before and after.

The recipe is conf/experiment/adapt.yaml. The verbs `prepare`, `pretrain` and `score` run in separate processes, as in
`cramming run`. With `--resume` a finished run is not trained further, only compared again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cramming import verbs
from cramming.children import run_or_exit
from cramming.config import require
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.device import select
from cramming.invocation import Invocation
from cramming.model.heads import MaskedLM
from cramming.model.load import load_encoder_config, load_masked_lm
from cramming.overrides import compose, in_words, name_of, setting
from cramming.progress import format_count, say, show_table
from cramming.record import is_run, load_record, refuse_finished_run
from cramming.resume import refuse_changed_settings
from cramming.starts.checkpoint import load_checkpoint
from eval.adapt.add_words import extended_checkpoint, refuse_tokenizer
from eval.adapt.measure import Comparison, compare, held_out_windows
from eval.adapt.page import LOSS_COLUMNS, Result, loss_rows, verdict, write_page
from eval.adapt.words import examples
from eval.own_tasks.page import Result as Scores
from eval.own_tasks.page import read
from eval.rules.load import load_run

# Settings of section `data` that every source has, and that the general text does not take over from the own text:
# they do not decide how a text is read and which documents are held out.
NOT_TAKEN_OVER = {"name", "corpus", "license", "max_documents"}

OWN_TEXT, GENERAL_TEXT = "own text", "general text"


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    *,
    general_text: Path | None,
    keep: float | None,
    add_words: int | None,
    tasks: Path | None,
) -> None:
    """Adapt a checkpoint.

    Args:
        recipe: Composed settings of the run.
        invocation: Options that all verbs share.
        general_text: File whose held-out part shows what the model has forgotten.
        keep: Share of the training tokens that come from `general_text`.
        add_words: Number of words of the own text that are added to the vocabulary.
        tasks: File of own tasks, on which the model is scored before and after.
    """
    for line in check(
        recipe,
        invocation,
        general_text=general_text,
        keep=keep,
        add_words=add_words,
        tasks=tasks,
    ):
        say(line)
    source = recipe["start"]["path"]
    invocation = _with_checkpoint_folder(recipe, invocation)
    added_words = 0
    if add_words is not None:
        invocation, added_words = _with_words(recipe, invocation, add_words)
        recipe = compose(invocation.overrides)
    if not _has_corpus(recipe, invocation):
        _prepare(invocation)
    training = invocation
    general: Invocation | None = None
    if general_text is not None:
        general = _general(invocation, general_text)
        _prepare(general)
        if keep is not None:
            training = mixed(recipe, invocation, general_text, keep)
            _require_enough(recipe, invocation, general, keep)
            _prepare(training)
    if _is_finished(invocation):
        folder = invocation.run_folder
        refuse_changed_settings(folder, load_record(folder)["config"], compose(training.overrides))
    else:
        run_or_exit(["pretrain", *training.arguments(*verbs.OPTIONS["pretrain"])])
    result = replace(measure(recipe, invocation, general), source=source, added_words=added_words)
    if tasks is not None:
        result = replace(result, scores=_scores(invocation, tasks, source))
    show_table("before and after", LOSS_COLUMNS, loss_rows(result.comparisons))
    say(verdict(result))
    pages = write_page(result, invocation.run_folder)
    say(f"adapt: {', '.join(map(str, pages))}; `cramming export` writes the model")


def check(
    recipe: Mapping[str, Any],
    invocation: Invocation,
    *,
    general_text: Path | None,
    keep: float | None,
    add_words: int | None,
    tasks: Path | None,
) -> Iterator[str]:
    """Return the lines that `--check` prints; raise UserError for a mistake that shows before training.

    Nothing is written.
    """
    objective = recipe["objective"]["name"]
    require(
        objective == "mlm",
        f"objective={objective}: adapt compares masked language models. Leave it out.",
    )
    require(
        keep is None or general_text is not None,
        f"--keep={keep}: no text to keep a share of. Give --general-text.",
    )
    require(
        keep is None or not recipe["data"]["corpus"],
        f"--keep={keep}: a finished corpus cannot be mixed. Give data.paths in place of data.corpus.",
    )
    require(
        add_words is None or not recipe["data"]["corpus"],
        f"--add-words={add_words}: a finished corpus has its tokenizer. Give data.paths in place of data.corpus.",
    )
    refuse_finished_run(invocation)
    source = recipe["start"]["path"]
    if add_words is not None:
        refuse_tokenizer(Path(source), add_words)
    lines = iter([f"checkpoint: {source}"])
    if tasks is not None:
        scoring = compose(_score_words(invocation))
        checked = verbs.check("score", scoring, invocation, tasks_file=tasks, model=[source])
        lines = chain(lines, checked)
    invocation_of_folder = _with_checkpoint_folder(recipe, invocation)
    preparations = list[Invocation]()
    if general_text is not None:
        preparations.append(_general(invocation_of_folder, general_text))
        if keep is not None:
            preparations.append(mixed(recipe, invocation_of_folder, general_text, keep))
    for each in preparations:
        lines = chain(lines, verbs.check("prepare", compose(each.overrides), each))
    names = ["pretrain"] if _has_corpus(recipe, invocation) else ["prepare", "pretrain"]
    for name in names:
        lines = chain(lines, verbs.check(name, recipe, invocation))
    return lines


def _scores(invocation: Invocation, tasks: Path, source: str) -> tuple[Scores, ...]:
    """Score the checkpoint and the run on own tasks with `cramming score`, which writes into the run's folder."""
    out = invocation.run_folder / "scores"
    words = [str(tasks), f"--model={source}", f"--model={invocation.run_folder}", f"--out={out}"]
    if invocation.device is not None:
        words.append(f"--device={invocation.device}")
    run_or_exit(["score", *words, *_score_words(invocation)])
    return tuple(read(out))


def _score_words(invocation: Invocation) -> list[str]:
    """Return the overrides of section `eval` as `cramming score` composes them."""
    words = [word for word in invocation.overrides if name_of(word).partition(".")[0] == "eval"]
    chooses_preset = any(name_of(word) == "eval" for word in words)
    return words if chooses_preset else ["eval=own_tasks", *words]


def _with_words(
    recipe: dict[str, Any], invocation: Invocation, count: int
) -> tuple[Invocation, int]:
    """Return an invocation that starts from a copy of the checkpoint with words of the text added, and their number."""
    _prepare(invocation)
    corpus = Corpus.open(corpus_folder(recipe, invocation.corpora))
    source = Path(recipe["start"]["path"])
    longer, added = extended_checkpoint(source, corpus, count, invocation.corpora)
    words = [word for word in invocation.overrides if name_of(word) != "start.path"]
    words.append(setting("start.path", str(longer)))
    return replace(invocation, overrides=tuple(words)), added


def _prepare(invocation: Invocation) -> None:
    run_or_exit(["prepare", *invocation.arguments(*verbs.OPTIONS["prepare"])])


def measure(
    recipe: Mapping[str, Any], invocation: Invocation, general: Invocation | None
) -> Result:
    """Compare the checkpoint and the run's final model on the held-out texts."""
    folder = invocation.run_folder
    source = Path(recipe["start"]["path"])
    device = select(invocation.device)
    own_corpus = Corpus.open(corpus_folder(recipe, invocation.corpora), verify=False)
    before, has_head = _checkpoint(source, own_corpus, int(recipe["seed"]))
    before = before.to(device).eval()
    after = load_masked_lm(folder / "final", dropout=0.0, attention_dropout=0.0).to(device).eval()
    length = recipe["train"]["sequence_length"]
    max_tokens = recipe["train"]["validation_tokens"]

    def compared(corpus: Corpus, text: str) -> Comparison:
        return compare(before, after, corpus, text, length, max_tokens)

    comparisons = [compared(own_corpus, OWN_TEXT)]
    if general is not None:
        general_folder = corpus_folder(compose(general.overrides), general.corpora)
        comparisons.append(compared(Corpus.open(general_folder, verify=False), GENERAL_TEXT))
    windows = held_out_windows(own_corpus, length, max_tokens)
    return Result(
        name=invocation.name,
        source=str(source),
        has_head=has_head,
        comparisons=tuple(comparisons),
        examples=tuple(examples(before, after, own_corpus, windows)),
        record=load_run(folder).record,
    )


def _checkpoint(folder: Path, corpus: Corpus, seed: int) -> tuple[MaskedLM, bool]:
    """Return the model at the start of training, and whether its masked-LM head is the checkpoint's, not a new one."""
    config = load_encoder_config(folder, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(seed)
    model = MaskedLM(config)
    return model, load_checkpoint(model, folder, corpus)


def _with_checkpoint_folder(recipe: Mapping[str, Any], invocation: Invocation) -> Invocation:
    """Return the invocation with the checkpoint's folder in place of its name.

    The files of a name on the hub may change between two of the verbs.
    """
    words = [word for word in invocation.overrides if name_of(word) != "start.path"]
    return replace(
        invocation, overrides=(*words, setting("start.path", str(recipe["start"]["path"])))
    )


def _general(invocation: Invocation, path: Path) -> Invocation:
    """Return the invocation that prepares the general text with the checkpoint's tokenizer.

    It takes over how the own text is read and held out (data.validation_fraction and others), so that the same
    documents are held out here and in the mix.
    """
    start = [word for word in invocation.overrides if name_of(word) == "start.path"]
    require(path.is_file(), f"--general-text={path}: no such file. Check the path.")
    paths = f"data.paths={in_words([str(path.absolute())])}"
    shared = {f"data.{name}" for name in _shared_settings() - NOT_TAKEN_OVER}
    common = []
    for word in invocation.overrides:
        setting_name = ".".join(name_of(word).split(".")[:2])  # data.filters of data.filters.gopher
        if setting_name in shared:
            common.append(word)
    words = ("experiment=adapt", *start, *common, "data.name=general", paths)
    return replace(invocation, overrides=words)


def _shared_settings() -> set[str]:
    """Return the settings of section `data` that every source has."""
    return compose(["data=mix"])["data"].keys() - {"source", "parts"}


def mixed(
    recipe: Mapping[str, Any], invocation: Invocation, general_text: Path, keep: float
) -> Invocation:
    """Return the invocation that trains on both texts and is validated on the own text.

    A document is held out by its content (docs/reference/corpus.md), so the mix holds out the same documents as the
    corpora of the single texts, and trains on none of them.
    """
    data = recipe["data"]
    shared = _shared_settings()
    text_settings = {key: value for key, value in data.items() if key not in shared}
    parts = [
        {"weight": 1 - keep, "name": "own", **text_settings},
        {
            "weight": keep,
            "name": "general",
            "source": "text",
            "paths": [str(general_text.absolute())],
        },
    ]
    dropped = {"data", *(f"data.{key}" for key in text_settings)}
    words = [word for word in invocation.overrides if name_of(word) not in dropped]
    held_out = str(corpus_folder(recipe, invocation.corpora).absolute())
    words += [
        "data=mix",
        f"data.parts={in_words(parts)}",
        setting("train.validation_corpus", held_out),
    ]
    return replace(invocation, overrides=tuple(words))


def _require_enough(
    recipe: Mapping[str, Any], invocation: Invocation, general: Invocation, keep: float
) -> None:
    """Raise UserError if the general text is too short for its share, or if a corpus holds out a single document.

    A corpus always holds out one document, even if none is chosen by its content. The mix would train on that one.
    """
    folders = (
        corpus_folder(recipe, invocation.corpora),
        corpus_folder(compose(general.overrides), general.corpora),
    )
    corpora = [Corpus.open(folder, verify=False) for folder in folders]
    for corpus in corpora:
        require(
            corpus.stream("validation").num_documents > 1,
            f"--keep={keep:g}: only one document of {corpus.folder} is held out."
            " Give more text, or raise data.validation_fraction.",
        )
    own_tokens, general_tokens = (corpus.stream("train").num_tokens for corpus in corpora)
    needed = own_tokens * keep / (1 - keep)
    require(
        general_tokens >= needed,
        f"--keep={keep:g}: needs {format_count(needed, 'tokens')} of general text, there are"
        f" {format_count(general_tokens, '')}. Give more general text, or a smaller --keep.",
    )


def _has_corpus(recipe: Mapping[str, Any], invocation: Invocation) -> bool:
    """Return whether the recipe names a corpus (data.corpus) that is finished."""
    is_finished = (corpus_folder(recipe, invocation.corpora) / MANIFEST).is_file()
    return bool(recipe["data"]["corpus"]) and is_finished


def _is_finished(invocation: Invocation) -> bool:
    folder = invocation.run_folder
    return is_run(folder) and load_record(folder).get("pretrain", {}).get("status") == "finished"
