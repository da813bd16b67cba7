"""The record is computed from the log alone; a run folder has one writer and one recipe."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.invocation import Invocation
from cramming.record import (
    load_record,
    refuse_finished_run,
    run_lock,
    write_record,
)
from cramming.record_schema import finite
from cramming.resume import changed_settings
from cramming.runlog import RUN_LOG, EventLog, ExternalModel

SETTINGS: dict[str, Any] = {
    "seed": 0,
    "division": "closed",
    "model": {"hidden_size": 32, "betas": [0.9, 0.95]},
    "budget": {"hours": 1.0},
    "eval": {"seeds": 3},
    "checkpoint": {"every_steps": None},
    "forced": [],
    "data": {"workers": None, "source": "embedded"},
    "parallel": {"name": "zero2"},
}


def changed(**sections: Any) -> dict[str, Any]:
    """The settings with sections changed."""
    merged = json.loads(json.dumps(SETTINGS))
    for key, value in sections.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize("name", ["a", "first-try_2.1", "lr=1e-3,b", "größe"])
def test_names_that_become_folders(tmp_path: Path, name: str) -> None:
    assert Invocation(name, tmp_path).run_folder == tmp_path / name


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "-a", "~", "report"])
def test_names_that_do_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name=") as caught:
        assert Invocation(name, tmp_path).run_folder
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_is_null() -> None:
    nan, inf = float("nan"), float("inf")
    value = {"a": [nan, 1.0, (inf, -inf)], "b": {"c": nan}, "d": "nan", "e": 5, "f": True}
    expected = {"a": [None, 1.0, [None, None]], "b": {"c": None}, "d": "nan", "e": 5, "f": True}
    assert finite(value) == expected


def test_the_written_record_is_written_again_byte_for_byte(unbroken: Path, tmp_path: Path) -> None:
    """It is derived from the log, whatever else the folder holds, and never read back."""
    run = tmp_path / "a"
    run.mkdir()
    shutil.copy(unbroken / RUN_LOG, run)
    (run / "record.json").write_text("{}")
    write_record(run)
    assert (run / "record.json").read_bytes() == (unbroken / "record.json").read_bytes()
    assert load_record(run) == load_record(unbroken)


def values_of(node: Any) -> set[str]:
    """The leaves of a JSON document that say something: numbers with digits enough, hashes, longer texts."""
    if isinstance(node, dict):
        return set().union(*map(values_of, node.values())) if node else set()
    if isinstance(node, list):
        return set().union(*map(values_of, node)) if node else set()
    text = json.dumps(node)
    return {text} if len(text) > 9 else set()


def test_no_fact_is_stored_twice(unbroken: Path) -> None:
    """The log is the only source: other files of the folder are derived from it, or are the model's."""
    documents = {path.name for path in unbroken.iterdir() if path.is_file()}
    assert documents == {RUN_LOG, "record.json"}
    lines = [json.loads(line) for line in (unbroken / RUN_LOG).read_text().splitlines()]
    assert values_of(json.loads((unbroken / "record.json").read_text()))
    recipe, *others = lines
    twice = values_of(recipe["recipe"]) & set().union(
        *(values_of({k: v for k, v in line.items() if k != "corpus"}) for line in others)
    )
    assert not {value for value in twice if not value.startswith('"/')}


@pytest.mark.parametrize("content", [None, "", "{", "[]\n", '{"event": "start"}\n'])
def test_logs_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RUN_LOG).write_text(content)
    with pytest.raises(UserError, match=RUN_LOG) as caught:
        load_record(tmp_path)
    assert "\n" not in str(caught.value)


class TestRestart:
    """Starting under a name that has a run."""

    def test_a_finished_run_is_never_trained_again(self, unbroken: Path) -> None:
        runs = unbroken.parent
        with pytest.raises(UserError, match="already has a finished run"):
            refuse_finished_run(Invocation("a", runs))
        assert refuse_finished_run(Invocation("a", runs, resume=True)) is True

    def test_the_name_of_a_scored_model_stays_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        log = EventLog(tmp_path / "a" / RUN_LOG)
        versions = {"suite_version": "1", "rules_version": "7", "division": "open"}
        versions["time"] = "2030-01-01T00:00:00+00:00"
        log.append(ExternalModel(name="a", model="bert", recipe={}, environment={}, **versions))
        log.close()
        for resume in (False, True):
            with pytest.raises(UserError, match="the model bert"):
                refuse_finished_run(Invocation("a", tmp_path, resume=resume))

    def test_a_new_name_is_free(self, tmp_path: Path) -> None:
        for resume in (False, True):
            assert refuse_finished_run(Invocation("a", tmp_path, resume=resume)) is False


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"model": {"hidden_size": 64}}, "model.hidden_size"),
        ({"model": {"betas": [0.9, 0.99]}}, "model.betas"),
        ({"model": {"extra": 1}}, "model.extra"),
        ({"budget": {"hours": 2.0}}, "budget.hours"),
        ({"data": {"source": "text"}}, "data.source"),
        (
            {"parallel": {"compression": {"name": "topk", "density": 0.1}}},
            "parallel.compression.density",
        ),
    ],
)
def test_a_resume_with_other_settings_names_the_first(changes: dict[str, Any], name: str) -> None:
    key, before, now = next(changed_settings(SETTINGS, changed(**changes)))
    assert key == name and before != now


def test_places_and_what_comes_after_the_training_may_change() -> None:
    after = {
        "eval": {"seeds": 5},
        "data": {"workers": 4},
        "checkpoint": {"every_steps": 3},
        "parallel": {"name": "ddp", "compression": {"name": "none"}},
    }
    settings = changed(forced=["sdpa"], **after)
    assert not list(changed_settings(SETTINGS, settings))


class TestLock:
    """One writer per run folder."""

    def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(
        self, tmp_path: Path
    ) -> None:
        code = f"""
import time
from pathlib import Path
from cramming.record import run_lock
with run_lock(Path({str(tmp_path / "a")!r})):
    print("on", flush=True)
    time.sleep(60)
"""
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert holder.stdout
        with holder.stdout:
            assert holder.stdout.readline() == "on\n"
        with (
            pytest.raises(UserError, match="another process is working on this run"),
            run_lock(tmp_path / "a"),
        ):
            pass
        holder.kill()
        holder.wait()
        with run_lock(tmp_path / "a"):
            pass

    def test_what_killed_processes_left_half_written_goes(self, tmp_path: Path) -> None:
        for name in (
            ".final.4194305.tmp/model.safetensors",
            "checkpoints/.step-00000002.pt.4194305.tmp",
        ):
            (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / name).write_text("half")
        with run_lock(tmp_path / "a"):
            assert sorted(p.name for p in (tmp_path / "a").rglob("*")) == [".lock", "checkpoints"]
