"""A replay finds the honest run's numbers again, bit for bit, and no forger's."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import replay, train_state
from cramming.checkpoint import read
from cramming.config import UserError, file_sha256
from cramming.engine import Engine
from cramming.journal import Journal, read_lines
from cramming.record import load_metrics, load_record
from cramming.recorded import RecordedRun, Segment
from cramming.repetition import Replay
from cramming.train_state import TrainState
from tests.conftest import before_step

Start = Callable[..., Path]
Compose = Callable[..., dict[str, Any]]
KEPT = [
    "budget.steps=8",
    "checkpoint.keep_at=[0,0.25,0.5,0.75]",
    "train.log_every=3",
    "train.validation_tokens=128",
]
EVERYTHING = ["replay.segments=all", "replay.steps=all", "replay.json=true"]


@pytest.fixture
def again(compose: Compose, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """`again(run)`: the problems that a replay finds, of all that it compares; of everything, unless told otherwise."""

    def call(run: Path, *overrides: str) -> list[str]:
        capsys.readouterr()
        code = 0
        try:
            replay.main(compose("device=cpu", f"replay.run={run}", *EVERYTHING, *overrides))
        except SystemExit as ended:
            code = int(str(ended.code))
        found = json.loads(capsys.readouterr().out)
        problems = [
            f"{one['what']}: {problem}" for one in found["outcomes"] for problem in one["problems"]
        ]
        assert code == bool(problems)
        return problems

    return call


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original, calls = Engine.update, [0]

    def update(self: Engine, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    monkeypatch.setattr(Engine, "update", update)


RAMP = ["schedule=triangle", "train.batch_ramp={start: 0.5, until: 0.8}"]
PHASES = "objective.phases=[{at: 0.2, rate: 0.15, causal: true}, {at: 0.7, rate: 0.05}]"
BY_LOSS = [
    "objective=mlm-by-loss",
    "objective.by_loss.power=100",
    "train.average={start: 0.3, every: 0.1}",
]


@pytest.mark.parametrize(
    "settings",
    [
        [*RAMP, PHASES, "model.dropout=0.2", "train.packing=documents"],
        [*BY_LOSS, "optim=lamb"],
        ["objective=rtd"],
    ],
)
def test_an_honest_run_that_was_stopped_and_resumed_gives_the_same_bits(
    start: Start, again: Callable[..., list[str]], settings: list[str]
) -> None:
    """Stopped within a segment, with all that a checkpoint holds."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        stop_in_step(patch, 5)
        start("name=a", *KEPT, *settings)
    run = start("name=a", "resume=true", *KEPT, *settings)
    assert [saved.steps for saved in RecordedRun.read(run).checkpoints] == [0, 2, 4, 5, 6, 8]
    assert again(run) == []


