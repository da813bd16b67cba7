"""What a run says about itself: before the training, while it goes on, and in its record at the end."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cramming import device as devices
from cramming.budget import Pace, seconds_before_import
from cramming.checks import tiny_defaults
from cramming.config import UserError
from cramming.data.held_out import ALL_MASK, bits_per_byte
from cramming.engine import StepStats
from cramming.journal import JOURNAL, EndReason, has_trained, read_journal
from cramming.model.config import count_parameters
from cramming.model.export import file_hashes, save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.stock import FAMILIES, stock_family
from cramming.progress import say
from cramming.record import Status, is_run, load_metrics, load_record, write_record_section
from cramming.runtime import compile_seconds, compiled_graphs
from cramming.train_state import Parts, note_changed_files

Judge = Callable[[Mapping[str, Any]], list[str]]


def announce(parts: Parts) -> None:
    """Print the derived arithmetic before the long part begins."""
    if not parts.clock:
        return
    model, config, budget = parts.model_config, parts.train, parts.clock.config
    count = count_parameters(model)
    targets = parts.source.masker.config.targets_per_row(config.sequence_length)
    say(
        f"model: {count.total / 1e6:.1f}M parameters, {count.without_embeddings / 1e6:.1f}M without embeddings,"
        f" vocabulary {model.vocab_size}; {parts.flops_per_token / 1e6:.1f} MFLOP per token"
    )
    tokens = config.batch_size * config.sequence_length
    other = config.validation_corpus
    elsewhere = f", validated on the text of {other}" if other else ""
    say(
        f"step: {config.batch_size} sequences of {config.sequence_length} = {tokens} tokens ="
        f" {parts.micro_batches} x {config.micro_batch} sequences x {parts.mesh.world_size} process(es);"
        f" {targets} targets per sequence; {parts.engine.precision.mode} on {parts.engine.device}, attention kernel"
        f" {' and '.join(parts.attention_kernels)}; peak learning rate {parts.peak_learning_rate:.3g}"
    )
    say(
        f"corpus: {parts.corpus.folder}, {parts.source.stream.num_tokens / 1e6:.1f}M tokens{elsewhere}; budget:"
        f" {budget.limit:g} {budget.unit}; started at step {parts.work.steps}"
        f" with {parts.clock.elapsed_seconds():.1f} s on the clock"
    )
    if (before := seconds_before_import()) > 10 and not parts.work.steps:
        say(
            f"warning: this process was {before:.0f} s old when `cramming` began, and they are on the clock; a script"
            " that starts it with `exec` hands on its own age: leave `exec` out"
        )
    if warning := tiny_defaults(parts.config):
        say(warning)


def warn(parts: Parts, judge: Judge) -> None:
    """Say which rules of the closed division the run has broken before its first step: not after a day."""
    if not parts.clock:
        return
    budget = parts.clock.config
    seconds = 3600 * budget.hours if budget.hours else parts.clock.elapsed_seconds()
    record = load_record(parts.folder)
    known = {**record["pretrain"], **setup_of(parts), "budget": {"spent_seconds": seconds}}
    for broken in judge({**record, "pretrain": known}):
        say(f"warning: not for the closed division, which this run claims (division=open does not): {broken}")


def log_step(parts: Parts, recent: deque[StepStats], progress: float, learning_rate: float, rate: float) -> None:
    """One row of metrics.jsonl: means over the last `log_every` steps of this process, and its tokens per second."""
    assert parts.clock and parts.metrics
    row = {
        "step": parts.work.steps,
        "progress": progress,
        "seconds": parts.work.last_step_seconds,
        "tokens": parts.work.tokens,
        "loss": sum(s.loss for s in recent) / len(recent),
        "accuracy": sum(s.accuracy for s in recent) / len(recent),
        "grad_norm": recent[-1].grad_norm,
        "lr": learning_rate,
        "tokens_per_second": rate,
    }
    parts.metrics.write(row)


def validate(parts: Parts, progress: float) -> dict[str, Any]:
    """Loss on the held-out text as all runs are asked; logged, and on the clock while training goes on."""
    assert parts.clock and parts.metrics
    loss, accuracy, targets = parts.engine.evaluate(parts.validation)
    row = {"step": parts.work.steps, "progress": progress, "tokens": parts.work.tokens}
    row |= {"seconds": parts.clock.elapsed_seconds(), "validation_loss": loss, "validation_accuracy": accuracy}
    parts.metrics.write(row)
    say(f"step {parts.work.steps} ({progress:.0%} of the budget): validation loss {loss:.3f}, accuracy {accuracy:.3f}")
    return {"loss": loss, "accuracy": accuracy, "targets": targets}


def validate_fully(parts: Parts) -> dict[str, Any]:
    """The last validation, which is off the clock: the same, and what compares with other objectives and vocabularies.

    The record's `pretrain.validation`: `loss` and `accuracy` of the pinned form, `all_mask_loss` and
    `all_mask_accuracy` with every target hidden behind [MASK] (nats per target both), `bits_per_byte` of the latter,
    and over how many `targets` of how many `tokens`.
    """
    found = validate(parts, 1.0)
    batches = parts.held_out.batches(ALL_MASK, parts.train.rows)
    loss, accuracy, _ = parts.engine.evaluate(batches)
    bits = bits_per_byte(loss, parts.validation_corpus.manifest)
    said = "" if bits is None else f", {bits:.3f} bits per byte"
    say(f"all targets behind [MASK]: validation loss {loss:.3f}, accuracy {accuracy:.3f}{said}")
    further = {"all_mask_loss": loss, "all_mask_accuracy": accuracy, "bits_per_byte": bits}
    return {**found, **further, "tokens": len(parts.held_out.ids_N)}


def validate_if_it_fits(parts: Parts, progress: float, pace: Pace, step_micro_batches: int) -> None:
    """Validate on the clock, unless it would leave no time for another step; and note how long it took."""
    assert parts.clock
    batches = len(parts.validation)
    predicted, left = pace.validation_seconds(batches), parts.clock.seconds_left()
    where = f"step {parts.work.steps} ({progress:.0%} of the budget)"
    if predicted + pace.step_seconds(step_micro_batches) > left:
        say(
            f"{where}: no validation, which would take about {predicted:.0f} s of the {left:.0f} s left"
            " (train.validations, train.validation_tokens)"
        )
        return
    began, graphs = time.monotonic(), compiled_graphs()
    validate(parts, progress)
    seconds = time.monotonic() - began
    pace.note_validation(batches, seconds, compiled_graphs() != graphs)
    say(f"{where}: validated in {seconds:.1f} s, predicted {predicted:.1f} s")


class ResumeWithLessError(UserError):
    """The record now has a smaller micro-batch, with which a resume goes on: the run is to be kept."""


def out_of_memory(parts: Parts) -> UserError:
    """What to do about training that ran out of memory; a micro-batch that `auto` chose is made smaller on record."""
    rows, engine = parts.train.rows, parts.engine
    fewer = max((n for n in range(1, rows // 2 + 1) if rows % n == 0), default=0)  # fits where `rows` do, in a ramp too
    begins = f"train.micro_batch={rows}: {engine.device} ran out of memory in training"
    if not fewer:
        return UserError(f"{begins}; use memory=checkpoint or a smaller model (`cramming plan` shows what each needs)")
    found = load_record(parts.folder)["pretrain"].get("micro_batch_found") if is_run(parts.folder) else None
    if found:
        found = f"{found}; {rows} did not fit in training"
        write_record_section(parts.folder, pretrain={"micro_batch": fewer, "micro_batch_found": found})
        return ResumeWithLessError(
            f"{begins}, though auto had found it to fit; go on with resume=true, which takes {fewer}"
        )
    again = " under another name, or go on with resume=true if something else had the memory"
    return UserError(f"{begins}; set train.micro_batch={fewer}" + (again if parts.work.steps else ""))


def finish(parts: Parts, reason: EndReason) -> None:
    """After the deadline: export the model and complete the record. None of this is on the clock."""
    assert parts.clock and parts.metrics
    work = parts.work
    validation = validate_fully(parts) if reason == "finished" and work.steps else None
    status = status_of(reason, validation)
    final: dict[str, str] | None = None
    if status == "finished":
        export(parts)
        final = file_hashes(parts.folder / "final")
    parts.metrics.close()
    note_changed_files(parts.folder, parts.corpus, parts.validation_corpus, again=True)
    budget = parts.clock.summary()
    section = {
        "status": status,
        **setup_of(parts),
        **work_of(parts, budget),
        **parts.clock.energy(),
        "validation": validation,
        "final_sha256": final and final["model.safetensors"],
        "final_files": final,
    }
    write_record_section(parts.folder, pretrain=section)
    if status == "exhausted":
        raise UserError(no_step_left(parts))
    if status == "diverged":
        raise UserError(
            f"{parts.folder}: the validation loss is not finite after {work.steps} steps, {work.skipped_steps} of them"
            " skipped: the training diverged and no model was written; lower optim.lr, or set precision=fp32"
        )
    if validation:
        family = stock_family(parts.model_config)
        form = f"transformers' {FAMILIES[family].architecture}" if family else "this suite's own, for `cramming glue`"
        say(
            f"{parts.folder}: {work.steps} steps, {work.tokens / 1e6:.1f}M tokens in {budget['spent_seconds']:.1f} s"
            f", validation loss {validation['loss']:.3f}; model in {parts.folder / 'final'} (format: {form})"
        )


def no_step_left(parts: Parts) -> str:
    """Why a run ended without a step, and what to do."""
    if has_trained(read_journal(parts.folder / JOURNAL)):
        return (
            f"{parts.folder}: the budget ended and no step is left: there were steps, but no checkpoint to go back or"
            " on from; begin under another name, with checkpoint.every_minutes well below the budget"
        )
    return f"budget: not one step of train.batch_size={parts.train.batch_size} fits into it; raise the budget"


def status_of(reason: EndReason, validation: Mapping[str, Any] | None) -> Status:
    """What became of a run that ended for this reason, with this validation."""
    if reason != "finished":
        return "interrupted"
    if validation is None:
        return "exhausted"
    return "finished" if math.isfinite(validation["loss"]) else "diverged"


def export(parts: Parts) -> None:
    """Write the model folder `final`."""
    model = parts.engine.model
    assert isinstance(model, MaskedLM)
    special = {f"{name}_token": token for name, token in parts.corpus.manifest.tokenizer.special.items()}
    save_pretrained(model, parts.folder / "final", parts.corpus.tokenizer_file, special)


def setup_of(parts: Parts) -> dict[str, Any]:
    """Of the record's section `pretrain`, how the model was trained."""
    count = count_parameters(parts.model_config)
    return {
        "start": parts.start.name,
        "objective": parts.source.masker.config.name,
        "devices": parts.mesh.world_size,
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "precision": parts.engine.precision.mode,
        "attention_kernels": parts.attention_kernels,
        "peak_learning_rate": parts.peak_learning_rate,
        "seed": parts.source.seed,
        "gate": parts.gates,
        "compiled": parts.runtime.compile != "off" or compiled_graphs() > 0,  # FlexAttention and others do in any case
    }


