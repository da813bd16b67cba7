"""`cramming report` over folders of runs: whole, broken, interrupted, foreign ones; and what may be ranked."""

import csv
import io
import json
import os
import re
import shutil
import statistics
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from cramming.config import UserError
from cramming.journal import Journal
from cramming.record import Status
from cramming.record_schema import read_record
from eval.finetune.history import history_file, stamp
from eval.report import leaderboard, plots, submission
from eval.report.main import main
from eval.report.ranking import Row, gain_over, rows_of
from eval.report.settings import recipe
from eval.report.wording import DASH
from eval.rules.load import load_runs
from cramming.data.suites import AVERAGES

pytestmark = pytest.mark.usefixtures("records_only")

REPORT = {"out": None, "each_run": True, "ledger": "no duels", "repository": None}


@pytest.fixture
def drawn() -> None:
    """For tests that look at the plots; the others go without, since drawing takes most of a report's time."""


@pytest.fixture(autouse=True)
def _no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "training", lambda curves: None)
        monkeypatch.setattr(plots, "scores", lambda bars, title: None)


def _report(runs: Path, **settings: Any) -> Path:
    main({"runs": str(runs), "report": REPORT | settings})
    return Path(settings.get("out") or runs / "report")


@pytest.fixture
def runs(tmp_path: Path, make_record: Any, write_run: Any, make_section: Any) -> Path:
    """Two full runs, of which the second scored higher."""
    for name, base in (("low", 0.6), ("high", 0.7)):
        record = make_record() | {"name": name}
        record["glue"]["pretrained"] = make_section("pretrained", base=base)
        write_run(tmp_path / "runs" / name, record)
    return tmp_path / "runs"


def _text(runs: Path) -> str:
    return (_report(runs) / "leaderboard.md").read_text(encoding="utf-8")


def _own(runs: Path, name: str) -> str:
    """A run's own report."""
    return (runs / name / "report" / "report.md").read_text(encoding="utf-8")


@contextmanager
def _record_of(run: Path) -> Iterator[dict[str, Any]]:
    """The record, to be changed in place."""
    path = run / "record.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    yield record
    path.write_text(json.dumps(record), encoding="utf-8")


