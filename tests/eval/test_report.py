"""`cramming report` over folders of runs: whole, damaged, unfinished, foreign ones; and what may be ranked."""

import csv
import os
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
from eval.report import leaderboard, plots, submission
from eval.report.main import main
from eval.report.ranking import Row, gain_over, rows_of
from eval.report.settings import recipe
from eval.report.wording import DASH
from eval.rules import load
from eval.rules.load import load_runs
from tests.eval.runs import score_run, write_external, write_run

REPORT: dict[str, Any] = {
    "out": None,
    "each_run": True,
    "duels": Path("no duels"),
    "repository": None,
}


@pytest.fixture
def drawn() -> None:
    """Draw the plots; the other tests go without, since that takes most of a report's time."""


@pytest.fixture(autouse=True)
def _no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "training", lambda curves: None)
        monkeypatch.setattr(plots, "scores", lambda bars, title: None)


def _report(runs: Path, **settings: Any) -> Path:
    main(runs=runs, **REPORT | settings)
    return Path(settings.get("out") or runs / "report")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two full runs of different recipes, of which the second scored higher."""
    write_run(tmp_path / "runs" / "low", learning_rate=1e-3, scores={"pretrained": 0.6})
    write_run(tmp_path / "runs" / "high", scores={"pretrained": 0.7, "random": 0.5})
    return tmp_path / "runs"


def _text(runs: Path) -> str:
    return (_report(runs, each_run=False) / "leaderboard.md").read_text(encoding="utf-8")


def _page(runs: Path, name: str) -> str:
    """Return a run's own report."""
    _report(runs)
    return (runs / name / "report" / "report.md").read_text(encoding="utf-8")


