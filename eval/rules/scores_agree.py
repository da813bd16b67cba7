"""The scores' part of R27: record.json against glue.json, pieces, predictions and history, and against itself."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import file_sha256, settings_hash
from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES
from cramming.record_schema import FineTuning, Record, Scores, TaskScore
from cramming.scores import spread
from eval.rules.evidence import files_of, fine_tuned, made_later, made_with, predicted
from eval.tasks.metrics import agree, is_value

CLOCK_SET = 2  # times that a machine's clock may have been set back while it fine-tuned


def scores_disagree(folder: Path, record: Record) -> Iterator[str]:
    """Each contradiction, beginning with the initialisation or baseline."""
    for name, section in {**record.glue, **record.baselines}.items():
        raw = record.raw[name] if name in record.baselines else record.raw["glue"][name]
        place = folder / "glue" / name
        problems = [*_itself(section, raw)]
        if not raw.get("sweep"):  # one has these files for each of its points, elsewhere
            later = made_later(record, name)
            problems += [
                *_glue_json(place, raw),
                *_pieces(place, section, raw, later),
                *_environment(place, raw),
            ]
            problems += (
                _history(record, name, section, place, later)
                if name not in record.baselines
                else ()
            )
        yield from (f"{name}: {problem}" for problem in problems)
    yield from _dates(record)


def _itself(section: Scores, raw: Mapping[str, Any]) -> Iterator[str]:
    """Means, deviations and intervals over seeds, ranges, and what the averages say they are."""
    for entry, task in section.tasks.items():
        for name, found in task.metrics.items():
            said, made = raw["tasks"][entry]["metrics"][name], spread(found.per_seed)
            if len(found.per_seed) != len(section.seeds):
                yield f"{entry}: {len(found.per_seed)} values of {name} for {len(section.seeds)} seeds"
            differ = [key for key, value in made.items() if not _close(said.get(key), value)]
            yield from (f"{entry}: {key} of {name} is not that of the seeds" for key in differ)
            odd = [
                value for value in found.per_seed if value is not None and not is_value(name, value)
            ]
            yield from (f"{entry}: {value:g} is no value of {name}" for value in odd)
        if entry in ENTRIES and (task.title, raw["tasks"][entry]["task"]) != (
            ENTRIES[entry][1].title,
            ENTRIES[entry][0].name,
        ):
            yield f"{entry} is called {task.title}"
    for name, average in AVERAGES.get(section.suite or "", {}).items():
        if (told := section.averages.get(name)) and told.definition != average.definition:
            yield f"{name} is not defined as in this version"
    if len(set(map(str, section.seeds))) != len(section.seeds):
        yield f"seeds {section.seeds}"


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return agree(a, b)


def _glue_json(place: Path, raw: Mapping[str, Any]) -> Iterator[str]:
    """The file is the section without the machine's part."""
    file = place / "glue.json"
    if not file.exists():
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    tasks = {
        entry: {k: v for k, v in task.items() if k != "seconds"}
        for entry, task in raw["tasks"].items()
    }
    told = {**raw, "tasks": tasks}
    yield from (
        f"{key} of glue.json is not the record's" for key in found if told.get(key) != found[key]
    )


def _pieces(
    place: Path, section: Scores, raw: Mapping[str, Any], later: Sequence[FineTuning]
) -> Iterator[str]:
    """Each stored result against the record's value of its seed, and against its predictions; none made `later`."""
    conditions, losses = raw.get("conditions", {}), dict[tuple[str, float], str]()
    other_keys, other_files = {line.key for line in later}, files_of(later)
    for entry, task in section.tasks.items():
        name = str(raw["tasks"][entry]["task"])
        for index, seed in enumerate(section.seeds):
            piece = place / "pieces" / f"{name}-seed{seed}.json"
            if not piece.exists():
                continue
            found = json.loads(piece.read_text(encoding="utf-8"))
            file = place / "predictions" / f"{name}-seed{seed}.npz"
            if found["key"] in other_keys:
                continue
            metrics, loss = found["entries"][entry]["metrics"], found["train_loss"]
            if loss and (other := losses.setdefault((name, loss), piece.name)) != piece.name:
                yield f"{piece.name} has the training loss of {other}, to the last bit"
            if any(not _close(metrics.get(n), m.per_seed[index]) for n, m in task.metrics.items()):
                yield f"{piece.name} has other values of {entry}"
            count = (metrics.get("accuracy") or 0) * (task.eval_examples or 0)
            if abs(count - round(count)) > 1e-3:
                yield f"{piece.name}: accuracy {metrics['accuracy']:g} is no share of {task.eval_examples} examples"
            if task.scored_epochs and found["epoch"] != task.scored_epochs[index]:
                yield f"{piece.name} is of epoch {found['epoch']}"
            asked = str(conditions.get(name, "")).partition("-")[0]
            if asked and found["key"].partition("-")[0] != settings_hash(
                asked, section.hyperparameters, seed
            ):
                yield f"{piece.name} is of other conditions than the record's"
            if not file.exists():
                continue
            sha256 = file_sha256(file)
            # A later scoring's gets its name before its piece does.
            if sha256 == found["predictions_sha256"] or (file.name, sha256) not in other_files:
                yield from _predictions(file, found, entry, task)


