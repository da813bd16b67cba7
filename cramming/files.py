"""Files on any file system: atomic replacement, one writer per folder, and advice on errors of the system.

Clusters and FUSE mounts may lack `flock` or `fsync`. A lock is a file `.lock` in the folder: with `flock` the kernel
frees it with the process; without, its existence is the lock. Where `fsync` is missing, finished files are written
without it, but a run log is refused. Names of temporary files contain the id of their process, so that those of killed
processes can be removed.
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
_ROOM = "Free space there"
_FOLDER = "Give another folder"
_RIGHT = "Get the permission, or give another folder"
_TAKEN = "Move the file in the way, or give another folder"
_GONE = "Check that the disk is sound and connected, or give another folder"
# Remedies for errors that are due to the state of the machine, not to a defect of the program.
_ADVICE = {
    "ENOSPC": _ROOM,
    "EDQUOT": _ROOM,
    "EFBIG": "Raise the limit of file sizes (`ulimit -f`)",
    "EROFS": _FOLDER,
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
    "EBUSY": "End the program that uses it",
    "ENAMETOOLONG": "Shorten the name",
    "ELOOP": "Repair the circular links, or give another folder",
    "ENFILE": "Close files of other programs",
    "EMFILE": "Raise the limit of open files (`ulimit -n`)",
    "ENOLCK": _FOLDER,
    "ENOTSUP": _FOLDER,
    "ENOSYS": _FOLDER,
}
ADVICE = {getattr(errno, name): advice for name, advice in _ADVICE.items() if hasattr(errno, name)}
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


def explain_os_error(error: OSError, path: Path | str, next_step: str = "run again") -> UserError:
    """Return an error of the system as one line with a remedy; raise `error` itself if it is a defect of the program.

    `path` is named if the error has no file name, as errors of writing have none.
    """
    if error.errno not in ADVICE:
        raise error
    path = error.filename or path
    return UserError(f"{path}: {error.strerror}. {ADVICE[error.errno]}, then {next_step}.")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents unless it exists; raise UserError where the system allows none, as in /proc."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise _cannot_create(error.filename) from None


def _cannot_create(path: Path | str) -> UserError:
    return UserError(f"{path}: nothing can be created here. {_FOLDER}, then run again.")


def sync(descriptor: int) -> bool:
    """Call `fsync`; return False if the file system does not support it."""
    return _is_supported(os.fsync, descriptor)


def _is_supported(call: Callable[..., object], *arguments: int) -> bool:
    """Call a function of the system; return False if this file system does not support it."""
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
    """Hold the folder for one writer; it is created if missing, and removed if empty at the end.

    Raises UserError if another process holds it: `work` is what that process does ("working on this run"), `advice`
    the remedy.
    """
    descriptor = _locked(folder / LOCK, f"{folder}: another process is {work}", advice)
    try:
        yield
    finally:
        if _is_at(descriptor, folder / LOCK):
            (folder / LOCK).unlink()
        os.close(descriptor)
        with suppress(OSError):  # the folder is not empty, or another process has removed it
            folder.rmdir()


def _locked(path: Path, busy: str, advice: str) -> int:
    """Return the open lock file. If its holder has removed the file meanwhile, the lock is void and is tried anew."""
    import fcntl  # not on Windows, which the command line refuses in one line

    for _ in range(100):
        try:
            descriptor, existed = _open_lock(path)
        except FileNotFoundError:
            # There is no folder yet, or its last holder removed it; or none can be made, as in /proc.
            with suppress(FileExistsError):
                make_folder(path.parent)
            continue
        problem = None
        try:
            has_flock = _is_supported(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if existed and not has_flock:
                problem = (
                    ", or was killed at it (this file system has no flock to tell)."
                    f" If it was killed, delete {path}"
                )
        except BlockingIOError:
            problem = f"; {advice}"
        if problem is None and _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        if problem:
            raise UserError(busy + problem)
    raise _cannot_create(path.parent)


def _open_lock(path: Path) -> tuple[int, bool]:
    """Return the descriptor of the lock file, and whether the file existed.

    Without flock only the process that creates the file may hold the lock. A check before the creation would be a race.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), False
    except FileExistsError:
        return os.open(path, os.O_RDWR), True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def release(folder: Path) -> None:
    """Remove the lock file of a killed process; a lock in use, or in a folder without write access, stays."""
    if (folder / LOCK).exists():
        with suppress(OSError, UserError), lock(folder, "using it"):
            pass


def clear(folder: Path) -> None:
    """Remove the contents of a folder but its lock, which is removed with the empty folder."""
    for path in folder.iterdir():
        if path.name != LOCK:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str = "**/*", *, locked: bool = True) -> None:
    """Remove the temporary files and folders of killed processes, as far as `pattern` matches them.

    Without the folder's lock (`locked`), files that have changed in the last hour stay: if several machines share the
    folder, their process may be alive on another one.
    """
    from psutil import pid_exists  # takes time to import

    for path in list(folder.glob(pattern)):
        if not TEMPORARY.fullmatch(path.name):
            continue
        process = int(path.name.split(".")[-2])
        # In a container all processes may have the id of this one.
        is_dead = process == os.getpid() or not pid_exists(process)
        if not is_dead or not path.exists():
            continue
        if locked or time.time() - path.stat().st_mtime > 3600:
            remove(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8; a reader sees the old or the new text as a whole."""
    overwrite_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def overwrite_atomically(
    path: Path, write: Callable[[Path], object], *, synced: bool = True
) -> None:
    """Replace `path`, a file or a folder, by the output of `write(temporary)`; a reader sees the old or the new whole.

    The temporary file lies beside the target and is synced before the rename, so a power cut or a `kill -9` leaves
    either version. Replacing a folder takes two renames, between which the old one is called `.old`. On an error the
    temporary file is removed and the target is unchanged. Without `synced` a power cut may leave an empty file, which
    suits many files that the same command writes again.
    """
    if path.is_symlink():
        path = path.resolve()  # the target of the link is replaced, not the link
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    written = False
    remove(temporary)
    try:
        write(temporary)
        written = True
        if synced:
            _sync_files(temporary)
        if temporary.is_dir() and path.is_dir():
            _exchange(temporary, path)
        else:
            temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # if it cannot be removed now, the next holder of the lock does so
            remove(temporary)
        if isinstance(error, OSError) and error.errno and _is_about(error, temporary):
            is_missing = error.errno == errno.ENOENT and error.filename == str(temporary)
            if is_missing and not written and path.parent.is_dir():  # as in /proc
                raise _cannot_create(path) from None
            error.filename = str(path)  # errors of writing and syncing have no file name
        raise


def _sync_files(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb") as handle:
                sync(handle.fileno())


def _is_about(error: OSError, temporary: Path) -> bool:
    return error.filename is None or str(error.filename).startswith(str(temporary))


def _exchange(temporary: Path, path: Path) -> None:
    """Replace a folder in two renames, because a rename cannot replace a folder that is not empty."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    remove(old)
