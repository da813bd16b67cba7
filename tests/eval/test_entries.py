"""Entries by recipe, their tracks, and the places that pretraining seeds leave them."""

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from eval.duel.duel_log import Configuration, Decision, DuelLog, SideTerms, Terms
from eval.recipe import BESIDE, SECTIONS, compared, recipe_of
from eval.report.entries import sort_tracks, track_for, verdicts_of
from eval.report.leaderboard import Board, board_of
from eval.report.ranking import RankedEntry, adjust_holm, interval, p_values
from eval.report.table import rows_of
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


def _board(runs: Path) -> Board:
    loaded = load_runs(runs)
    return board_of(rows_of(loaded), loaded, verdicts_of(DuelLog(runs / "duels")))


def _ranked(runs: Path) -> list[RankedEntry]:
    return _board(runs).ranked


def _groups(runs: Path) -> dict[str, list[str]]:
    frame = _board(runs).frame
    measured = frame[frame["division"] != "published"]
    return {title: list(group["model"]) for title, group in measured.groupby("group", sort=False)}


def _on(device: str) -> dict[str, Any]:
    return {"change": {"setup": {"environment": {"device": {"name": device}}}}}


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
    new, old, older = ranked = _ranked(tmp_path)
    assert [each.entry.label for each in ranked] == list(scores)
    assert [each.places for each in ranked] == ["1", "2–3", "2–3"]
    runs = new.entry.scores
    assert new.entry.cell("avg9")[:2] == pytest.approx(
        (statistics.fmean(runs), statistics.stdev(runs))
    )
    assert interval(runs) == pytest.approx(
        stats.t.interval(0.95, 2, new.entry.main, stats.sem(runs))
    )
    pairs = p_values([each.entry.scores for each in ranked])[[0, 0, 1], [1, 2, 2]]
    assert [old.p, older.p] == pytest.approx(adjust_holm(pairs)[::2])
    assert new.p is None and old.needed is None and older.needed is not None
    assert not any(each.entry.remarks for each in ranked)


def test_an_entrys_name_is_its_runs_whoever_else_has_theirs(write: Write, tmp_path: Path) -> None:
    """A copy of one of them makes its label longer, not its name; of runs named by number nothing would be left."""
    for seed, base in enumerate((0.7, 0.706, 0.703)):
        write(f"a_{seed}", base, 0, seed)
        write(str(seed), base - 0.1, 1, seed)
    shutil.copytree(tmp_path / "a_1", tmp_path / "other-a_1")
    assert [each.entry.label for each in _ranked(tmp_path)] == ["a", "1"]


def test_single_runs_share_places_within_the_noise_of_fine_tuning(
    write: Write, tmp_path: Path
) -> None:
    for name, base in (("a", 0.7), ("b", 0.699), ("c", 0.65), ("d", 0.65)):
        write(name, base, recipe=ord(name))
    assert [each.places for each in _ranked(tmp_path)] == ["1–2", "1–2", "3–4", "3–4"]
    write("a1", 0.702, recipe=ord("a"), seed=1)
    assert [each.entry.confirmed for each in _ranked(tmp_path)] == [True, False, False, False]


@pytest.mark.parametrize(("seeds", "places"), [("medians", ["1–2", "1–2"]), ("means", ["1", "2"])])
def test_seeds_whose_means_have_another_order_than_the_medians_tell_nothing_apart(
    write: Write, tmp_path: Path, seeds: str, places: list[str]
) -> None:
    """Each seed of the first fails on another task, which medians of the tasks do not see."""
    names = (
        "mnli_matched",
        "mnli_mismatched",
        "qqp",
        "qnli",
        "sst2",
        "cola",
        "stsb",
        "mrpc",
        "rte",
    )
    better: dict[str, list[float]] = {name: [0.81, 0.81, 0.811] for name in names}
    if seeds == "medians":
        for place, name in enumerate(names):
            better[name][place % 3] = 0.3
    write("a", 0.0, scores={"pretrained": better})
    write("b", 0.0, 1, scores={"pretrained": {name: [0.8, 0.8, 0.801] for name in names}})
    assert [each.places for each in _ranked(tmp_path)] == places


def test_what_could_be_a_selection_is_said(write: Write, tmp_path: Path) -> None:
    write("a-1", 0.7, seed=1)
    write("a-4", 0.7, seed=4)
    write("a-diverged", 0.0, ended="diverged")
    write("a-finished", 0.0, scores={})
    commit = {"environment": {"git": {"commit": "f" * 20}}}
    write("other", 0.6, recipe=1, change={"setup": commit, "scoring": commit})
    write("other1", 0.6, recipe=1, seed=1)
    chosen, other = _ranked(tmp_path)
    assert chosen.entry.remarks == [
        "pretraining seeds 1, 4, not 0 to 1",
        "not counted of the same recipe: a-diverged (diverged), a-finished (not scored)",
    ]
    assert other.entry.remarks == ["code of 2 commits"]


def test_runs_compete_within_their_track(write: Write, tmp_path: Path) -> None:
    write("cpu", 0.6)
    for name, device in (("a6000", "NVIDIA RTX A6000"), ("a6000-too", "RTX A6000")):
        write(name, 0.7, ord(device[0]), **_on(device))
    assert [len(models) for models in _groups(tmp_path).values()] == [2, 1]
    assert [each.places for each in _ranked(tmp_path)] == ["1–2", "1–2", "1"]


def test_tracks_of_equal_work_know_no_device() -> None:
    day = track_for("hours", 24, None, "NVIDIA A100-SXM4-80GB")
    work = track_for("exaflops", 13, "wall", "Test CPU")
    minutes = track_for("hours", 0.05, "cpu", "AMD EPYC")
    assert day == track_for("hours", 24, "wall", "A100 80GB")
    assert work == track_for("exaflops", 13, None, None)
    assert [track.title for track in (day, work, minutes)] == [
        "24 hours on A100 80GB",
        "13 exaflops on any device (the day of an RTX A6000)",
        "3 minutes of CPU time on AMD EPYC",
    ]
    assert sort_tracks([None, work, minutes, day]) == [day, minutes, work, None]


def test_another_objective_competes_by_the_same_clock_in_a_table_of_its_own(
    write: Write, tmp_path: Path
) -> None:
    write("masked", 0.6)
    write("electra", 0.7, recipe=1, overrides=["objective=rtd"])
    dirty = {"setup": {"environment": {"git": {"dirty": True}}}}
    write("dirty", 0.8, recipe=2, overrides=["objective=rtd"], change=dirty)
    assert list(_groups(tmp_path).values()) == [["masked"], ["electra", "masked"], ["dirty"]]
    ranked = {each.entry.label: each.entry.first.ranked for each in _ranked(tmp_path)}
    assert ranked == {"masked": True, "electra": False}


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
    assert _ranked(tmp_path)[1].duel == "lost by pinned validation loss"
    decide("e", "undecided")
    decide("f", "loss", "the candidate is diverged with seed 1")
    assert _ranked(tmp_path)[1].duel.split("; ") == [
        "1 of 3 lost by pinned validation loss",
        "1 of 3 undecided by pinned validation loss",
        "1 of 3 won as a run failed",
    ]
    write("old", 0.699, recipe=0, **_on("Other CPU"))
    assert not any(each.duel for each in _ranked(tmp_path))
