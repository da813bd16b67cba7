"""The verbs: where each lives, and how a call of one is composed, checked, swept and run.

A verb's module is imported only when it runs. `run` and `--sweep` start processes of their own, as the budget clock
counts from the start of a process.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml

from cramming.children import run_or_exit, run_process
from cramming.config import RootConfig, UserError, build, require
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.invocation import Call, Invocation
from cramming.overrides import compose, name_of, points_of, resumed
from cramming.progress import say, show_table
from cramming.record import WITHOUT_MODEL, is_run, load_record, refuse_finished_run

MODULES = {
    "prepare": "data_prep.prepare",
    "pretrain": "cramming.launch",
    "glue": "eval.glue",
    "report": "eval.report.main",
    "verify": "eval.verify",
    "adapt": "eval.adapt.main",
    "settings": "cramming.settings_reference",
    "inspect": "cramming.data.inspect",
    "diagnose": "eval.diagnose.main",
    "measure": "eval.measure",
    "plan": "cramming.plan.main",
    "bench": "cramming.bench.main",
    "study": "eval.extras.study",
    "duel": "eval.duel.main",
    "ladder": "eval.duel.ladder",
    "project": "eval.extras.project",
    "replay": "cramming.replay",
    "submit": "eval.submit",
    "export": "eval.export",
    "score": "eval.own_tasks.main",
}
# Functions that a verb's `main` gets, of packages that its own may not import.
DEPENDENCIES = {
    "pretrain": {"broken_rules": "eval.rules.table:foreseen"},
    "verify": {
        "make_tasks": "data_prep.verify_corpus:embedded_tasks",
        "search": "data_prep.verify_corpus:overlap",
    },
}
PIPELINE = ("prepare", "pretrain", "glue", "report")
TRAINING_VERBS = ("run", "pretrain")
# Options of the invocation that the verbs started as processes take.
_ON_A_RUN = ("name", "runs", "corpora", "device")
OPTIONS = {
    "run": (*_ON_A_RUN, "resume", "trackers", "nonce"),
    "prepare": ("corpora",),
    "pretrain": (*_ON_A_RUN, "resume", "trackers", "nonce"),
    "glue": _ON_A_RUN,
}


def run(call: Call) -> None:
    """Do what was asked for; UserError for mistakes."""
    if not call.has_recipe:
        main_of(call.verb)(**call.options)
    elif call.sweep:
        sweep(call)
    elif call.show_config:
        print(yaml.safe_dump(recipe_of(call), sort_keys=False, allow_unicode=True), end="")
    elif call.check:
        lines = check(call.verb, recipe_of(call), call.invocation, **call.options)
        for line in [*lines, "all in order, nothing was written"]:
            say(line)
    elif call.verb == "run":
        run_all(recipe_of(call), call.invocation)
    else:
        main_of(call.verb)(recipe_of(call), call.invocation, **call.options)


def recipe_of(call: Call) -> dict[str, Any]:
    """Return the composed recipe: of a run that is resumed or scored, its own with what was typed."""
    invocation = call.invocation
    recipe = compose(invocation.overrides)
    check_root(recipe)
    continues_run = invocation.resume or (call.verb == "glue" and not call.options.get("model"))
    logged = logged_recipe(invocation.run_folder) if continues_run else None
    if logged is not None:
        recipe = resumed(logged, invocation.overrides, recipe)
    if invocation.nonce is not None:
        recipe["nonce"] = invocation.nonce
    return recipe


def main_of(verb: str) -> Callable[..., Any]:
    """Return a verb's `main`, with the dependencies that it gets."""
    main = importlib.import_module(MODULES[verb]).main
    dependencies = {keyword: _load(name) for keyword, name in DEPENDENCIES.get(verb, {}).items()}
    return lambda *arguments, **options: main(*arguments, **dependencies, **options)


def _load(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))


def logged_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the recipe of the run in a folder, None where no run was trained there."""
    if not is_run(folder):
        return None
    record = load_record(folder)
    return record["config"] if "pretrain" in record else None


def check_root(recipe: Mapping[str, Any]) -> None:
    """Raise UserError for a root setting that is none, or has a wrong value."""
    plain = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    for key in plain.keys() - RootConfig.model_fields.keys():
        raise UserError(
            f"{key}={plain[key]}: no setting. Those of a section are typed as {key}.<name>=..."
        )
    build(RootConfig, plain, "")


def check(
    verb: str, recipe: Mapping[str, Any], invocation: Invocation, **options: Any
) -> Iterator[str]:
    """Return lines about what a verb, or each verb of `run`, would do; UserError for what it would refuse.

    Nothing is written.
    """
    lines: Iterator[str] = iter(())
    for name in _pipeline(recipe, invocation) if verb == "run" else [verb]:
        if name == "report":
            continue
        module = importlib.import_module(MODULES[name])
        lines = chain(lines, module.check(recipe, invocation, **options))
        _require_writable(name, recipe, invocation)
    return lines


def _require_writable(verb: str, recipe: Mapping[str, Any], invocation: Invocation) -> None:
    """Raise UserError where the verb's folder cannot be made, or nothing in it."""
    folder = invocation.run_folder.absolute()
    if verb == "prepare":
        folder = corpus_folder(recipe, invocation.corpora).absolute()
        if (folder / MANIFEST).is_file():  # it may lie where nothing can be written
            return
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(
            f"{folder}: nothing can be made in {nearest}. Get the right to, or give another folder."
        )


