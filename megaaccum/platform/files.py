"""Files and folders that have to exist, or to be on the disk, before a run continues, and whose they are."""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOCK = ".megaaccum.lock"
"""The file in a run's folder that its owner holds locked, with the owner in it."""
_WAIT = 5.0
"""Seconds in which the ranks of a start that was killed may end."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
"""Variables that are the same in all starts of one job, also on another host after a requeue."""
_held: dict[Path, int] = {}
"""File descriptors of the locks that this process holds. Closing one gives its lock up."""


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path) -> BinaryIO:
    """A new file at `path`, in place of any entry of that name, which is removed and, if it is a link, not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, to be read. Raises OSError also if it is a pipe or a device, on which a reader would wait."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: a reader, even after a crash, finds the old file or the new one
    whole."""
    aside = path.with_name(path.name + ".new")
    with open_new(aside) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def set_aside(path: Path) -> Path:
    """Rename `name.ext` to the first free of `name.1.ext`, `name.2.ext`, ...; returns the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return path.rename(aside)


def folder_problems(key: str, folder: str) -> list[str]:
    """Reasons why the folder that `key` names cannot be written; empty if it can. Makes the folder, and writes a byte
    to it, since a full disk still makes empty files."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"\0")
    except OSError as error:
        return [f"{key} {folder!r} cannot be written: {error.strerror or error}; set {key} to a folder that can"]
    return []


def claim(folder: Path) -> str:
    """Lock `folder` for this process, until it ends or releases it. Returns why another process has it; empty if this
    one has. Raises OSError if the lock's file cannot be written.

    The system holds the lock for a process, so that of a process that was killed is free, whatever its file says. Locks
    reach over hosts on some file systems only: an owner on another host counts as alive until its file is removed.
    """
    folder = folder.resolve()
    if folder in _held:
        return ""
    # A lock of the process (POSIX), unlike flock's, is not kept by a forked worker that outlives its rank.
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + _WAIT
    while (is_taken := _is_taken(handle)) and time.monotonic() < deadline:
        time.sleep(0.1)
    owner, here = _owner(handle), _this_process()
    elsewhere = owner.get("host", here["host"]) != here["host"] and (not here["job"] or owner.get("job") != here["job"])
    if is_taken or elsewhere:
        os.close(handle)
        who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"
        remedy = "end it first" if is_taken else f"if it has ended, remove {folder / LOCK}"
        return f"{folder} belongs to another run ({who}, since {owner.get('start', 'a moment ago')}): {remedy}"
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(here).encode(), 0)
    _held[folder] = handle
    atexit.register(release)  # now, because a rank begins without its launcher's exit handlers
    return ""


def _is_taken(handle: int) -> bool:
    """Whether another process holds the lock; if none does, this one does from now on."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return False  # also on a file system without locks, where only an owner on another host is seen


def _owner(handle: int) -> dict[str, str]:
    """The owner in a lock's file; empty after a release."""
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _this_process() -> dict[str, str]:
    job = next((f"{name}={os.environ[name]}" for name in _JOBS if os.environ.get(name, "none") != "none"), "")
    start = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "start": start, "job": job}


def release() -> None:
    """Give up the locks of this process."""
    while _held:
        _, handle = _held.popitem()
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.close(handle)


os.register_at_fork(after_in_child=_held.clear)
