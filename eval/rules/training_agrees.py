"""The work's part of R27: journal, metrics.jsonl and record tell of the same steps, at a pace that the device can have.

The journal has counters and two clocks, metrics.jsonl the steps once more with losses and learning rates, the record
their last values; config.yaml says what a step is, and the schedule what its learning rate was.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cramming.config import build, choose
from cramming.journal import MAX_HEARTBEAT_SECONDS
from cramming.plan import cards
from cramming.record_schema import Record
from cramming.schedule import SCHEDULES, BatchRamp, Schedule, learning_rate_factor, ramp_step

CLOCK_HOURS = 1.0  # by which clocks of machines, or of one before and after it was set, may differ
SLOW_CLOCK = 0.05  # share by which the journal's seconds may be shorter than those of the wall clock, most of the time
FEWEST_BEATS = 0.1  # share of the due heartbeats that a process writes at least, to a disk that is slow to sync
CORE_FLOPS = 1e13  # no core of a CPU does more in a second: 4 GHz times 2,048 of AMX
UNKNOWN_CARD = 4 * max(card.tflops for card in cards.CARDS) * 1e12


@dataclass(frozen=True)
class Evidence:
    """A run's folder as its files say it: `events` of the journal, `rows` of metrics.jsonl, `config` of config.yaml."""

    folder: Path
    record: Record
    events: list[Any]  # `Event`, with the counters of `cramming.budget.Work`
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]

    @property
    def training(self) -> Mapping[str, Any]:
        """The record's section `pretrain`."""
        found: Mapping[str, Any] = self.record.raw["pretrain"]
        return found

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """The environments of the run's processes: the last one wrote the record's measurements."""
        return [found.raw for found in (self.record.environment, *self.record.resumed)]

    @property
    def setups(self) -> list[str]:
        """The hashes of these in the journal, which versions before 2026-11-25 did not write, nor corpus.json, nor the
        whole of the last validation into metrics.jsonl."""
        return [
            event["setup"]
            for event in self.events
            if event["event"] == "start" and "setup" in event
        ]

    @property
    def losses(self) -> list[Mapping[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.rows if "loss" in row]


def counters_disagree(e: Evidence) -> Iterator[str]:
    """Counters of the journal: they grow, belong to each other, and the last ones are the record's."""
    train = e.config["train"]
    ramp = (
        build(BatchRamp, train["batch_ramp"], "train.batch_ramp") if train["batch_ramp"] else None
    )
    most, least = train["batch_size"], ramp_step(ramp, train["batch_size"])
    saved: dict[str, Any] = {}
    for before, now in pairwise([e.events[0], *in_order_of_work(e.events)]):
        steps, sequences, where = now["steps"], now["sequences"], f"step {now['steps']}"
        if now["tokens"] != sequences * train["sequence_length"]:
            yield f"{where} is {now['tokens']} tokens, {sequences} sequences of {train['sequence_length']}"
        if not steps * least <= sequences <= steps * most:
            yield f"{where} is {sequences} sequences, by config.yaml {most} each"
        names = (
            "steps",
            "sequences",
            "tokens",
            "flops",
            "charged_flops",
            "last_step_seconds",
            "data_wait_seconds",
        )
        if now["event"] not in ("start", "resume"):
            yield from (f"{where}: {n} falls" for n in names if now.get(n, 0) < before.get(n, 0))
        if now["event"] == "start" and (steps or now["tokens"]):
            yield f"process {now['process']} begins with {steps} steps"
        if now["event"] == "checkpoint":
            saved[now["sha256"]] = now
        elif now["event"] == "resume" and (was := saved.get(now["sha256"])):
            yield from (
                f"{where}: {n} is not that of its checkpoint"
                for n in names[:4]
                if now.get(n) != was.get(n)
            )
    yield from _last_line(e)


def in_order_of_work(events: Sequence[Any]) -> list[Any]:
    """Return the events with each checkpoint before the heartbeats of later steps in its process.

    Its entry is written when the file is complete; meanwhile training continues.
    """
    ordered: list[Any] = []
    for event in events:
        position = len(ordered)
        while event["event"] == "checkpoint" and _is_overtaken_by(event, ordered[position - 1]):
            position -= 1
        ordered.insert(position, event)
    return ordered


def _is_overtaken_by(checkpoint: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    return bool(event["event"] == "heartbeat" and event["steps"] > checkpoint["steps"])


def _last_line(e: Evidence) -> Iterator[str]:
    """What `cramming.finish.work_of` makes of it."""
    last, training, seconds = e.events[-1], e.training, e.events[-1]["last_step_seconds"]
    if last["event"] != "end":
        yield "the last line is not the end of the run that the record has as finished"
    peak, flops = e.machines[-1]["device"].get("peak_tflops"), last["flops"]
    windows = e.record.corpus.tokens // e.config["train"]["sequence_length"] - 1  # of `BatchSource`
    derived = {
        "tokens": last["tokens"],
        "sequences": last["sequences"],
        "exaflops": flops / 1e18,
        "skipped_steps": last["skipped_steps"],
        "recompilations": last["recompilations"],
        "tokens_per_second": last["tokens"] / seconds,
        "data_wait_share": last["data_wait_seconds"] / seconds,
        "corpus_epochs": last["sequences"] / windows,
        "model_flops_utilization": flops / seconds / (peak * 1e12 * training["devices"])
        if peak
        else None,
    }
    used = [
        event.get("joules") for event in {event["process"]: event for event in e.events}.values()
    ]
    derived["energy_kwh"] = None if None in used else sum(used) / 3.6e6
    yield from (
        f"{name} is {value}, in the record {training.get(name)}"
        for name, value in derived.items()
        if not _same(training.get(name), value)
    )
    budget = training["budget"]
    if budget["unit"] == "hours" and not _same(budget["spent"], seconds / 3600):
        yield f"{seconds / 3600:.6g} hours are spent, in the record {budget['spent']:.6g}"


def _same(a: Any, b: Any) -> bool:
    return a == b or (
        a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    )


def clocks_disagree(e: Evidence) -> Iterator[str]:
    """The journal's seconds against the wall clock, the heartbeats' distance, and dates."""
    starts = [event for event in e.events if event["event"] == "start"]
    if len(e.record.resumed) < len(starts) - 1:
        yield f"{len(starts)} processes, and the record has the environment of {1 + len(e.record.resumed)}"
    created = datetime.fromisoformat(str(e.record.created)).timestamp()
    walls = [created, *(event["wall"] for event in e.events)]
    if abs(walls[1] - created) > 3600 * CLOCK_HOURS:
        yield f"the first process began {(walls[1] - created) / 3600:.1f} hours after the record was created"
    yield from (
        f"the wall clock goes back by {was - now:.0f} s"
        for was, now in pairwise(walls)
        if was - now > 3600 * CLOCK_HOURS
    )
    together = [(was, now) for was, now in pairwise(e.events) if now["event"] != "start"]
    if starts[0].get("clock") != "cpu":
        ratios = list(_paces(e.events))
        if len(ratios) > 2 and abs(median(ratios) - 1) > SLOW_CLOCK:
            yield f"a second of the journal is {median(ratios):.2f} s of the wall clock, most of the time"
    pace = [
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
        for a, b in pairwise(e.losses)
        if b["step"] > a["step"]
    ]
    yield from _silent(e, median(pace or [0.0]))
    shortest = min(pace, default=0.0) / 2
    for was, now in together:
        gap, steps = _passed(was, now), now["steps"] - was["steps"]
        if (
            gap > 2 * MAX_HEARTBEAT_SECONDS
            and steps > 1
            and steps * shortest > MAX_HEARTBEAT_SECONDS + 1
        ):
            yield f"{steps} steps in {gap:.0f} s without a heartbeat, due every {MAX_HEARTBEAT_SECONDS:g} s"


def _paces(events: Sequence[Any]) -> Iterator[float]:
    """Seconds of the wall clock in one of the journal, over stretches of a process of at least a tenth of a second."""
    begin = events[0]
    for event in events:
        if event["process"] != begin["process"]:
            begin = event
        elif (passed := event["elapsed"] - begin["elapsed"]) >= 0.1:
            yield (event["wall"] - begin["wall"]) / passed
            begin = event


def _silent(e: Evidence, step_seconds: float) -> Iterator[str]:
    """Processes with hardly any of the heartbeats that config.yaml has them write, whatever the disk's pace was.

    One that is stopped for a while writes none, and one when it goes on: of the time between two events counts what its
    steps take, plus the time in which one heartbeat must be written."""
    every = float(e.config["budget"]["heartbeat_seconds"])
    for process in {event["process"]: None for event in e.events}:
        own = [event for event in e.events if event["process"] == process]
        most = [
            (b["steps"] - a["steps"]) * step_seconds + every / FEWEST_BEATS
            for a, b in pairwise(own)
        ]
        lasted = sum(min(_passed(a, b), m) for (a, b), m in zip(pairwise(own), most))
        beats, due = sum(event["event"] == "heartbeat" for event in own), lasted / every
        if beats < int(FEWEST_BEATS * due):
            yield f"process {process} has {beats} of {due:.0f} heartbeats, one every {every:g} s"


def _passed(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Seconds between two events of a process, by the slower clock: with many cores the CPU's may be the faster."""
    return float(min(now[clock] - was[clock] for clock in ("elapsed", "wall")))


def standing(events: Sequence[Any]) -> list[Any]:
    """The events of the work that was kept: no step behind a checkpoint that a later process went on from, and of a
    process that began anew none of those before it. Heartbeats come before `resume` while a checkpoint is loaded."""
    kept: list[Any] = []
    began = (
        False  # a process that has said neither what it goes on from nor that it has made a step
    )
    for event in events:
        if event["event"] == "resume":
            kept = [one for one in kept if one["steps"] <= event["steps"]]
        elif began and event["steps"]:
            kept = []
        began = event["event"] == "start" or (
            began and event["event"] != "resume" and not event["steps"]
        )
        kept.append(event)
    return kept


def metrics_disagree(e: Evidence) -> Iterator[str]:
    """metrics.jsonl against the configuration, its own order, the journal and the record."""
    yield from _rows(e)
    losses, training = e.losses, e.training
    if not losses or losses[-1]["loss"] != training["train_loss"]:
        yield f"the last loss is {losses[-1]['loss'] if losses else None}, the record's {training['train_loss']}"
    checks = [row for row in e.rows if any(key.startswith("validation_") for key in row)]
    found = {f"validation_{key}": value for key, value in training["validation"].items()}
    last = checks[-1] if checks else {}
    told = {name: value for name, value in last.items() if name.startswith("validation_")}
    whole = (
        told.keys() >= found.keys() - {"validation_targets", "validation_tokens"} or not e.setups
    )
    if (
        last.get("step") != training["steps"]
        or not whole
        or any(found.get(k) != v for k, v in told.items())
    ):
        yield "the last validation is not the record's"
    every, steps = e.config["train"]["log_every"], {row["step"] for row in losses}
    if lacking := [str(n) for n in range(every, training["steps"] + 1, every) if n not in steps]:
        yield f"no row of step {', '.join(lacking[:3])}"
    kept = standing(e.events)
    saved = {
        event["steps"]: event["last_step_seconds"]
        for event in kept
        if event["event"] == "checkpoint"
    }
    at = {row["step"]: row["seconds"] for row in losses}
    yield from (
        f"no row of the checkpoint after step {step}, at {seconds:.2f} s"
        for step, seconds in saved.items()
        if step and not _same(at.get(step), seconds)
    )
    yield from out_of_order(losses, kept)


def out_of_order(losses: Sequence[Mapping[str, Any]], events: Sequence[Any]) -> Iterator[str]:
    """Rows behind an event of a later step, or before one of an earlier step, by the clock.

    A day has tens of thousands of both: not every pair is looked at.
    """
    known = sorted((event["steps"], event["last_step_seconds"]) for event in events)
    steps = [step for step, _ in known]
    swapped = [(seconds, step) for step, seconds in known]
    earliest, latest = (
        list(accumulate(reversed(swapped), min))[::-1],
        list(accumulate(swapped, max)),
    )
    for row in losses:
        step, seconds = row["step"], row["seconds"]
        later, earlier = bisect_left(steps, step + 2), bisect_right(steps, step - 2)
        wrong = [found for found in earliest[later : later + 1] if found[0] < seconds - 1e-3]
        wrong += [found for found in latest[earlier - 1 : earlier] if found[0] > seconds + 1e-3]
        if wrong:
            yield f"step {step} at {seconds:.2f} s, in budget.jsonl step {wrong[0][1]} at {wrong[0][0]:.2f} s"


def _rows(e: Evidence) -> Iterator[str]:
    config, length = e.config, e.config["train"]["sequence_length"]
    schedule, train = choose(SCHEDULES, config["schedule"], "schedule"), config["train"]
    budget, peak = e.training["budget"], e.training["peak_learning_rate"]
    before: Mapping[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "progress": 0.0}
    # Versions before 2026-11-26 wrote the row of a step behind that of its validation where the process ended there.
    for row in sorted(e.rows, key=lambda row: (row["step"], "loss" not in row)):
        step, where = row["step"], f"step {row['step']}"
        size = step * train["batch_size"] * length
        if row["tokens"] > size or (train["batch_ramp"] is None and row["tokens"] != size):
            yield f"{where} is {row['tokens']} tokens, by config.yaml {size}"
        if any(row[key] < before[key] for key in before):
            yield f"{where}: {', '.join(key for key in before if row[key] < before[key])} falls"
        if (amount := {"steps": step, "tokens": row["tokens"]}.get(budget["unit"])) is not None:
            if (
                not math.isclose(row["progress"], min(1.0, amount / budget["limit"]), rel_tol=1e-9)
                and row["progress"] != 1
            ):
                yield f"{where}: progress is {row['progress']:.4f}, {amount / budget['limit']:.4f} of the budget"
        elif budget["unit"] == "hours" and "loss" in row:
            spent = row["seconds"] / (3600 * budget["limit"])
            if not spent - 1e-9 <= row["progress"] <= spent + 0.01 + 5 / (3600 * budget["limit"]):
                yield f"{where}: progress is {row['progress']:.4f}, {spent:.4f} of the budget"
        if "loss" in row:
            yield from (
                f"{where}: {problem}" for problem in _other_rate(peak, schedule, before, row)
            )
            for name in ("loss", "accuracy"):
                told, each = row[name], row.get(f"each_{name}") or [row[name]]
                if None not in (told, *each) and not math.isclose(
                    sum(each) / len(each), told, rel_tol=1e-9
                ):
                    yield f"{where}: the {name} is {told}, the mean of its steps {sum(each) / len(each)}"
            most = {"loss": math.inf, "grad_norm": math.inf, "accuracy": 1}
            yield from (
                f"{where}: {key} is {row[key]}"
                for key in most
                if row[key] is not None and not 0 <= row[key] <= most[key]
            )
        before = {key: row[key] for key in before}


def _other_rate(
    peak: float, schedule: Schedule, before: Mapping[str, Any], row: Mapping[str, Any]
) -> Iterator[str]:
    """The learning rate is the schedule's where the row's last step began; in rows of versions before 2026-11-26, some
    of which do not say where or have the rate of a later step, somewhere between two rows, within 1 % of the peak."""
    low, high, slack = before["progress"], row["progress"], 0.01 * peak
    span = [low + (high - low) * n / 32 for n in range(33)]
    begun = row.get("each_progress", [])[-1:]
    if not all(low <= progress <= high for progress in begun):
        yield f"its last step began at progress {begun[0]:.4f}, not from {low:.4f} to {high:.4f}"
    if "each_accuracy" in row:
        span, slack = begun, 1e-9 * peak
    rates = [peak * learning_rate_factor(schedule, progress) for progress in span]
    if not min(rates) - slack <= row["lr"] <= max(rates) + slack:
        yield f"the learning rate is {row['lr']:.3g}, by the schedule {rates[-1]:.3g}"


def too_fast(e: Evidence) -> Iterator[str]:
    """No stretch of the training was faster than the device is at its peak, of several the fastest."""
    per_token = e.training["exaflops"] * 1e18 / e.training["tokens"]
    fastest = max(e.machines, key=_peak_flops)
    peak = e.training["devices"] * _peak_flops(fastest)
    spans = [
        (a, b)
        for a, b in pairwise([{"tokens": 0, "seconds": 0.0}, *e.losses])
        if b["seconds"] > a["seconds"]
    ]
    for was, now in [
        *spans,
        (
            {"tokens": 0, "seconds": 0.0},
            {**e.training, "seconds": e.training["budget"]["spent_seconds"]},
        ),
    ]:
        rate = (now["tokens"] - was["tokens"]) * per_token / (now["seconds"] - was["seconds"])
        if rate > 1.05 * peak:
            device = fastest["device"]["name"]
            yield f"{rate / 1e12:.3g} TFLOP/s at {now['tokens']} tokens; {device} has {peak / 1e12:.3g} at most"
            return


def _peak_flops(machine: Mapping[str, Any]) -> float:
    """What one device of this machine can do in a second."""
    device = machine["device"]
    if device["kind"] == "cpu":
        return CORE_FLOPS * float(machine["cpu_count"])
    card = cards.find(device["name"], device.get("memory_bytes"))
    return max(card.tflops, card.fp8_tflops or 0) * 1e12 if card else UNKNOWN_CARD
