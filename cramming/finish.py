"""How a run ends: the last validation, the exported model and the last events. Off the clock, and on rank 0 alone."""

from typing import Any

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import ALL_MASK
from cramming.model.export import file_hashes, save_pretrained
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.model.stock import families, stock_family
from cramming.progress import say
from cramming.run import Run
from cramming.runlog import EndReason, Exported, MicroBatch, Validation
from cramming.train_parts import finite_or_none

MAX_DATA_WAIT_SHARE = 0.01  # of the seconds charged; above it a warning is printed


class ResumeWithLessError(UserError):
    """The log now has a smaller micro-batch, with which a resume continues."""

    keeps_run = True


def finish(run: Run, reason: EndReason, problem: UserError | None = None) -> None:
    """Validate, export and log the final model. `problem`: why there is none, of a run whose training diverged."""
    if problem is not None:
        raise problem
    if reason != "finished":
        return
    if not run.clock.work.steps:
        raise UserError(no_step_left(run))
    warn_of_data_wait(run)
    finish_hooks(run)
    validation = validate_fully(run)
    loss = validation.loss if validation.loss is not None else validation.replaced_token_loss
    run.checkpointer.note_changed_files(is_last=True)
    if loss is None:
        raise UserError(
            f"{run.folder}: the validation loss is not finite after {run.clock.work.steps} steps,"
            f" {run.clock.work.skipped_steps} of them skipped: the training diverged and no model was written."
            " Lower optim.lr, or set precision=fp32."
        )
    compiled = run.config.runtime.compile != "off" or devices.compiled_graphs() > 0
    exported = Exported(
        files=export(run),
        compiled=compiled,
        compile_seconds=devices.compile_seconds(),
        peak_memory_bytes=devices.peak_memory_bytes(run.engine.device),
    )
    run.logger.append(exported)
    _announce_end(run, loss)
    from cramming.plateau import plateau_line  # of no use before the end

    if line := plateau_line(run.data.held_out.ids_N, validation.all_mask_loss, run.folder):
        say(line)


def _announce_end(run: Run, loss: float) -> None:
    """Say what was done, and in which format the model lies where."""
    work, objective = run.clock.work, run.config.objective
    family = stock_family(run.config.model)
    form = "this suite's own, for `cramming glue`"
    if family:
        names = families()[family]
        form = f"transformers' {names.architecture if objective.has_masked_lm else names.encoder}"
    say(
        f"{run.folder}: {work.steps} steps, {work.tokens / 1e6:.1f}M tokens in"
        f" {work.last_step_seconds:.1f} s, {objective.validation_name} {loss:.3f};"
        f" model in {run.folder / 'final'} (format: {form})"
    )


def finish_hooks(run: Run) -> None:
    """Let hooks change the final weights, such as to their mean along the way."""
    for hook in run.engine.hooks:
        if line := hook.finish():
            say(f"{run.folder}: {line}")


def validate_fully(run: Run) -> Validation:
    """Log and return the validation of the final weights.

    Beside the pinned form it has loss and accuracy with every target behind [MASK], by which objectives compare; a run
    that detects replaced tokens has no such head.
    """
    more: dict[str, Any] = {"held_out_tokens": len(run.data.held_out.ids_N)}
    if run.config.objective.has_masked_lm:
        batches = run.data.held_out.batches(ALL_MASK, run.config.train.rows)
        loss, accuracy, _ = run.engine.evaluate(batches)
        more |= {
            "all_mask_loss": finite_or_none(loss),
            "all_mask_accuracy": finite_or_none(accuracy),
        }
        say(f"all targets behind [MASK]: validation loss {loss:.3f}, accuracy {accuracy:.3f}")
    validation = run.validator.validate(1.0, more)
    assert validation is not None
    return validation


def export(run: Run) -> dict[str, str]:
    """Write the model folder `final`; the SHA-256 of its files. Of an encoder without a masked-LM head it is alone."""
    model, corpus = run.engine.model, run.data.corpus
    assert isinstance(model, PretrainedModel)
    model = model if isinstance(model, MaskedLM) else model.encoder
    special = {f"{name}_token": token for name, token in corpus.manifest.tokenizer.special.items()}
    save_pretrained(model, run.folder / "final", corpus.tokenizer_file, special)
    return file_hashes(run.folder / "final")


def warn_of_data_wait(run: Run) -> None:
    """Say so if training waited for its batches for more than a hundredth of the time charged."""
    work = run.clock.work
    share = work.data_wait_seconds / work.last_step_seconds if work.last_step_seconds else 0.0
    if share > MAX_DATA_WAIT_SHARE:
        say(
            f"warning: {run.folder}: training waited for batches for {share:.1%} of its time. Put the corpus on a"
            " faster disk, or use a machine with more memory or idle cores."
        )


def no_step_left(run: Run) -> str:
    """Return why a run ended without a step, and what to do."""
    budget = run.clock.budget
    assert budget
    if budget.has_trained:
        return (
            f"{run.folder}: the budget ended and no step is left: there was no checkpoint to roll back to or to"
            " resume from. Begin under another name, with checkpoint.every_minutes well below the budget."
        )
    why = f"budget: not one step of train.batch_size={run.config.train.batch_size} fits into it"
    if budget.config.unit == "hours":
        counted = ""
        if run.config.start.name == "cooccurrence":
            counted = ", counting of start=cooccurrence included"
        why += f" ({budget.elapsed_seconds():.1f} s had passed by then{counted})"
    return f"{why}. Raise the budget."


def out_of_memory(run: Run) -> UserError:
    """Return what to do about training that ran out of memory; a micro-batch chosen by `auto` is made smaller."""
    rows, engine = run.config.train.rows, run.engine
    begins = f"train.micro_batch={rows}: {engine.device} ran out of memory in training"
    # Divisors fit where `rows` do, in a ramp too.
    divisors = [n for n in range(1, rows // 2 + 1) if rows % n == 0]
    if not divisors:
        return UserError(
            f"{begins}. Use memory.checkpoint_every=1 or a smaller model (`cramming plan` shows what each needs)."
        )
    fewer = max(divisors)
    if run.has_auto_micro_batch:
        if run.logger.log:
            how = f"auto; {rows} did not fit in training"
            run.logger.append(MicroBatch(sequences=fewer, how=how))
        return ResumeWithLessError(
            f"{begins}, though auto had found it to fit. Resume with --resume, which takes {fewer}."
        )
    other = ""
    if run.clock.work.steps:
        other = " under another name, or resume with --resume if something else had the memory"
    return UserError(f"{begins}. Set train.micro_batch={fewer}{other}.")
