"""No scoring goes without a trace: each fine-tuning is a line of glue/history.jsonl, and the rules read them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, file_sha256
from cramming.data.task_files import GLUE
from cramming.record import load_record
from eval.finetune import history, scoring
from eval.glue import main
from eval.rules.load import load_run
from eval.rules.table import judge

Change = Callable[..., dict[str, Any]]


@pytest.fixture
def few(config: dict[str, Any], with_eval: Change) -> dict[str, Any]:
    return with_eval(config, tasks=["cola"])


def told(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in past(config).read_text().splitlines()]


def past(config: dict[str, Any]) -> Path:
    return history.history_file(Path(config["runs"]) / "first")


def finding(config: dict[str, Any], rule: str) -> tuple[bool, str]:
    verdict = judge(load_run(Path(config["runs"]) / "first").record)
    return next((f.ok, f.evidence) for f in verdict.findings if f.rule == rule)


def test_each_fine_tuning_is_a_line_and_a_second_set_shows(
    few: dict[str, Any], with_eval: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    main(few)
    assert "a second set" not in capsys.readouterr().out
    first = past(few).read_bytes()
    assert [(run["init"], run["task"], run["seed"]) for run in told(few)] == [
        ("pretrained", "cola", s) for s in (0, 1)
    ]
    main(few)
    assert past(few).read_bytes() == first, "what is found stored is no new line"
    assert finding(few, "R7")[0] and finding(few, "R20") == (True, "pretrained: last epoch")
    hyper = {**few["eval"]["hyperparameters"], "learning_rate": 2e-3}
    main(with_eval(few, hyperparameters=hyper))
    assert "a second set of settings keeps it out of the closed division" in capsys.readouterr().out
    assert past(few).read_bytes().startswith(first) and len(told(few)) == 4
    assert {run["hyperparameters"]["learning_rate"] for run in told(few)} == {1e-3, 2e-3}
    assert finding(few, "R7")[0]
    assert finding(few, "R20") == (False, "pretrained: last epoch, one of 2 sets in its history")


def test_a_sweep_is_not_warned_of_what_it_is(
    few: dict[str, Any], with_eval: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate in (1e-3, 2e-3):
        main(
            with_eval(
                few,
                sweep=True,
                hyperparameters={**few["eval"]["hyperparameters"], "learning_rate": rate},
            )
        )
    assert "warning" not in capsys.readouterr().out
    assert finding(few, "R20") == (
        False,
        "pretrained: last epoch, best of 2 sets of hyperparameters, one of 2 sets in its history",
    )
    main(few)  # the first point once more, as what competes
    assert "a second set of settings" in capsys.readouterr().out


def test_what_was_scored_before_there_was_a_history_may_be_scored_again(
    few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(few)
    past(few).unlink()
    path = Path(few["runs"]) / "first" / "record.json"
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "history"}
    path.write_text(json.dumps(older | {"rules_version": "4"}))
    main(few)  # finds all of it stored
    monkeypatch.setattr("eval.rules.load.KNOWN", {file_sha256(path)})
    assert not past(few).exists() and finding(few, "R7")[0]


def test_a_fine_tuning_that_might_have_another_outcome_is_announced(
    few: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where either is done on part of the data, R20 does not compare the two."""
    said = []
    for subset in (True, False, False, True):
        for module in ("store", "scoring"):
            monkeypatch.setattr(
                f"eval.finetune.{module}.is_subset", lambda suite, data, subset=subset: subset
            )
        main(few)
        shutil.rmtree(past(few).parent / "pretrained")
        said.append(
            "cola seed 0, cola seed 1 was fine-tuned before"
            in " ".join(capsys.readouterr().out.split())
        )
    assert said == [False, False, True, False]


