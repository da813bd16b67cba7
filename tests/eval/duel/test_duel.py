"""A duel ends when its test says so, is fought once, goes on after a kill, and its log keeps what was lost too."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cramming.budget import limits_of
from cramming.config import UserError
from cramming.files import lock
from cramming.invocation import Invocation
from cramming.overrides import with_implied
from cramming.record import load_metrics
from cramming.runlog import RUN_LOG, Event, Timed, read_log
from eval.duel import ladder, main, sides
from eval.duel.duel_log import Decision, Duel, DuelLog, PairResult, SideResult, SideTerms, Terms
from eval.duel.main import (
    DuelConfig,
    Opponent,
    fight,
    measure_of,
    needs_scores,
    with_comparable_budgets,
)
from eval.duel.sequential_test import RULE
from eval.duel.sides import Side
from tests.eval.runs import write_run

Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> DuelConfig:
    return DuelConfig(
        base="",
        candidate="",
        pairs=5,
        first_look=3,
        error=0.05,
        delta=0.01,
        glue=False,
        keep=False,
        duels=tmp_path / "duels",
        json=False,
    )


HERE = Invocation(device="cpu")


def side_at(folder: Path) -> Side:
    return Side(Invocation(folder.name, folder.parent))


class Fought:
    """Sides that train at once, to losses that are given by folder name; what was trained, in its order."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, losses: Callable[[str], float | None]
    ) -> None:
        self.trained: list[list[str]] = []
        monkeypatch.setattr(
            sides,
            "train",
            lambda pair, cores, title: self.trained.append([s.folder.name for s in pair]),
        )
        monkeypatch.setattr(Side, "result", lambda side: self.result(losses(side.folder.name)))

    @staticmethod
    def result(loss: float | None) -> SideResult:
        if loss is None:
            return SideResult(status="diverged", seconds=8.0)
        curve = [(0.5, loss + 1.0), (1.0, loss)]
        return SideResult(status="finished", loss=loss, curve=curve, seconds=8.0)


CORPORA = {"corpora": ("c0", "c1")}


@pytest.fixture
def begin(config: DuelConfig, compose: Compose) -> Callable[[], tuple[DuelLog, list[Opponent]]]:
    def begun() -> tuple[DuelLog, list[Opponent]]:
        log = DuelLog(config.duels)
        opponents = [
            Opponent([override], compose(override)) for override in ("optim=adamw", "optim=sgd")
        ]
        if "d0" not in log.duels():
            rule = rule_of(config, measure="loss", seed=0)
            main.begin(log, "d0", opponents, ["h0", "h1"], rule, "Test CPU")
        return log, opponents

    return begun


def rule_of(config: DuelConfig, **more: Any) -> dict[str, Any]:
    return {**{name: getattr(config, name) for name in RULE}, **CORPORA, **more}


def against(base: dict[str, Any], candidate: dict[str, Any]) -> list[Opponent]:
    return [Opponent([], base), Opponent([], candidate)]