def test_a_budget_of_time_is_repeated_at_the_progress_of_its_steps(
    start: Start, again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    run = start("name=a", *KEPT, "budget.steps=null", "budget.minutes=0.02", "schedule=triangle")
    recorded = RecordedRun.read(run)
    assert 3 <= len(recorded.segments) <= recorded.last
    assert again(run) == []


def test_a_run_without_kept_checkpoints_is_replayed_from_its_seed(
    unbroken: Path, again: Callable[..., list[str]]
) -> None:
    assert RecordedRun.read(unbroken).segments[0][:3] == (None, 1, 9)
    assert again(unbroken, "replay.steps=4") == []
    assert again(unbroken, "replay.steps=null", "replay.segments=2") == []


def test_what_is_kept_stays_and_changes_no_number(
    start: Start, losses: Callable[[Path], Any]
) -> None:
    kept, plain = (
        start("name=a", *KEPT, "checkpoint.every_steps=1"),
        start("name=b", *KEPT, "checkpoint.keep_at=[]"),
    )
    names = [
        "kept-00000000.pt",
        "kept-00000002.pt",
        "kept-00000004.pt",
        "kept-00000006.pt",
        "step-00000007.pt",
    ]
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == [
        *names,
        "step-00000008.pt",
    ]
    assert (
        load_record(kept)["pretrain"]["final_sha256"]
        == load_record(plain)["pretrain"]["final_sha256"]
    )


def test_a_validation_that_a_crash_threw_away_is_not_held_against_the_run(
    start: Start, unbroken: Path, again: Callable[..., list[str]]
) -> None:
    """At half of the compute, in step 6; crashed in step 8 and resumed from step 4, with three steps' compute lost."""

    def crash() -> None:
        raise KeyboardInterrupt

    compute = f"budget.exaflops={load_record(unbroken)['pretrain']['exaflops']}"
    settings = ["budget.steps=null", compute, "train.log_every=4", "checkpoint.every_steps=4"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before_step(patch, 8, crash)
        start("name=a", *settings)
    run = start("name=a", "resume=true", *settings)
    assert (run / "metrics.jsonl").read_text().count("validation_loss") == 2
    assert list(RecordedRun.read(run).validations) == [RecordedRun.read(run).last] == [9]
    assert again(run) == []


def test_a_signal_ends_a_replay_wherever_it_comes(
    unbroken: Path, again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in its loop alone: nothing is to be saved, so the command line's handlers stay."""
    monkeypatch.setattr(TrainState, "validate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        again(unbroken, "replay.steps=1")


# Forgeries. A forger writes whatever agrees: the log's means, the journal's chain and hashes, the record. -------------


@pytest.fixture(scope="module")
def honest(
    tmp_path_factory: pytest.TempPathFactory, compose: Compose, tiny_overrides: list[str]
) -> Start:
    """`honest(*overrides)`: a run that kept its checkpoints, made once for each set of overrides; read-only."""
    from cramming import pretrain

    runs, made = tmp_path_factory.mktemp("honest"), dict[tuple[str, ...], Path]()

    def call(*overrides: str) -> Path:
        if overrides not in made:
            name = f"run{len(made)}"
            pretrain.main(
                compose(*tiny_overrides, *KEPT, f"runs={runs}", f"name={name}", *overrides)
            )
            made[overrides] = runs / name
        return made[overrides]

    return call


def rewrite_log(run: Path, change: Callable[[int, float], float | None]) -> None:
    """Each step's loss as `change(step, loss)` gives it, and the means with them."""
    rows = load_metrics(run)
    for row in rows:
        if "loss" in row:
            first = row["step"] - len(row["each_loss"]) + 1
            row["each_loss"] = [
                change(step, loss) for step, loss in enumerate(row["each_loss"], first)
            ]
            row["loss"] = sum(row["each_loss"]) / len(row["each_loss"])
    write_log(run, rows)


def write_log(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = [row for row in rows if "loss" in row]
    edit_record(run, lambda record: record["pretrain"].update(train_loss=trained[-1]["loss"]))


def change_rows(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    rows = load_metrics(run)
    for row in rows:
        change(row)
    write_log(run, rows)


def edit_record(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = load_record(run)
    change(record)
    (run / "record.json").write_text(json.dumps(record))


def set_in(run: Path, key: str, value: Any) -> None:
    section, name = key.split(".")
    edit_record(run, lambda record: record["config"][section].update({name: value}))


def reseal(run: Path, change: Callable[[dict[str, Any]], Any] = lambda event: None) -> None:
    """Chain the journal anew, with the hashes that the checkpoints have now."""
    events, journal = list(read_lines(run / "budget.jsonl")), run / "budget.jsonl"
    journal.unlink()
    writer = Journal(journal)
    for event in events:
        change(event)
        for path in (run / "checkpoints").glob(f"*-{event['steps']:08d}.pt"):
            if "sha256" in event:
                event["sha256"] = file_sha256(path)
        del event["previous"]
        writer.write(event)
    writer.close()


def checkpoint_of(run: Path, steps: int) -> Path:
    return next((run / "checkpoints").glob(f"*-{steps:08d}.pt"))


def alter(run: Path, steps: int, change: Callable[[dict[str, Any]], Any]) -> None:
    path = checkpoint_of(run, steps)
    state = read(path)
    change(state)
    torch.save(state, path)
    reseal(run)


def smuggle(run: Path, steps: int, other: Path, from_steps: int) -> None:
    """Weights and optimizer of another run's checkpoint, the counters and random states of this one's."""
    source = read(checkpoint_of(other, from_steps))
    alter(
        run, steps, lambda state: state.update(model=source["model"], optimizer=source["optimizer"])
    )


def copy_steps(run: Path, other: Path, first: int, last: int) -> None:
    source = RecordedRun.read(other).steps
    rewrite_log(run, lambda step, loss: source[step].loss if first <= step <= last else loss)


def blurred(run: Path, *distances: int) -> Callable[[int, float], float]:
    """A step's loss is the mean of those so many steps behind it."""
    at = {step: found.loss or 0.0 for step, found in RecordedRun.read(run).steps.items()}
    return lambda step, _: sum(at[min(8, max(1, step + d))] for d in distances) / len(distances)


def moments(state: dict[str, Any]) -> None:
    for one in state["optimizer"]["state"].values():
        one["exp_avg"] *= 2


def one_weight(state: dict[str, Any]) -> None:
    next(iter(state["model"].values())).view(-1)[3] += 1e-6


def lower_validation(row: dict[str, Any]) -> None:
    if "validation_loss" in row and row["progress"] < 1:
        row["validation_loss"] *= 0.99


def later_progress(row: dict[str, Any]) -> None:
    if "loss" in row:
        row["each_progress"] = [min(1.0, progress + 0.01) for progress in row["each_progress"]]


def twice_the_tokens(run: Path) -> None:
    change_rows(run, lambda row: row.update(tokens=2 * row["tokens"]))
    edit_record(
        run, lambda record: record["pretrain"].update(tokens=2 * record["pretrain"]["tokens"])
    )


def more_steps(run: Path) -> None:
    """The last row as if there had been four steps more."""
    change_rows(run, lambda row: row.update(step=row["step"] + 4) if row["step"] == 8 else None)
    edit_record(run, lambda record: record["pretrain"].update(steps=12))


def no_kept(run: Path, steps: int) -> None:
    checkpoint_of(run, steps).unlink()
    reseal(run, lambda event: event.pop("kept", None) if event["steps"] == steps else None)


def final_of(run: Path, other: Path, steps: int) -> None:
    """The last checkpoint, final/ and the validation of a run that trained longer."""
    smuggle(run, 8, other, steps)
    section = load_record(other)["pretrain"]
    names = ("validation", "final_sha256", "final_files")
    edit_record(
        run, lambda record: record["pretrain"].update({name: section[name] for name in names})
    )
    shutil.rmtree(run / "final")
    shutil.copytree(other / "final", run / "final")


def edit_line(run: Path, number: int, without: str) -> None:
    """Take a text out of a line of the log."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace(without, "", 1)
    path.write_text("".join(lines))


SEED, RATE, LONG = ("seed=1",), ("optim.lr=0.01",), ("budget.steps=24",)
Forge = Callable[[Path, Start], Any]
FORGERIES: dict[str, Forge] = {
    "the curve is one per cent lower": lambda run, other: rewrite_log(
        run, lambda step, loss: 0.99 * loss
    ),
    "the curve is 0.001 nats lower": lambda run, other: rewrite_log(
        run, lambda step, loss: loss - 1e-3
    ),
    "the second half of the curve is lower": lambda run, other: rewrite_log(
        run, lambda s, x: x - 0.1 * (s > 4)
    ),
    "the curve is shifted by a step": lambda run, other: rewrite_log(run, blurred(run, 1)),
    "the curve is smoothed": lambda run, other: rewrite_log(run, blurred(run, -1, 0, 1)),
    "one step is edited": lambda run, other: rewrite_log(
        run, lambda step, loss: loss - 1e-6 * (step == 5)
    ),
    "a row's mean is edited, not its steps": lambda run, other: change_rows(
        run, lambda row: row.update(loss=5.0) if row["step"] == 6 and "loss" in row else None
    ),
    "a segment of another seed": lambda run, other: copy_steps(run, other(*SEED), 3, 4),
    "the log of another learning rate": lambda run, other: copy_steps(run, other(*RATE), 1, 8),
    "gradient norms are lower": lambda run, other: change_rows(
        run, lambda row: row.update(grad_norm=0.9 * row["grad_norm"]) if "loss" in row else None
    ),
    "a validation is lower": lambda run, other: change_rows(run, lower_validation),
    "the last validation is lower": lambda run, other: edit_record(
        run, lambda record: record["pretrain"]["validation"].update(loss=5.0)
    ),
    "each step's progress is later": lambda run, other: change_rows(run, later_progress),
    "a row that is no JSON any more": lambda run, other: edit_line(run, 1, "{"),
    "a row without its step": lambda run, other: edit_line(run, 1, "step"),
    "rows are gone": lambda run, other: write_log(
        run, [row for row in load_metrics(run) if row["step"] > 3]
    ),
    "more steps than there were": lambda run, other: more_steps(run),
    "more tokens than there were": lambda run, other: twice_the_tokens(run),
    "the seed of the configuration": lambda run, other: edit_record(
        run, lambda r: r["config"].update(seed=1)
    ),
    "the batch of the configuration": lambda run, other: set_in(run, "train.batch_size", 4),
    "the sequence length of the configuration": lambda run, other: set_in(
        run, "train.sequence_length", 16
    ),
    "the learning rate of the configuration": lambda run, other: set_in(run, "optim.lr", 2e-3),
    "the schedule of the configuration": lambda run, other: set_in(run, "schedule.decay", 0.9),
    "the share of targets of the configuration": lambda run, other: set_in(
        run, "objective.rate", 0.15
    ),
    "dropout that the configuration does not name": lambda run, other: set_in(
        run, "model.dropout", 0.1
    ),
    "trained weights before the first step": lambda run, other: smuggle(run, 0, run, 8),
    "more steps at a quarter": lambda run, other: smuggle(run, 2, other(*LONG), 18),
    "another learning rate at a half": lambda run, other: smuggle(run, 4, other(*RATE), 4),
    "another seed at three quarters": lambda run, other: smuggle(run, 6, other(*SEED), 6),
    "a checkpoint of another run as it is": lambda run, other: (
        shutil.copy(checkpoint_of(other(*SEED), 4), checkpoint_of(run, 4)),
        reseal(run),
    ),
    "a checkpoint that the journal does not have": lambda run, other: shutil.copy(
        checkpoint_of(other(*SEED), 4), checkpoint_of(run, 4)
    ),
    "one weight of a checkpoint": lambda run, other: alter(run, 4, one_weight),
    "the optimizer's moments of a checkpoint": lambda run, other: alter(run, 6, moments),
    "the counters of a checkpoint": lambda run, other: alter(
        run, 4, lambda state: state["work"].update(sequences=state["work"]["sequences"] + 8)
    ),
    "a kept checkpoint is gone, with its mark in the journal": lambda run, other: no_kept(run, 4),
    "final/ of a run that trained longer": lambda run, other: final_of(run, other(*LONG), 24),
    "final/ without its checkpoint": lambda run, other: edit_record(
        run, lambda record: record["pretrain"].update(final_sha256="00" * 32)
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_run_is_found(
    honest: Start, tmp_path: Path, again: Callable[..., list[str]], forgery: str
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    FORGERIES[forgery](run, honest)
    assert again(run)


@pytest.mark.parametrize("how", ["pretrained", "other data"])
def test_a_run_that_went_on_honestly_from_what_was_smuggled_in_is_found(
    start: Start,
    honest: Start,
    make_corpus: Start,
    tmp_path: Path,
    again: Callable[..., list[str]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the beginning is false, and every file was made by training: pretrained weights at the start; or another
    corpus, which the record does not name."""
    if how == "pretrained":
        trained, original = (
            read(checkpoint_of(honest(*LONG), 24))["model"],
            train_state.start_engine,
        )

        def start_engine(*arguments: Any) -> Any:
            engine, work = original(*arguments)
            engine.model.load_state_dict(trained)
            return engine, work

        with monkeypatch.context() as patch:
            patch.setattr(train_state, "start_engine", start_engine)
            run = start("name=a", *KEPT)
    else:
        run = start("name=a", *KEPT, f"data.corpus={make_corpus(tmp_path / 'other', seed=1)}")
        claimed = load_record(honest())["corpus"]
        edit_record(run, lambda record: record.update(corpus=claimed))
        reseal(
            run,
            lambda event: (
                event.update(corpus=claimed["manifest_sha256"]) if "corpus" in event else None
            ),
        )
    assert any("losses" in problem for problem in again(run))


def test_smuggled_at_a_quarter_and_trained_on_from_there(
    start: Start, honest: Start, again: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Stopped, other weights put into its checkpoints, resumed: the log is that of real training at every step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        stop_in_step(patch, 2)
        start("name=a", *KEPT)
    run = tmp_path / "runs" / "a"
    smuggle(run, 2, honest(*LONG), 18)
    run = start("name=a", "resume=true", *KEPT)
    (problem,) = again(run)
    assert "from the seed" in problem and "kept-00000002.pt" in problem


def test_elsewhere_a_tolerance_is_measured(
    honest: Start, tmp_path: Path, again: Callable[..., list[str]]
) -> None:
    """As on a machine with other threads: what is honest passes, a curve that is one per cent lower does not."""
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    edit_record(run, lambda record: record["environment"].update(threads=7))
    assert again(run) == []
    for more, found in ((1, True), (-1, False)):
        alter(
            run,
            4,
            lambda state, more=more: state["work"].update(tokens=state["work"]["tokens"] + more),
        )
        assert any("work.tokens" in problem for problem in again(run)) == found, (
            "a count has no rounding"
        )
    smuggle(run, 4, honest(*SEED), 4)
    assert any("kept-00000004.pt" in problem for problem in again(run))
    rewrite_log(run, lambda step, loss: 0.99 * loss)
    assert len([problem for problem in again(run) if "losses" in problem]) == 4


@pytest.mark.parametrize("name", ["loss", "all_mask_loss", "bits_per_byte"])
def test_elsewhere_too_each_loss_of_the_last_validation_is_compared(
    honest: Start, tmp_path: Path, compose: Compose, name: str
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    was = load_record(run)["pretrain"]["validation"][name]
    for claimed, problems in ((was, 0), (0.99 * (was or 5.0), 1)):
        edit_record(
            run,
            lambda record, claim={name: claimed}: record["pretrain"]["validation"].update(claim),
        )
        edit_record(run, lambda record: record["environment"].update(threads=7))
        (found,) = Replay.of(RecordedRun.read(run), compose("device=cpu")).end()
        assert found.allowed > 0 and len(found.problems) == problems, found.problems


@pytest.mark.parametrize(
    "where", ["memory.offload_optimizer=false", "memory.offload_optimizer=true"]
)
def test_the_repetitions_that_a_tolerance_is_made_of_differ_in_every_step(
    honest: Start, tmp_path: Path, compose: Compose, where: str
) -> None:
    """Also where the optimizer has copies of the weights."""
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    edit_record(run, lambda record: record["environment"].update(threads=7))
    repeating = replace(
        Replay.of(RecordedRun.read(run), compose("device=cpu", where)), rounding=1e-2
    )
    once, twin = (repeating.repeat(Segment(None, 1, 3, None), number) for number in range(2))
    assert all(a != b for a, b in zip(once.losses, twin.losses, strict=True))


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (
            ["parallel.compression=qsgd"],
            {"pretrain": {"devices": 2}},
            "parallel.compression=qsgd on 2 processes",
        ),
        (["model.dropout=0.2"], {"pretrain": {"devices": 2}}, "dropout on 2 processes"),
        (
            ["model.attention_dropout=0.2"],
            {"environment": {"device": {"kind": "cuda", "name": "H9"}}},
            "dropout by random numbers of H9",
        ),
        (["parallel.compression=qsgd"], {}, ""),
        ([], {"pretrain": {"devices": 2}}, ""),
    ],
)
def test_a_run_with_numbers_that_one_process_here_does_not_have_is_refused_not_called_false(
    honest: Start,
    tmp_path: Path,
    again: Callable[..., list[str]],
    settings: list[str],
    change: Any,
    says: str,
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(*settings), run)
    edit_record(
        run, lambda record: [record[section].update(values) for section, values in change.items()]
    )
    if not says:
        assert again(run) == []
        return
    with pytest.raises(
        UserError, match=f"{says}.* does not repeat, so a replay here cannot judge it"
    ):
        again(run)


def test_random_numbers_are_drawn_as_the_run_drew_them_elsewhere_too(
    honest: Start, tmp_path: Path, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    """How it is computed decides which numbers are drawn: it is the run's own, not this call's."""
    run = tmp_path / "a"
    shutil.copytree(
        honest("model.attention_dropout=0.2", "train.packing=documents", "attention.kernel=padded"),
        run,
    )
    edit_record(run, lambda record: record["environment"].update(threads=7))
    replay.main(compose("device=cpu", f"replay.run={run}", "attention.kernel=sdpa", *EVERYTHING))
    assert "within a measured tolerance" in capsys.readouterr().out


def test_what_is_missing_is_said_in_one_line(
    honest: Start,
    tmp_path: Path,
    compose: Compose,
    make_corpus: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)

    def refused(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            replay.main(compose("device=cpu", f"replay.run={run}", *EVERYTHING, *overrides))
        return str(caught.value)

    assert "not the corpus" in refused(f"data.corpus={make_corpus(tmp_path / 'other', seed=1)}")
    assert "name=b: names no run beside" in refused("name=b")
    assert str(tmp_path / "gone") in refused(f"data.corpus={tmp_path / 'gone'}")
    checkpoint_of(run, 4).unlink()
    with pytest.raises(SystemExit):
        replay.main(compose("device=cpu", f"replay.run={run}", *EVERYTHING))
    assert "no checkpoint of step 4, which the journal has" in capsys.readouterr().out
    change_rows(run, lambda row: row.pop("each_loss", None))
    assert "only newer runs" in refused()
    (run / "metrics.jsonl").unlink()
    assert "no training step" in refused()
    assert "no such record" in refused(f"replay.run={tmp_path}")
