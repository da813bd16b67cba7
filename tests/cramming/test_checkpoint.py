"""What is saved comes back bit for bit, from the newest file that is whole."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import checkpoint
from cramming.budget import Work
from cramming.config import UserError, file_sha256
from cramming.engine import Engine
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision, PrecisionConfig
from cramming.recipe import CheckpointConfig
from cramming.runlog import Saved

KNOWN: list[Saved] = []  # by all tests here: no two files are the same
CPU = torch.device("cpu")


class State(Engine):
    """A model, an optimizer with history, a scaler."""

    def __init__(self, model: torch.nn.Module, steps: int):
        precision = Precision(PrecisionConfig(mode="fp32", tf32=False), CPU)
        super().__init__(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.1),
            precision,
            None,
            Mesh.solo(CPU),
            CPU,
        )
        self.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(steps):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            self.optimizer.step()

    def everything(self) -> list[Any]:
        state = self.optimizer.state_dict()
        tensors = [t for s in state["state"].values() for t in s.values()]
        return [
            *self.model.state_dict().values(),
            *tensors,
            state["param_groups"],
            self.precision.scaler.state_dict(),
        ]

    def save(self, folder: Path, steps: int, *, retain: bool = False) -> Path:
        return checkpoint.save(folder, self, *record_of(steps), retain=retain)

    def save_with(self, saver: checkpoint.Saver, folder: Path, steps: int) -> None:
        saver.save(folder, self, *record_of(steps), retain=False)

    def load(self, folder: Path) -> Work | None:
        newest = checkpoint.newest_of(folder, KNOWN)
        return checkpoint.load(checkpoint.path_of(folder, newest), self) if newest else None


def record_of(steps: int) -> tuple[Work, Callable[[str], None]]:
    def enter(sha256: str) -> None:
        KNOWN.append(Saved(steps, sha256))

    return Work(steps=steps, sequences=7 * steps), enter


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(a, b)
    )


def test_roundtrip(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    saved = State(make_model(0), 3)
    saved.precision.scaler.scale(torch.ones(1))
    saved.precision.scaler.update(4.0)
    torch.manual_seed(99)
    saved.save(tmp_path, 3)
    expected = torch.rand(5)

    other = State(make_model(1), 0)
    assert not same(saved.everything(), other.everything())
    torch.manual_seed(0)
    assert other.load(tmp_path) == Work(steps=3, sequences=21)
    assert same(saved.everything(), other.everything())
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(("before", "now"), [(False, True), (True, False)])
def test_a_loss_scale_begins_anew_where_the_format_changes(
    tmp_path: Path, make_model: Callable[..., Any], before: bool, now: bool
) -> None:
    """With precision=auto a resume on an older GPU is in fp16, and the run may have begun in bf16, or on a CPU."""
    saved, other = State(make_model(0), 3), State(make_model(1), 0)
    for state, is_fp16 in ((saved, before), (other, now)):
        state.precision.scaler = torch.amp.GradScaler("cpu", enabled=is_fp16)
    fresh = other.precision.scaler.state_dict()
    saved.save(tmp_path, 3)
    assert other.load(tmp_path) == Work(steps=3, sequences=21)
    assert other.precision.scaler.state_dict() == fresh


def test_no_checkpoint_is_not_an_error(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    assert State(make_model(), 0).load(tmp_path) is None
    assert State(make_model(), 0).load(tmp_path / "nothing") is None


def test_the_newest_two_are_kept(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    state = State(make_model(), 1)
    for steps in (9, 10, 99_999_999, 100, 1000):
        if steps != 99_999_999:
            state.save(tmp_path, steps)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000100.pt", "step-00001000.pt"]


@pytest.mark.parametrize("left", ["nothing", "all but a byte", "one flipped bit"])
def test_a_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, make_model: Callable[..., Any], left: str
) -> None:
    state = State(make_model(), 2)
    state.save(tmp_path, 2)
    before = [x.clone() if torch.is_tensor(x) else x for x in state.everything()]
    state = State(state.model, 1)
    newest = state.save(tmp_path, 3)
    damage(newest, left)
    other = State(make_model(5), 0)
    assert other.load(tmp_path) == Work(steps=2, sequences=14)
    assert same(other.everything(), before)


def damage(path: Path, left: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= left == "one flipped bit"
    path.write_bytes({"nothing": b"", "all but a byte": content[:-1]}.get(left, content))


def test_a_save_that_ends_at_any_byte_is_the_systems_error_and_keeps_the_old_ones(
    tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    """The last bytes too, which torch's own writer reports otherwise than the first."""
    resource = pytest.importorskip("resource")
    state = State(make_model(), 1)
    size = state.save(tmp_path, 1).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in [*range(0, size, size // 20), *range(size - 2000, size, 100), size - 1]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                state.save(tmp_path, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.filename == str(tmp_path / "step-00000002.pt")
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_when_a_save_is_due() -> None:
    by_steps = CheckpointConfig(every_minutes=10.0, every_steps=3, keep_at=())
    assert [s for s in range(1, 10) if by_steps.is_due(s, 0.0)] == [3, 6, 9]
    by_time = CheckpointConfig(every_minutes=0.5, every_steps=None, keep_at=())
    assert not by_time.is_due(1, 29.9)
    assert by_time.is_due(1, 30.0)


def test_a_checkpoint_is_an_entry_before_it_has_its_name(
    tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    """Killed in between, a process leaves an entry without a file: harmless. The other way round is a foreign file."""
    state, seen = State(make_model(), 1), []

    def enter(sha256: str) -> None:
        (temporary,) = tmp_path.iterdir()
        seen.append((temporary.suffix, file_sha256(temporary) == sha256))

    path = checkpoint.save(tmp_path, state, Work(steps=1), enter)
    assert seen == [(".tmp", True)]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_save_reads_nothing_again(
    tmp_path: Path, make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for it, on the clock: the SHA-256 is made of what is written."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "file_sha256", lambda path: pytest.fail(f"{path} is read"))
        path = State(make_model(), 1).save(tmp_path, 1)
    assert KNOWN[-1] == Saved(1, file_sha256(path))


def test_a_checkpoint_that_is_no_entry_is_not_taken(
    tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    """Another run's, whole, under the name of one of ours; and one of ours under another number."""
    ours, theirs = State(make_model(0), 1), State(make_model(1), 2)
    first, second = (ours.save(tmp_path / "ours", steps) for steps in (1, 2))
    known = KNOWN[-2:]
    second.write_bytes(theirs.save(tmp_path / "theirs", 2).read_bytes())
    assert checkpoint.newest_of(tmp_path / "ours", known) == known[0]
    second.unlink()
    first.rename(second)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoint.newest_of(tmp_path / "ours", known)


@pytest.mark.parametrize("retain", [False, True])
def test_of_two_files_with_one_number_the_one_on_record_is_loaded(
    tmp_path: Path, make_model: Callable[..., Any], retain: bool
) -> None:
    """One checkpoint is retained; the other is another run's, or of a training that a crash threw away."""
    theirs, ours, other = (State(make_model(seed), 2) for seed in (7, 8, 9))
    theirs.save(tmp_path, 2, retain=not retain)
    del KNOWN[-1]
    path = ours.save(tmp_path, 2, retain=retain)
    assert other.load(tmp_path) == Work(steps=2, sequences=14)
    assert same(other.everything(), ours.everything())
    assert checkpoint.path_of(tmp_path, KNOWN[-1]) == path


class TestBackground:
    """Checkpoints that a thread writes while the state changes."""

    @pytest.fixture(autouse=True)
    def _in_background(self, in_background: None) -> None:
        pass

    @pytest.fixture
    def disk(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """A disk that writes nothing until this is set."""
        ready, write = threading.Event(), checkpoint.overwrite_atomically

        def delayed(*arguments: Any) -> None:
            assert ready.wait(timeout=30)
            write(*arguments)

        monkeypatch.setattr(checkpoint, "overwrite_atomically", delayed)
        return ready

    def test_what_is_saved_is_the_state_of_its_step(
        self, tmp_path: Path, make_model: Callable[..., Any], disk: threading.Event
    ) -> None:
        state, other = State(make_model(0), 3), State(make_model(1), 0)
        expected = [x.clone() if torch.is_tensor(x) else x for x in state.everything()]
        with checkpoint.Saver() as saver:
            state.save_with(saver, tmp_path, 3)
            for tensor in filter(torch.is_tensor, state.everything()):
                tensor.add_(1)
            state.optimizer.param_groups[0]["lr"] = 7.0
            state.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            assert not list(tmp_path.iterdir())
            disk.set()
        assert other.load(tmp_path) == Work(steps=3, sequences=21)
        assert same(other.everything(), expected)

    def test_the_next_save_waits_for_the_one_before(
        self, tmp_path: Path, make_model: Callable[..., Any], disk: threading.Event
    ) -> None:
        state = State(make_model(0), 3)
        with checkpoint.Saver() as saver:
            state.save_with(saver, tmp_path, 3)
            threading.Timer(0.2, disk.set).start()
            state.save_with(saver, tmp_path, 4)
            assert (tmp_path / "step-00000003.pt").exists()
        assert [saved.steps for saved in KNOWN[-2:]] == [3, 4]
        assert (tmp_path / "step-00000004.pt").exists()

    @pytest.mark.parametrize("when", ["the next step", "the next save", "the end"])
    def test_an_error_is_raised_in_training(
        self, tmp_path: Path, make_model: Callable[..., Any], when: str
    ) -> None:
        """The system's, with the file's name, as where training waits for the file."""
        resource = pytest.importorskip("resource")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        state = State(make_model(), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with (
                pytest.raises(OSError, match="File too large") as caught,
                checkpoint.Saver() as saver,
            ):
                state.save_with(saver, tmp_path, 2)
                until = time.monotonic() + 30
                while when == "the next step" and time.monotonic() < until:
                    saver.check()
                if when == "the next save":
                    state.save_with(saver, tmp_path, 3)
                    pytest.fail("the error was not raised")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.filename == str(tmp_path / "step-00000002.pt")
        assert not list(tmp_path.iterdir())

    def test_training_that_fails_keeps_its_checkpoint_and_its_error(
        self, tmp_path: Path, make_model: Callable[..., Any], disk: threading.Event
    ) -> None:
        state = State(make_model(), 1)
        with contextlib.suppress(ZeroDivisionError), checkpoint.Saver() as saver:
            state.save_with(saver, tmp_path, 2)
            threading.Timer(0.2, disk.set).start()
            raise ZeroDivisionError
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]


def test_a_copy_shares_what_its_source_shares_and_nothing_with_it() -> None:
    weight = torch.arange(6.0).view(2, 3)
    source = {"tied": [weight, weight], "turned": weight.T, "number": 3}
    copy = checkpoint.copy_to_host(source)
    expected = weight.clone()
    weight.zero_()
    assert copy["tied"][0] is copy["tied"][1]
    assert same([*copy["tied"], copy["turned"]], [expected, expected, expected.T])
    assert copy["number"] == 3