def test_seeds_that_the_record_drops_stay_in_the_history(
    few: dict[str, Any], with_eval: Change
) -> None:
    main(with_eval(few, seeds=[0, 1, 2, 3]))
    main(with_eval(few, seeds=[0, 1, 2]))
    assert finding(few, "R21") == (
        False,
        "pretrained: seeds [0, 1, 2], in the history of pretrained also 3",
    )
    main(with_eval(few, seeds=[0, 1, 2, 3]))
    assert finding(few, "R21") == (True, "pretrained: seeds [0, 1, 2, 3]") and len(told(few)) == 4


@pytest.fixture
def stopped(
    few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], None]:
    """Score, and stop when the first result gets its name: its line is written, and it is not kept."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def score(config: dict[str, Any]) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("eval.finetune.store._name", stop)
            main(config)

    return score


def between_the_names(predictions: Path, piece: Path) -> None:
    predictions.with_name(f"{predictions.name}.finished").replace(predictions)
    raise KeyboardInterrupt


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "stop", "lines"),
    [
        ("eval.finetune.store.write_json", interrupt, 0),
        ("eval.finetune.history.write_record_section", interrupt, 1),
        ("eval.finetune.store._name", interrupt, 1),
        ("eval.finetune.store._name", between_the_names, 1),
    ],
)
def test_wherever_a_scoring_is_stopped_a_result_with_a_line_is_found_again(
    few: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    stop: Callable[..., None],
    lines: int,
) -> None:
    """On a GPU it could not be repeated to the last bit: a second outcome."""
    few["eval"]["seeds"] = [0]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, stop)
        main(few)
    pieces = past(few).parent / "pretrained/pieces"
    assert (len(told(few)) if lines else past(few).exists()) == lines and not list(
        pieces.glob("*.json")
    )
    main(few)
    assert (
        [run["seed"] for run in told(few)] == [0]
        and finding(few, "R7")[0]
        and finding(few, "R20")[0]
    )
    assert [file.name for file in pieces.iterdir()] == ["cola-seed0.json"]


def test_what_was_fine_tuned_for_another_suite_or_initialisation_is_no_choice(
    tmp_path: Path,
) -> None:
    def scoring_of(suite: Any, init: str, **changes: Any) -> history.Scoring:
        return history.Scoring(
            tmp_path, suite, init, dict.fromkeys(history.PROTOCOL, "as it was") | changes, 1, {}
        )

    scoring_of("embedded", "pretrained").add(
        GLUE["cola"], 0, {"entries": {}, "predictions_sha256": "", "key": ""}, False
    )
    other = {"precision": "fp32"}
    assert (
        scoring_of("embedded", "pretrained", **other).other_set() == "precision=as it was, not fp32"
    )
    for suite, init in (("glue", "pretrained"), ("embedded", "random")):
        assert scoring_of(suite, init, **other).other_set() is None


def test_a_scoring_that_was_stopped_cannot_be_taken_back(
    few: dict[str, Any], with_eval: Change, stopped: Callable[[dict[str, Any]], None]
) -> None:
    """Neither the first, by removing what it left, nor the lines of a second."""
    wild = with_eval(few, hyperparameters={**few["eval"]["hyperparameters"], "learning_rate": 1e-2})
    stopped(wild)
    folder = past(few).parent
    folder.rename(folder.with_name("aside"))
    with pytest.raises(
        UserError, match=r"history\.jsonl: is missing; restore it, or score the model folder under"
    ):
        main(few)
    assert not finding(few, "R7")[0]
    folder.with_name("aside").rename(folder)
    main(few)
    whole = past(few).read_bytes()
    stopped(wild)
    assert finding(few, "R7")[0] and not finding(few, "R20")[0]
    past(few).write_bytes(whole)
    with pytest.raises(UserError, match=r"history\.jsonl: is not as the record knows it"):
        main(few)
    assert not finding(few, "R7")[0]


def test_the_points_of_a_sweep_stay_when_the_best_is_scored_as_if_it_were_the_only_one(
    few: dict[str, Any], with_eval: Change
) -> None:
    for rate in (1e-3, 2e-3):
        hyper = {**few["eval"]["hyperparameters"], "learning_rate": rate}
        main(with_eval(few, sweep=True, hyperparameters=hyper))
    best = load_record(Path(few["runs"]) / "first")["glue"]["pretrained"]["hyperparameters"]
    main(with_eval(few, hyperparameters=best))
    assert finding(few, "R20") == (False, "pretrained: last epoch, one of 2 sets in its history")


def test_results_from_another_folder_are_not_in_the_history(
    few: dict[str, Any], with_eval: Change
) -> None:
    """Their key is the same: nothing is fine-tuned here, so nothing is told here."""
    main({**few, "name": "other"})
    main(with_eval(few, seeds=[0]))
    folder = Path(few["runs"])
    for kind in ("pieces/cola-seed1.json", "predictions/cola-seed1.npz"):
        shutil.copy(
            folder / "other/glue/pretrained" / kind, folder / "first/glue/pretrained" / kind
        )
    main(few)
    assert finding(few, "R7") == (False, "not in the history as recorded: pretrained/cola")


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs from now on is another version of torch."""
    real = scoring.environment
    monkeypatch.setattr(
        scoring, "environment", lambda device: {**real(device), "torch": "elsewhere"}
    )


