"""`cramming adapt`: prepare the text, train the checkpoint further on it, and say what that brought.

The recipe is conf/experiment/adapt.yaml, and its verbs run in processes of their own, as those of `cramming run` do.
What is new here is the comparison at the end. A run that is finished is only measured again, with `--resume`.
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
from eval.adapt.add_words import extended_checkpoint
from eval.adapt.measure import Comparison, compare, held_out_windows
from eval.adapt.page import LOSS_COLUMNS, Result, loss_rows, verdict, write_page
from eval.adapt.words import examples
from eval.own_tasks.page import Result as Scores
from eval.own_tasks.page import read
from eval.rules.load import load_run

# Settings that every source has and that say nothing about how a text is read and held out.
OF_OWN_TEXT = {"name", "corpus", "license", "max_documents"}

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
    """Adapt a checkpoint; `general_text`: a file whose held-out part shows what was forgotten.

    `keep`: share of the training text that is taken from it. `add_words`: number of the text's words that get an
    entry of their own. `tasks`: file of own tasks, on which the model is scored before and after.
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
    invocation, source = _pinned(recipe, invocation), recipe["start"]["path"]
    if add_words is not None:
        recipe, invocation = _with_words(recipe, invocation, add_words)
    training, general = invocation, None
    if not _has_corpus(recipe, invocation):
        _prepare(invocation)
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
    result = replace(
        measure(recipe, invocation, general), source=source, added_words=add_words or 0
    )
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
    """Return lines about what would be done; UserError for what can be known to be wrong. Nothing is written."""
    objective = recipe["objective"]["name"]
    require(
        objective == "mlm",
        f"objective={objective}: adapt compares masked language models. Leave it out.",
    )
    require(
        keep is None or general_text is not None,
        f"--keep={keep}: of which text? Give --general-text.",
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
    lines = iter([f"checkpoint: {source}"])
    if tasks is not None:
        scoring = compose(_score_words(invocation))
        checked = verbs.check("score", scoring, invocation, tasks_file=tasks, model=[source])
        lines = chain(lines, checked)
    pinned = _pinned(recipe, invocation)
    others = list[Invocation]()
    if general_text is not None:
        others.append(_general(pinned, general_text))
        if keep is not None:
            others.append(mixed(recipe, pinned, general_text, keep))
    for other in others:
        lines = chain(lines, verbs.check("prepare", compose(other.overrides), other))
    names = ["pretrain"] if _has_corpus(recipe, invocation) else ["prepare", "pretrain"]
    for name in names:
        lines = chain(lines, verbs.check(name, recipe, invocation))
    return lines


def _scores(invocation: Invocation, tasks: Path, source: str) -> tuple[Scores, ...]:
    """Return the results of `cramming score` for the checkpoint and the run, kept in the run's folder."""
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
) -> tuple[dict[str, Any], Invocation]:
    """Return recipe and invocation with a checkpoint of a longer vocabulary, made from the text and the one given."""
    _prepare(invocation)
    corpus = Corpus.open(corpus_folder(recipe, invocation.corpora))
    source = Path(recipe["start"]["path"])
    longer = extended_checkpoint(source, corpus, count, invocation.corpora)
    words = [word for word in invocation.overrides if name_of(word) != "start.path"]
    words.append(setting("start.path", str(longer)))
    return compose(words), replace(invocation, overrides=tuple(words))


def _prepare(invocation: Invocation) -> None:
    run_or_exit(["prepare", *invocation.arguments(*verbs.OPTIONS["prepare"])])


def measure(
    recipe: Mapping[str, Any], invocation: Invocation, general: Invocation | None
) -> Result:
    """Compare the checkpoint and the run's final model on the held-out texts."""
    folder, source = invocation.run_folder, Path(recipe["start"]["path"])
    device = select(invocation.device)
    own_corpus = Corpus.open(corpus_folder(recipe, invocation.corpora), verify=False)
    before, has_head = _checkpoint(source, own_corpus, int(recipe["seed"]))
    before = before.to(device).eval()
    after = load_masked_lm(folder / "final", dropout=0.0, attention_dropout=0.0).to(device).eval()
    length, max_tokens = recipe["train"]["sequence_length"], recipe["train"]["validation_tokens"]

    def compared(corpus: Corpus, text: str) -> Comparison:
        return compare(before, after, corpus, text, length, max_tokens)

    comparisons = [compared(own_corpus, OWN_TEXT)]
    if general is not None:
        place = corpus_folder(compose(general.overrides), general.corpora)
        comparisons.append(compared(Corpus.open(place, verify=False), GENERAL_TEXT))
    return Result(
        name=invocation.name,
        source=str(source),
        has_head=has_head,
        comparisons=tuple(comparisons),
        examples=tuple(
            examples(before, after, own_corpus, held_out_windows(own_corpus, length, max_tokens)),
        ),
        record=load_run(folder).record,
    )


def _checkpoint(folder: Path, corpus: Corpus, seed: int) -> tuple[MaskedLM, bool]:
    """Return the checkpoint as training begins with it, and whether its masked-LM head is its own."""
    config = load_encoder_config(folder, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(seed)
    model = MaskedLM(config)
    return model, load_checkpoint(model, folder, corpus)


def _pinned(recipe: Mapping[str, Any], invocation: Invocation) -> Invocation:
    """Return the invocation with the checkpoint's folder: a name on the hub may get other files meanwhile."""
    words = [word for word in invocation.overrides if name_of(word) != "start.path"]
    return replace(
        invocation, overrides=(*words, setting("start.path", str(recipe["start"]["path"])))
    )


def _general(invocation: Invocation, path: Path) -> Invocation:
    """Return the invocation that prepares the general text with the checkpoint's tokenizer.

    Settings that both texts share are the own text's, so that the mix holds the same documents out.
    """
    start = [word for word in invocation.overrides if name_of(word) == "start.path"]
    require(path.is_file(), f"--general-text={path}: no such file. Check the path.")
    paths = f"data.paths={in_words([str(path.absolute())])}"
    shared = {f"data.{name}" for name in _shared_settings() - OF_OWN_TEXT}
    common = [
        word for word in invocation.overrides if ".".join(name_of(word).split(".")[:2]) in shared
    ]
    words = ("experiment=adapt", *start, *common, "data.name=general", paths)
    return replace(invocation, overrides=words)


def _shared_settings() -> set[str]:
    """Return the settings of data that every source has."""
    return compose(["data=mix"])["data"].keys() - {"source", "parts"}


def mixed(
    recipe: Mapping[str, Any], invocation: Invocation, general_text: Path, keep: float
) -> Invocation:
    """Return the invocation that trains on both texts and is validated on the own one.

    Documents are held out by their content (docs/reference/corpus.md), so those of each text alone are held out here.
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
    """Raise UserError where the general text would end before the own text does, or one document is held out.

    A single document may be held out for want of others, and the mix would train on it.
    """
    places = (
        corpus_folder(recipe, invocation.corpora),
        corpus_folder(compose(general.overrides), general.corpora),
    )
    corpora = [Corpus.open(place, verify=False) for place in places]
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
        f" {format_count(general_tokens, '')}. Give more of it, or keep less.",
    )


def _has_corpus(recipe: Mapping[str, Any], invocation: Invocation) -> bool:
    """Return whether the corpus is the user's own and finished."""
    is_finished = (corpus_folder(recipe, invocation.corpora) / MANIFEST).is_file()
    return bool(recipe["data"]["corpus"]) and is_finished


def _is_finished(invocation: Invocation) -> bool:
    folder = invocation.run_folder
    return is_run(folder) and load_record(folder).get("pretrain", {}).get("status") == "finished"
