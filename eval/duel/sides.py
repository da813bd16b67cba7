"""The two sides of a pair: runs of this suite, each in a separate process.

On a CPU both train at once, with a core and a thread each, so that other load on the machine slows both; the next pair
swaps the cores. On a GPU they train one after the other, the next pair in the other order. The process of a side
survives when the duel is killed: the next call waits for it, or uses its result.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cramming.children import environment_as_given
from cramming.config import UserError
from cramming.files import LOCK, lock, remove
from cramming.invocation import Invocation
from cramming.progress import Progress, say
from cramming.record import WITHOUT_MODEL, is_run, load_metrics, load_record
from cramming.record_schema import read_record
from cramming.runlog import RUN_LOG
from cramming.scores import mean_of
from cramming.verbs import OPTIONS
from eval.duel.duel_log import SideResult

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OVER = ("finished", *WITHOUT_MODEL)  # states of a run whose training is over
PROGRESS = re.compile(rb'"progress":([0-9.e-]+)[,}]')
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Side:
    """Run of a pair, described by its call."""

    call: Invocation

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.call.run_folder

    def with_overrides(self, *more: str) -> "Side":
        """Return the same run with further overrides."""
        return Side(replace(self.call, overrides=(*self.call.overrides, *more)))

    def has_trained(self) -> bool:
        """Return whether pretraining is over, with or without a model."""
        return is_run(self.folder) and read_record(load_record(self.folder)).training.status in OVER

    def has_scores(self) -> bool:
        """Return whether the run is scored, or has no model to score."""
        record = read_record(load_record(self.folder))
        return record.training.status != "finished" or record.trained is not None

    def is_at_work(self) -> bool:
        """Return whether a process holds the lock of the run, whether this call or another one started it."""
        if not (self.folder / LOCK).exists():
            return False
        try:
            with lock(self.folder, "working on this run"):
                return False
        except UserError:
            return True

    def progress(self) -> float:
        """Return the share of the budget that is spent, from the end of the log, which is read twice a second."""
        log = self.folder / RUN_LOG
        if not log.exists():
            return 0.0
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            values = PROGRESS.findall(file.read())
        return float(values[-1]) if values else 0.0

    def result(self) -> SideResult:
        """Return the run's entry for the log of duels."""
        record = read_record(load_record(self.folder))
        training, scored = record.training, record.trained
        curve: list[tuple[float, float | None]] = []
        for row in load_metrics(self.folder):
            if "validation_loss" in row:
                curve.append((row["progress"], row["validation_loss"]))
        scores: dict[str, float | None] | None = None
        if scored:
            scores = {name: task.score for name, task in scored.tasks.items()}
        return SideResult(
            status=training.status or "unknown",
            loss=training.validation.loss,
            all_mask_loss=training.validation.all_mask_loss,
            bits_per_byte=training.validation.bits_per_byte,
            steps=training.steps,
            tokens=training.tokens,
            seconds=training.budget.spent_seconds,
            curve=curve,
            scores=scores,
            score=mean_of(list((scores or {}).values())),
        )

    def drop_weights(self) -> None:
        """Remove the weights, which are large and not part of the result. The log and the predictions stay."""
        for name in ("checkpoints", "final"):
            remove(self.folder / name)


def train(sides: Sequence[Side], cores: Sequence[int], title: str) -> None:
    """Pretrain the sides that have not ended, at once on a core each, or one after the other without `cores`.

    If only one of two simultaneous sides is left, it does not train alone on an otherwise idle machine: a copy of the
    other side trains beside it as its load, and the result of the copy is discarded.
    """
    left = [side for side in sides if not side.has_trained()]
    if not cores:
        for side in left:
            _run("pretrain", [side], [None], title)
        return
    if len(left) == 1 and not left[0].is_at_work():
        left_and_copy: list[Side] = []
        for side in sides:
            left_and_copy.append(side if side in left else _discarded_copy(side))
        _run("pretrain", left_and_copy, cores, title)
    elif left:
        _run("pretrain", left, [cores[sides.index(side)] for side in left], title)
    for copy in map(_discarded_copy, sides):
        if not copy.is_at_work():  # also removes the copy of a call that was killed
            remove(copy.folder)
            _log(copy).unlink(missing_ok=True)


def score(sides: Sequence[Side], cores: Sequence[int], title: str) -> None:
    """Fine-tune and score the sides that are not scored."""
    left = [side for side in sides if not side.has_scores()]
    if cores:
        _run("glue", left, [cores[sides.index(side)] for side in left], title)
        return
    for side in left:
        _run("glue", [side], [None], title)


def _discarded_copy(side: Side) -> Side:
    return Side(replace(side.call, name=f"{side.call.name}-again"))


def _run(verb: str, sides: Sequence[Side], cores: Sequence[int | None], title: str) -> None:
    """Run a verb for all sides at once; raise UserError if one of them fails."""
    idle = [(side, core) for side, core in zip(sides, cores) if not side.is_at_work()]
    started = {side.folder: _start(verb, side, core) for side, core in idle}
    others = [side for side in sides if side.folder not in started]
    for side in others:
        say(
            f"{side.folder}: waiting for the process that works in this folder. If there is none, delete {LOCK} there."
        )
    try:
        with Progress(title, total=100.0, unit="%") as bar:
            while _is_running(started.values(), others):
                time.sleep(POLL_SECONDS)
                if verb == "pretrain":
                    bar.update(100 * min(side.progress() for side in sides))
    except BaseException:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()
        raise
    for side in sides:
        is_done = side.has_trained() if verb == "pretrain" else side.has_scores()
        if not is_done:
            code = started[side.folder].returncode if side.folder in started else None
            raise UserError(
                f"duel: `cramming {verb}` of {side.folder.name} {_ending(code, _log(side))}. See {_log(side)}. The same"
                " command continues the duel."
            )


def _is_running(processes: Iterable[subprocess.Popen[bytes]], others: Sequence[Side]) -> bool:
    if any(process.poll() is None for process in processes):
        return True
    return any(side.is_at_work() for side in others)


def _start(verb: str, side: Side, core: int | None) -> subprocess.Popen[bytes]:
    """Start a verb, on `core` if given, in a new session: Ctrl-C and the end of this process do not stop it."""
    if verb == "pretrain":
        remove(
            side.folder
        )  # the folder of a killed run: resuming it would spend budget on a second start
    side.folder.parent.mkdir(parents=True, exist_ok=True)
    threads = {} if core is None else ONE_THREAD
    with _log(side).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cramming", verb, *side.call.arguments(*OPTIONS[verb])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment_as_given(), **threads},
            start_new_session=True,
        )
    if core is not None and hasattr(os, "sched_setaffinity"):
        # The process starts no thread before this call: its imports take seconds.
        os.sched_setaffinity(process.pid, {core})
    return process


def _log(side: Side) -> Path:
    return side.folder.with_name(f"{side.folder.name}.log")


def _ending(code: int | None, log: Path) -> str:
    """Return how a failed side ended, from its exit code (if known) and the last line of its log."""
    if code == -signal.SIGKILL:
        return f"was killed by signal {-code} (out of memory?)"
    if code is not None and code < 0:
        return f"was killed by signal {-code}"
    if code == 128 + signal.SIGTERM:
        return "was terminated"
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].removeprefix("cramming: ").rstrip(".") if lines else "no message"
    shown_code = "" if code is None else f" (code {code})"
    return f"failed{shown_code}: {last}"
