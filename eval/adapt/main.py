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
from cramming.model.export import load_encoder_config, load_masked_lm
from cramming.model.heads import MaskedLM
from cramming.overrides import compose, name_of, setting
from cramming.progress import say, show_table
from cramming.record import is_run, load_record, refuse_finished_run
from cramming.start_checkpoint import load_checkpoint
from eval.adapt.measure import Comparison, compare, held_out_windows
from eval.adapt.page import LOSS_COLUMNS, Result, loss_rows, verdict, write_page
from eval.adapt.words import examples
from eval.rules.load import load_run

OWN, GENERAL = "own text", "general text"


def main(recipe: dict[str, Any], invocation: Invocation, *, general_text: Path | None) -> None:
    """Adapt a checkpoint; `general_text`: a file whose held-out part shows what was forgotten."""
    for line in check(recipe, invocation, general_text=general_text):
        say(line)
    invocation = _pinned(recipe, invocation)
    general = None
    if general_text is not None:
        general = _general(invocation, general_text)
        run_or_exit(["prepare", *general.arguments(*verbs.OPTIONS["prepare"])])
    if not _has_corpus(recipe, invocation):
        run_or_exit(["prepare", *invocation.arguments(*verbs.OPTIONS["prepare"])])
    if not _is_finished(invocation):
        run_or_exit(["pretrain", *invocation.arguments(*verbs.OPTIONS["pretrain"])])
    result = measure(recipe, invocation, general)
    show_table("before and after", LOSS_COLUMNS, loss_rows(result.comparisons))
    say(verdict(result))
    pages = write_page(result, invocation.run_folder)
    say(f"adapt: {', '.join(map(str, pages))}; `cramming export` writes the model")


def check(
    recipe: Mapping[str, Any], invocation: Invocation, *, general_text: Path | None
) -> Iterator[str]:
    """Return lines about what would be done; UserError for what can be known to be wrong. Nothing is written."""
    require(
        recipe["objective"]["name"] == "mlm",
        f"objective={recipe['objective']['name']}: adapt compares masked language models. Leave it out.",
    )
    refuse_finished_run(invocation)
    lines = iter([f"checkpoint: {recipe['start']['path']}"])
    if general_text is not None:
        general = _general(_pinned(recipe, invocation), general_text)
        lines = chain(lines, verbs.check("prepare", compose(general.overrides), general))
    names = ["pretrain"] if _has_corpus(recipe, invocation) else ["prepare", "pretrain"]
    for name in names:
        lines = chain(lines, verbs.check(name, recipe, invocation))
    return lines


def measure(
    recipe: Mapping[str, Any], invocation: Invocation, general: Invocation | None
) -> Result:
    """Compare the checkpoint and the run's final model on the held-out texts."""
    folder, source = invocation.run_folder, Path(recipe["start"]["path"])
    device = select(invocation.device)
    own = Corpus.open(corpus_folder(recipe, invocation.corpora), verify=False)
    before, has_head = _checkpoint(source, own, int(recipe["seed"]))
    before = before.to(device).eval()
    after = load_masked_lm(folder / "final", dropout=0.0, attention_dropout=0.0).to(device).eval()
    length, max_tokens = recipe["train"]["sequence_length"], recipe["train"]["validation_tokens"]

    def compared(corpus: Corpus, text: str) -> Comparison:
        return compare(before, after, corpus, text, length, max_tokens)

    comparisons = [compared(own, OWN)]
    if general is not None:
        place = corpus_folder(compose(general.overrides), general.corpora)
        comparisons.append(compared(Corpus.open(place, verify=False), GENERAL))
    return Result(
        name=invocation.name,
        source=str(source),
        has_head=has_head,
        comparisons=tuple(comparisons),
        examples=tuple(
            examples(before, after, own, held_out_windows(own, length, max_tokens)),
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
    """Return the invocation that prepares the general text with the checkpoint's tokenizer."""
    start = [word for word in invocation.overrides if name_of(word) == "start.path"]
    require(path.is_file(), f"--general-text={path}: no such file. Check the path.")
    paths = f"data.paths=[{setting('', str(path.absolute())).lstrip('=')}]"
    words = ("experiment=adapt", *start, "data.name=general", paths)
    return replace(invocation, overrides=words)


def _has_corpus(recipe: Mapping[str, Any], invocation: Invocation) -> bool:
    """Return whether the corpus is the user's own and finished."""
    is_finished = (corpus_folder(recipe, invocation.corpora) / MANIFEST).is_file()
    return bool(recipe["data"]["corpus"]) and is_finished


def _is_finished(invocation: Invocation) -> bool:
    folder = invocation.run_folder
    return is_run(folder) and load_record(folder).get("pretrain", {}).get("status") == "finished"
