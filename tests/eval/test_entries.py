"""Entries by recipe, their tracks, and the places that pretraining seeds leave them."""

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from eval.duel.duel_log import Configuration, Decision, DuelLog, SideTerms, Terms
from eval.recipe import BESIDE, SECTIONS, compared, recipe_of
from eval.report.entries import RankedEntry, _apart_by_fine_tuning, verdicts_of
from eval.report.leaderboard import Board, board_of
from eval.report.leaderboard_csv import PLACE_COLUMNS
from eval.report.noise import adjusted, p_values
from eval.report.ranking import rows_of
from eval.report.tracks import Track, in_order, track_for
from eval.rules.load import load_run, load_runs
from tests.eval.runs import CORPUS_SHA256, write_external, write_run

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(name, base, recipe, seed, ...)`: a run whose scores are around `base`."""

    def run(name: str, base: float, recipe: int = 0, seed: int = 0, **facts: Any) -> Path:
        facts = {"scores": {"pretrained": base}, **facts}
        return write_run(tmp_path / name, seed=seed, learning_rate=1e-3 * (1 + recipe), **facts)

    return run


def _board(runs: Path, duels: Path | None = None) -> Board:
    found = load_runs(runs)
    verdicts = verdicts_of(DuelLog(duels or runs / "duels"))
    return board_of(rows_of(found), found, verdicts, None)


def _on(device: str) -> dict[str, Any]:
    return {"change": {"setup": {"environment": {"device": {"name": device}}}}}


def _ranked_entries(runs: Path) -> list[RankedEntry]:
    return _board(runs).ranked_entries


def test_a_recipe_is_its_settings_and_its_corpus(write: Write, tmp_path: Path) -> None:
    """Seed, name, budget, device and the place of the corpus are no part of it."""
    record = load_run(write("a", 0.7)).record
    first = recipe_of(record)
    assert first is not None
    for section in SECTIONS:
        changed = {section: {**record.config, "new": 2} if section == "train" else {"new": 2}}
        config = {**record.config, **changed, "seed": 7, "name": "other"}
        other = recipe_of(record.model_copy(update={"config": config}))
        assert (other == first) == (section in BESIDE)
    corpus = record.corpus.model_copy(update={"manifest_sha256": "0" * 64})
    assert recipe_of(record.model_copy(update={"corpus": corpus})) != first
    assert recipe_of(load_run(write_external(tmp_path / "bert")).record) is None


def test_an_entry_is_the_mean_of_its_seeds_with_their_noise(write: Write, tmp_path: Path) -> None:
    scores = {
        "new": [0.70, 0.706, 0.703],
        "old": [0.65, 0.652, 0.648],
        "older": [0.645, 0.649, 0.648],
    }
    for recipe, (name, bases) in enumerate(scores.items()):
        for seed, base in enumerate(bases):
            write(f"{name}-seed{seed}", base, recipe, seed)
    new, old, older = _ranked_entries(tmp_path)
    assert [one.entry.label for one in (new, old, older)] == list(scores)
    assert [one.places for one in (new, old, older)] == ["1", "2–3", "2–3"]
    runs = [row.main for row in new.entry.rows]
    assert new.entry.main == pytest.approx(statistics.fmean(runs))  # type: ignore[type-var]
    assert new.entry.spread == pytest.approx(statistics.stdev(runs))  # type: ignore[type-var]
    assert new.entry.bounds == pytest.approx(
        stats.t.interval(0.95, 2, new.entry.main, stats.sem(runs))
    )
    pairs = p_values([one.entry.scores for one in (new, old, older)])[[0, 0, 1], [1, 2, 2]]
    assert [old.p, older.p] == pytest.approx(adjusted(pairs)[::2])
    assert new.p is None and old.needed is None and older.needed is not None
    assert not any(one.entry.remarks for one in (new, old, older))


def test_an_entrys_name_is_its_runs_whoever_else_has_theirs(write: Write, tmp_path: Path) -> None:
    """A copy of one of them makes its label longer, not its name; of runs named by number nothing would be left."""
    for seed, base in enumerate((0.7, 0.706, 0.703)):
        write(f"a_{seed}", base, 0, seed)
        write(str(seed), base - 0.1, 1, seed)
    shutil.copytree(tmp_path / "a_1", tmp_path / "other-a_1")
    assert [one.entry.label for one in _ranked_entries(tmp_path)] == ["a", "1"]


def test_single_runs_look_as_simple_as_they_are(write: Write, tmp_path: Path) -> None:
    """One that stands among recipes with several seeds is unconfirmed, and has their spread to be told apart by."""
    for name, base in (("a", 0.7), ("b", 0.699), ("c", 0.65), ("d", 0.65)):
        write(name, base, recipe=ord(name))
    board = _board(tmp_path)
    assert board.noise_columns == [] and [one.places for one in board.ranked_entries] == [
        "1–2",
        "1–2",
        "3–4",
        "3–4",
    ]
    write("a1", 0.702, recipe=ord("a"), seed=1)
    write("a2", 0.701, recipe=ord("a"), seed=2)
    board = _board(tmp_path)
    rows = board.groups[0].rows
    assert board.ranked_entries[0].entry.confirmed and len(board.noise_columns) == 3
    assert {len(row) for group in board.groups for row in group.rows} == {len(board.columns)}
    assert [row[5].small for row in rows] == ["", *["unconfirmed"] * 3]


def test_what_could_be_a_selection_is_said(write: Write, tmp_path: Path) -> None:
    write("a-1", 0.7, seed=1)
    write("a-4", 0.7, seed=4)
    write("a-diverged", 0.0, ended="diverged")
    write("a-interrupted", 0.0, ended="stopped")
    write("a-finished", 0.0, scores={})
    commit = {"environment": {"git": {"commit": "f" * 20}}}
    write("other", 0.6, recipe=1, change={"setup": commit, "scoring": commit})
    write("other1", 0.6, recipe=1, seed=1)
    chosen, other = _ranked_entries(tmp_path)
    assert chosen.entry.remarks == [
        "pretraining seeds 1, 4, not 0 to 1",
        "not counted of the same recipe: a-diverged (diverged), a-finished (not scored), a-interrupted (interrupted)",
    ]
    assert other.entry.remarks == ["code of 2 commits"]


def test_runs_compete_within_their_track(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("cpu", 0.6)
    for name, device in (("a6000", "NVIDIA RTX A6000"), ("a6000-too", "RTX A6000")):
        write(name, 0.7, ord(device[0]), **_on(device))
    board = _board(tmp_path)
    titles = [group.title for group in board.groups if group.rows]
    assert titles == ["Closed division, 1 min on RTX A6000", "Closed division, 1 min on Test CPU"]
    assert [one.places for one in board.ranked_entries] == ["1–2", "1–2", "1"]
    monkeypatch.setattr(
        Track, "title", "1 min"
    )  # as of two limits that are the same to three digits
    assert [len(group.rows) for group in _board(tmp_path).groups if group.rows] == [2, 1]


def test_seeds_whose_means_have_another_order_than_the_medians_tell_nothing_apart() -> None:
    """Each seed of the first fails on another task, which medians of the tasks do not see."""
    better = [80.1, 79.9, 80.0, 80.0, 80.0]
    for worse, told in (
        ([79.0, 78.9, 79.3, 78.6, 79.1], False),
        ([81.0, 81.1, 80.9, 81.2, 81.0], True),
    ):
        found: Any = [
            SimpleNamespace(main=main, fine_tunings=seeds)
            for main, seeds in ((80.5, worse), (80.0, better))
        ]
        assert _apart_by_fine_tuning(found)[0, 1] == told


def test_tracks_of_equal_work_know_no_device() -> None:
    day, work = (
        track_for("hours", 24, None, "NVIDIA A100-SXM4-80GB"),
        track_for("exaflops", 13, "wall", "Test CPU"),
    )
    assert day == track_for("hours", 24, "wall", "A100 80GB") and day.title == "24 h on A100 80GB"
    assert work == track_for("exaflops", 13, None, None)
    assert work.title == "13 exaFLOPs on any device (the day of an RTX A6000)"
    minutes = track_for("hours", 0.05, "cpu", "AMD EPYC")
    assert minutes.title == "3 min of CPU time on AMD EPYC"
    assert in_order([None, work, minutes, day]) == [day, minutes, work, None]


def test_another_objective_competes_by_the_same_clock_in_a_table_of_its_own(
    write: Write, tmp_path: Path
) -> None:
    write("masked", 0.6)
    write("electra", 0.7, recipe=1, overrides=["objective=rtd"])
    dirty = {"setup": {"environment": {"git": {"dirty": True}}}}
    write("dirty", 0.8, recipe=2, overrides=["objective=rtd"], change=dirty)
    board = _board(tmp_path)
    found = {
        group.title: [row[1].text for row in group.rows] for group in board.groups if group.rows
    }
    track = "1 min on Test CPU"
    assert list(found.values())[:2] == [["masked"], ["electra", "masked"]]
    assert list(found)[:2] == [f"Closed division, {track}", f"Any objective, same clock, {track}"]
    assert found["Open division, not ranked"] == ["dirty"]
    tables = {one.entry.label: PLACE_COLUMNS["table"](one) for one in board.ranked_entries}
    assert tables == {"masked": "closed", "electra": "any objective"}


def test_the_verdict_of_a_duel_stands_beside_the_recipes_that_fought(
    write: Write, tmp_path: Path
) -> None:
    write("new", 0.7, recipe=1)
    write("new1", 0.702, recipe=1, seed=1)
    write("old", 0.699, recipe=0)
    log = DuelLog(tmp_path / "duels")
    for name in ("old", "new"):
        settings = load_run(tmp_path / name).record.config
        log.append(Configuration(hash=name, settings=compared(settings)))

    def decide(name: str, verdict: str, why: str | None = None) -> None:
        terms = Terms(
            id=name,
            base=SideTerms(hash="old", overrides=[]),
            candidate=SideTerms(hash="new", overrides=[]),
            pairs=4,
            error=0.05,
            delta=0.01,
            first_look=3,
            measure="loss",
            seed=0,
            corpora=(CORPUS_SHA256, CORPUS_SHA256),
            device="Test CPU",
            clock="wall",
            budgets=({"hours": 1 / 60}, {"hours": 1 / 60}),
            code={},
        )
        log.append(terms)
        log.append(Decision(id=name, verdict=verdict, why=why))  # type: ignore[arg-type]

    decide("d", "win")
    board = _board(tmp_path)
    assert board.ranked_entries[1].duel == "lost by pinned validation loss"
    assert board.groups[0].rows[1][7].text == "lost by pinned validation loss"
    decide("e", "undecided")
    decide("f", "loss", "the candidate is diverged with seed 1")
    assert _ranked_entries(tmp_path)[1].duel == (
        "1 of 3 lost by pinned validation loss; 1 of 3 undecided by pinned validation loss;"
        " 1 of 3 won as a run of the other failed"
    )
    write("old", 0.699, recipe=0, **_on("Other CPU"))
    assert not any(one.duel for one in _ranked_entries(tmp_path))
