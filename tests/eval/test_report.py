"""`cramming report` over folders of runs: whole, damaged, unfinished, foreign ones; and what may be ranked."""

import csv
import os
import re
import shutil
import statistics
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.record import RECORD, load_record
from cramming.record_schema import Record
from cramming.runlog import RUN_LOG, head_of, read_log
from eval.report import submission
from eval.report.facts import facts_of
from eval.report.leaderboard import Board, board_of
from eval.report.main import main
from eval.report.references import REFERENCES
from eval.report.table import Row, rows_of
from eval.rules import load
from eval.rules.load import load_run, load_runs
from tests.eval.runs import add_measures, score_run, write_external, write_run

REPORT: dict[str, Any] = {
    "out": None,
    "each_run": True,
    "duels": Path("no duels"),
    "repository": None,
}
GOLDEN = Path(__file__).parent / "golden"
HASH = re.compile(r"\b[0-9a-f]{12,64}\b")


def _report(runs: Path, **settings: Any) -> Path:
    main(runs=runs, **REPORT | settings)
    return Path(settings.get("out") or runs / "report")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two full runs of different recipes, of which the second scored higher."""
    write_run(tmp_path / "runs" / "low", learning_rate=1e-3, scores={"pretrained": 0.6})
    write_run(tmp_path / "runs" / "high", scores={"pretrained": 0.7, "random": 0.5})
    return tmp_path / "runs"


def _page(runs: Path, name: str) -> str:
    """Return a run's own report."""
    _report(runs)
    return (runs / name / "report" / "report.md").read_text(encoding="utf-8")


def _csv(runs: Path, **settings: Any) -> list[dict[str, str]]:
    out = _report(runs, each_run=False, **settings)
    with (out / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_runs_without_scores_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "a", scores={})
    assert {row["kind"] for row in _csv(tmp_path)} == {"published"}
    assert "no scores" in _page(tmp_path, "a")


def _board(runs: Path, suite: str = "glue") -> Board:
    loaded = load_runs(runs)
    return board_of([row for row in rows_of(loaded) if row.suite == suite], loaded, {})


def _groups(runs: Path) -> dict[str, list[str]]:
    """Return the models of each group of the GLUE table, from top to bottom."""
    groups = _board(runs).frame.groupby("group", sort=False)
    return {title.split(",")[0].split(":")[0]: list(group["model"]) for title, group in groups}


