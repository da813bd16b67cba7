"""Scorings of a run: events in its log, and predictions in files named by their SHA-256.

    runs/<name>/predictions/<sha256>.npz    of one task and seed: `dev.<entry>`, `test.<entry>`, `test_ids.<entry>`

A file is on the disk before the event that names it, so a crash loses one fine-tuning at most. A stored result counts
if its file has the hash of its event and gives the event's scores; otherwise the fine-tuning is repeated.
"""

import hashlib
import io
import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from cramming.config import file_sha256
from cramming.data.suites import SUITES, SuiteName
from cramming.data.task_files import texts_sha256
from cramming.files import overwrite_atomically
from cramming.record_schema import finite
from cramming.runlog import (
    RUN_EVENTS,
    RUN_LOG,
    Event,
    EventLog,
    Finetuned,
    LabelledSet,
    Scoring,
    SetScores,
    read_log,
)
from cramming.scores import run_name, scores_of
from eval.finetune.loop import Predictions
from eval.tasks.datasets import Split, TaskData, examples_sha256, seen_in_training
from eval.tasks.metrics import agree, score


class ScoreLog:
    """Log of a run in `folder` while it is scored: appends events, and looks up stored results.

    `scores` are those of the log at any time, `first` is its first event, or None for a new log.
    """

    def __init__(self, folder: Path) -> None:
        """Read the log in order to continue it; the caller holds the folder's lock."""
        entries = read_log(folder / RUN_LOG)
        self.folder = folder
        self.first: Event | None = entries[0].event if entries else None
        self.scores = scores_of(entries)
        self._log = EventLog(folder / RUN_LOG, durable=False)

    def append(self, event: Event) -> None:
        """Append an event; it is on the disk then if the file system can sync."""
        self._log.append(event)
        written = RUN_EVENTS.validate_json(event.model_dump_json(exclude_none=True))
        self.scores.add(written)
        self.first = self.first or written

    def begin(self, scoring: Scoring) -> None:
        """Append a scoring, unless the current one, which may have been interrupted, is the same."""
        current = self.scores.current
        if current is not None:
            is_same = current.model_dump(exclude={"time"}) == scoring.model_dump(exclude={"time"})
            if is_same:
                return
        self.append(scoring)

    def load(
        self, data: TaskData, seed: int, key: str, *, anywhere: bool = False
    ) -> Finetuned | None:
        """Return the first stored result with this key whose predictions are intact, or None.

        The part of a key behind the hyphen names the machine of a result; with `anywhere` those of other machines
        count too.
        """
        for result in self._stored(run_name(data.task.name, seed), key, anywhere):
            if self._is_intact(result, data):
                return result
        return None

    def save(self, data: TaskData, seed: int, key: str, predictions: Predictions) -> Finetuned:
        """Write the predictions of one fine-tuning, then append its event; return the event."""
        arrays = {f"dev.{name}": values for name, values in predictions.scored.items()}
        arrays |= {f"test.{name}": values for name, values in predictions.blind.items()}
        for split in data.blind:
            if split.ids is not None:
                arrays[f"test_ids.{split.source.entry}"] = np.array(split.ids)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        content = buffer.getvalue()
        sha256 = hashlib.sha256(content).hexdigest()
        file = self._predictions_file(sha256)
        overwrite_atomically(file, lambda temporary: temporary.write_bytes(content))
        result = Finetuned(
            time=now(),
            task=data.task.name,
            seed=seed,
            key=key,
            predictions=sha256,
            entries=score_sets(data, predictions.scored),
            train_loss=finite(predictions.train_loss),
            epoch=predictions.epoch,
            seconds=round(predictions.seconds, 3),
        )
        self.append(result)
        return result

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _stored(self, name: str, key: str, anywhere: bool) -> Iterator[Finetuned]:
        parts = 1 if anywhere else 2
        for (run, known), result in self.scores.results.items():
            if run == name and known.split("-")[:parts] == key.split("-")[:parts]:
                yield result

    def _is_intact(self, result: Finetuned, data: TaskData) -> bool:
        """Return whether the predictions of a result exist, unaltered, and give its scores."""
        file = self._predictions_file(result.predictions)
        if not file.is_file() or file_sha256(file) != result.predictions:
            return False
        with suppress(KeyError), np.load(file, allow_pickle=False) as arrays:
            predictions = {s.source.entry: arrays[f"dev.{s.source.entry}"] for s in data.scored}
            return _are_equal(score_sets(data, predictions), result.entries)
        return False

    def _predictions_file(self, sha256: str) -> Path:
        return self.folder / "predictions" / f"{sha256}.npz"


def now() -> str:
    """Return the time in the format of events."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def score_sets(data: TaskData, predictions: Mapping[str, np.ndarray]) -> dict[str, SetScores]:
    """Return the metrics of every labelled set."""
    entries = {}
    for split in data.scored:
        assert split.labels is not None
        scores = score(data.task.metrics, predictions[split.source.entry], split.labels)
        entries[split.source.entry] = SetScores(
            metrics=finite(scores.values), problems=scores.problems, notes=scores.notes
        )
    return entries


def _are_equal(scores: Mapping[str, SetScores], stored: Mapping[str, SetScores]) -> bool:
    """Return whether metrics are equal up to the last bits, in which versions of libraries differ."""
    if scores.keys() != stored.keys():
        return False
    for name, entry in scores.items():
        known = stored[name].metrics
        if entry.metrics.keys() != known.keys():
            return False
        if not all(agree(value, known[metric]) for metric, value in entry.metrics.items()):
            return False
    return True


def describe_sets(suite: SuiteName, data: TaskData) -> dict[str, LabelledSet]:
    """Return the metrics, numbers of examples and hashes of a task's labelled sets."""
    return {split.source.entry: _describe_set(suite, data, split) for split in data.scored}


def _describe_set(suite: SuiteName, data: TaskData, split: Split) -> LabelledSet:
    official = SUITES[suite].official
    other_size = data.subset or len(split) != split.source.examples
    return LabelledSet(
        title=split.source.title,
        task=data.task.name,
        metrics=list(data.task.metrics),
        main_metric=data.task.main_metric,
        train_examples=len(data.train),
        official_train_examples=data.task.train.examples if official else None,
        eval_examples=len(split),
        official_eval_examples=split.source.examples if official else None,
        subset=official and other_size,
        skipped_rows=data.train.skipped,
        data_sha256=examples_sha256(data.train, split),
        texts_sha256=texts_sha256(itertools.chain(*split.texts)),
        seen_in_training=seen_in_training(data.train, split),
    )