def _pipeline(recipe: Mapping[str, Any], invocation: Invocation) -> list[str]:
    """Return the verbs of `run`: without `prepare` where the corpus is given, or of a run that is resumed."""
    verbs = list(PIPELINE)
    has_corpus = (corpus_folder(recipe, invocation.corpora) / MANIFEST).exists()
    is_given = recipe["data"]["corpus"] or (invocation.resume and is_run(invocation.run_folder))
    if has_corpus and is_given:
        verbs.remove("prepare")
    return verbs


def run_all(recipe: Mapping[str, Any], invocation: Invocation) -> None:
    """Run the verbs of the pipeline, each in a process of its own.

    First a process checks them all: a mistake in what `glue` reads must not show after a day of training.
    """
    refuse_finished_run(invocation)
    run_or_exit(["run", "--check", *invocation.arguments(*OPTIONS["run"])])
    for verb in _pipeline(recipe, invocation):
        if verb == "report":
            run_or_exit(["report", f"--runs={invocation.runs}"])
        else:
            run_or_exit([verb, *invocation.arguments(*OPTIONS[verb])])


def sweep(call: Call) -> None:
    """Run each point in a process of its own, once all of them are checked, and print a table of the results.

    A point whose run ends without a model, such as a learning rate that diverged, does not hold up the others.
    """
    require(not call.show_config, "--show-config: prints one recipe. Leave --sweep out.")
    points = sweep_points(call)
    check_points(points)
    if call.check:
        say(f"{len(points)} points, all in order, nothing was written")
        return
    extra = [f"--{name}={value}" for name, value in call.options.items() if value is not None]
    for point in points:
        ended = ended_without_model(point)
        if ended:
            say(f"{point.invocation.name}: its run {ended} without a model, left out")
            continue
        words = [*extra, *point.invocation.arguments(*OPTIONS[call.verb])]
        code = run_process([sys.executable, "-m", "cramming", call.verb, *words])
        if code and not ended_without_model(replace(point, verb="glue")):
            sys.exit(code if code > 0 else 128 - code)
    if call.verb != "prepare":
        rows = [_result(point.invocation) for point in points]
        show_table("sweep", ["run", "status", "steps", "tokens", "validation loss", "score"], rows)


def sweep_points(call: Call) -> list[Call]:
    """Return the calls of a sweep. Runs are named by what varies in their training: `<name>-0.001-muon`."""
    points = points_of(call.invocation.overrides)
    calls = []
    for words in points:
        name = call.invocation.name
        for word in _varied(words, points):
            if not name_of(word).startswith("eval"):
                value = word.partition("=")[2]
                name += "-" + re.sub(r"[^\w.+,@-]+", "_", value).strip("_")
        invocation = replace(call.invocation, name=name, overrides=tuple(words))
        calls.append(replace(call, invocation=invocation, sweep=False))
    return calls


def _varied(words: Sequence[str], points: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that not all points have."""
    shared = set(words).intersection(*points)
    return [word for word in words if word not in shared]


def check_points(points: Sequence[Call]) -> None:
    """Raise UserError for a mistake in any point, before a day goes into those that come before it."""
    every = [point.invocation.overrides for point in points]
    folders: set[Path] = set()
    for point in points:
        invocation = point.invocation
        ended = ended_without_model(point)
        try:
            if point.verb in TRAINING_VERBS or not ended:
                check(point.verb, recipe_of(point), invocation, **point.options)
            if point.verb in TRAINING_VERBS and not ended:
                refuse_finished_run(invocation)
        except UserError as error:
            varied = " ".join(_varied(invocation.overrides, every))
            raise UserError(f"{varied or 'every point'}: {error}") from None
        if point.verb in TRAINING_VERBS and invocation.run_folder in folders:
            raise UserError(
                f"--name={invocation.name}: several points of the sweep have this name."
                " Vary something that the training reads."
            )
        folders.add(invocation.run_folder)


def ended_without_model(call: Call) -> str:
    """Return how the run of a point ended that left no model, where the sweep goes on without it; else "".

    A run of other settings is another one.
    """
    folder = call.invocation.run_folder
    scores_run = call.verb == "glue" and not call.options.get("model")
    resumes_run = call.verb in TRAINING_VERBS and call.invocation.resume
    if not (scores_run or resumes_run) or not is_run(folder):
        return ""
    record = load_record(folder)
    status = record.get("pretrain", {}).get("status")
    if status not in WITHOUT_MODEL:
        return ""
    changed_settings = _load("cramming.resume:changed_settings")
    is_another = resumes_run and any(changed_settings(record["config"], recipe_of(call)))
    return "" if is_another else str(status)


def _result(invocation: Invocation) -> list[str]:
    """Return the row of a run in the table of a sweep."""
    folder = invocation.run_folder
    record = load_record(folder) if is_run(folder) else {}
    training = record.get("pretrain", {})
    loss = (training.get("validation") or {}).get("loss")
    averages = record.get("glue", {}).get("pretrained", {}).get("averages", {})
    score = next((average["value"] for average in averages.values()), None)
    numbers = [training.get("steps"), training.get("tokens")]
    cells = []
    for number in numbers:
        cells.append("–" if number is None else f"{number:,}")
    cells.append("–" if loss is None else f"{loss:.3f}")
    cells.append("–" if score is None else f"{score:.1f}")
    return [invocation.name, training.get("status", "–"), *cells]