def work_of(parts: Parts, budget: dict[str, Any]) -> dict[str, Any]:
    """Of the record's section `pretrain`, what was done in the budget (the clock's summary) and how fast.

    All but the peak of memory and the seconds of compiling is about the whole run, not its last process; speed and
    shares are of all the seconds charged.
    """
    work, device = parts.work, parts.engine.device
    last_row: dict[str, Any] = next((row for row in reversed(load_metrics(parts.folder)) if "loss" in row), {})
    peak_tflops, seconds = devices.describe(device).peak_tflops, budget["spent_seconds"]
    peak_flops = peak_tflops * 1e12 * parts.mesh.world_size if peak_tflops else None
    return {
        "budget": budget,
        "steps": work.steps,
        "tokens": work.tokens,
        "sequences": work.sequences,
        "exaflops": work.flops / 1e18,
        "corpus_epochs": work.sequences / parts.source.num_windows,
        "train_loss": last_row.get("loss"),
        "tokens_per_second": work.tokens / seconds if seconds else None,
        "data_wait_share": work.data_wait_seconds / seconds if seconds else None,
        "model_flops_utilization": work.flops / seconds / peak_flops if peak_flops and seconds else None,
        "recompilations": work.recompilations,
        "compile_seconds": compile_seconds(),
        "peak_memory_bytes": devices.peak_memory_bytes(device),
        "skipped_steps": work.skipped_steps,
    }