def test_the_first_result_stands_wherever_it_was_made(
    few: dict[str, Any],
    with_eval: Change,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two sittings on two machines, and training rows in another order, are one scoring."""
    main(with_eval(few, seeds=[0], init=["pretrained", "random"]))
    train = Path(few["eval"]["data_dir"]) / "CoLA/train.tsv"
    train.write_text("".join(reversed(train.read_text().splitlines(True))))
    elsewhere(monkeypatch)
    main(with_eval(few, init=["pretrained", "random"]))
    assert "seed 0" in (said := capsys.readouterr().out) and "(stored, made elsewhere" in said
    done = [(run["init"], run["seed"]) for run in told(few)]
    assert done == [
        ("pretrained", 0),
        ("random", 0),
        ("pretrained", 1),
        ("random", 0),
        ("random", 1),
    ]
    assert finding(few, "R7")[0] and finding(few, "R20")[0]
    sections = load_record(Path(few["runs"]) / "first")["glue"]
    places = [section["conditions"]["cola"].split("-")[1:] for section in sections.values()]
    assert [len(of_init) for of_init in places] == [2, 1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose history has two lines."""
    for seed in (0, 1):
        history.append(tmp_path, {"seed": seed, "score": float("nan")})
    return tmp_path


def test_a_line_that_a_crash_cut_short_never_counted(run: Path) -> None:
    path, recorded = history.history_file(run), load_record(run)["history"]
    with path.open("a") as file:
        file.write('{"seed": 2, "sco')
    assert history.stamp(path) == recorded and recorded["entries"] == 2
    history.refuse_altered(run)
    history.append(run, {"seed": 3})
    found = history.read_history(path, recorded)
    assert [entry["seed"] for entry in found["entries"]] == [0, 1, 3] and found[
        "sha256"
    ] == recorded["sha256"]
    assert load_record(run)["history"]["entries"] == 3


@pytest.mark.parametrize("line", ["[]", "{", "\udcff", "[" * 100_000, f"1{'0' * 5000}"])
def test_a_damaged_history_is_named(run: Path, line: str) -> None:
    path = history.history_file(run)
    path.write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
    assert "history.jsonl:1: damaged" in history.read_history(path, None)["problem"]
    with pytest.raises(UserError, match=r"history\.jsonl:1: damaged"):
        history.refuse_altered(run)


@pytest.mark.parametrize("recorded", ["text", [1], {"entries": 2}, {"sha256": None}])
def test_a_record_that_names_no_last_line_is_refused(run: Path, recorded: Any) -> None:
    (run / "record.json").write_text(json.dumps(load_record(run) | {"history": recorded}))
    with pytest.raises(UserError, match=r"history\.jsonl: is not as the record knows it"):
        history.refuse_altered(run)
