"""The lock of a run's folder: one job writes to it, and another gets a message that names the owner, which
`training/run_folder.claim_folders` raises."""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megaaccum.texts import parse_json

LOCK = ".megaaccum.lock"
"""The file in a run's folder that its owner holds locked, with the owner in it."""
WAIT_SECONDS = 5.0
"""Seconds in which the ranks of a start that was killed may end."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
"""Variables that are the same in all starts of one job, also on another host after a requeue."""
_held: dict[Path, int] = {}
"""File descriptors of the locks that this process holds. Closing one gives its lock up."""


def claim(folder: Path) -> str:
    """Lock `folder` for this process, until it ends or releases it. Returns why another process has it; empty if this
    one has. Raises OSError if the lock's file cannot be written.

    The system frees the lock of a process that was killed, even if its file still names it. Locks reach over hosts
    on some file systems only: an owner on another host counts as alive until its file is removed.
    """
    folder = folder.resolve()
    if folder in _held:
        return ""
    # A lock of the process (POSIX), unlike flock's, is not kept by a forked worker that outlives its rank.
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + WAIT_SECONDS
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
        owner = parse_json(os.pread(handle, 4096, 0))
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
