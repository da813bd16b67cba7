"""How a run ends: the last validation, the exported model and the record. Off the clock, and on rank 0 alone."""

import math
from typing import Any

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import ALL_MASK, bits_per_byte
from cramming.journal import JOURNAL, EndReason, has_trained, read_journal, spent_seconds
from cramming.model.export import file_hashes, save_pretrained
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.model.stock import FAMILIES, stock_family
from cramming.progress import say
from cramming.record import Status, is_run, load_metrics, load_record, write_record_section
from cramming.train_state import ResumeWithLessError, TrainState

MAX_DATA_WAIT_SHARE = 0.01  # of the seconds charged; above it a warning is printed


def finish(state: TrainState, reason: EndReason, problem: UserError | None = None) -> None:
    """Export the model and complete the record. `problem`: why there is none, of a run whose training diverged."""
    assert state.clock and state.metrics
    work, objective = state.work, state.config.objective
    if reason == "finished":
        take_average(state)
    validation = validate_fully(state) if reason == "finished" and work.steps else None
    status: Status = (
        "diverged" if problem else "interrupted" if reason != "finished" else "exhausted"
    )
    if validation:
        loss: float = validation.get("replaced_token_loss", validation["loss"])
        status = "finished" if math.isfinite(loss) else "diverged"
    final = export(state) if status == "finished" else None
    state.metrics.close()
    state.data.note_changed_files(state.folder, again=True)
    budget = state.clock.summary()
    section = {
        "status": status,
        **state.setup(),
        **work_of(state, budget),
        **state.clock.energy(),
        "validation": validation,
        "final_sha256": final and final["model.safetensors"],
        "final_files": final,
    }
    write_record_section(state.folder, pretrain=section)
    warn_of_data_wait(state, section["data_wait_share"])
    if status == "exhausted":
        raise UserError(no_step_left(state))
    if status == "diverged":
        raise problem or UserError(
            f"{state.folder}: the validation loss is not finite after {work.steps} steps, {work.skipped_steps} of them"
            " skipped: the training diverged and no model was written; lower optim.lr, or set precision=fp32"
        )
    if validation:
        family = stock_family(state.config.model)
        stock = family and (
            FAMILIES[family].encoder if objective.replaces_tokens else FAMILIES[family].architecture
        )
        form = f"transformers' {stock}" if stock else "this suite's own, for `cramming glue`"
        say(
            f"{state.folder}: {work.steps} steps, {work.tokens / 1e6:.1f}M tokens in {budget['spent_seconds']:.1f} s"
            f", {objective.validation_name} {loss:.3f}; model in {state.folder / 'final'} (format: {form})"
        )


def take_average(state: TrainState) -> None:
    """Let the mean of the weights along the way be the final ones, if the run makes one."""
    if average := state.engine.average:
        average.take()
        mean, none = (
            f"the mean of {average.count} along the way",
            "the last ones, as no step began from its start on",
        )
        say(
            f"{state.folder}: the final weights are {mean if average.count else none} (train.average)"
        )


def validate_fully(state: TrainState) -> dict[str, Any]:
    """The record's `pretrain.validation`: `loss` and `accuracy` of the pinned form, `all_mask_loss` and
    `all_mask_accuracy` with every target hidden behind [MASK] (nats per target both), which compare with other
    objectives, `bits_per_byte` of the latter, with other vocabularies, and over how many `targets` of `tokens`.

    Of a run that tells replaced tokens these are None but for the numbers of tokens: `replaced_token_loss` (nats per
    token) and `replaced_token_accuracy` are there instead. The log's last row has the same."""
    further: dict[str, Any] = dict.fromkeys(("all_mask_loss", "all_mask_accuracy", "bits_per_byte"))
    if not state.config.objective.replaces_tokens:
        loss, accuracy, _ = state.engine.evaluate(
            state.data.held_out.batches(ALL_MASK, state.config.train.rows)
        )
        bits = bits_per_byte(loss, state.data.validation_corpus.manifest)
        further = {"all_mask_loss": loss, "all_mask_accuracy": accuracy, "bits_per_byte": bits}
        said = "" if bits is None else f", {bits:.3f} bits per byte"
        say(f"all targets behind [MASK]: validation loss {loss:.3f}, accuracy {accuracy:.3f}{said}")
    return {**state.validate(1.0, further), "tokens": len(state.data.held_out.ids_N)}