@pytest.mark.parametrize(
    ("loss", "pairs", "verdict"),
    [
        (
            lambda name: (
                {"base": 5.0, "candidate": 4.5}[name[:-2]] + 0.01 * int(name[-1]) * (name[0] == "c")
            ),
            3,
            "win",
        ),
        (lambda name: 5.0 + (name[0] == "c") * (0.5 + 0.01 * int(name[-1])), 3, "loss"),
        (lambda name: 5.0 + (name[0] == "c") * 0.001 * int(name[-1]), 3, "equivalent"),
        (lambda name: 5.0 + (name[0] == "c") * (-1.0) ** int(name[-1]), 5, "undecided"),
        (lambda name: None if name == "candidate-1" else 5.0, 2, "loss"),
        (lambda name: None if name == "base-0" else 5.0, 1, "void"),
    ],
)
def test_a_duel_ends_as_soon_as_its_test_has_a_verdict(
    begin: Any,
    config: DuelConfig,
    monkeypatch: pytest.MonkeyPatch,
    loss: Any,
    pairs: int,
    verdict: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fought = Fought(monkeypatch, loss)
    log, opponents = begin()
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    duel = log.duels()["d0"]
    assert duel.decision is not None and duel.decision.verdict == verdict
    assert len(duel.pairs) == pairs == len(fought.trained)
    assert (
        fought.trained[:2] == [["base-0", "candidate-0"], ["candidate-1", "base-1"]][:pairs]
    )  # cores change hands
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    assert len(fought.trained) == pairs, "fought once, shown ever after"
    capsys.readouterr()
    ladder.show(log, as_json=False)
    ladder.show(log, as_json=True)
    shown, _, listed = capsys.readouterr().out.rpartition('{"duels"')
    assert verdict in shown and f'"verdict": "{verdict}"' in listed


@pytest.mark.parametrize(
    ("loss", "pairs"),
    [
        (lambda name: 5.0 - (name[0] == "c") * (0.5 + 0.01 * int(name[-1])), 3),
        (
            lambda name: 5.0 + (name[0] == "c") * (-1.0) ** int(name[-1]),
            5,
        ),  # undecided, and no pair is left
        (lambda name: None if name == "candidate-1" else 5.0, 2),
    ],
)
def test_a_kill_between_a_pair_and_its_verdict_costs_neither(
    begin: Any, config: DuelConfig, monkeypatch: pytest.MonkeyPatch, loss: Any, pairs: int
) -> None:
    fought, append = Fought(monkeypatch, loss), DuelLog.append
    log, opponents = begin()

    def killed(self: DuelLog, event: Event) -> None:
        if isinstance(event, Decision):
            raise KeyboardInterrupt
        append(self, event)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DuelLog, "append", killed)
        fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    monkeypatch.setattr(main, "code", lambda: {"commit": "another"})  # no more of it is needed
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    assert len(fought.trained) == pairs and log.duels()["d0"].decision is not None


