"""`cramming glue`: fine-tune a model on every task and seed, and put the scores into the run's record.

The model is `runs/<name>/final`, or any Hugging Face encoder by `model_path=<folder or hub name>`. The tasks are
GLUE's, from local official files (`eval.data_dir`) or the hub (`eval=hub`), or those of the embedded corpus
(`eval=embedded`). A run that was interrupted goes on at the first (task, seed) that was not finished.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cramming.config import UserError, build, expand_home, require
from cramming.device import describe, select
from cramming.environment import environment
from cramming.model.config import ModelConfig
from cramming.progress import Progress, say
from cramming.record import (
    WITHOUT_MODEL,
    create_run_folder,
    is_run,
    load_record,
    run_folder,
    run_lock,
    write_record,
    write_record_section,
)
from cramming.record_schema import WITHOUT_ENCODER, read_record
from eval.extras import sweep
from eval.extras.minimal_pairs import open_masked_lm, read_pairs, score_pairs
from eval.finetune import history
from eval.finetune.baselines import score_baseline
from eval.finetune.config import EvalConfig
from eval.finetune.encode import EncodedTask
from eval.finetune.models import ModelSource, altered, open_model, position_limit
from eval.finetune.scoring import score_model
from eval.finetune.store import RunStore, show_averages, write_json
from eval.tasks.datasets import in_one_order
from eval.tasks.locate import FoundSuite, find_suite, find_tasks


def main(config: dict[str, Any]) -> None:
    """Score the run `name` (or `model_path`) as section `eval` says; UserError for whatever is missing or wrong."""
    settings = build(EvalConfig, config["eval"], "eval")
    device = select(config["device"])
    folder = run_folder(config)
    source = find_model(config, folder)
    refuse_length(settings, source.label, source.max_length)
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    data = []
    with Progress(
        "read", total=len(suite.tasks), unit="tasks"
    ) as bar:  # the largest take some seconds each
        for task in suite.tasks:
            bar.note(task.title)
            found = in_one_order(suite.read(task))
            data.append(
                found if settings.predict_test else replace(found, blind=(), unasked=found.blind)
            )
            bar.advance()
    pairs = read_pairs(settings.minimal_pairs) if settings.minimal_pairs else []
    with run_lock(folder):
        if config["model_path"]:
            start_record(folder, config, device)
        if is_run(folder):
            history.refuse_altered(folder)
            warn_of_other_corpus(folder, suite)
        if pairs:  # first, as not every model has a head for them
            known, length = (
                stored_record(folder).get("minimal_pairs") or {},
                settings.hyperparameters.max_length,
            )
            accuracies = score_pairs(source, pairs, device, length, known)
            write_record_section(folder, minimal_pairs=accuracies)
            say(f"minimal pairs: {accuracies['accuracy']:.1f} over {len(pairs)} paradigms")
        encoded: dict[str, EncodedTask] = {}  # tokenized once for all initialisations
        for init in settings.init:
            place = folder / suite.section / init
            point = sweep.point_folder(place, settings.hyperparameters) if settings.sweep else place
            section = score_model(
                point, folder, source, init, suite, data, settings, device, encoded
            )
            show_averages(section)
            if settings.sweep:
                write_json(point / "section.json", section)
            else:
                write_scores(folder, suite, {init: section})
        if settings.sweep:
            write_scores(folder, suite, sweep.choose(folder / suite.section, settings.init))
        # Last: until a model's scores are there, the record and the files keep the baselines of another suite.
        for name in WITHOUT_ENCODER if settings.baselines else ():
            store = RunStore(folder / suite.section / name)
            section = score_baseline(name, store, suite.name, data, suite.absent)
            show_averages(section)
            write_scores(folder, suite, {name: section})


def warn_of_other_corpus(folder: Path, suite: FoundSuite) -> None:
    """Say where the embedded tasks are not those of the corpus that the run was trained on."""
    trained_on = read_record(load_record(folder)).corpus.manifest_sha256
    if suite.corpus_sha256 and trained_on not in (None, suite.corpus_sha256):
        say(
            "warning: these tasks are of another corpus than the run was trained on: the open division (R22)"
        )


def write_scores(folder: Path, suite: FoundSuite, scores: dict[str, Any]) -> None:
    """Put scores, by initialisation or baseline, into the record. It holds GLUE or the embedded tasks: what it has of
    the other goes. Suites that no rule judges have all their scores in one section."""
    if suite.section != "glue":
        write_record_section(folder, **{suite.section: scores})
        return
    raw = stored_record(folder)
    record = read_record(raw)
    known = {f"glue.{init}": section for init, section in record.glue.items()} | record.baselines
    stale = [name for name, section in known.items() if section.suite not in (None, suite.name)]
    if stale:
        say(
            f"the record holds one suite, now {suite.name}: dropped from it {', '.join(stale)} of another"
        )
        for name in stale:
            section, _, part = name.rpartition(".")
            del (raw[section] if section else raw)[part]
        write_record(folder, raw)
    models = {init: section for init, section in scores.items() if init not in WITHOUT_ENCODER}
    baselines = {name: section for name, section in scores.items() if name not in models}
    write_record_section(folder, **baselines, glue=models)


def stored_record(folder: Path) -> dict[str, Any]:
    """The record that is there by now, if there is one."""
    return load_record(folder) if is_run(folder) else {}


def check(config: dict[str, Any]) -> None:
    """UserError for what can be known to be wrong beforehand, of the model that is there, else of the one that will be;
    real tasks are read, to the last line."""
    settings = build(EvalConfig, config["eval"], "eval")
    select(config["device"])
    if config["model_path"] or (run_folder(config) / "final").is_dir():
        source = find_model(config, run_folder(config))
        refuse_length(settings, source.label, source.max_length)
        if settings.minimal_pairs:
            open_masked_lm(source, torch.device("cpu"))
    else:
        limit = position_limit(build(ModelConfig, config["model"], "model"))
        refuse_length(settings, f"{config['name']}'s model", limit)
        says = f"{settings.minimal_pairs}: needs a masked language model, which objective=rtd does not leave"
        has_head = config["objective"]["name"] != "rtd"
        require(
            has_head or not settings.minimal_pairs, f"eval.minimal_pairs={says}; set it to null"
        )
    if settings.minimal_pairs:
        read_pairs(settings.minimal_pairs)
    if settings.source == "embedded":  # they come with the corpus
        find_tasks(settings.tasks or ())
        return
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    for task in suite.tasks:
        suite.read(task)


def find_model(config: dict[str, Any], folder: Path) -> ModelSource:
    """The model to score."""
    if config["model_path"]:
        return open_model(config["model_path"])
    final, name = folder / "final", config["name"]
    hint = f"run `cramming pretrain name={name}` or give model_path=<folder>"
    if (
        is_run(folder)
        and (status := read_record(load_record(folder)).training.status) in WITHOUT_MODEL
    ):
        hint = f"the run is {status}; train under another name, or give model_path=<folder>"
    require(final.is_dir(), f"{final}: no trained model; {hint}")
    source = open_model(final)
    if is_run(folder) and (wrong := altered(read_record(load_record(folder)), source.files)):
        raise UserError(
            f"{final}/{wrong}; restore it, or score the folder under another name with model_path={final}"
        )
    return source


def refuse_length(settings: EvalConfig, label: str, limit: int | None) -> None:
    """UserError where sequences would be longer than the model has positions for."""
    length = settings.hyperparameters.max_length
    require(
        limit is None or length <= limit,
        f"eval.hyperparameters.max_length={length}: {label} has {limit} positions; set it to {limit} or less",
    )


def start_record(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """A record for a model that this suite did not pretrain; UserError where the name belongs to another model."""
    if not is_run(folder):
        create_run_folder(folder, config, environment(asdict(describe(device))), resume=False)
        return
    record, name, now = load_record(folder), config["name"], config["model_path"]
    require(
        "pretrain" not in record,
        f"name={name}: {folder} is a pretraining run; give another name for model_path",
    )
    before = record.get("config", {}).get("model_path")
    require(
        not before
        or Path(before).expanduser().resolve() == expand_home(now, "model_path").resolve(),
        f"model_path={now}: name={name} has the scores of model_path={before}; give another name",
    )