def export(state: TrainState) -> dict[str, str]:
    """Write the model folder `final`; the SHA-256 of its files. Of an encoder without a masked-LM head it is alone."""
    model, corpus = state.engine.model, state.data.corpus
    assert isinstance(model, PretrainedModel)
    model = model if isinstance(model, MaskedLM) else model.encoder
    special = {f"{name}_token": token for name, token in corpus.manifest.tokenizer.special.items()}
    save_pretrained(model, state.folder / "final", corpus.tokenizer_file, special)
    return file_hashes(state.folder / "final")


def work_of(state: TrainState, budget: dict[str, Any]) -> dict[str, Any]:
    """Of the record's section `pretrain`, what was done in the budget (the clock's summary) and how fast.

    All but the peak of memory and the seconds of compiling is about the whole run, not its last process; speed and
    shares are of all the seconds charged.
    """
    work, device = state.work, state.engine.device
    last_row: dict[str, Any] = next(
        (row for row in reversed(load_metrics(state.folder)) if "loss" in row), {}
    )
    peak_tflops, seconds = devices.describe(device).peak_tflops, budget["spent_seconds"]
    peak_flops = (
        peak_tflops * 1e12 * load_record(state.folder)["pretrain"]["devices"]
        if peak_tflops
        else None
    )
    return {
        "budget": budget,
        "steps": work.steps,
        "tokens": work.tokens,
        "sequences": work.sequences,
        "exaflops": work.flops / 1e18,
        "corpus_epochs": work.sequences / state.data.source.num_windows,
        "train_loss": last_row.get("loss"),
        "tokens_per_second": work.tokens / seconds if seconds else None,
        "data_wait_share": work.data_wait_seconds / seconds if seconds else None,
        "model_flops_utilization": work.flops / seconds / peak_flops
        if peak_flops and seconds
        else None,
        "recompilations": work.recompilations,
        "compile_seconds": devices.compile_seconds(),
        "peak_memory_bytes": devices.peak_memory_bytes(device),
        "skipped_steps": work.skipped_steps,
    }


def warn_of_data_wait(state: TrainState, share: float | None) -> None:
    """Say so if training waited for its batches for more than a hundredth of the time charged."""
    if share is not None and share > MAX_DATA_WAIT_SHARE:
        say(
            f"warning: {state.folder}: training waited for batches for {share:.1%} of its time. Put the corpus on a"
            " faster disk, or use a machine with more memory or idle cores."
        )


def no_step_left(state: TrainState) -> str:
    """Why a run ended without a step, and what to do."""
    events = read_journal(state.folder / JOURNAL)
    if has_trained(events):
        return (
            f"{state.folder}: the budget ended and no step is left: there were steps, but no checkpoint to go back or"
            " on from; begin under another name, with checkpoint.every_minutes well below the budget"
        )
    why = f"budget: not one step of train.batch_size={state.config.train.batch_size} fits into it"
    if state.clock and state.clock.config.unit == "hours":
        counted = (
            ", counting of start=cooccurrence included"
            if state.config.start.name == "cooccurrence"
            else ""
        )
        why += f" ({spent_seconds(events):.1f} s had passed by then{counted})"
    return f"{why}; raise the budget"


def out_of_memory(state: TrainState) -> UserError:
    """What to do about training that ran out of memory; a micro-batch that `auto` chose is made smaller on record."""
    rows, engine = state.config.train.rows, state.engine
    fewer = max(
        (n for n in range(1, rows // 2 + 1) if rows % n == 0), default=0
    )  # fits where `rows` do, in a ramp too
    begins = f"train.micro_batch={rows}: {engine.device} ran out of memory in training"
    if not fewer:
        return UserError(
            f"{begins}; use memory.checkpoint_every=1 or a smaller model (`cramming plan` shows what each needs)"
        )
    found = (
        load_record(state.folder)["pretrain"].get("micro_batch_found")
        if is_run(state.folder)
        else None
    )
    if found:
        found = f"{found}; {rows} did not fit in training"
        write_record_section(
            state.folder, pretrain={"micro_batch": fewer, "micro_batch_found": found}
        )
        return ResumeWithLessError(
            f"{begins}, though auto had found it to fit; go on with resume=true, which takes {fewer}"
        )
    again = " under another name, or go on with resume=true if something else had the memory"
    return UserError(
        f"{begins}; set train.micro_batch={fewer}" + (again if state.work.steps else "")
    )