def _csv(runs: Path) -> list[dict[str, str]]:
    _text(runs)
    with (runs / "report" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _first_column(text: str) -> list[str]:
    return [
        line.split("|")[2].strip().split("<br>")[0]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def _trained(runs: Path, name: str) -> Row:
    rows = [row for row in rows_of(load_runs(runs)) if not row.baseline]
    return next(row for row in rows if row.run.folder.name == name)


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_writes_everything_and_names_the_page_last(
    runs: Path, drawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _report(runs)
    shown = capsys.readouterr().out
    assert shown.strip().splitlines()[-1] == f"report: {out / 'leaderboard.html'}"
    assert "avg-9" in shown and "high" in shown
    tables = [f"leaderboard.{kind}" for kind in ("md", "html", "csv", "tex")]
    for name in (*tables, "plots/training.svg", "plots/scores-glue.svg"):
        assert (out / name).stat().st_size > 500, name
    for name in ("report.md", "report.html"):
        assert (runs / "high" / "report" / name).stat().st_size > 500, name
    assert not list(runs.rglob("*.tmp"))


def test_what_is_derived_may_be_removed_and_comes_back_byte_for_byte(
    runs: Path, drawn: None
) -> None:
    _report(runs)
    first = _contents(runs)
    assert f"high/{RECORD}" in first
    shutil.rmtree(runs / "report")
    shutil.rmtree(runs / "high" / "report")
    (runs / "high" / RECORD).unlink()
    (runs / "low" / RECORD).write_text("{}")
    _report(runs)
    assert _contents(runs) == first


def test_several_processes_write_the_same_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _report(runs)
    first = _contents(runs)
    shutil.rmtree(runs / "report")
    monkeypatch.setattr(load, "BYTES_PER_PROCESS", 1)
    _report(runs)
    assert _contents(runs) == first


def test_a_report_can_be_rebuilt_from_a_copied_run_folder(runs: Path, tmp_path: Path) -> None:
    first = _page(runs, "high")
    shutil.copytree(
        runs / "high", tmp_path / "copies" / "high", ignore=shutil.ignore_patterns("report", RECORD)
    )
    assert _page(tmp_path / "copies", "high") == first


def test_a_page_names_the_head_of_the_log(runs: Path) -> None:
    entries = read_log(runs / "high" / RUN_LOG)
    page = _page(runs, "high")
    assert entries[-1].sha256 in page and f"{len(entries)} events" in page
    first_line = head_of(runs / "high" / RUN_LOG)
    assert first_line is not None and first_line[:12] in page


def test_rows_are_ranked_by_average_with_references_beneath(runs: Path) -> None:
    text = _text(runs)
    names = _first_column(text[: text.index("## Pretraining")])
    ordered = ("high", "low", "RoBERTa-base", "BERT-base, no pretraining")
    places = [names.index(name) for name in ordered]
    assert places == sorted(places)
    assert "| 1 | high<br>" in text and "| 2 | low<br>" in text


@pytest.mark.parametrize("steps", [10, 103, 250])
@pytest.mark.parametrize("unit", ["hours", "exaflops", "tokens", "steps"])
def test_a_plain_run_of_any_length_is_of_the_closed_division(
    tmp_path: Path, unit: Any, steps: int
) -> None:
    """Its checkpoint may come at any time between two heartbeats."""
    run = load.load_run(write_run(tmp_path / "a", unit=unit, steps=steps))
    assert run.problem is None and run.verdict.division == "closed", run.verdict.broken


@pytest.mark.parametrize("copy", [shutil.copytree, lambda folder, other: other.symlink_to(folder)])
def test_the_same_run_twice_has_one_rank_and_is_named(runs: Path, copy: Any) -> None:
    copy(runs / "high", runs / "other")
    assert "same weights as high (other)" in _text(runs)
    rows = [row for row in rows_of(load_runs(runs)) if not row.baseline]
    assert [(row.run.label, row.ranked) for row in rows] == [
        ("high (high)", True),
        ("high (other)", False),
        ("low", True),
    ]
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
    if division == "open":
        assert len(verdict.broken) == 1 and "same weights as probe" in verdict.broken[0].evidence


def test_csv_has_the_exact_numbers_and_settings_say_where_it_goes(
    runs: Path, tmp_path: Path
) -> None:
    _report(runs, out=tmp_path / "site", each_run=False)
    assert not (runs / "report").exists() and not (runs / "high" / "report").exists()
    assert not (runs / "high" / RECORD).exists()
    with (tmp_path / "site" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    high = next(row for row in rows if row["run"] == "high" and row["init"] == "pretrained")
    record = load_record(runs / "high")
    section, training = record["glue"]["pretrained"], record["pretrain"]
    assert float(high["avg9"]) == pytest.approx(section["averages"]["avg9"]["value"], rel=1e-6)
    assert float(high["rte"]) == pytest.approx(section["tasks"]["rte"]["score"], rel=1e-6)
    assert float(high["exaflops"]) == pytest.approx(training["exaflops"], rel=1e-6)
    assert high["division"] == "closed" and high["seeds"] == "0 1 2"
    assert {row["kind"] for row in rows} == {"run", "published"}


def test_the_plotted_runs_are_the_best_of_those_that_can_be_trusted(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        plots, "training", lambda curves: drawn.extend(curve.label for curve in curves)
    )
    for place in range(7):
        base = 0.61 + place / 100
        write_run(runs / f"run{place}", learning_rate=0.01 + place, scores={"pretrained": base})
    write_run(runs / "high", change={"setup": {"training": {"seed": 3}}})
    _report(runs, each_run=False)
    assert drawn == [*(f"run{place}" for place in range(6, -1, -1)), "low"]


def test_words_of_a_log_are_one_line_of_latex(runs: Path) -> None:
    device = {"name": "RTX\n\n100% & more"}
    for name in ("high", "low"):
        write_run(runs / name, change={"setup": {"environment": {"device": device}}})
    text = (_report(runs) / "leaderboard.tex").read_text(encoding="utf-8")
    assert r"1 min on RTX 100\% \& more}} \\" in text
    for part in text.split(r"\toprule")[1:]:
        lines = part.partition(r"\bottomrule")[0].splitlines()
        assert all(line == r"\midrule" or line.endswith(r"\\") for line in lines[1:])


def _cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda path: path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1')),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":2')),
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
    text = _text(runs)
    unreadable = text[text.index("## Not readable") : text.index("## Pretraining")]
    assert f"| bad | {runs / 'bad' / RUN_LOG}" in unreadable and "notes" not in text
    assert "| 1 | high<br>" in text and "| 2 | low<br>" in text
    _report(runs)
    assert not (runs / "bad" / "report").exists()


def test_values_that_no_run_writes_are_named(runs: Path) -> None:
    write_run(runs / "bad", change={"setup": {"environment": {"cpu_count": "two"}}})
    text = _text(runs)
    assert "| bad | " in text and "environment.cpu_count" in text and "| 1 | high<br>" in text


def test_names_are_escaped_in_every_form(runs: Path) -> None:
    write_run(runs / "ungefähr 长名", name="<b>长|$x$</b>", scores={"pretrained": 0.5})
    out = _report(runs)
    text = (out / "leaderboard.md").read_text(encoding="utf-8")
    html = (out / "leaderboard.html").read_text(encoding="utf-8")
    assert "<b>" not in html and "&lt;b&gt;长" in html and "&lt;b>长" in text


def test_a_run_that_can_only_be_read_gets_no_report_of_its_own(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_access = os.access
    monkeypatch.setattr(  # root may everything
        os, "access", lambda path, mode: path != runs / "low" and may_access(path, mode)
    )
    page = _report(runs, out=tmp_path / "site") / "leaderboard.md"
    assert "low" in page.read_text(encoding="utf-8")
    assert {path.name for path in (runs / "low").iterdir()} == {RUN_LOG, "final", "predictions"}
    assert "low: these folders can only be read" in capsys.readouterr().out


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
    text = _text(runs)
    assert f"| young | {status or 'finished'} |" in text and ", 2 ranked" in text


def test_a_scoring_that_is_not_finished_takes_the_rank(runs: Path) -> None:
    score_run(runs / "high", hyperparameters={"epochs": 3}, fine_tunings=2)
    row = _trained(runs, "high")
    assert row.verdict.division == "unfinished" and not row.ranked
    assert "27 not fine-tuned" in _page(runs, "high")
    assert "| 1 | low<br>" in _text(runs)


def test_an_unscored_run_that_contradicts_itself_is_not_simply_finished(runs: Path) -> None:
    write_run(runs / "whole", scores={})
    write_run(runs / "forged", scores={}, change={"setup": {"training": {"parameters": 7}}})
    text = _text(runs)
    table = text[text.index("## Pretraining") :]
    assert "| whole | finished |" in table and "| forged | finished<br>breaks P1 |" in table


def test_the_forms_of_the_validation_are_printed_and_what_does_not_compare_is_marked(
    runs: Path,
) -> None:
    """A loss on another text compares with no other."""
    other = {"validation": {"manifest_sha256": "0123456789abcdef" * 4}}
    write_run(runs / "low", loss=7.25, change={"setup": {"corpus": other}})
    record = load_record(runs / "high")["pretrain"]
    losses = [
        record["train_loss"],
        *(record["validation"][key] for key in ("loss", "all_mask_loss")),
    ]
    losses.append(record["validation"]["bits_per_byte"])
    text = _text(runs)
    assert f"| {' | '.join(f'{loss:.3f}' for loss in losses)} |" in text
    assert "| 7.250 on 01234567 | 7.500 |" in text
    found = {(row["validation_loss"], row["all_mask_loss"]) for row in _csv(runs)}
    assert found >= {("7.5", "7.75"), ("7.25", "7.5")}


def test_what_a_sweep_chose_has_no_rank_and_says_so_in_its_row(runs: Path) -> None:
    write_run(runs / "high", scores={})
    for place in range(6):
        score_run(
            runs / "high",
            values=0.7 + place / 100,
            hyperparameters={"learning_rate": 1e-5 * (1 + place)},
            change={"scoring": {"sweep": ["pretrained"]}},
        )
    text = _text(runs)
    row = next(line for line in text.splitlines() if line.startswith("|  | high<br>"))
    assert "best of 6 sets of hyperparameters" in row and "| 1 | low<br>" in text


def test_subsets_and_missing_tasks_are_marked_and_have_no_rank(runs: Path) -> None:
    record = load_record(runs / "high")
    values = {
        name: task["metrics"][task["main_metric"]]["per_seed"]
        for name, task in record["glue"]["pretrained"]["tasks"].items()
        if name != "qqp"
    }
    subset = {"train_examples": 13459, "subset": True}
    write_run(
        runs / "high",
        scores={"pretrained": values},
        change={"scoring": {"entries": {"qnli": subset}}},
    )
    text = _text(runs)
    row = next(line for line in text.splitlines() if line.startswith("|  | high<br>"))
    assert "†" in row and f"| {DASH} | {DASH} |" in row
    assert text.index("| 1 | low<br>") < text.index("Not ranked: parts") < text.index(row)
    assert "no score for QQP" in text and "13,459 of 104,743" in _page(runs, "high")
    write_run(runs / "low", change={"scoring": {"entries": {"qnli": subset}}})
    trained = _trained(runs, "low")
    assert not trained.ranked and trained.main is not None
    assert leaderboard.number_cells(trained)[0].text.endswith("†")


@pytest.mark.parametrize(
    ("facts", "group"),
    [
        ({"division": "open"}, "Open division"),
        ({"change": {"setup": {"environment": {"git": {"dirty": True}}}}}, "Open division"),
        ({"change": {"setup": {"training": {"parameters": 7}}}}, "Not ranked: invalid"),
    ],
)
def test_only_the_closed_division_is_ranked(runs: Path, facts: dict[str, Any], group: str) -> None:
    write_run(runs / "high", **facts)
    text = _text(runs)
    words = ("Closed division, 1 min on Test CPU", "| 1 | low<br>", group, "|  | high<br>")
    places = [text.index(word) for word in words]
    assert places == sorted(places) and ", 1 ranked" in text


def test_a_downloaded_model_has_no_rank_whatever_it_scores(runs: Path) -> None:
    write_external(runs / "bert")
    text = _text(runs)
    assert "|  | bert<br>" in text and "| 1 | high<br>" in text
    assert _trained(runs, "bert").verdict.division == "open"


def test_the_gain_is_over_the_best_row_without_pretraining(runs: Path) -> None:
    """It is not over random weights where a bag of words has nearly all that the model has."""
    write_run(runs / "high", scores={"pretrained": 0.7, "random": 0.5, "floor": 0.695})
    page = _page(runs, "high")
    assert "+0.5 points above the best row without pretraining (bag of words)" in page
    write_run(runs / "high", scores={"pretrained": 0.7, "floor": 0.8})
    assert "points below the best row without pretraining" in _page(runs, "high")


def test_gains_are_means_over_the_entries_that_both_have(runs: Path) -> None:
    rows = [row for row in rows_of(load_runs(runs)) if row.run.label == "high"]
    trained, random = sorted(rows, key=lambda row: row.baseline)
    gain, count = gain_over(trained, random)
    assert gain == pytest.approx(20.0, abs=0.1) and count == 9


def test_a_recipe_names_the_corpus_that_was_read(tmp_path: Path) -> None:
    """Where it was given by its folder, the settings of text and tokenizer beside it were not read."""
    corpus = {
        "vocab_size": 199,
        "tokenizer": {"kind": "bpe"},
        "sources": [{"kind": "text"}, {"kind": "tokenizer"}],
    }
    change = {"setup": {"corpus": corpus, "training": {"objective": "causal, then mlm"}}}
    write_run(tmp_path / "a", change=change)
    change["start"] = {"recipe": {"data": {"corpus": "corpora/a"}}}
    write_run(tmp_path / "b", change=change)
    first, second = (recipe(run.record) for run in load_runs(tmp_path))
    assert first["Data"] == "embedded" and second["Data"] == "text"
    assert first["Tokenizer"] == "bpe 199" and first["Masking"] == "causal, then mlm 25%"
    assert set(recipe(Record()).values()) == {""}


def test_baselines_are_one_group_once_each_below_the_ranked_rows(runs: Path) -> None:
    """A baseline with the best average of all is there too; one that two runs share names both."""
    for name, base in (("low", 0.6), ("high", 0.7)):
        scores = {"pretrained": base, "random": 0.5, "floor": 0.8, "constant": 0.1}
        write_run(runs / name, scores=scores, learning_rate=base)
    text = _text(runs)
    names = [name for name in _first_column(text[: text.index("## Pretraining")]) if name]
    ordered = ("high", "low", "bag of words", "random initialisation", "constant class")
    places = [names.index(name) for name in ordered]
    assert places == sorted(places) and len(names) == len(set(names))
    assert "bag of words<br>of high, low" in text


def test_averages_carry_the_spread_of_each_seeds_average(runs: Path) -> None:
    tasks = load_record(runs / "high")["glue"]["pretrained"]["tasks"]
    values: dict[str, list[float | None]] = {name: [0.70, 0.71, 0.75] for name in tasks}
    write_run(runs / "high", scores={"pretrained": values})
    row = _trained(runs, "high")
    assert row.of_seeds("avg9") == pytest.approx([70, 71, 75], abs=0.1)
    spread = statistics.stdev(row.of_seeds("avg9"))
    assert leaderboard.number_cells(row)[0].small == f"±{spread:.1f}"
    write_run(runs / "high", scores={"pretrained": {**values, "rte": [0.7, None, 0.7]}})
    row = _trained(runs, "high")
    assert row.of_seeds("avg9") == [] and row.spread("avg9") is None


def test_csv_cells_that_a_spreadsheet_would_run_are_defused(tmp_path: Path) -> None:
    names = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1+1", "-5", "plain"]
    for place, name in enumerate(names):
        write_run(tmp_path / str(place), name=name, learning_rate=0.1 + place)
    cells = {cell for row in _csv(tmp_path) for cell in row.values()}
    assert not [cell for cell in cells if cell.strip(" ")[:1] in ("=", "+", "@", "\t")]
    assert {cell for cell in cells if cell.startswith("-")} == {"-5"}
    assert {"'=1+1", "' =1+1", "plain"} <= cells


def test_embedded_tasks_have_a_table_of_their_own(runs: Path) -> None:
    write_run(runs / "small", suite="embedded")
    text = _text(runs)
    glue, embedded = text.index("## GLUE"), text.index("## Embedded tasks")
    assert "| 1 | small<br>" in text[embedded:] and "| small<br>" not in text[glue:embedded]
    assert "RoBERTa" not in text[embedded : text.index("## Pretraining")]


RANDOM = "Random init, median | Difference"
WORDS, TRAINED = "Bag of words, median | Difference", "Pretrained, mean | Pretrained, median"


@pytest.mark.parametrize(
    ("scores", "columns"),
    [
        ({"pretrained": 0.9, "random": 0.5, "floor": 0.5}, f"{TRAINED} | {RANDOM} | {WORDS}"),
        ({"random": 0.5, "floor": 0.5}, f"Random init, mean | Random init, median | {WORDS}"),
        ({"floor": 0.5}, "Bag of words, mean | Bag of words, median"),
    ],
)
def test_a_page_says_whose_the_scores_are(
    runs: Path, scores: dict[Any, float], columns: str
) -> None:
    write_run(runs / "high", scores=scores)
    assert f"| Examples | {columns} |\n" in _page(runs, "high")


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
    assert "test predictions: CoLA.tsv, SST-2.tsv" in _page(runs, "high") and not archive.exists()
    monkeypatch.setattr(
        submission, "collect", lambda *_: (dict.fromkeys(submission.FILES, np.zeros(10)), {})
    )
    assert "report/submission.zip" in _page(runs, "high")
    assert len(zipfile.ZipFile(archive).namelist()) == 11
