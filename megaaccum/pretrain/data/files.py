"""Files that other processes read: locks, errors of the disk in words, and pairs that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megaaccum.errors import DataError
from megaaccum.platform.files import free_bytes, sync

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a DataError that names `path`, what was being done, and the free bytes.

    Raises:
        DataError: the disk or a quota is full, the path cannot be written or read, or any other error of the system.
    """
    try:
        yield
    except OSError as error:
        # numpy's tofile (and so numpy.save) reports a full disk without an errno: "1640 requested and 468 written".
        if error.errno in _FULL or (error.errno is None and "requested and" in str(error)):
            reason = f"no space left ({free_bytes(path):,} bytes are free there). Free some, or choose another folder"
        else:
            reason = error.strerror or str(error)
        raise DataError(f"{doing} {error.filename or path}: {reason}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` for the block; waits for its holder. The system frees it if its holder dies.

    Works between the processes of a host, and between hosts on a shared file system that passes flock on (NFS does).

    Raises:
        DataError: the file cannot be made, or its file system has no locks.
    """
    with disk_errors("cannot lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            os.close(handle)
            raise
    try:
        yield
    finally:
        os.close(handle)


def make_once(path: Path, lock: Path, make: Callable[[], None]) -> None:
    """Have `make` make `path` where it is not there yet: of any number of processes one does, and the others wait."""
    if not path.exists():
        with locked(lock):
            if not path.exists():
                make()


def digest_of(facts: object) -> str:
    """A short digest of facts that JSON can hold."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """A short digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` in which files are written aside; it is gone after the block, come what may.

    What a killed process left in it is removed first.

    Raises:
        DataError: another process is writing the same target, or the folder cannot be made.
    """
    folder = target.parent / f".{target.name}.building"
    with disk_errors("cannot write beside", target):
        handle = _claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _claim(folder: Path) -> int:
    """A locked handle of `folder`, which is made, or emptied of a dead process's leavings."""
    while (handle := _try_claim(folder)) is None:
        pass
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    return handle


def _try_claim(folder: Path) -> int | None:
    """A locked handle of `folder`, or None if its last owner has just removed it.

    Raises:
        DataError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(handle)
        target = folder.parent / folder.name.removeprefix(".").removesuffix(".building")
        raise DataError(f"another process is writing {target} now; wait for it to end") from None
    os.close(handle)
    return None


def publish_pair(staged: Path, prefix: Path) -> None:
    """Moves `staged`.bin, .tokenizer.json and .idx to the same names under `prefix`; the .idx comes last.

    A pair is complete when it has an .idx: an interruption here leaves no .idx, never one of another .bin.

    Raises:
        DataError: a file cannot be moved.
    """
    with disk_errors("cannot write", prefix):
        with_suffix(prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".tokenizer.json", ".idx"):
            source = with_suffix(staged, suffix)
            sync(source)
            source.rename(with_suffix(prefix, suffix))
        sync(prefix.parent)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` with `suffix` appended; a dot in the prefix's own name stays."""
    return prefix.parent / (prefix.name + suffix)
