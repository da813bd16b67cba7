"""Files on any file system: replaced whole or not at all, one writer per folder, the system's errors with advice.

Clusters and FUSE mounts may lack `flock` or `fsync`. A lock is a file `.lock` in the folder: with `flock` the kernel
frees it with the process; without, its existence is the lock. A finished file whose `fsync` is not supported is kept;
the run log refuses. Temporary files carry the id of their process, which tells those that killed ones left.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cramming.config import UserError

LOCK = ".lock"
TEMPORARY = re.compile(r"\..+\.(\d+)\.(tmp|old)")
_ROOM, _PLACE, _RIGHT = (
    "make room there",
    "give another place",
    "get the right to use it, or give another place",
)
_TAKEN = "something else has its place; move that, or give another place"
_GONE = "check that the disk is sound and connected, or give another place"
# What a user does about an error that is the machine's state and no defect of the program.
_ADVICE = {
    "ENOSPC": _ROOM,
    "EDQUOT": _ROOM,
    "EFBIG": "no file may grow so large there; raise the limit (`ulimit -f`)",
    "EROFS": "it can only be read; give another place",
    "EACCES": _RIGHT,
    "EPERM": _RIGHT,
    "EIO": _GONE,
    "EREMOTEIO": _GONE,
    "ESTALE": _GONE,
    "ENOTCONN": _GONE,
    "ENODEV": _GONE,
    "ENXIO": _GONE,
    "EEXIST": _TAKEN,
    "ENOTDIR": _TAKEN,
    "EISDIR": _TAKEN,
    "EBUSY": "end what uses it",
    "ENAMETOOLONG": "shorten it",
    "ELOOP": "links lead in a circle; mend them, or give another place",
    "ENFILE": "close other programs' files",
    "EMFILE": "raise the limit of open files (`ulimit -n`)",
    "ENOLCK": _PLACE,
    "ENOTSUP": _PLACE,
    "ENOSYS": _PLACE,
}
ADVICE = {getattr(errno, name): advice for name, advice in _ADVICE.items() if hasattr(errno, name)}
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


def explained(error: OSError, place: Path | str, again: str = "run again") -> UserError:
    """The system's error as one line: where, what, what to do. `error` itself is raised if it is a defect of ours.

    `place` is named where the error has no file's name: those of writing do not.
    """
    if error.errno not in ADVICE:
        raise error
    return UserError(
        f"{error.filename or place}: {error.strerror}; {ADVICE[error.errno]}, then {again}"
    )


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there. UserError where the system makes none, as in /proc."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise _takes_nothing(error.filename) from None


def _takes_nothing(place: Path | str) -> UserError:
    return UserError(f"{place}: nothing can be made here; give another place, then run again")


def sync(descriptor: int) -> bool:
    """`fsync`; False where the file system does not have it."""
    return _is_supported(os.fsync, descriptor)


def _is_supported(call: Callable[..., object], *arguments: int) -> bool:
    """Make a call of the system; False where this file system does not have it."""
    try:
        call(*arguments)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


@contextmanager
def lock(
    folder: Path, work: str, advice: str = "wait for it or use another folder"
) -> Iterator[None]:
    """One writer per folder, which is made if it is missing and removed if it is empty at the end.

    UserError where another process has it: `work` is what that one does ("working on this run"), `advice` what to do.
    """
    descriptor = _locked(folder / LOCK, f"{folder}: another process is {work}", advice)
    try:
        yield
    finally:
        if _is_at(descriptor, folder / LOCK):
            (folder / LOCK).unlink()
        os.close(descriptor)
        with suppress(OSError):  # another file is in it, or another process has removed it
            folder.rmdir()


def _locked(path: Path, busy: str, advice: str) -> int:
    """The open lock file. One that its holder has removed meanwhile locks nobody out: then all again."""
    import fcntl  # not on Windows, which the command line refuses in one line

    for _ in range(100):
        existed, problem = False, None
        try:  # without flock, only the one that makes the file may hold the lock: looking first would be a race
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                descriptor, existed = os.open(path, os.O_RDWR), True
        except (
            FileNotFoundError
        ):  # there is no folder yet, or its last holder removed it; or, always, as in /proc
            with suppress(FileExistsError):
                make_folder(path.parent)
            continue
        try:
            if (
                not _is_supported(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                and existed
            ):
                problem = f", or one was killed here: this file system has no flock to tell; if none is, delete {path}"
        except BlockingIOError:
            problem = f"; {advice}"
        if problem is None and _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        if problem:
            raise UserError(busy + problem)
    raise _takes_nothing(path.parent)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def release(folder: Path) -> None:
    """Remove the lock file that a killed process left; one in use, or where nothing can be written, stays."""
    if (folder / LOCK).exists():
        with suppress(OSError, UserError), lock(folder, "using it"):
            pass


def clear(folder: Path) -> None:
    """Remove all that is in a folder but its lock, with which an empty folder goes."""
    for path in folder.iterdir():
        if path.name != LOCK:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str = "**/*", *, locked: bool = True) -> None:
    """Remove the temporary files and folders that killed processes left, as far as `pattern` finds them.

    The process may live on another machine, where several share the folder: without its lock (`locked`), what has
    changed in the last hour stays.
    """
    from psutil import pid_exists  # takes time to import

    for path in [path for path in folder.glob(pattern) if TEMPORARY.fullmatch(path.name)]:
        process = int(path.name.split(".")[-2])
        is_dead = process == os.getpid() or not pid_exists(
            process
        )  # in a container they all have the same number
        if is_dead and path.exists() and (locked or time.time() - path.stat().st_mtime > 3600):
            remove(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8; a reader sees the old or the new whole."""
    overwrite_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def overwrite_atomically(
    path: Path, write: Callable[[Path], object], *, synced: bool = True
) -> None:
    """Replace `path`, a file or a folder, by what `write(temporary)` makes; a reader sees the old or the new whole.

    The temporary lies beside the target and is synced before the rename, so a power cut or a `kill -9` leaves either
    version; only to replace a folder takes two renames, between which the old one is called `.old`. On an error the
    temporary is removed and the target is untouched. Without `synced` a power cut may leave an empty file: for many
    files that the same command writes again.
    """
    path = (
        path.resolve() if path.is_symlink() else path
    )  # what a link leads to is replaced, not the link
    make_folder(path.parent)
    temporary, written = path.with_name(f".{path.name}.{os.getpid()}.tmp"), False
    remove(temporary)
    try:
        write(temporary)
        written = True
        for file in [temporary, *temporary.rglob("*")] if synced else []:
            if file.is_file():
                with file.open("rb") as handle:
                    sync(handle.fileno())
        if temporary.is_dir() and path.is_dir():
            _exchange(temporary, path)
        else:
            temporary.replace(path)
    except BaseException as error:
        with suppress(
            OSError
        ):  # the next holder of the lock removes what this disk no longer lets go of
            remove(temporary)
        if (
            isinstance(error, OSError)
            and error.errno
            and str(error.filename or temporary).startswith(str(temporary))
        ):
            is_missing = error.errno == errno.ENOENT and error.filename == str(temporary)
            if is_missing and not written and path.parent.is_dir():  # as in /proc
                raise _takes_nothing(path) from None
            error.filename = str(path)  # errors of writing and syncing know no name
        raise


def _exchange(temporary: Path, path: Path) -> None:
    """A rename cannot replace a folder that is not empty."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    remove(old)