def _predictions(
    file: Path, piece: Mapping[str, Any], entry: str, task: TaskScore
) -> Iterator[str]:
    """As many as there are examples, of the task's classes, and no score for a model whose output was not finite (NaN);
    without the labels no more can be said."""
    if file_sha256(file) != piece["predictions_sha256"]:
        yield f"{file.name} is not what its piece was made of"
        return
    values = predicted(file, f"dev.{entry}")
    if len(values) != task.eval_examples:
        yield f"{file.name} has {len(values)} predictions for {task.eval_examples} examples of {entry}"
    labels = ENTRIES[entry][0].labels if entry in ENTRIES else ()
    finite = values[np.isfinite(values)]
    if labels and not np.isin(finite, np.arange(len(labels))).all():
        yield f"{file.name} has predictions of {entry} that are no class of it"
    if len(finite) < len(values) and any(
        value is not None for value in piece["entries"][entry]["metrics"].values()
    ):
        yield f"{file.name} has predictions of {entry} that are not finite, and a score"


def _history(
    record: Record, init: str, section: Scores, place: Path, later: Sequence[FineTuning]
) -> Iterator[str]:
    """The last line of each task and seed that the section was kept with names the piece's predictions."""
    if record.history_file is None:
        return
    last, other_keys = dict[tuple[str, str], FineTuning](), {line.key for line in later}
    for line in fine_tuned(record, init, named=True):
        if made_with(line) == made_with(section):
            last[str(line.task), str(line.seed)] = line
    for (task, seed), line in last.items():
        piece = place / "pieces" / f"{task}-seed{seed}.json"
        if piece.exists() and seed in map(str, section.seeds):
            found = json.loads(piece.read_text(encoding="utf-8"))
            if (
                found["predictions_sha256"] != line.predictions_sha256
                and found["key"] not in other_keys
            ):
                yield f"{piece.name} is not of the predictions in the history"
        if line.model_sha256 != section.model_sha256:
            yield f"{task} seed {seed} is of other weights in the history"


def _environment(place: Path, raw: Mapping[str, Any]) -> Iterator[str]:
    """timing.json has the machine and the seconds once more."""
    file = place / "timing.json"
    if not file.exists():
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["environment"] != raw.get("environment") or not _close(
        sum(found["seconds"].values()), raw.get("seconds")
    ):
        yield "timing.json has another machine or other seconds"


def _dates(record: Record) -> Iterator[str]:
    """No fine-tuning came before the run, none before the line in front of it; machines' clocks may differ, and one may
    be set, but not again and again."""
    lines = record.history_file.entries if record.history_file else []
    times = [
        datetime.fromisoformat(str(text)).timestamp()
        for text in (record.created, *(line.time for line in lines))
    ]
    if any(now < was - 3600 for was, now in pairwise(times)):
        yield "history: a fine-tuning of before the run, or before the line in front of it"
    places = [str(line.key).partition("-")[2] for line in lines]
    same = [
        now < was
        for (was, now), (here, there) in zip(pairwise(times[1:]), pairwise(places))
        if here == there
    ]
    if sum(same) > CLOCK_SET:
        yield f"history: {sum(same)} lines are of before the line in front of them, on the same machine"
