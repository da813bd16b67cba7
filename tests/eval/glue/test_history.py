"""No scoring goes without a trace: each fine-tuning stays in the log, and the user is told what it will mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.record import load_record
from eval.finetune import scoring
from tests.eval.glue.calls import main

Change = Callable[..., dict[str, Any]]


@pytest.fixture
def small(config: dict[str, Any], with_eval: Change) -> dict[str, Any]:
    return with_eval(config, tasks=["cola"])


def history(config: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = load_record(Path(config["runs"]) / "first")["history"]
    return rows


def with_rate(config: dict[str, Any], rate: float) -> dict[str, Any]:
    hyper = {**config["eval"]["hyperparameters"], "learning_rate": rate}
    return {**config, "eval": {**config["eval"], "hyperparameters": hyper}}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_each_fine_tuning_is_a_row_and_a_second_set_of_settings_is_warned_of(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(small)
    assert "warning" not in said(capsys)
    first = history(small)
    assert [(row["init"], row["task"], row["seed"]) for row in first] == [
        ("pretrained", "cola", seed) for seed in (0, 1)
    ]
    main(small)
    assert history(small) == first, "what is found stored is no new row"
    main(with_rate(small, 2e-3))
    assert "a second set of settings keeps it out of the closed division" in said(capsys).lower()
    rows = history(small)
    assert rows[:2] == first and len(rows) == 4
    assert {row["hyperparameters"]["learning_rate"] for row in rows} == {1e-3, 2e-3}


def test_the_first_settings_need_no_second_fine_tuning(
    small: dict[str, Any],
    section_of: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Results of other settings replace none: the record returns to what it was, with its results."""
    main(small)
    before = section_of(small)
    main(with_rate(small, 2e-3))
    capsys.readouterr()
    main(small)
    after = section_of(small)
    assert len(history(small)) == 4 and "warning" not in said(capsys)
    assert {**after, "history_entries": 2} == before and after["history_entries"] == 4


def test_a_sweep_is_not_warned_of_what_it_is(
    small: dict[str, Any], with_eval: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate in (1e-3, 2e-3):
        main(with_rate(with_eval(small, sweep=True), rate))
    out = said(capsys)
    assert "warning" not in out and "sweep: 2 points, best {'learning_rate'" in out
    assert len(history(small)) == 4
    main(with_rate(small, 3e-3))
    assert "a second set of settings" in said(capsys).lower()


def test_a_sweep_that_is_repeated_writes_nothing(small: dict[str, Any], with_eval: Change) -> None:
    both = with_eval(small, sweep=True, init=["pretrained", "random"], seeds=[0])
    log = Path(small["runs"]) / "first" / "run.jsonl"
    for rate in (1e-3, 2e-3):
        main(with_rate(both, rate))
    before = log.read_bytes()
    for rate in (1e-3, 2e-3):
        main(with_rate(both, rate))
    assert log.read_bytes() == before
    sections = load_record(log.parent)["glue"].values()
    assert [len(section["sweep"]["points"]) for section in sections] == [2, 2]


def test_a_fine_tuning_that_might_have_another_outcome_is_announced(
    small: dict[str, Any],
    with_eval: Change,
    corpus: Path,
    predictions_of: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a part of the official data, the rules do not compare the two."""
    told = []
    embedded = with_eval(small, source="embedded", data_dir=None)
    for case in (small, {**embedded, "name": "second"}):
        main(case)
        predictions_of(case, "cola", 0).unlink()
        main(case)
        told.append("was fine-tuned before" in said(capsys))
    assert told == [False, True]


def test_seeds_that_the_record_drops_stay_in_the_history(
    small: dict[str, Any], with_eval: Change, section_of: Callable[..., dict[str, Any]]
) -> None:
    main(with_eval(small, seeds=[0, 1, 2]))
    main(small)
    assert section_of(small)["seeds"] == [0, 1]
    assert [row["seed"] for row in history(small)] == [0, 1, 2]
    main(with_eval(small, seeds=[0, 1, 2]))
    assert section_of(small)["seeds"] == [0, 1, 2] and len(history(small)) == 3


@pytest.mark.parametrize("lost", ["a line", "the order", "a value"])
def test_an_altered_log_is_not_continued(small: dict[str, Any], lost: str) -> None:
    main(small)
    log = Path(small["runs"]) / "first" / "run.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    if lost == "a line":
        del lines[-2]
    elif lost == "the order":
        lines[-2:] = reversed(lines[-2:])
    else:
        lines[-2] = lines[-2].replace(b'"seed":0', b'"seed":1')
    damaged = b"".join(lines)
    log.write_bytes(damaged)
    with pytest.raises(UserError, match=r"run\.jsonl:\d+: "):
        main(small)
    assert log.read_bytes() == damaged


def test_the_first_result_stands_wherever_it_was_made(
    small: dict[str, Any],
    with_eval: Change,
    finetuned: Callable[..., list[tuple[str, str, int]]],
    section_of: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two sittings on two machines, and training rows in another order, are one scoring."""
    main(with_eval(small, seeds=[0], init=["pretrained", "random"]))
    train = Path(small["eval"]["data_dir"]) / "CoLA/train.tsv"
    train.write_text("".join(reversed(train.read_text().splitlines(True))))
    real = scoring.environment
    monkeypatch.setattr(
        scoring, "environment", lambda device: {**real(device), "torch": "elsewhere"}
    )
    main(with_eval(small, init=["pretrained", "random"]))
    assert "(stored, made elsewhere" in said(capsys)
    assert finetuned(small) == [
        ("pretrained", "cola", 0),
        ("random", "cola", 0),
        ("pretrained", "cola", 1),
        ("random", "cola", 0),
        ("random", "cola", 1),
    ]
    places = [
        section_of(small, init)["conditions"]["cola"].split("-")[1:]
        for init in ("pretrained", "random")
    ]
    assert [len(of_init) for of_init in places] == [2, 1]
