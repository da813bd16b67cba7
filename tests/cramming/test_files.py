"""Files are replaced whole, one process writes to a folder, and what the system refuses is told with what to do."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.files import (
    ADVICE,
    LOCK,
    explain_os_error,
    lock,
    overwrite_atomically,
    release,
    sweep,
    write_atomically,
)

NO_SUCH_CALL = [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL]
DEAD = 2**22 + 1  # above the largest id that Linux gives


def refusing(number: int) -> Callable[..., None]:
    """A call of the system that ends with this error."""

    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


class TestLock:
    def test_a_second_one_is_refused_and_nothing_is_left(self, tmp_path: Path) -> None:
        folder = tmp_path / "a"
        with (
            lock(folder, "at work"),
            pytest.raises(UserError, match=r"a: another process is at work; wait$"),
            lock(folder, "at work", "wait"),
        ):
            pass
        assert not folder.exists()

    @pytest.mark.parametrize("number", [*NO_SUCH_CALL, errno.ENOLCK])
    def test_without_flock_the_lock_is_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", refusing(number))
        folder = tmp_path / "a"
        with lock(folder, "at work"):
            (folder / "file").write_text("")
            with (
                pytest.raises(
                    UserError, match=r"another process is at work.*no flock.*delete .*a/\.lock"
                ),
                lock(folder, "at work"),
            ):
                pass
        with lock(folder, "at work"):
            pass
        assert [path.name for path in folder.iterdir()] == ["file"]

    def test_without_flock_one_that_comes_first_keeps_the_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process makes the file just before this one opens it."""
        real = os.open

        def late(path: Path, *arguments: int) -> int:
            os.close(real(path, os.O_CREAT | os.O_WRONLY))
            return real(path, *arguments)

        monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOSYS))
        monkeypatch.setattr("cramming.files.os.open", late)
        with (
            pytest.raises(UserError, match="another process is at work"),
            lock(tmp_path, "at work"),
        ):
            pass
        assert (tmp_path / LOCK).exists()

    def test_what_is_released_is_no_lock_in_use(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with lock(tmp_path, "at work"):
            release(tmp_path)
            assert (tmp_path / LOCK).exists()
        (tmp_path / LOCK).write_text("")  # a killed process left it
        release(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_lock_of_a_removed_file_counts_for_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The holder ends, and removes the file, between our opening of it and our locking."""
        flock, ended = fcntl.flock, []

        def slow(descriptor: int, operation: int) -> None:
            if not ended:
                ended.append(True)
                (tmp_path / LOCK).unlink()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", slow)
        with lock(tmp_path, "at work"):
            assert (tmp_path / LOCK).exists()
            with pytest.raises(UserError, match="another process"), lock(tmp_path, ""):
                pass

    def test_a_linked_folder_stays(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        with lock(tmp_path / "link", "at work"):
            pass
        assert (tmp_path / "link").is_dir()


class TestSweep:
    def test_what_dead_processes_left_goes_and_nothing_else(self, tmp_path: Path) -> None:
        living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        dead = [
            f".final.{DEAD}.tmp/model",
            f".final.{DEAD}.old/model",
            f"glue/pieces/.a.json.{DEAD}.tmp",
        ]
        alive = [f".record.json.{living.pid}.tmp", "final/model", f"a.{DEAD}.tmp", ".tmp", ".a.tmp"]
        for name in [*dead, *alive]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("")
        sweep(tmp_path)
        assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(
            alive
        )
        assert not list(tmp_path.glob(".final*"))
        living.communicate(b"\n")

    def test_without_the_lock_only_what_has_long_been_left(self, tmp_path: Path) -> None:
        old, new = tmp_path / f".a.{DEAD}.tmp", tmp_path / f".b.{DEAD}.tmp"
        for path in (old, new):
            path.write_text("")
        os.utime(old, (0, 0))
        sweep(tmp_path, locked=False)
        assert [path.name for path in tmp_path.iterdir()] == [new.name]


@pytest.mark.parametrize("number", NO_SUCH_CALL)
def test_a_file_that_cannot_be_synced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(number))
    write_atomically(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_sync_that_fails_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_atomically(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write_atomically(tmp_path / "a", "new")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "a"))
    assert (tmp_path / "a").read_text() == "old" and _everything(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "space"),
        (errno.EDQUOT, "space"),
        (errno.EROFS, "another folder"),
        (errno.EIO, "disk"),
        (errno.EACCES, "permission"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_each_error_of_the_system_has_its_own_advice(number: int, advice: str) -> None:
    told = str(explain_os_error(OSError(number, os.strerror(number)), "runs/a", "run again"))
    problem, remedy = told.split(". ")
    assert problem == f"runs/a: {os.strerror(number)}"
    assert advice in remedy and remedy.endswith(", then run again.")
    assert ("space" in remedy) == (number in (errno.ENOSPC, errno.EDQUOT))


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a file system that makes no files"
)
def test_a_place_where_nothing_can_be_made_is_named() -> None:
    """Its answer is that there is no such file, as if a file of ours were missing."""
    makes: list[Callable[[Path], object]] = [
        lambda place: lock(place, "at work").__enter__(),
        lambda place: write_atomically(place, ""),
        lambda place: write_atomically(place / "file", ""),
        lambda place: overwrite_atomically(place, Path.mkdir),
        lambda place: overwrite_atomically(place / "a/b", Path.mkdir),
    ]
    for make in makes:
        with pytest.raises(UserError, match=r"^/proc/x: "):
            make(Path("/proc/x"))
    with (
        pytest.raises(UserError, match=r"^/proc: "),
        lock(Path("/proc"), "at work"),
    ):
        pass


def test_a_lock_is_had_while_others_remove_its_folder(tmp_path: Path) -> None:
    """The last holder removes an empty folder, whenever the next one looks for it."""
    code = f"""
from pathlib import Path
from cramming.config import UserError
from cramming.files import lock
got = 0
while got < 300:
    try:
        with lock(Path({str(tmp_path / "folder")!r}), "at work"):
            got += 1
    except UserError as error:
        assert "another process is at work" in str(error), error
"""
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert not (tmp_path / "folder").exists()


def test_a_file_that_the_writer_misses_is_a_defect_of_ours(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        overwrite_atomically(
            tmp_path / "a", lambda temporary: (temporary / "no/such").write_text("")
        )
    with pytest.raises(FileNotFoundError):
        overwrite_atomically(tmp_path / "a", lambda temporary: (tmp_path / "b").read_text())
    with pytest.raises(FileNotFoundError):
        overwrite_atomically(tmp_path / "a", lambda temporary: None)


def test_an_error_that_is_a_defect_of_ours_is_raised() -> None:
    assert errno.ENOENT not in ADVICE
    with pytest.raises(FileNotFoundError, match="ours"):
        explain_os_error(FileNotFoundError(errno.ENOENT, "ours"), "runs/a")


def test_a_folder_that_cannot_be_exchanged_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite_atomically(tmp_path / "model", _folder_of("old"))
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        overwrite_atomically(tmp_path / "model", _folder_of("new"))
    assert _everything(tmp_path) == ["model", "old"]


def _folder_of(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        (path / name).write_text(name)

    return write


def _everything(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*"))


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    overwrite_atomically(tmp_path / "link", lambda p: p.mkdir())
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").is_dir()
    assert _everything(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_writer_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(error):
        overwrite_atomically(target, fail)
    assert target.read_text() == "old"
    assert _everything(tmp_path) == ["file.txt"]


def test_a_folder_is_replaced_whole_and_survives_a_failing_writer(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write(*names: str, fail: bool = False) -> Any:
        def writer(path: Path) -> None:
            path.mkdir()
            for name in names:
                (path / name).write_text(name)
            if fail:
                raise RuntimeError

        return writer

    overwrite_atomically(target, write("z"))
    overwrite_atomically(target, write("a", "b"))
    with pytest.raises(RuntimeError):
        overwrite_atomically(target, write("c", fail=True))
    assert _everything(tmp_path) == ["a", "b", "model"]
    overwrite_atomically(target, write("c"))
    assert _everything(tmp_path) == ["c", "model"]
