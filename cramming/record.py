"""Record of a run: all of its facts, computed from its log by one pure function.

Report, rules, verify, study and duel read the record and no other file of the folder. `record.json` is the same for
people and other programs, and is never read back. A number that is missing or not finite is null: JSON has no NaN,
and a substitute could be mistaken for a measurement.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

from cramming.config import UserError
from cramming.files import LOCK, lock, sweep, write_atomically
from cramming.invocation import Invocation
from cramming.runlog import (
    FORMAT_VERSION,
    RUN_LOG,
    TRAINING_EVENTS,
    Entry,
    ExternalModel,
    Process,
    Start,
    Steps,
    Training,
    Validation,
    has_events,
    read_log,
    tokens_per_second,
    training_of,
)

RECORD = "record.json"
# Status of a run's pretraining. An exhausted one has spent its budget without completing a step.
Status = Literal["running", "interrupted", "finished", "diverged", "exhausted"]
WITHOUT_MODEL: tuple[Status, ...] = ("diverged", "exhausted")  # runs that ended without a model
ENERGY_SOURCE = "NVML energy counter"


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: a log with an event."""
    return has_events(folder / RUN_LOG)


def is_untouched(folder: Path) -> bool:
    """Return whether a run's folder holds nothing but its lock, or a log without an event."""
    names = {path.name for path in folder.iterdir()}
    return names <= {LOCK, RUN_LOG} and not is_run(folder)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer and remove files of killed ones; raise UserError if another process holds it."""
    with lock(folder, "working on this run"):
        sweep(folder)
        yield


def refuse_finished_run(invocation: Invocation) -> bool:
    """Return whether the run of this name is finished and `--resume` leaves it unchanged.

    Raises UserError if the name has a run and `--resume` is not given, or if the run cannot be resumed.
    """
    folder, resume = invocation.run_folder, invocation.resume
    if not is_run(folder):
        return False
    record = load_record(folder)
    status = record.get("pretrain", {}).get("status")
    scored = record.get("scored_model")
    another = "Give another name"
    rows = (
        (scored, f"has the scores of the model {scored}. {another}."),
        (status == "diverged", f"has a run that diverged, which cannot be resumed. {another}."),
        (
            status == "exhausted",
            f"has a run whose budget is spent, without a completed step. {another}.",
        ),
        (
            status == "finished" and not resume,
            f"already has a finished run. {another}, or --resume keeps it (`cramming run` then scores it).",
        ),
        (
            status != "finished" and not resume,
            "has an unfinished run. Add --resume, or give another name.",
        ),
    )
    for applies, problem in rows:
        if applies:
            raise UserError(f"--name={invocation.name}: {folder} {problem}")
    return bool(status == "finished")


def load_record(folder: Path) -> dict[str, Any]:
    """Return the record of a run folder; raise UserError if it has no log, or a damaged one."""
    entries = read_run(folder)
    return derive(entries)


def read_run(folder: Path) -> list[Entry]:
    """Return the entries of a run's log; raise UserError if there is none."""
    entries = read_log(folder / RUN_LOG)
    if not entries:
        raise UserError(f"{folder / RUN_LOG}: no such run log. Give a run folder.")
    return entries


def write_record(folder: Path) -> dict[str, Any]:
    """Write `record.json` for people and other programs, and return the record."""
    record = load_record(folder)
    write_atomically(folder / RECORD, record_text(record))
    return record


def record_text(record: Mapping[str, Any]) -> str:
    """Return the content of `record.json`; pydantic serialises it ten times as fast as `json` with an indent."""
    return to_json(record, indent=1, inf_nan_mode="null").decode() + "\n"


def derive(entries: Sequence[Entry], training: Training | None = None) -> dict[str, Any]:
    """Return the record of a log, as a pure function of its events.

    `training` is the result of `training_of`, if the caller has it.
    """
    training = training or training_of(entries)
    first = entries[0].event
    if not isinstance(first, Start | ExternalModel):
        raise UserError(f"{RUN_LOG}:1: the first event is {first.event}, not a start.")
    recipe = first.recipe or {}
    record: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "name": first.name,
        "suite_version": first.suite_version,
        "rules_version": first.rules_version,
        "log": {"start": entries[0].sha256, "head": entries[-1].sha256, "events": len(entries)},
        "config": recipe,
    }
    if isinstance(first, Start):
        record |= _training_sections(training)
    else:
        record |= {
            "created": first.time,
            "environment": first.environment,
            "division_requested": first.division,
            "scored_model": first.model,
        }
    return record | _score_sections(entries)


