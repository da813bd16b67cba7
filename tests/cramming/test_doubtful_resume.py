"""A resume continues what the run's own log knows, and nothing else: no time comes back, no training is given."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import checkpoint, device, launch
from cramming.config import UserError
from cramming.engine import Engine
from cramming.invocation import Invocation
from cramming.record import load_record
from cramming.runlog import RUN_LOG, Resume, read_log, training_of
from tests.conftest import before_step
from tests.faults import Crash

Start = Callable[..., Path]
Result = Callable[[Path], dict[str, Any]]
Refused = Callable[..., str]
EVERY = "checkpoint.every_steps=3"


def crash(*_: Any, **__: Any) -> None:
    raise Crash


@pytest.fixture(scope="module")
def crashed_once(
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> Path:
    """The run that went down in step 9 of 12, with checkpoints of steps 3 and 6; read-only."""
    runs = tmp_path_factory.mktemp("crashed")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 9, crash)
        launch.main(compose(*tiny_overrides, EVERY), Invocation(runs=runs, name="a", device="cpu"))
    return runs / "a"


@pytest.fixture
def crashed(crashed_once: Path, tmp_path: Path) -> Path:
    """A copy of it, where `start` and `refused` look for the run "a"."""
    return Path(shutil.copytree(crashed_once, tmp_path / "runs" / "a"))


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_honest_resume_names_its_checkpoint(
    start: Start, crashed: Path, unbroken: Path, result: Result
) -> None:
    assert result(start(EVERY, name="a", resume=True)) == result(unbroken)
    entries = read_log(crashed / RUN_LOG)
    (resumed,) = [entry.event for entry in entries if isinstance(entry.event, Resume)]
    assert resumed.steps == 6
    assert (6, resumed.sha256) in training_of(entries).saved


def test_the_place_of_compiled_code_of_each_process_stays_on_record(
    start: Start, crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "GIVEN_CACHES", {"TORCHINDUCTOR_CACHE_DIR": "/warm"})
    record = load_record(start(EVERY, name="a", resume=True))
    processes = (record["environment"], *record["resumed"])
    assert [process["compile_cache"] for process in processes] == ["own", "given"]


def test_the_open_division_once_claimed_stays(start: Start, crashed: Path) -> None:
    start(EVERY, "division=open", name="a", resume=True)
    assert load_record(crashed)["division_requested"] == "open"


@pytest.mark.parametrize("lines", [None, 0, 1, 5])
def test_a_log_that_is_lost_or_cut_short_gives_no_time_back(
    crashed: Path, refused: Refused, lines: int | None
) -> None:
    log = crashed / RUN_LOG
    content = log.read_text().splitlines(keepends=True)
    assert len(content) > 10
    log.unlink()
    if lines is not None:
        log.write_text("".join(content[:lines]))
    before = contents(crashed)
    assert RUN_LOG in refused(EVERY, resume=True)
    assert contents(crashed) == before
    if not lines:  # then the record alone shows that there was a log
        shutil.rmtree(crashed / "checkpoints")
        assert RUN_LOG in refused(EVERY, resume=True)


def test_another_runs_log(crashed: Path, unbroken: Path, refused: Refused) -> None:
    log = (unbroken / RUN_LOG).read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(log) if '"checkpoint"' in line and '"step":9' in line)
    (crashed / RUN_LOG).write_text("".join(log[: at + 1]))
    assert "every checkpoint is damaged" in refused(EVERY, resume=True)


def test_a_later_checkpoint_of_another_run_is_refused(
    crashed: Path, unbroken: Path, refused: Refused
) -> None:
    shutil.copy(unbroken / "checkpoints" / "step-00000012.pt", crashed / "checkpoints")
    assert "a checkpoint of step 12" in refused(EVERY, resume=True)


def test_another_runs_checkpoint_under_the_number_of_ours_is_not_taken(
    start: Start, crashed: Path, unbroken: Path, result: Result
) -> None:
    foreign = unbroken / "checkpoints" / "step-00000012.pt"
    shutil.copy(foreign, crashed / "checkpoints" / "step-00000006.pt")
    assert result(start(EVERY, name="a", resume=True)) == result(unbroken)
    (resumed,) = [
        entry.event for entry in read_log(crashed / RUN_LOG) if isinstance(entry.event, Resume)
    ]
    assert resumed.steps == 3


def test_another_limit_than_the_processes_before(crashed: Path, refused: Refused) -> None:
    assert "budget.steps" in refused(EVERY, "budget.steps=50", resume=True)


class TestEnded:
    """A run that ended stays ended."""

    @pytest.fixture
    def ended(self, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """Killed after the end, before the model was exported."""
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr("cramming.finish.finish", crash)
            start(EVERY, name="a")
        return tmp_path / "runs" / "a"

    def test_a_resume_exports_its_model_and_trains_no_more(
        self,
        start: Start,
        ended: Path,
        unbroken: Path,
        monkeypatch: pytest.MonkeyPatch,
        result: Result,
    ) -> None:
        assert load_record(ended)["pretrain"]["status"] == "running"
        monkeypatch.setattr(Engine, "forward_backward", lambda *_, **__: pytest.fail("it trained"))
        assert result(start(EVERY, name="a", resume=True)) == result(unbroken)
        kinds = [entry.event.event for entry in read_log(ended / RUN_LOG)]
        assert kinds[-3:] == ["end", "validation", "exported"]

    def test_it_does_not_resume_from_an_older_checkpoint(
        self, ended: Path, refused: Refused
    ) -> None:
        (ended / "checkpoints" / "step-00000012.pt").unlink()
        assert "every checkpoint is damaged" in refused(EVERY, resume=True)
        shutil.rmtree(ended / "checkpoints")
        assert "its last checkpoint is gone" in refused(EVERY, resume=True)


@pytest.mark.usefixtures("each_saver")
def test_a_run_has_ended_once_its_last_checkpoint_is_saved(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unbroken: Path,
    result: Result,
    refused: Refused,
) -> None:
    """A full disk at the end must not cost the run."""

    def full(*_: Any, **__: Any) -> None:
        raise UserError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "overwrite_atomically", full)
        assert refused() == "no room"
    (process,) = load_record(tmp_path / "runs" / "a")["pretrain"]["budget"]["processes"]
    assert process["ended"] == "failed"
    assert result(start(name="a", resume=True)) == result(unbroken)