def _first_column(text: str) -> list[str]:
    return [
        line.split("|")[2].strip().split("<br>")[0]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


@pytest.mark.parametrize("copy", [shutil.copytree, lambda folder, other: other.symlink_to(folder)])
def test_the_same_run_twice_has_one_rank_and_is_named(runs: Path, copy: Any) -> None:
    copy(runs / "high", runs / "other")
    text = (_report(runs, each_run=False) / "leaderboard.md").read_text(encoding="utf-8")
    assert (
        "| 1 | high (high)<br>" in text
        and "| 2 | low<br>" in text
        and "|  | high (other)<br>" in text
    )
    assert (
        "Not ranked: the weights of a row above" in text and "same weights as high (other)" in text
    )
    rows = [row for row in rows_of(load_runs(runs)) if not row.baseline]
    assert [row.ranked for row in rows] == [True, False, True]
    assert all(row.verdict.division == "closed" for row in rows)


@pytest.mark.parametrize(
    ("time", "change", "division"),
    [
        ("2030-01-01", {"hyperparameters": {"epochs": 3}}, "open"),
        ("2030-01-01", {"scores": {"rte": 0.5}}, "open"),
        (
            "2030-01-03",
            {"hyperparameters": {"epochs": 3}},
            "closed",
        ),  # chose nothing for what was before it
        ("2030-01-01", {"model_sha256": "0" * 64}, "closed"),
        ("2030-01-01", {"suite": "embedded"}, "closed"),
    ],
)
def test_settings_that_were_tried_on_the_same_weights_under_another_name_count(
    runs: Path, time: str, change: dict[str, Any], division: str
) -> None:
    """R20, where the report sees both; a scoring that was stopped is enough."""
    shutil.copytree(runs / "high", runs / "probe")
    for name, changes in (("high", {"time": "2030-01-02"}), ("probe", {"time": time, **change})):
        path, record = (
            history_file(runs / name),
            json.loads((runs / name / "record.json").read_text()),
        )
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        journal = Journal(path)
        for line in lines:
            journal.write(line | changes)
        journal.close()
        record |= {"name": name, "history": stamp(path)}
        if name == "probe":
            del record["glue"]
        (runs / name / "record.json").write_text(json.dumps(record))
    (row,) = (
        row for row in rows_of(load_runs(runs)) if row.run.label == "high" and not row.baseline
    )
    assert row.verdict.division == division
    if division == "open":
        assert [f.rule for f in row.verdict.broken] == ["R20"]
        assert "same weights as probe" in row.verdict.broken[0].evidence


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


def test_rows_are_ranked_by_average_with_both_averages_and_references_beneath(runs: Path) -> None:
    text = _text(runs)
    names = _first_column(text[: text.index("## Pretraining")])
    places = [
        names.index(name) for name in ("high", "low", "RoBERTa-base", "BERT-base, no pretraining")
    ]
    assert places == sorted(places)
    assert "| 1 | high<br>" in text and "| 2 | low<br>" in text
    for average in AVERAGES["glue"].values():
        assert average.definition in text
    assert "dev split, median of 3 seeds, last epoch scored, 5 epochs" in text
    assert "second-hand" in text


def test_csv_has_the_exact_numbers_and_settings_say_where_it_goes(
    runs: Path, tmp_path: Path
) -> None:
    _report(runs, out=str(tmp_path / "site"), each_run=False)
    assert (tmp_path / "site" / "leaderboard.html").exists()
    assert not (runs / "report").exists() and not (runs / "high" / "report").exists()
    rows = list(
        csv.DictReader(
            io.StringIO((tmp_path / "site" / "leaderboard.csv").read_text(encoding="utf-8"))
        )
    )
    high = next(row for row in rows if row["run"] == "high" and row["init"] == "pretrained")
    with _record_of(runs / "high") as record:
        section, training = record["glue"]["pretrained"], record["pretrain"]
        assert float(high["avg9"]) == pytest.approx(section["averages"]["avg9"]["value"], rel=1e-6)
        assert float(high["rte"]) == pytest.approx(section["tasks"]["rte"]["score"], rel=1e-6)
        assert (
            float(high["exaflops"]) == pytest.approx(training["exaflops"], rel=1e-6)
            and training["exaflops"] < 1e-4
        )
    assert high["division"] == "closed" and high["seeds"] == "0 1 2"
    assert {row["kind"] for row in rows} == {"run", "published"}
    shutil.copytree(runs / "high", runs / "copy")
    found = rows_of(load_runs(runs))
    assert {row.run.label for row in found} == {"high (copy)", "high (high)", "low"}
    trained, random = (
        next(r for r in found if r.run.folder.name == "high" and r.init == i)
        for i in ("pretrained", "random")
    )
    assert gain_over(trained, random) == (pytest.approx(20.0), 9)


def test_the_plotted_runs_are_the_best_of_those_that_can_be_trusted(
    runs: Path, make_record: Any, make_section: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        plots, "training", lambda curves: drawn.extend(curve.label for curve in curves)
    )
    for place in range(7):
        record = make_record() | {"name": f"run{place}"}
        record["glue"]["pretrained"] = make_section("pretrained", base=0.61 + place / 100)
        write_run(runs / f"run{place}", record)
    with _record_of(runs / "high") as record:
        record["pretrain"]["budget"]["overrun_seconds"] = 3600.0
    _report(runs, each_run=False)
    assert drawn == [*(f"run{place}" for place in range(6, -1, -1)), "low"]


def test_words_of_a_record_are_one_line_of_latex(runs: Path) -> None:
    for name in ("high", "low"):
        with _record_of(runs / name) as record:
            for process in (record["environment"], *record["resumed"]):
                process["device"]["name"] = "RTX\n\n100% & more"
    text = (_report(runs) / "leaderboard.tex").read_text(encoding="utf-8")
    tables = [
        part.partition(r"\bottomrule")[0].splitlines() for part in text.split(r"\toprule")[1:]
    ]
    assert r"\textit{Closed division, 1 min on RTX 100\% \& more}} \\" in text
    assert all(
        line == r"\midrule" or line.endswith(r"\\")
        for table in tables
        for line in table
        if table.index(line)
    )


def test_same_records_same_bytes(runs: Path, drawn: None) -> None:
    for metrics in runs.glob("*/metrics.jsonl"):  # the score plot will do
        metrics.unlink()

    def content() -> dict[str, bytes]:
        return {str(p.relative_to(runs)): p.read_bytes() for p in runs.rglob("*") if p.is_file()}

    _report(runs)
    first = content()
    _report(runs)
    assert content() == first


def test_a_report_can_be_rebuilt_from_a_copied_run_folder(runs: Path, tmp_path: Path) -> None:
    _report(runs)
    shutil.copytree(
        runs / "high", tmp_path / "elsewhere" / "high", ignore=shutil.ignore_patterns("report")
    )
    _report(tmp_path / "elsewhere")
    ours, theirs = (
        folder / "high" / "report" / "report.md" for folder in (runs, tmp_path / "elsewhere")
    )
    assert ours.read_bytes() == theirs.read_bytes()


def test_bad_runs_are_listed_and_hide_no_other(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    broken = {
        "torn": b'{"format": 1, "na',
        "old": b'{"format": 99}',
        "list": b"[]",
        "binary": b"\xff\xfe",
        "deep": b"[" * 100_000,
        "long": b'{"format": 1, "steps": 1' + 4300 * b"0" + b"}",
    }
    for name, content in broken.items():
        (runs / name).mkdir()
        (runs / name / "record.json").write_bytes(content)
    (runs / "unborn").mkdir()
    (runs / "unborn" / "budget.jsonl").write_text("")
    (runs / "notes").mkdir()
    write_run(runs / "ungefähr 长名", make_record() | {"name": "<b>长|$x$</b>"})
    out = _report(runs)
    text, html = (
        (out / f"leaderboard.{kind}").read_text(encoding="utf-8") for kind in ("md", "html")
    )
    for name in (*broken, "unborn"):
        assert f"| {name} | " in text
    assert "recursion" in text and "4300 digits" in text
    assert "record format 99" in text and "notes" not in text
    assert "<b>" not in html and "&lt;b&gt;长" in html
    assert "| 1–2 | high<br>" in text and "| 1–2 | &lt;b>长" in text and "| 3 | low<br>" in text
    assert not (runs / "torn" / "report").exists()


@pytest.mark.parametrize("name", ["budget.jsonl", "metrics.jsonl"])
def test_a_file_that_cannot_be_opened_hides_no_run(runs: Path, name: str) -> None:
    path = runs / "low" / name
    path.unlink()
    path.mkdir()  # an error of the operating system, for root as well
    text = _text(runs)
    assert "| 1 | high<br>" in text and "| low<br>" in text
    assert (f"{name}: Is a directory" in _own(runs, "low")) == (name == "budget.jsonl")


def test_a_run_that_can_only_be_read_gets_no_report_of_its_own(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, may = next(path for path in sorted(runs.iterdir()) if path.is_dir()), os.access
    shutil.rmtree(place / "report", ignore_errors=True)
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != place and may(path, mode)
    )  # root may everything
    page = _report(runs, out=str(tmp_path / "site")) / "leaderboard.md"
    assert place.name in page.read_text(encoding="utf-8") and not (place / "report").exists()
    assert f"{place.name}: these folders can only be read" in capsys.readouterr().out


def test_interrupted_and_unscored_runs_are_shown_but_not_ranked(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    record = make_record() | {"name": "killed"}
    del record["glue"]
    record["pretrain"].update(status="interrupted", validation=None)
    write_run(runs / "killed", record)
    assert "\n- [killed](../killed/report/report.md), not scored, interrupted. " in _text(runs)
    own = _own(runs, "killed")
    assert own.startswith("# killed [not scored, interrupted]")
    assert (
        "Not scored yet: `cramming glue name=killed`" in own
        and "is interrupted, not finished" in own
    )


def test_an_unscored_run_that_contradicts_itself_is_not_simply_finished(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    for name in ("whole", "cut"):
        record = make_record() | {"name": name}
        del record["glue"]
        write_run(runs / name, record)
    (runs / "cut" / "budget.jsonl").unlink()
    text = _text(runs)
    table = text[text.index("## Pretraining") :]
    assert "| whole | finished |" in table and "| cut | finished<br>breaks R5 |" in table


def test_the_forms_of_the_validation_are_printed_and_what_does_not_compare_is_marked(
    runs: Path,
) -> None:
    """One on another text compares with nobody's."""
    with _record_of(runs / "low") as record:
        record["corpus"]["validation"] = {"manifest_sha256": "0123456789abcdef" * 4}
        for key in ("all_mask_loss", "all_mask_accuracy", "bits_per_byte", "tokens"):
            del record["pretrain"]["validation"][key]
    text = _text(runs)
    assert "| All [MASK] | Bits/byte |" in text and "| 5.432 | 5.500 | 5.750 | 1.875 |" in text
    assert "| 5.432 | 5.500 on 01234567 | – | – |" in text
    with (runs / "report" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        found = {
            (row["validation_loss"], row["all_mask_loss"], row["bits_per_byte"])
            for row in csv.DictReader(file)
        }
    assert found >= {("5.5", "5.75", "1.875"), ("5.5", "", "")}


def test_odd_values_are_named_and_not_printed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _record_of(runs / "low") as record:
        record["pretrain"].update(status=7, train_loss=float("nan"))
    text = _text(runs)
    status = f"pretrain.status is 7, not one of {', '.join(get_args(Status))}"
    phrases = f"{status}; pretrain.train_loss is nan, not a finite number"
    incomplete = text[text.index("## Odd values in records") : text.index("## Pretraining")]
    assert f"| low | {phrases} |" in incomplete and "high" not in incomplete
    assert f"{runs / 'low' / 'record.json'}: {phrases}" in " ".join(capsys.readouterr().out.split())
    assert f"Odd values in the record: {phrases}." in _own(runs, "low")
    assert "nan" not in text[: text.index("## Odd values in records")]


def test_what_a_sweep_chose_has_no_rank_and_says_so_in_its_row(runs: Path) -> None:
    with _record_of(runs / "high") as record:
        record["glue"]["pretrained"]["sweep"] = {"points": [{"mean": 70.0}] * 6}
    lines = _text(runs).splitlines()
    row = next(line for line in lines if line.startswith("|") and "| high<br>" in line)
    assert row.startswith("|  | high<br>") and "3 seeds, best of 6 sets of hyperparameters," in row
    assert "open<br>R20" in row and any(line.startswith("| 1 | low<br>") for line in lines)


def test_subsets_and_missing_tasks_are_marked_and_have_no_rank(
    runs: Path, recompute_averages: Any
) -> None:
    with _record_of(runs / "high") as record:
        for section in record["glue"].values():
            del section["tasks"]["qqp"]
            section["absent"] = {"qqp": "no such task folder in data"}
            section["tasks"]["qnli"].update(train_examples=13459, subset=True)
            section["averages"] = recompute_averages(section)
    text = _text(runs)
    row = next(line for line in text.splitlines() if line.startswith("|") and "| high<br>" in line)
    assert row.startswith("|  |") and "†" in row and f"| {DASH} | {DASH} |" in row
    assert text.index("| 1 | low<br>") < text.index("Not ranked: parts") < text.index(row)
    assert "no score for QQP (no such task folder in data)" in text
    assert "13,459 of 104,743" in _own(runs, "high")
    with _record_of(runs / "low") as record:
        record["glue"]["pretrained"]["tasks"]["qnli"].update(train_examples=13459, subset=True)
    row = next(
        row for row in rows_of(load_runs(runs)) if row.run.label == "low" and not row.baseline
    )
    assert (
        not row.ranked
        and row.main is not None
        and leaderboard.number_cells(row)[0].text.endswith("†")
    )


@pytest.mark.parametrize(
    ("change", "group"),
    [
        (lambda r: r.update(division_requested="open"), "Open division"),
        (lambda r: r.pop("pretrain"), "Open division"),
        (lambda r: r["environment"]["git"].update(dirty=True), "Open division"),
        (lambda r: r["pretrain"]["budget"].update(overrun_seconds=2.0), "Not ranked: invalid"),
    ],
)
def test_only_the_closed_division_is_ranked(runs: Path, change: Any, group: str) -> None:
    """Not even with the best average, as a downloaded model has it."""
    with _record_of(runs / "high") as record:
        change(record)
    text = _text(runs)
    places = [
        text.index(words)
        for words in ("Closed division, 1 min on Test CPU", "| 1 | low<br>", group, "|  | high<br>")
    ]
    assert places == sorted(places) and ", 1 ranked" in text
    assert not [line for line in text.splitlines() if line.startswith("| 2 |")]


def test_the_gain_is_over_the_best_row_without_pretraining(
    runs: Path, make_record: Any, make_section: Any, write_run: Any
) -> None:
    """Not over random weights, where a bag of words has nearly all that the model has."""
    record = make_record() | {"floor": make_section("bag of words", base=0.695), "name": "high"}
    record["constant"] = make_section("constant class", base=0.9)
    del record["constant"]["tasks"][
        "stsb"
    ]  # a constant has no correlation, and is no match for the nine entries
    write_run(runs / "high", record)
    line = "high: +0.5 points above the best row without pretraining (bag of words), on average over the 9 entries"
    assert line in _text(runs)
    own = _own(runs, "high")
    assert (
        "+0.5 points above the best row without pretraining (bag of words)" in own
        and "+20.0 points" not in own
    )
    record["floor"] = make_section("bag of words", base=0.8)
    write_run(runs / "high", record)
    assert re.search(
        r"high: [1-9][0-9]*\.[0-9] points below the best row without pretraining", _text(runs)
    )


def test_a_recipe_names_the_corpus_that_was_read(make_record: Any) -> None:
    """Where it was given by its folder, the settings of text and tokenizer beside it were not read by anybody."""
    record = make_record()
    record["config"] = {
        "data": {"name": "embedded", "corpus": None},
        "objective": {"name": "mlm", "rate": 0.25},
    }
    record["corpus"] |= {
        "vocab_size": 199,
        "tokenizer": {"kind": "bpe"},
        "sources": [{"kind": "text"}, {"kind": "tokenizer"}],
    }
    record["pretrain"]["objective"] = "causal, then mlm"
    found = recipe(read_record(record))
    assert (found["Data"], found["Tokenizer"]) == ("embedded", "bpe 199")
    assert found["Masking"] == "causal, then mlm 25%"
    record["config"]["data"]["corpus"] = "corpora/a"
    assert recipe(read_record(record))["Data"] == "text"
    del record["pretrain"]  # a model that was trained elsewhere
    assert set(recipe(read_record(record)).values()) == {""}


def test_baselines_are_one_group_once_each_below_the_ranked_rows(
    runs: Path, make_record: Any, make_section: Any, write_run: Any
) -> None:
    """Even a baseline with the best average of all; one that two runs share names both."""
    for name, base in (("low", 0.6), ("high", 0.7)):
        record = make_record() | {"name": name, "floor": make_section("bag of words", base=0.8)}
        record["constant"] = make_section("constant class", base=0.1)
        record["glue"]["pretrained"] = make_section("pretrained", base=base)
        write_run(runs / name, record)
    del record["floor"]["tasks"]["qnli"]  # scored on fewer tasks, it still says nothing new
    write_run(runs / "high", record)
    text = _text(runs)
    names = [name for name in _first_column(text[: text.index("## Pretraining")]) if name]
    places = [
        names.index(n)
        for n in ("high", "low", "bag of words", "random initialisation", "constant class")
    ]
    assert places == sorted(places) and len(names) == len(set(names))
    assert "bag of words<br>of high, low" in text or "bag of words<br>of low, high" in text


def _trained(runs: Path, record: dict[str, Any], write_run: Any) -> Row:
    write_run(runs / "high", {**record, "name": "high"})
    return next(
        row for row in rows_of(load_runs(runs)) if row.run.label == "high" and not row.baseline
    )


def test_averages_carry_the_spread_of_each_seeds_average(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    record = make_record()
    for entry in record["glue"]["pretrained"]["tasks"].values():
        entry["metrics"][entry["main_metric"]]["per_seed"] = [0.70, 0.71, 0.75]
    row = _trained(runs, record, write_run)
    assert row.of_seeds("avg9") == pytest.approx([70, 71, 75])
    assert row.spread("avg9") == pytest.approx(statistics.stdev([70, 71, 75]))
    assert leaderboard.number_cells(row)[0].small == "±2.6"
    record["glue"]["pretrained"]["tasks"]["rte"]["metrics"]["accuracy"]["per_seed"] = [
        0.7,
        None,
        0.7,
    ]
    row = _trained(runs, record, write_run)
    assert row.of_seeds("avg9") == [] and row.spread("avg9") is None


def test_csv_cells_that_a_spreadsheet_would_run_are_defused(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    for folder, name in enumerate(
        ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1+1", "-5", "plain"]
    ):
        record = make_record() | {"name": name}
        record["pretrain"]["validation"]["loss"] = -1.5
        write_run(runs / str(folder), record)
    with (_report(runs) / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        cells = {cell for row in csv.DictReader(file) for cell in row.values()}
    assert not [cell for cell in cells if cell.strip(" ")[:1] in ("=", "+", "@", "\t")]
    assert {cell for cell in cells if cell.startswith("-")} == {"-5", "-1.5"}
    assert {"'=1+1", "' =1+1", "plain"} <= cells


def test_the_terminal_shows_the_tasks_that_were_scored(
    tmp_path: Path,
    make_record: Any,
    write_run: Any,
    recompute_averages: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = make_record()
    for section in record["glue"].values():
        section["tasks"] = {name: section["tasks"][name] for name in ("cola", "sst2", "rte")}
        section["averages"] = recompute_averages(section)
    write_run(tmp_path / "first", record)
    _report(tmp_path)
    head = next(line for line in capsys.readouterr().out.splitlines() if "Division" in line)
    assert head.split() == ["#", "Model", "Division", "SST-2", "CoLA", "RTE"]


def test_one_epoch_is_no_epochs(runs: Path, make_record: Any, write_run: Any) -> None:
    record = make_record() | {"name": "high"}
    for section in record["glue"].values():
        section["hyperparameters"]["epochs"] = 1
    write_run(runs / "high", record)
    text = _text(runs)
    own = _own(runs, "high")
    assert (
        ", 1 epoch (high)" in text
        and "pretrained: 1 epoch," in own
        and "1 epochs" not in text + own
    )


def test_embedded_tasks_have_a_table_of_their_own(
    runs: Path, make_record: Any, write_run: Any
) -> None:
    write_run(runs / "small", make_record("embedded") | {"name": "small"})
    text = _text(runs)
    glue, embedded = text.index("## GLUE"), text.index("## Embedded tasks")
    assert "| 1 | small<br>" in text[embedded:] and "| small<br>" not in text[glue:embedded]
    assert "RoBERTa" not in text[embedded : text.index("## Pretraining")]


RANDOM = "Random init, median | Difference"
WORDS, TRAINED = "Bag of words, median | Difference", "Pretrained, mean | Pretrained, median"


@pytest.mark.parametrize(
    ("suites", "columns"),
    [
        (
            dict.fromkeys(("pretrained", "random", "floor"), "glue"),
            f"{TRAINED} | {RANDOM} | {WORDS}",
        ),
        ({"pretrained": "glue", "random": "embedded", "floor": "embedded"}, TRAINED),
        ({"pretrained": "glue", "floor": "glue"}, f"{TRAINED} | {WORDS}"),
        ({"random": "glue", "floor": "glue"}, f"Random init, mean | Random init, median | {WORDS}"),
        ({"floor": "glue"}, "Bag of words, mean | Bag of words, median"),
    ],
)
def test_a_page_compares_scores_of_one_suite_and_says_whose_they_are(
    runs: Path,
    make_record: Any,
    write_run: Any,
    make_section: Any,
    suites: dict[str, str],
    columns: str,
) -> None:
    found = {init: make_section(init, suite, 0.9) for init, suite in suites.items()}
    lowest = {"floor": found.pop("floor")} if "floor" in found else {}
    record = {**make_record(), "name": "high", "floor": None, **lowest, "glue": found}
    write_run(runs / "high", record)
    text = _run_text(runs)
    assert f"| Examples | {columns} |\n" in text
    assert ("above the best row without pretraining" in text) == (
        TRAINED in columns and columns != TRAINED
    )


def test_user_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for settings, words in (
        ({"runs": str(tmp_path / "none"), "report": REPORT}, "no run folder inside"),
        ({"runs": str(tmp_path / "empty"), "report": REPORT}, "no run folder"),
        ({"runs": str(tmp_path), "report": REPORT | {"out": str(tmp_path / "file")}}, "is a file"),
        ({"runs": str(tmp_path), "report": REPORT | {"colour": 1}}, "report.colour"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            main(settings)
        assert "\n" not in str(caught.value)


def test_submission_is_written_when_complete_and_explained_when_not(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = runs / "high" / "report" / "submission.zip"
    assert (
        "for want of test predictions: CoLA.tsv, SST-2.tsv" in _run_text(runs)
        and not archive.exists()
    )
    monkeypatch.setattr(
        submission, "collect", lambda *_: (dict.fromkeys(submission.FILES, np.zeros(10)), {})
    )
    assert "Submission to the GLUE server: report/submission.zip" in _run_text(runs)
    assert len(zipfile.ZipFile(archive).namelist()) == 11


def _run_text(runs: Path) -> str:
    _report(runs)
    return _own(runs, "high")
