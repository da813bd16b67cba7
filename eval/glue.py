"""`cramming glue`: fine-tune a model on every task and seed, and put the scores into the run's record.

The model is `runs/<name>/final`, or any Hugging Face encoder by `model_path=<folder or hub name>`. The tasks are
GLUE's, from local official files (`eval.data_dir`) or the hub (`eval=hub`), or those of the embedded corpus
(`eval=embedded`). A run that was interrupted goes on at the first (task, seed) that was not finished.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cramming.config import UserError, build, expand_home
from cramming.device import describe, select
from cramming.environment import environment
from cramming.model.config import ModelConfig
from cramming.progress import Progress, say
from cramming.record import (
    create_run_folder,
    drop_record_sections,
    load_record,
    run_folder,
    run_lock,
    write_record_section,
)
from eval.extras import sweep
from eval.extras.minimal_pairs import read_pairs, score_pairs
from eval.finetune import history
from eval.finetune.encode import EncodedTask
from eval.finetune.floor import score_floor
from eval.finetune.models import Init, ModelSource, altered, open_model, position_limit
from eval.finetune.results import Pieces, write_json
from eval.finetune.scoring import EvalConfig, score_model, show_averages, with_seconds
from eval.rules.record import WITHOUT_ENCODER, read_record
from eval.tasks.datasets import TaskData, in_one_order
from eval.tasks.locate import FoundSuite, find_suite, find_tasks


def main(config: dict[str, Any]) -> None:
    """Score the run `name` (or `model_path`) as section `eval` says; UserError for whatever is missing or wrong."""
    settings = build(EvalConfig, config["eval"], "eval")
    device = select(config["device"])
    folder = run_folder(config)
    source = find_model(config, folder)
    refuse_length(settings.hyperparameters.max_length, source.label, source.max_length)
    refuse_design(settings.init, source.label, source.designed)
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    data = read_tasks(suite)
    if not settings.predict_test:
        data = [replace(task_data, blind=()) for task_data in data]
    if settings.minimal_pairs:
        read_pairs(settings.minimal_pairs)  # what is wrong with them is known before anything is written
    with run_lock(folder):
        if config["model_path"]:
            start_record(folder, config, device)
        kind = suite.section
        if (folder / "record.json").exists():
            history.refuse_altered(folder)
            trained_on = read_record(load_record(folder)).corpus.manifest_sha256
            if suite.corpus_sha256 and trained_on not in (None, suite.corpus_sha256):
                say("warning: these tasks are of another corpus than the run was trained on: the open division (R22)")
        # Written with the first model's scores: until then those of another suite stay in the record.
        beside = score_without_encoder(folder / kind, suite, data) if settings.floor else {}
        if settings.minimal_pairs:
            length = settings.hyperparameters.max_length
            pairs = score_pairs(source, settings.minimal_pairs, device, length)
            write_record_section(folder, minimal_pairs=pairs)
            say(f"minimal pairs: {pairs['accuracy']:.1f} over {len(pairs['paradigms'])} paradigms")
        encoded: dict[str, EncodedTask] = {}  # tokenized once for all initialisations
        for init in settings.init:
            place = folder / kind / init
            point = sweep.point_folder(place, settings.hyperparameters) if settings.sweep else place
            section = score_model(point, folder, source, init, suite, data, settings, device, encoded)
            show_averages(section)
            if settings.sweep:
                write_json(point / "section.json", section)
            else:
                write_scores(folder, suite, beside | {kind: beside.get(kind, {}) | {init: section}})
        if settings.sweep:
            chosen = sweep.choose(folder / kind, settings.init)
            write_scores(folder, suite, beside | {kind: beside.get(kind, {}) | chosen})


def read_tasks(suite: FoundSuite) -> list[TaskData]:
    """All tasks; the largest take some seconds each."""
    data = []
    with Progress("read", total=len(suite.tasks), unit="tasks") as bar:
        for task in suite.tasks:
            bar.note(task.title)
            data.append(in_one_order(suite.read(task)))
            bar.advance()
    return data


def write_scores(folder: Path, suite: FoundSuite, scores: dict[str, Any]) -> None:
    """Put `scores` into the record. A record holds GLUE or the embedded tasks: what it has of the other goes."""
    record = read_record(load_record(folder) if (folder / "record.json").exists() else {})
    known = {f"glue.{init}": section for init, section in record.glue.items()}
    known |= {name: section for name in WITHOUT_ENCODER if (section := getattr(record, name))}
    stale = [name for name, section in known.items() if section.suite not in (None, suite.name)]
    if suite.section == "glue" and stale:
        say(f"the record holds one suite, now {suite.name}: dropped from it {', '.join(stale)} of another")
        drop_record_sections(folder, stale)
    write_record_section(folder, **scores)


def score_without_encoder(place: Path, suite: FoundSuite, data: Sequence[TaskData]) -> dict[str, Any]:
    """The part of the record that is the bag of words and the constant class."""
    found = {}
    for name in WITHOUT_ENCODER:
        scored, seconds = score_floor(name, Pieces(place / name), suite.name, data, suite.absent)
        show_averages(scored)
        found[name] = with_seconds(scored, {f"{task}-seed0": spent for task, spent in seconds.items()})
    return found if suite.section == "glue" else {suite.section: found}


def check(config: dict[str, Any]) -> None:
    """UserError for what can be known to be wrong beforehand, of the model that is there, else of the one that will be;
    real tasks are read, to the last line."""
    settings = build(EvalConfig, config["eval"], "eval")
    select(config["device"])
    if config["model_path"] or (run_folder(config) / "final").is_dir():
        source = find_model(config, run_folder(config))
        label, limit, designed = source.label, source.max_length, source.designed
    else:
        model, label = build(ModelConfig, config["model"], "model"), f"{config['name']}'s model"
        limit, designed = position_limit(model), model.attention_init != "random"
    refuse_length(settings.hyperparameters.max_length, label, limit)
    refuse_design(settings.init, label, designed)
    if settings.minimal_pairs:
        read_pairs(settings.minimal_pairs)
    if settings.source == "embedded":  # they come with the corpus
        find_tasks(list(settings.tasks or ()))
        return
    suite = find_suite(settings.source, settings.data_dir, settings.tasks, config)
    for task in suite.tasks:
        suite.read(task)


def find_model(config: dict[str, Any], folder: Path) -> ModelSource:
    """The model to score."""
    if config["model_path"]:
        return open_model(config["model_path"])
    final = folder / "final"
    if not final.is_dir():
        raise UserError(
            f"{final}: no trained model; run `cramming pretrain name={config['name']}` or give model_path=<folder>"
        )
    source = open_model(final)
    if (folder / "record.json").exists() and (wrong := altered(read_record(load_record(folder)), source.files)):
        raise UserError(f"{final}/{wrong}; restore it, or score the folder under another name with model_path={final}")
    return source


def refuse_length(max_length: int, label: str, limit: int | None) -> None:
    """UserError where sequences would be longer than the model has positions for."""
    if limit is not None and max_length > limit:
        raise UserError(
            f"eval.hyperparameters.max_length={max_length}: {label} has {limit} positions; set it to {limit} or less"
        )


def refuse_design(inits: Sequence[Init], label: str, designed: bool) -> None:
    """UserError where the row of a designed start is asked for and there is no design."""
    if "designed" in inits and not designed:
        raise UserError(
            f"eval.init={list(inits)}: {label} starts from plain random weights (model.attention_init=random), so"
            " designed is random here; take it out"
        )


def start_record(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """A record for a model that this suite did not pretrain; UserError where the name belongs to another model."""
    if (folder / "record.json").exists():
        record = load_record(folder)
        if "pretrain" in record:
            raise UserError(f"name={config['name']}: {folder} is a pretraining run; give another name for model_path")
        before, now = record.get("config", {}).get("model_path"), config["model_path"]
        if before and Path(before).expanduser().resolve() != expand_home(now, "model_path").resolve():
            raise UserError(
                f"model_path={now}: name={config['name']} has the scores of model_path={before}; give another name"
            )
        return
    create_run_folder(folder, config, environment(asdict(describe(device))), resume=False)