def _training_sections(training: Training) -> dict[str, Any]:
    """Return the sections of a pretraining."""
    starts = [process.start for process in training.processes]
    setups = [process.setup for process in training.processes if process.setup]
    environments = [setup.environment for setup in setups]
    created = datetime.fromtimestamp(starts[0].wall, UTC)
    sections: dict[str, Any] = {
        "created": created.isoformat(timespec="seconds"),
        "division_requested": "open" if any(s.division == "open" for s in starts) else "closed",
        "environment": environments[0] if environments else {},
        "resumed": environments[1:],
        "pretrain": _pretraining(training),
    }
    if training.setup is not None:
        corpus = training.setup.corpus or {}
        sections["corpus"] = {**corpus, "changed": training.changed_files}
    return sections


def _score_sections(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the sections of scorings: glue, superglue, baselines, checkpoints, minimal pairs and the history."""
    if all(entry.event.event in TRAINING_EVENTS for entry in entries):
        return {}
    from cramming.scores import WITHOUT_ENCODER, scores_of  # imported late: loads SciPy

    scores = scores_of(entries)
    sections: dict[str, Any] = {}
    for (name, *path, init), section in scores.sections.items():
        if name == "glue" and init in WITHOUT_ENCODER:
            sections[init] = section
            continue
        place = sections.setdefault(name, {})
        for suite in path:
            place = place.setdefault(suite, {})
        place[init] = section
    for name in ("minimal_pairs", "measured"):
        event = getattr(scores, name)
        if event is not None:
            sections[name] = event.model_dump(exclude={"event"})
    if scores.history:
        sections["history"] = scores.history
    if scores.unfinished:
        sections["unfinished"] = scores.unfinished
    return sections


def _status(training: Training) -> Status:
    """Return the status of a run's pretraining."""
    if training.exported is not None:
        return "finished"
    if training.finished_after == 0:
        return "exhausted"
    last = training.processes[-1]
    if last.ended == "diverged":
        return "diverged"
    if training.finished_after is not None:
        final = training.final_validation
        diverged = final is not None and _loss(final) is None
        return "diverged" if diverged else "running"
    return "running" if last.ended == "killed" else "interrupted"


def _loss(validation: Validation) -> float | None:
    if validation.replaced_token_loss is not None:
        return validation.replaced_token_loss
    return validation.loss


def _pretraining(training: Training) -> dict[str, Any]:
    """Return the record's section `pretrain`."""
    section: dict[str, Any] = {"status": _status(training), "budget": _budget(training)}
    setups = [process.setup for process in training.processes if process.setup]
    if setups:
        forced: set[str] = set()
        for setup in setups:
            gates = setup.training.get("gate", {})
            forced |= {trick for trick, state in gates.items() if state == "forced"}
        section |= setups[-1].training
        section["forced"] = sorted(forced)
        section["devices"] = max(setup.devices for setup in setups)
        section |= _work(training, section)
    if training.micro_batch is not None:
        section["micro_batch"] = training.micro_batch.sequences
        section["micro_batch_found"] = training.micro_batch.how
    section |= _energy(training.processes)
    section |= dict.fromkeys(("validation", "final_sha256", "final_files"))
    final = training.final_validation
    if final is not None:
        section["validation"] = _validation_section(final, training)
    exported = training.exported
    if exported is not None:
        section["final_sha256"] = exported.files.get("model.safetensors")
        section["final_files"] = exported.files
        section["compiled"] = exported.compiled
        section["compile_seconds"] = exported.compile_seconds
        section["peak_memory_bytes"] = exported.peak_memory_bytes
    return section


def _budget(training: Training) -> dict[str, Any]:
    """Return the limit and the spent part of the budget; time is charged up to the last completed step."""
    start = training.processes[0].start
    counters = training.counters
    seconds = float(counters.get("last_step_seconds", 0.0))
    flops = counters.get("flops", 0.0) + counters.get("lost_flops", 0.0)
    spent = {
        "hours": seconds / 3600,
        "exaflops": flops / 1e18,
        "tokens": float(counters.get("tokens", 0)),
        "steps": float(counters.get("steps", 0)),
    }
    overrun = seconds - 3600 * start.limit if start.unit == "hours" else 0.0
    return {
        "unit": start.unit,
        "limit": start.limit,
        "clock": start.clock,
        "spent": spent[start.unit],
        "spent_seconds": seconds,
        "overrun_seconds": max(0.0, overrun),
        "processes": [_process(process) for process in training.processes],
    }


def _process(process: Process) -> dict[str, Any]:
    return {
        "started": process.start.wall,
        "spent_seconds": process.spent_seconds,
        "ended": process.ended,
    }


def _work(training: Training, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work in the budget and its speed; rates and shares are of all charged seconds."""
    counters = training.counters
    seconds = float(counters.get("last_step_seconds", 0.0))
    tokens = counters.get("tokens", 0)
    flops = counters.get("flops", 0.0)
    setup = [process.setup for process in training.processes if process.setup][-1]
    peak_tflops = setup.environment.get("device", {}).get("peak_tflops")
    peak_flops = peak_tflops * 1e12 * section["devices"] if peak_tflops else None
    utilization = flops / seconds / peak_flops if peak_flops and seconds else None
    return {
        "steps": counters.get("steps", 0),
        "tokens": tokens,
        "sequences": counters.get("sequences", 0),
        "exaflops": flops / 1e18,
        "corpus_epochs": counters.get("sequences", 0) / setup.windows if setup.windows else None,
        "train_loss": training.steps[-1].loss if training.steps else None,
        "tokens_per_second": tokens_per_second(tokens, seconds),
        "data_wait_share": counters.get("data_wait_seconds", 0.0) / seconds if seconds else None,
        "model_flops_utilization": utilization,
        "recompilations": counters.get("recompilations", 0),
        "skipped_steps": counters.get("skipped_steps", 0),
    }


def _energy(processes: Sequence[Process]) -> dict[str, Any]:
    """Return the energy of all processes, or None if that of one is unknown.

    A partial sum would pass for the whole.
    """
    known = [process.joules for process in processes if process.joules is not None]
    if not known or len(known) < len(processes):
        return {"energy_kwh": None, "energy_source": None}
    return {"energy_kwh": sum(known) / 3.6e6, "energy_source": ENERGY_SOURCE}


def _validation_section(final: Validation, training: Training) -> dict[str, Any]:
    """Return the final validation; bits per byte follow from its loss with every target shown as [MASK]."""
    section = final.model_dump(
        exclude={"event", "step", "progress", "seconds", "tokens", "held_out_tokens"}
    )
    section["tokens"] = final.held_out_tokens
    section["bits_per_byte"] = None
    tokens_per_byte = training.setup.tokens_per_byte if training.setup else None
    if final.all_mask_loss is not None and tokens_per_byte is not None:
        section["bits_per_byte"] = final.all_mask_loss * tokens_per_byte / math.log(2)
    return section


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log that no resume has superseded, in the order of their steps.

    A row of training has `loss`, a row of a validation `validation_loss` and related numbers.
    """
    entries = read_log(folder / RUN_LOG)
    return metrics_of(training_of(entries))


def metrics_of(training: Training) -> list[dict[str, Any]]:
    """Return training and validation rows in the order of their steps."""
    rows = [_row(event) for event in training.steps]
    rows += [_row(event) for event in training.validations]
    return sorted(rows, key=lambda row: (row["step"], "loss" not in row))


def _row(event: Steps | Validation) -> dict[str, Any]:
    row = event.model_dump(exclude={"event"})
    if isinstance(event, Steps):
        return row
    counters = ("step", "progress", "seconds", "tokens")
    result = {key: row[key] for key in counters}
    for key, value in row.items():
        if key not in counters and value is not None:
            result[f"validation_{key}"] = value
    if event.replaced_token_loss is None:
        result["validation_loss"] = event.loss
    return result
