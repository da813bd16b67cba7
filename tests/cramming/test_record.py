"""The record: merged atomically, no number in it that is none; a run folder has one writer and one set of settings."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.record import (
    MetricsLog,
    create_run_folder,
    finite,
    load_metrics,
    load_record,
    refuse_finished_run,
    run_folder,
    run_lock,
    write_record_section,
)
from cramming.resume import changed_settings

SETTINGS: dict[str, Any] = {
    "name": "a",
    "seed": 0,
    "resume": False,
    "runs": "runs",
    "corpora": "corpora",
    "division": "closed",
    "model": {"hidden_size": 32, "betas": [0.9, 0.95]},
    "budget": {"hours": 1.0},
    "eval": {"seeds": 3},
    "checkpoint": {"every_steps": None},
    "report": {"title": "x"},
    "forced": [],
    "bench": {"out": "bench"},
    "plan": {"json": None},
    "inspect": {"document": None},
    "data": {"workers": None, "source": "embedded"},
    "parallel": {"name": "zero2"},
}


def changed(**sections: Any) -> dict[str, Any]:
    merged = json.loads(json.dumps(SETTINGS))
    for key, value in sections.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize("name", ["a", "first-try_2.1", "lr=1e-3,b", "größe"])
def test_names_that_become_folders(tmp_path: Path, name: str) -> None:
    assert run_folder({"name": name, "runs": str(tmp_path)}) == tmp_path / name


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "-a", "~", "report"])
def test_names_that_do_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name=") as caught:
        run_folder({"name": name, "runs": str(tmp_path)})
    assert "\n" not in str(caught.value)


def test_sections_are_merged_one_level_deep(tmp_path: Path) -> None:
    write_record_section(tmp_path, pretrain={"status": "running"}, glue={"random": {"score": 1}})
    write_record_section(tmp_path, pretrain={"steps": 5}, glue={"pretrained": {"score": 2}})
    write_record_section(tmp_path, glue={"random": {"seconds": 3}})
    found = load_record(tmp_path)
    assert found["pretrain"] == {"status": "running", "steps": 5}
    assert found["glue"] == {"random": {"seconds": 3}, "pretrained": {"score": 2}}
    assert (found["format"], found["name"]) == (1, tmp_path.name)
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    assert finite(
        {"a": [nan, 1.0, (inf, -inf)], "b": {"c": nan}, "d": "nan", "e": 5, "f": True}
    ) == {
        "a": [None, 1.0, [None, None]],
        "b": {"c": None},
        "d": "nan",
        "e": 5,
        "f": True,
    }
    write_record_section(tmp_path, pretrain={"train_loss": nan, "validation": {"loss": inf}})
    text = (tmp_path / "record.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert load_record(tmp_path)["pretrain"] == {"train_loss": None, "validation": {"loss": None}}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("{", "not readable as JSON"),
        ("[]", "record format list"),
        ('{"format": 99}', "record format 99"),
        ("{}", "record format None"),
        (None, "no such record"),
    ],
)
def test_records_that_cannot_be_read(tmp_path: Path, content: str | None, names: str) -> None:
    if content is not None:
        (tmp_path / "record.json").write_text(content)
    with pytest.raises(UserError, match=names) as caught:
        load_record(tmp_path)
    assert "record.json" in str(caught.value)
    assert "\n" not in str(caught.value)


class TestRestart:
    def settings(self, tmp_path: Path, *, resume: bool) -> dict[str, Any]:
        return {"name": "a", "runs": str(tmp_path), "resume": resume}

    @pytest.mark.parametrize(
        "sections", [{"pretrain": {"status": s}} for s in ("running", "interrupted")] + [{}]
    )
    def test_an_unfinished_run_goes_on_only_with_resume(
        self, tmp_path: Path, sections: dict[str, Any]
    ) -> None:
        write_record_section(tmp_path / "a", config=SETTINGS, **sections)
        with pytest.raises(UserError, match="resume=true"):
            refuse_finished_run(self.settings(tmp_path, resume=False))
        assert refuse_finished_run(self.settings(tmp_path, resume=True)) is False

    def test_a_finished_run_is_never_trained_again(self, tmp_path: Path) -> None:
        write_record_section(tmp_path / "a", pretrain={"status": "finished"})
        with pytest.raises(UserError, match="already has a finished run"):
            refuse_finished_run(self.settings(tmp_path, resume=False))
        assert refuse_finished_run(self.settings(tmp_path, resume=True)) is True

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize(
        ("sections", "names"),
        [
            ({"pretrain": {"status": "diverged"}}, "diverged.*give another name"),
            (
                {"pretrain": {"status": "exhausted"}},
                "budget is spent, without a step that was kept; give another name",
            ),
            (
                {"config": {"model_path": "bert"}, "glue": {}},
                "scores of model_path=bert; give another name",
            ),
        ],
    )
    def test_what_cannot_go_on_keeps_its_name(
        self, tmp_path: Path, sections: dict[str, Any], names: str, resume: bool
    ) -> None:
        write_record_section(tmp_path / "a", **sections)
        with pytest.raises(UserError, match=names):
            refuse_finished_run(self.settings(tmp_path, resume=resume))

    def test_a_new_name_is_free(self, tmp_path: Path) -> None:
        for resume in (False, True):
            assert refuse_finished_run(self.settings(tmp_path, resume=resume)) is False


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 1}, "seed=1: the run in .* was started with seed=0"),
        ({"model": {"hidden_size": 64}}, r"model\.hidden_size=64.*=32"),
        ({"model": {"betas": [0.9, 0.99]}}, r"model\.betas"),
        (
            {"model": {"extra": 1}},
            r"model\.extra=1: .* was started without this setting; resume with",
        ),
        ({"budget": {"hours": 2.0}}, r"budget\.hours=2\.0"),
        ({"data": {"source": "text"}}, r"data\.source=text"),
        (
            {"parallel": {"compression": {"name": "topk", "density": 0.1}}},
            r"parallel\.compression\..*resume with the",
        ),
    ],
)
def test_a_resume_with_other_settings_names_the_first(changes: dict[str, Any], names: str) -> None:
    problem = next(changed_settings(Path("runs/a"), {"config": SETTINGS}, changed(**changes)))
    assert re.match(names, problem)


def test_places_and_what_comes_after_the_training_may_change() -> None:
    after = {
        "eval": {"seeds": 5},
        "bench": {"out": "x"},
        "plan": {"json": "x"},
        "inspect": {"document": 3},
    }
    after |= {"data": {"workers": 4}, "checkpoint": {"every_steps": 3}}
    after |= {"parallel": {"name": "ddp", "compression": {"name": "none"}}}
    settings = changed(resume=True, runs="elsewhere", forced=["sdpa"], **after)
    assert not list(changed_settings(Path("runs/a"), {"config": SETTINGS}, settings))


def test_a_resume_keeps_what_the_first_start_wrote(tmp_path: Path) -> None:
    create_run_folder(tmp_path, SETTINGS, {"torch": "1"}, resume=False)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {"config.yaml", "environment.json", "record.json"} <= before.keys()
    create_run_folder(tmp_path, changed(resume=True, division="open"), {"torch": "2"}, resume=True)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    record_before, record_after = (
        json.loads(files.pop("record.json")) for files in (before, after)
    )
    assert after == before
    added = {"resumed": [{"torch": "2"}], "division_requested": "open"}
    assert (
        record_after == record_before | added
    )  # a resume may run elsewhere, with other code: it must show
    create_run_folder(
        tmp_path, changed(resume=True, division="closed"), {"torch": "3"}, resume=True
    )
    assert load_record(tmp_path)["division_requested"] == "open"  # a claim that stays


class TestMetrics:
    @pytest.mark.parametrize(
        ("written", "kept"),
        [
            # A resume goes on from an earlier step, and may have no time to come as far; then the end is validated.
            (
                [
                    "1 loss",
                    "2 loss",
                    "2 validation_loss",
                    "3 loss",
                    "4 validation_loss",
                    "2 validation_loss",
                ],
                [0, 1, 5],
            ),
            # Killed behind step 60, which is done again: the first validation was of weights that are gone.
            (["50 loss", "60 loss", "60 validation_loss", "60 loss"], [0, 3]),
            # The last step is logged when training is over, if it is not one of every so many.
            (["7 validation_loss", "7 loss", "7 validation_loss"], [1, 2]),
        ],
    )
    def test_a_row_takes_back_what_a_resume_does_again(
        self, tmp_path: Path, written: list[str], kept: list[int]
    ) -> None:
        log, rows = MetricsLog(tmp_path), list[dict[str, Any]]()
        for number, (step, kind) in enumerate(line.split() for line in written):
            rows.append({"step": int(step), kind: float(number)})
            log.write(rows[-1])
        log.close()
        assert load_metrics(tmp_path) == [rows[number] for number in kept]

    @pytest.mark.parametrize(
        ("begun", "stand"),
        [
            ([0.42, 0.50, 0.62, 0.70], True),  # unbroken
            ([0.4, 0.5, 0.61, 0.69], True),  # a budget of steps: the progress is that of the work
            ([0.75, 0.80, 0.85, 0.90], False),  # killed behind step 7, resumed from step 4
            ([0.43, 0.46, 0.49, 0.52], False),  # the same, and the journal's last seconds were lost
        ],
    )
    def test_what_a_crash_threw_away_goes_though_no_row_has_its_step_again(
        self, tmp_path: Path, begun: list[float], stand: bool
    ) -> None:
        """A validation, and the row of a checkpoint that is damaged, among the steps of the first row of a resume."""
        rows: list[dict[str, Any]] = [
            {"step": 4, "loss": 5.0, "progress": 0.40, "each_progress": [0.0, 0.1, 0.2, 0.3]},
            {"step": 4, "validation_loss": 5.0, "progress": 0.41},
            {"step": 6, "validation_loss": 4.0, "progress": 0.61},
            {"step": 7, "loss": 4.0, "progress": 0.69, "each_progress": [0.3, 0.42, 0.5, 0.62]},
            {"step": 8, "loss": 3.0, "progress": 0.95, "each_progress": begun},
        ]
        log = MetricsLog(tmp_path)
        for row in rows:
            log.write(row)
        log.close()
        assert load_metrics(tmp_path) == (rows if stand else rows[:2] + rows[4:])

    def test_a_torn_line_costs_no_other(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
        assert [r["step"] for r in load_metrics(tmp_path)] == [1]
        log = MetricsLog(tmp_path)
        log.write({"step": 2, "loss": 1.0})
        log.close()
        assert [r["step"] for r in load_metrics(tmp_path)] == [1, 2]

    @pytest.mark.parametrize(
        "line",
        [
            *(b"[1]", b'{"stip": 1}', b'{"step": "1"}', b"\xff\xfe", b'{"st\x8bp": 1}', b"null"),
            *(
                b'{"step": 2, "each_progress": [' + each + b"]}"
                for each in (b'"a", null', b"{}, [1]", b"NaN, 1e999")
            ),
        ],
    )
    def test_a_damaged_line_costs_no_other(self, tmp_path: Path, line: bytes) -> None:
        """At the end of a day's training it must not cost the record."""
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
        assert [r["step"] for r in load_metrics(tmp_path)] == [1, 2]

    def test_every_row_is_on_disk_at_once_and_holds_no_nan(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path)
        log.write({"step": 1, "loss": float("nan")})
        assert load_metrics(tmp_path) == [{"step": 1, "loss": None}]
        log.close()


class TestLock:
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
