"""A study runs what is missing, compares variants over seeds, and goes on after an interruption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, build
from eval import study
from eval.reading import Run
from eval.study import StudyConfig, main, result, write

Calls = list[tuple[str, list[str]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The verbs that a study calls; they leave records as the real ones do."""
    made: Calls = []

    def verb(name: str, overrides: list[str], excused: Any = None) -> None:
        made.append((name, overrides))
        run = dict(override.split("=", 1) for override in overrides if "=" in override)["name"]
        path = tmp_path / run / "record.json"
        path.parent.mkdir(exist_ok=True)
        record = json.loads(path.read_text()) if path.exists() else {"format": 1, "name": run}
        if name == "pretrain":
            record["pretrain"] = {"status": "finished", "validation": {"loss": 2.5}, "tokens": 1000}
        elif name == "glue":
            record["glue"] = {"pretrained": {"suite": "embedded", "tasks": {}, "averages": {}}}
        path.write_text(json.dumps(record))

    monkeypatch.setattr(study, "_verb", verb)
    monkeypatch.setattr(study, "_given_overrides", lambda: ["study.what=vocab", "name=x", "seed=5", "budget.hours=1"])
    return made


def settings(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {"runs": str(tmp_path), "name": "x", "study": {"vocab_sizes": [512, 1024], "seeds": [0, 1], **changes}}


def test_every_variant_and_seed_runs_with_the_users_settings(calls: Calls, tmp_path: Path) -> None:
    main(settings(tmp_path))
    assert [verb for verb, _ in calls] == ["prepare", "pretrain", "glue"] * 4
    assert calls[0][1] == ["budget.hours=1", "tokenizer.vocab_size=512", "name=x-vocab512-0", "seed=0"]
    table = (tmp_path / "x-vocab-study" / "study.md").read_text()
    assert "| vocab512 | 2 | – | – | 2.500 | 1,000 |" in table and "| vocab1024 | 2 |" in table


def test_the_same_command_again_does_only_what_is_missing(calls: Calls, tmp_path: Path) -> None:
    main(settings(tmp_path, glue=False))
    assert {verb for verb, _ in calls} == {"prepare", "pretrain"}
    calls.clear()
    main(settings(tmp_path))
    assert [verb for verb, _ in calls] == ["glue"] * 4
    calls.clear()
    path = tmp_path / "x-vocab512-1" / "record.json"
    path.write_text(json.dumps({"format": 1, "pretrain": {"status": "interrupted"}}))
    main(settings(tmp_path))
    assert [verb for verb, _ in calls] == ["prepare", "pretrain", "glue"] and "resume=true" in calls[1][1]


def test_a_diverged_run_has_no_score_and_is_not_repeated(calls: Calls, tmp_path: Path) -> None:
    for name in ("x-a-0", "x-b-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps({"format": 1, "pretrain": {"status": "diverged"}}))
    main(settings(tmp_path, what="data", data={"a": ["data/filters=none"], "b": []}, seeds=[0]))
    assert not calls
    assert "| a | 1 | – | – | – | – |" in (tmp_path / "x-data-study" / "study.md").read_text()


def scored(name: str, average: float | None) -> Run:
    section = {"suite": "embedded", "tasks": {}, "averages": {"embedded": {"value": average}}}
    record = {"name": name, "glue": {"pretrained": section}, "pretrain": {"validation": {"loss": 3.0}, "tokens": 10}}
    return Run(Path(name), name, record)


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    found = result("v", [scored("a", 60.0), scored("b", 64.0)])
    assert found == ("v", 2, 62.0, pytest.approx(8**0.5), 3.0, 10.0)
    assert result("v", [scored("a", None)])[2:4] == (None, None)
    write(tmp_path, "data", [found])
    assert "| v | 2 | 62.0 | 2.83 | 3.000 | 10 |" in (tmp_path / "study.md").read_text()
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_verb_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.sys, "executable", "false")
    with pytest.raises(UserError, match=r"`cramming prepare` ended with code 1"):
        study._verb("prepare", [])
    study._verb("pretrain", [], lambda: True)


def test_settings(compose: Callable[..., dict[str, Any]]) -> None:
    config = build(StudyConfig, compose()["study"], "study")
    assert config.variants["vocab4096"] == ["tokenizer.vocab_size=4096"]
    assert {"unfiltered", "filtered"} < config.data.keys()
    with pytest.raises(UserError, match=r"study: what=all: choose one of vocab, data"):
        build(StudyConfig, {"what": "all"}, "study")
    with pytest.raises(UserError, match="study: nothing to run"):
        build(StudyConfig, {"vocab_sizes": []}, "study")