def _trained(runs: Path, name: str) -> Row:
    rows = [row for row in rows_of(load_runs(runs)) if not row.is_baseline]
    return next(row for row in rows if row.run.folder.name == name)


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["leaderboard.md", "leaderboard.tex", "report.md"])
def test_pages_are_as_before(tmp_path: Path, name: str) -> None:
    """Snapshot of the pages; after a change on purpose run with UPDATE_GOLDEN=1 and read the difference."""
    folder = tmp_path / "runs"
    every = {"pretrained": 0.7, "random": 0.5, "floor": 0.55, "constant": 0.3}
    for seed in (0, 1):
        scores = every | {"pretrained": 0.7 + 0.003 * seed}
        write_run(folder / f"best-{seed}", seed=seed, scores=scores)  # type: ignore[arg-type]
    write_run(folder / "open", division="open", learning_rate=0.1, scores={"pretrained": 0.8})
    add_measures(folder / "best-1")
    score_run(folder / "open", values=0.6, hyperparameters={"freeze": True})
    two = {"pretrained": {name: [0.7, 0.71, 0.72] for name in ("cola", "sst2")}}
    write_run(folder / "two tasks", learning_rate=0.2, scores=two)  # type: ignore[arg-type]
    write_run(folder / "running", learning_rate=0.3, ended=None)
    out = _report(folder)
    path = folder / "best-1" / "report" / name if name == "report.md" else out / name
    text = HASH.sub("<hash>", path.read_text(encoding="utf-8"))
    for rules in (
        "## Reference",
        "<details><summary>Rules",
    ):  # the page of rules has a test of its own
        text = text.partition(rules)[0]
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_what_is_derived_may_be_removed_and_comes_back_byte_for_byte(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By several processes too."""
    out = _report(runs)
    assert capsys.readouterr().out.strip().splitlines()[-1] == f"report: {out / 'leaderboard.html'}"
    first = _contents(runs)
    expected = {f"report/leaderboard.{kind}" for kind in ("md", "html", "csv", "tex")}
    expected |= {f"high/report/report.{kind}" for kind in ("md", "html")}
    assert {*expected, f"high/{RECORD}"} <= first.keys()
    assert not [name for name in first if name.endswith(".tmp")]
    shutil.rmtree(runs / "report")
    shutil.rmtree(runs / "high" / "report")
    (runs / "high" / RECORD).unlink()
    (runs / "low" / RECORD).write_text("{}")
    monkeypatch.setattr(load, "BYTES_PER_PROCESS", 1)
    _report(runs)
    assert _contents(runs) == first


def test_a_report_can_be_rebuilt_from_a_copied_run_folder(runs: Path, tmp_path: Path) -> None:
    first = _page(runs, "high")
    ignored = shutil.ignore_patterns("report", RECORD)
    shutil.copytree(runs / "high", tmp_path / "copies" / "high", ignore=ignored)
    assert _page(tmp_path / "copies", "high") == first


def test_a_page_names_both_ends_of_the_log(runs: Path) -> None:
    entries = read_log(runs / "high" / RUN_LOG)
    page = _page(runs, "high")
    assert entries[-1].sha256 in page and str(head_of(runs / "high" / RUN_LOG)) in page


def test_rows_are_ranked_by_average_with_references_beneath(runs: Path) -> None:
    assert list(_groups(runs)) == ["Closed division", "Baselines", "Published results"]
    assert _groups(runs)["Closed division"] == ["high", "low"]
    assert list(_board(runs).frame["place"])[:2] == ["1", "2"]


@pytest.mark.parametrize("steps", [10, 103, 250])
@pytest.mark.parametrize("unit", ["hours", "exaflops", "tokens", "steps"])
def test_a_plain_run_of_any_length_is_of_the_closed_division(
    tmp_path: Path, unit: Any, steps: int
) -> None:
    """Its checkpoint may come at any time between two heartbeats."""
    run = load_run(write_run(tmp_path / "a", unit=unit, steps=steps))
    assert run.problem is None and run.verdict.division == "closed", run.verdict.broken


@pytest.mark.parametrize("copy", [shutil.copytree, lambda folder, other: other.symlink_to(folder)])
def test_the_same_run_twice_has_one_rank_and_is_named(runs: Path, copy: Any) -> None:
    copy(runs / "high", runs / "other")
    rows = [row for row in rows_of(load_runs(runs)) if not row.is_baseline]
    assert [(row.run.label, row.ranked) for row in rows] == [
        ("high (high)", True),
        ("high (other)", False),
        ("low", True),
    ]
    assert rows[0].same_weights == ["high (other)"]
    assert all(row.verdict.division == "closed" for row in rows)


@pytest.mark.parametrize(
    ("minutes", "change", "division"),
    [
        (5, {}, "open"),
        (15, {}, "closed"),  # chose nothing for what was before it
        (5, {"model_sha256": "0" * 64}, "closed"),
    ],
)
def test_settings_that_were_tried_on_the_same_weights_under_another_name_count(
    runs: Path, minutes: int, change: dict[str, Any], division: str
) -> None:
    """The report sees both; a scoring that was stopped is enough."""
    write_run(runs / "probe", weights="high", scores={})
    time = {"time": f"2030-01-01T00:{minutes:02d}:00+00:00"}
    score_run(
        runs / "probe",
        hyperparameters={"epochs": 3},
        fine_tunings=20,
        change={"scoring": {**time, **change}, "finetuned": time},
    )
    verdict = _trained(runs, "high").verdict
    assert verdict.division == division
    assert [finding.rule for finding in verdict.broken] == (["R17"] if division == "open" else [])


def test_csv_has_the_exact_numbers_and_settings_say_where_it_goes(
    runs: Path, tmp_path: Path
) -> None:
    rows = _csv(runs, out=tmp_path / "site")
    assert not (runs / "report").exists() and not (runs / "high" / "report").exists()
    assert not (runs / "high" / RECORD).exists()
    high = next(row for row in rows if row["run"] == "high" and row["init"] == "pretrained")
    record = load_record(runs / "high")
    section, training = record["glue"]["pretrained"], record["pretrain"]
    assert float(high["avg9"]) == pytest.approx(section["averages"]["avg9"]["value"], rel=1e-6)
    assert float(high["rte"]) == pytest.approx(section["tasks"]["rte"]["score"], rel=1e-6)
    assert float(high["exaflops"]) == pytest.approx(training["exaflops"], rel=1e-6)
    assert high["division"] == "closed" and high["seeds"] == "0 1 2"


def test_csv_has_the_published_rows_with_their_sources(runs: Path) -> None:
    rows = _csv(runs)
    assert {row["kind"] for row in rows} == {"run", "published"}
    published = {row["run"]: row for row in rows if row["kind"] == "published"}
    assert list(published) == [reference.title for reference in REFERENCES]
    for reference in REFERENCES:
        row = published[reference.title]
        assert row["source"] == reference.source and float(row["avg9"]) == reference.avg9
        for entry, score in reference.scores.items():
            assert float(row[entry]) == score


def test_words_of_a_log_are_one_line_of_latex(runs: Path) -> None:
    write_run(runs / "low", name="RTX\n\n100% & more")
    text = (_report(runs) / "leaderboard.tex").read_text(encoding="utf-8")
    assert r"& RTX 100\% \& more &" in text
    for part in text.split(r"\midrule")[1:]:
        lines = part.partition(r"\bottomrule")[0].strip().splitlines()
        assert all(line.endswith(r"\\") for line in lines)


def _cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda path: path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1')),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":1')),
        lambda path: path.write_bytes(b"\xff\xfe\n"),
        lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
        lambda path: path.write_bytes(b""),
    ],
)
def test_a_damaged_log_is_listed_and_hides_no_other(
    runs: Path, damage: Callable[[Path], object]
) -> None:
    write_run(runs / "bad")
    damage(runs / "bad" / RUN_LOG)
    (runs / "notes").mkdir()
    text = (_report(runs) / "leaderboard.md").read_text(encoding="utf-8")
    problems = text.partition("## Not readable")[2].partition("##")[0]
    assert f"- bad: {runs / 'bad' / RUN_LOG}" in problems and "notes" not in problems
    assert not (runs / "bad" / "report").exists()
    assert _groups(runs)["Closed division"] == ["high", "low"]


def test_values_that_no_run_writes_are_named(runs: Path) -> None:
    write_run(runs / "bad", change={"setup": {"environment": {"cpu_count": "two"}}})
    problems = {run.folder.name: run.problem for run in load_runs(runs) if run.problem}
    assert list(problems) == ["bad"] and "environment.cpu_count" in str(problems["bad"])


def test_a_run_that_can_only_be_read_gets_no_report_of_its_own(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_access = os.access
    monkeypatch.setattr(  # root may everything
        os, "access", lambda path, mode: path != runs / "low" and may_access(path, mode)
    )
    _report(runs, out=tmp_path / "site")
    assert {path.name for path in (runs / "low").iterdir()} == {RUN_LOG, "final", "predictions"}
    assert "low: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"ended": None}, "running"),
        ({"ended": "stopped"}, "interrupted"),
        ({"ended": "diverged"}, "diverged"),
        ({"steps": 0}, "exhausted"),
        ({"scores": {}}, ""),
    ],
)
def test_a_run_that_is_not_finished_is_shown_but_not_ranked(
    runs: Path, facts: dict[str, Any], status: str
) -> None:
    write_run(runs / "young", **facts)
    badge = ", ".join(filter(None, ("not scored", status)))
    assert _page(runs, "young").startswith(f"# young [{badge}]")
    text = (runs / "report" / "leaderboard.md").read_text(encoding="utf-8")
    assert f"| young | {status or 'finished'} |" in text
    assert len(_board(runs).ranked) == 2


def test_a_scoring_that_is_not_finished_takes_the_rank(runs: Path) -> None:
    score_run(runs / "high", hyperparameters={"epochs": 3}, fine_tunings=2)
    row = _trained(runs, "high")
    assert row.verdict.division == "unfinished" and not row.ranked
    assert "27 not fine-tuned" in _page(runs, "high")
    assert _groups(runs)["Closed division"] == ["low"]


def test_the_forms_of_the_validation_are_facts(runs: Path) -> None:
    """A loss on another text names that text: it compares with no other."""
    other = {"validation": {"manifest_sha256": "0123456789abcdef" * 4}}
    write_run(runs / "low", loss=7.25, change={"setup": {"corpus": other}})
    rows = {(row["run"], row["init"]): row for row in _csv(runs)}
    high, low = rows["high", "pretrained"], rows["low", "pretrained"]
    assert (high["validation_loss"], high["all_mask_loss"]) == ("7.5", "7.75")
    assert (low["validation_loss"], low["validation_corpus_sha256"][:4]) == ("7.25", "0123")
    assert high["validation_corpus_sha256"] == ""


def test_what_a_sweep_chose_has_no_rank_and_says_so_in_its_row(runs: Path) -> None:
    write_run(runs / "high", scores={})
    for place in range(6):
        score_run(
            runs / "high",
            values=0.7 + place / 100,
            hyperparameters={"learning_rate": 1e-5 * (1 + place)},
            change={"scoring": {"sweep": ["pretrained"]}},
        )
    frame = _board(runs).frame.set_index("model")
    assert "best of 6 sets of hyperparameters" in frame.loc["high", "detail"]
    assert _groups(runs)["Closed division"] == ["low"]


def test_subsets_and_missing_tasks_are_marked_and_have_no_rank(runs: Path) -> None:
    tasks = load_record(runs / "high")["glue"]["pretrained"]["tasks"]
    values = {name: [0.7, 0.71, 0.72] for name in tasks if name != "qqp"}
    subset = {"scoring": {"entries": {"qnli": {"train_examples": 13459, "subset": True}}}}
    write_run(runs / "high", scores={"pretrained": values}, change=subset)
    assert "13,459 of 104,743" in _page(runs, "high")
    groups = _groups(runs)
    assert groups["Closed division"] == ["low"] and groups["Not ranked"] == ["high"]
    high = _trained(runs, "high")
    assert high.cell("qnli").mark == "†" and high.cell("avg9").value is None
    assert high.cell("scored_mean")[::2] == (pytest.approx(71.0, abs=0.1), "‡")
    write_run(runs / "low", change=subset)
    low = _trained(runs, "low")
    assert not low.ranked and low.cell("avg9").mark == "†"


def test_a_chosen_subset_of_tasks_has_its_own_columns_only(tmp_path: Path) -> None:
    for name, base in (("low", 0.6), ("high", 0.7)):
        scores: Any = {
            "pretrained": {task: [base] * 3 for task in ("cola", "sst2")},
            "floor": {task: [0.5] * 3 for task in ("cola", "sst2")},
        }
        write_run(tmp_path / name, learning_rate=base, scores=scores)
    board = _board(tmp_path)
    assert board.columns == ["place", "model", "gain", "scored_mean", "sst2", "cola", "division"]
    assert list(board.frame["model"])[:3] == ["high", "low", "bag of words"]
    assert board.headline.startswith("high: task mean‡ 70.0‡, +20.0 points over bag of words")


@pytest.mark.parametrize(
    ("facts", "group"),
    [
        ({"division": "open"}, "Open division"),
        ({"change": {"setup": {"environment": {"git": {"dirty": True}}}}}, "Open division"),
        ({"change": {"setup": {"training": {"parameters": 7}}}}, "Not ranked"),
    ],
)
def test_only_the_closed_division_is_ranked(runs: Path, facts: dict[str, Any], group: str) -> None:
    write_run(runs / "high", scores={"pretrained": 0.7}, **facts)
    groups = _groups(runs)
    assert list(groups) == ["Closed division", group, "Published results"]
    assert groups["Closed division"] == ["low"] and groups[group] == ["high"]


def test_a_downloaded_model_has_no_rank_whatever_it_scores(runs: Path) -> None:
    write_external(runs / "bert")
    assert _trained(runs, "bert").verdict.division == "open"
    assert _groups(runs)["Closed division"] == ["high", "low"]


@pytest.mark.parametrize(("words", "gain"), [(0.695, 0.5), (0.8, -10.0)])
def test_the_gain_is_over_the_best_row_without_pretraining(
    runs: Path, words: float, gain: float
) -> None:
    """It is not over random weights where a bag of words has nearly all that the model has."""
    write_run(runs / "high", scores={"pretrained": 0.7, "random": 0.5, "floor": words})
    best = _trained(runs, "high").gain
    assert best is not None
    assert (best.baseline.init, best.entries) == ("bag of words", 9)
    assert best.points == pytest.approx(gain, abs=0.1)


def test_facts_name_the_corpus_that_was_read(tmp_path: Path) -> None:
    """If the corpus is set by its folder, the settings of text and tokenizer were not read."""
    corpus = {
        "vocab_size": 199,
        "tokenizer": {"kind": "bpe"},
        "sources": [{"kind": "text"}, {"kind": "tokenizer"}],
    }
    change = {"setup": {"corpus": corpus, "training": {"objective": "causal, then mlm"}}}
    write_run(tmp_path / "a", change=change)
    change["start"] = {"recipe": {"data": {"corpus": "corpora/a"}}}
    write_run(tmp_path / "b", change=change)
    first, second = (facts_of(run.record) for run in load_runs(tmp_path))
    assert first["data"] == "embedded" and second["data"] == "text"
    assert (first["tokenizer"], first["vocab_size"]) == ("bpe", 199)
    assert (first["objective"], first["masking_rate"]) == ("causal, then mlm", 0.25)
    assert not any(facts_of(Record()).values())


def test_baselines_are_one_group_once_each_below_the_ranked_rows(runs: Path) -> None:
    """A baseline with the best average of all is there too; one that two runs share names both."""
    for name, base in (("low", 0.6), ("high", 0.7)):
        scores: Any = {"pretrained": base, "random": 0.5, "floor": 0.8, "constant": 0.1}
        write_run(runs / name, scores=scores, learning_rate=base)
    names = ["bag of words", "random initialisation", "constant class"]
    assert _groups(runs)["Baselines"] == names
    detail = _board(runs).frame.set_index("model").loc["bag of words", "detail"]
    assert detail == "of high, low"


def test_averages_carry_the_spread_of_each_seeds_average(runs: Path) -> None:
    tasks = load_record(runs / "high")["glue"]["pretrained"]["tasks"]
    values: dict[str, list[float | None]] = {name: [0.70, 0.71, 0.75] for name in tasks}
    write_run(runs / "high", scores={"pretrained": values})
    row = _trained(runs, "high")
    assert row.scores_by_seed("avg9") == pytest.approx([70, 71, 75], abs=0.1)
    assert row.cell("avg9").spread == statistics.stdev(row.scores_by_seed("avg9"))
    write_run(runs / "high", scores={"pretrained": {**values, "rte": [0.7, None, 0.7]}})
    assert _trained(runs, "high").scores_by_seed("avg9") == []


def test_csv_cells_that_a_spreadsheet_would_run_are_defused(tmp_path: Path) -> None:
    names = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1+1", "-5", "plain"]
    for place, name in enumerate(names):
        write_run(tmp_path / str(place), name=name, learning_rate=0.1 + place)
    cells = {cell for row in _csv(tmp_path) for cell in row.values()}
    assert not [cell for cell in cells if cell.strip(" ")[:1] in ("=", "+", "@", "\t")]
    assert {cell for cell in cells if cell.startswith("-")} == {"-5"}
    assert {"'=1+1", "' =1+1", "plain"} <= cells


def test_demo_tasks_have_a_table_of_their_own(runs: Path) -> None:
    write_run(runs / "small", suite="embedded")
    assert list(_board(runs, "embedded").frame["division"]) == ["closed", "baseline"]
    assert "small" not in set(_board(runs).frame["model"])


@pytest.mark.parametrize(
    "scores", [("pretrained", "floor", "random"), ("floor", "random"), ("floor",)]
)
def test_a_page_says_whose_the_scores_are(runs: Path, scores: tuple[str, ...]) -> None:
    titles = {
        "pretrained": "Pretrained",
        "floor": "Bag of words",
        "random": "Random initialisation",
    }
    write_run(runs / "high", scores=dict.fromkeys(scores, 0.5))  # type: ignore[arg-type]
    first, *others = (titles[name] for name in scores)
    columns = [first, *(f"{name} | Difference" for name in others)]
    assert f"| Task | {' | '.join(columns)} | Metric |" in _page(runs, "high")


def test_user_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for settings, word in (
        ({"runs": tmp_path / "none"}, "none: no run inside"),
        ({"runs": tmp_path / "empty"}, "empty: no run inside"),
        ({"runs": tmp_path, "out": tmp_path / "file"}, "--out="),
        ({"runs": tmp_path, "repository": "me"}, "--repository=me"),
    ):
        with pytest.raises(UserError, match=word) as caught:
            main(**REPORT | settings)
        assert "\n" not in str(caught.value)


def test_submission_is_written_when_complete_and_explained_when_not(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = runs / "high" / "report" / "submission.zip"
    assert "CoLA.tsv, SST-2.tsv" in _page(runs, "high") and not archive.exists()
    predictions = dict.fromkeys(submission.FILES, np.zeros(10))
    monkeypatch.setattr(submission, "collect", lambda *_: (predictions, {}))
    assert "report/submission.zip" in _page(runs, "high")
    assert len(zipfile.ZipFile(archive).namelist()) == 11