def test_another_rule_for_the_same_seeds_is_refused(
    begin: Any, compose: Compose, config: DuelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fought(monkeypatch, lambda name: 5.0 - (name[0] == "c") * (0.5 + 0.01 * int(name[-1])))
    log, opponents = begin()
    rule = rule_of(config, measure="loss", seed=2)
    main.begin(log, "d1", opponents, ["h0", "h1"], rule, "Test CPU")
    fight(log, "d1", [0, 1], opponents, config, HERE, seed=2)
    first, second = (side.settings for side in opponents)
    spelt = compose("optim=adamw", "train.log_every=7")  # the same to whoever trains by it
    for sides_of, corpora_of in (
        ([first, second], ["c0", "c1"]),
        ([spelt, second], ["c0", "c1"]),
        ([second, spelt], ["c1", "c0"]),
    ):
        with pytest.raises(UserError, match=r"duel d1 with seeds 2 to 4.* seed=5"):
            main.check_seeds(log, sides_of, corpora_of, "Test CPU", range(4, 9))
    main.check_seeds(log, [first, second], ["c0", "c1"], "Test CPU", range(5, 10))
    main.check_seeds(log, [first, second], ["c0", "c1"], "another", range(9))
    main.check_seeds(log, [first, second], ["c0", "c2"], "Test CPU", range(9))
    for other in (compose("optim=sgd", "optim.lr=0.5"), compose("optim=sgd", "budget.minutes=9")):
        main.check_seeds(log, [first, other], ["c0", "c1"], "Test CPU", range(9))


def test_the_log_keeps_every_duel_with_both_configurations_and_the_ladder_shows_it(
    begin: Any,
    config: DuelConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Fought(monkeypatch, lambda name: 5.0 - (name[0] == "c") * (0.5 + 0.01 * int(name[-1])))
    log, opponents = begin()
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    assert log.configurations()["h1"]["optim"]["name"] == "sgd"
    capsys.readouterr()
    ladder.show(log, as_json=False)
    shown = capsys.readouterr().out
    assert "optim=sgd  optim=adamw" in shown and "win" in shown and "0.05 false verdicts" in shown
    assert "<svg" in (config.duels / "ladder.svg").read_text()
    (pair, *_) = ladder.seconds_and_losses(log.duels()["d0"])
    assert pair.base == [(4.0, 6.0), (8.0, 5.0)] and pair.candidate[-1] == (8.0, 4.5)
    assert "<svg" in (config.duels / "d0" / "curves.svg").read_text()
    ladder.show(log, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["error_spent"] == 0.05 and report["duels"][0]["verdict"] == "win"
    assert report["duels"][0]["reaches_base_at"] == pytest.approx(
        0.755, abs=0.01
    )  # 0.5 + half of 0.51 below, of 1.0


def test_a_log_of_duels_that_was_altered_is_refused(
    begin: Any, config: DuelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fought(monkeypatch, lambda name: 5.0 - (name[0] == "c") * (0.5 + 0.01 * int(name[-1])))
    log, opponents = begin()
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    content = log.path.read_bytes()
    lines = content.splitlines(keepends=True)
    for altered in (
        content.replace(b'"loss":5.0', b'"loss":4.0', 1),
        b"".join([*lines[:2], *lines[3:]]),
    ):
        log.path.write_bytes(altered)
        with pytest.raises(UserError, match=r"duels\.jsonl:\d+: "):
            log.duels()


def test_a_side_that_is_left_over_trains_beside_the_other_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = [side_at(tmp_path / "base-0"), side_at(tmp_path / "candidate-0")]
    monkeypatch.setattr(Side, "has_trained", lambda side: side.folder.name == "base-0")
    trained = []

    def run(verb: str, at_once: list[Side], cores: list[int], title: str) -> None:
        trained.append([side.folder.name for side in at_once])
        for side in at_once:
            side.folder.mkdir()

    monkeypatch.setattr(sides, "_run", run)
    sides.train(pair, [0, 1], "a duel")
    assert trained == [["base-0-again", "candidate-0"]]
    assert [path.name for path in tmp_path.iterdir()] == ["candidate-0"]


def test_other_code_does_not_go_on_with_a_duel(
    begin: Any, config: DuelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fought(monkeypatch, lambda name: 5.0)
    log, opponents = begin()
    monkeypatch.setattr(
        main, "code", lambda: {"commit": "another", "dirty": False, "diff_sha256": None}
    )
    with pytest.raises(UserError, match=r"duel d0: .*code"):
        fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    assert log.duels()["d0"].starts == 0


def test_the_progress_of_a_long_run_is_known_at_once(tmp_path: Path) -> None:
    each = {"each_progress": [0.1] * 100, "each_loss": [2.0] * 100}
    rows = [
        {"event": "steps", "step": step, "progress": step / 10_000, **each}
        for step in range(1, 9001)
    ]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (tmp_path / RUN_LOG).write_text("\n".join([*lines, '{"event":"steps","step":9001,"progr']))
    began = time.perf_counter()
    assert {side_at(tmp_path).progress() for _ in range(10)} == {0.9}
    assert time.perf_counter() - began < 0.2


def test_the_progress_of_a_run_is_that_of_its_last_row(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", ended=None)
    assert side_at(run).progress() == pytest.approx(load_metrics(run)[-1]["progress"])


def test_the_result_of_a_side_is_what_its_record_says(tmp_path: Path) -> None:
    result = side_at(write_run(tmp_path / "a")).result()
    assert (result.status, result.loss, result.steps) == ("finished", 7.5, 100)
    assert result.curve[-1] == (1.0, 7.5) and result.scores and result.score is not None
    lost = side_at(write_run(tmp_path / "b", ended="diverged")).result()
    assert (lost.status, lost.loss, lost.scores) == ("diverged", None, None)


def terms(base: Sequence[str] = (), candidate: Sequence[str] = ()) -> Terms:
    return Terms(
        id="d0",
        base=SideTerms(hash="h0", overrides=list(base)),
        candidate=SideTerms(hash="h1", overrides=list(candidate)),
        pairs=3,
        error=0.05,
        delta=0.01,
        first_look=3,
        measure="loss",
        seed=0,
        corpora=("c0", "c1"),
        device="Test CPU",
        clock="wall",
        budgets=({"hours": 1.0}, {"hours": 1.0}),
        code={},
    )


def test_scores_are_compared_over_the_tasks_that_all_runs_have() -> None:
    base, candidate = (
        SideResult(status="finished", scores=scores)
        for scores in ({"rte": 50.0, "cola": 10.0}, {"rte": 54.0, "cola": None})
    )
    pair = PairResult(id="d0", seed=0, turned=False, code={}, base=base, candidate=candidate)
    assert Duel(terms(), [pair]).score_differences() == [4.0]


def test_scores_decide_where_a_side_has_no_masked_lm_loss(
    compose: Compose, config: DuelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlm, rtd = compose(), compose("objective=rtd")
    assert not needs_scores(against(mlm, mlm), glue=False)
    assert needs_scores(against(mlm, rtd), glue=True)
    with pytest.raises(UserError, match="Add --glue"):
        needs_scores(against(rtd, mlm), glue=False)
    other = compose("objective=rtd", "eval.hyperparameters.epochs=2")
    with pytest.raises(UserError, match="fine-tuned with different settings"):
        needs_scores(against(mlm, other), glue=True)
    monkeypatch.setattr(sides, "train", lambda *_: None)
    score = {"base-0": 60.0, "base-1": 61.0, "base-2": 60.5}
    monkeypatch.setattr(
        Side,
        "result",
        lambda side: SideResult(status="finished", score=score.get(side.folder.name, 65.0)),
    )
    log = DuelLog(config.duels)
    judged = rule_of(config, measure="score", seed=0)
    opponents = [Opponent(["a=1"], mlm), Opponent(["objective=rtd"], rtd)]
    main.begin(log, "d0", opponents, ["h0", "h1"], judged, "Test CPU")
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    duel = log.duels()["d0"]
    assert ladder.summary(duel)["verdict"] == "win" and ladder.summary(duel)["higher_is_better"]
    assert ladder.summary(duel)["mean"] == pytest.approx(4.5, abs=0.5)
    assert ladder.reaches_base_at(duel) is None
    ladder.show(log, as_json=False)


def test_a_candidate_that_changes_nothing_is_undecided_for_good_and_has_no_interval(
    begin: Any, config: DuelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fought(monkeypatch, lambda name: 5.0 + int(name[-1]))
    log, opponents = begin()
    fight(log, "d0", [0, 1], opponents, config, HERE, seed=0)
    decision = log.duels()["d0"].decision
    assert decision is not None and decision.verdict == "undecided"
    assert (decision.mean, decision.low, decision.high) == (0.0, None, None)


@pytest.mark.parametrize(
    ("base", "candidate", "labels"),
    [
        (["a=1", "budget.minutes=8"], ["a=2", "budget.minutes=4"], ("a=2", "a=1")),
        (
            ["a=1", "budget.minutes=8"],
            ["a=1", "budget.minutes=4"],
            ("budget.minutes=4", "budget.minutes=8"),
        ),
        (
            ["budget.hours=null", "budget.minutes=8"],
            ["budget.minutes=4"],
            ("budget.minutes=4", "budget.minutes=8"),
        ),
        (["a=1"], ["a=1", "b=2"], ("b=2", "the same without it")),
        (["a=1", "b=2"], ["a=1"], ("without what the base sets", "b=2")),
    ],
)
def test_a_label_is_what_one_side_has_alone(
    base: list[str], candidate: list[str], labels: tuple[str, str]
) -> None:
    duel = Duel(terms(base, candidate))
    assert (ladder.label(duel), ladder.base_label(duel)) == labels


def test_both_sides_need_the_same_text_and_one_budget(
    compose: Compose, make_corpus: Any, tmp_path: Path
) -> None:
    first, second = make_corpus(tmp_path / "a"), make_corpus(tmp_path / "b", seed=1)
    base, other = compose(f"data.corpus={first}"), compose(f"data.corpus={second}")
    assert measure_of([base, base], [first, first]) == "loss"
    with pytest.raises(UserError, match="validated on different text"):
        measure_of([base, other], [first, second])
    theirs = compose(f"data.corpus={second}", f"train.validation_corpus={first}")
    assert measure_of([base, theirs], [first, second]) == "loss"
    third = make_corpus(tmp_path / "c", spelling="<pad>")
    assert measure_of([base, compose(f"data.corpus={third}")], [first, third]) == "bits_per_byte"
    less, more = compose("budget.minutes=1"), compose("budget.minutes=2")
    timed = with_comparable_budgets(against(more, less), [0, 1])
    assert [side.settings["budget"]["clock"] for side in timed] == ["cpu", "cpu"]
    for candidate, says in (
        (more, "budget.hours="),
        (compose("budget.steps=5"), "budget.hours="),
        (compose("budget.minutes=1", "train.validations=0"), "train.validations: 4 and 0"),
    ):
        with pytest.raises(UserError, match=says):
            with_comparable_budgets(against(less, candidate), [])


def test_a_sides_budget_replaces_the_shared_one_in_whichever_unit() -> None:
    shared = with_implied(["budget.minutes=1", "budget.clock=cpu"])
    for text, limits in (
        ("", {"hours": 1 / 60}),
        ("budget.minutes=0.5", {"hours": 0.5 / 60}),
        ("budget.hours=0.001", {"hours": 0.001}),
        ("+budget.steps=20", {"steps": 20}),
    ):
        budget = main._opponent("candidate", shared, text).settings["budget"]
        assert limits_of(budget) == limits and budget["clock"] == "cpu"


def test_a_run_that_is_no_side_decides_nothing(
    compose: Compose, config: DuelConfig, tmp_path: Path
) -> None:
    """One of the default name, whose model could not be scored."""
    (tmp_path / "runs" / "default" / "final").mkdir(parents=True)
    side = compose("model=tiny", "eval=embedded")
    here = Invocation(runs=tmp_path / "runs", device="cpu")
    main.check_sides(against(side, side), dataclasses.replace(config, glue=True), here)


def test_of_a_side_only_checkpoints_and_weights_are_removed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "base-0")
    (run / "checkpoints").mkdir()
    before = {path.name for path in run.iterdir()}
    result = side_at(run).result()
    side_at(run).drop_weights()
    assert before - {path.name for path in run.iterdir()} == {"checkpoints", "final"}
    assert side_at(run).result() == result


@pytest.fixture
def duel(
    tiny_overrides: list[str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `cramming duel`; what is left of its runs at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cramming", "duel", *words]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_after_kill_9_the_sides_train_on_and_the_duel_goes_on(
    duel: Callable[..., subprocess.Popen[str]], tiny_overrides: list[str], tmp_path: Path
) -> None:
    words = [
        *("--base", "", "--candidate", "optim.lr=1e-3 model.qk_norm=true"),
        *("--pairs", "3", "--device", "cpu"),
        *tiny_overrides,
        "budget.steps=80",
    ]
    first = duel(*words)
    wait_for(lambda: len(list(tmp_path.glob(f"duels/*/*-0/{RUN_LOG}"))) == 2, first)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    killed = time.time()
    out, err = duel(*words, "--json").communicate(timeout=120)
    report = json.loads(out)
    assert report["pairs_fought"] == 3 and report["clock"] == "cpu", err
    logs = [read_log(path) for path in tmp_path.glob(f"duels/*/*-0/{RUN_LOG}")]
    walls = [[e.event.wall for e in log if isinstance(e.event, Timed)] for log in logs]
    assert len(walls) == 2 and max(each[0] for each in walls) < killed
    assert max(each[-1] for each in walls) > killed, "ended after, not begun again"
    assert not list(tmp_path.glob("duels/*/*/final")), "weights are no result"
    with lock(tmp_path / "duels", "fighting another duel"):
        repeated, err = duel(*words, "--json").communicate(timeout=60)
    assert repeated and json.loads(repeated) == report, err
    longer = duel(*words, "--pairs", "4")
    assert "with seeds 0 to 2" in longer.communicate(timeout=60)[1] and longer.returncode


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0
) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--base", ""], "--candidate"),
        (["--base", "", "--candidate", ""], "the base has the same settings"),
        (["--base", "", "--candidate", "optim.lr=1e-3 seed=4"], "seed=4 is for the whole duel"),
        (["--base", "", "--candidate", "no.such=1"], "--candidate: "),
        (["--base", "optim.lr='1", "--candidate", ""], "No closing quotation"),
        (["--base", "", "--candidate", "seed=1", "--pairs", "60"], "--pairs"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    from cramming import cli

    monkeypatch.setattr(sys, "argv", ["cramming", "duel", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and says in error
