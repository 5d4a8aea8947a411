"""The lock of a run's folder, between processes, hosts and starts of one job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaaccum.pretrain.launch import lock


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.0)
    for name in lock._JOBS:
        monkeypatch.delenv(name, raising=False)
    yield
    lock.release()


def other_process(folder: Path, then: str = "wait") -> int:
    """A process that has the folder, and lives until it is killed, or ends."""
    ready, wrote = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(wrote, b"y" if lock.claim(folder) == "" else b"n")
        signal.pause() if then == "wait" else None
        if then == "release":
            lock.release()
        os._exit(0)
    assert os.read(ready, 1) == b"y"
    os.close(ready), os.close(wrote)
    return pid


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def written_by_another_host(folder: Path, **more: str) -> None:
    owner = {"host": "elsewhere", "pid": "7", "start": "2026-01-01 00:00:00 +0000", "job": ""} | more
    (folder / lock.LOCK).write_text(json.dumps(owner))


def test_one_process_has_a_folder_and_keeps_it_by_every_name(tmp_path):
    assert lock.claim(tmp_path) == ""
    assert lock.claim(tmp_path / ".." / tmp_path.name) == ""
    owner = json.loads((tmp_path / lock.LOCK).read_text())
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), str(os.getpid()))


def test_a_second_process_is_told_who_has_it(tmp_path):
    pid = other_process(tmp_path)
    try:
        problem = lock.claim(tmp_path)
        assert f"belongs to another run (process {pid} on {socket.gethostname()}, since 20" in problem
        assert problem.endswith("end it first")
    finally:
        killed(pid)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path):
    killed(other_process(tmp_path))
    assert (tmp_path / lock.LOCK).read_text() != ""
    assert lock.claim(tmp_path) == ""


def test_a_start_waits_a_moment_for_one_that_is_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_SECONDS", 60.0)
    pid = other_process(tmp_path)
    if (killer := os.fork()) == 0:
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    assert lock.claim(tmp_path) == ""
    os.waitpid(pid, 0), os.waitpid(killer, 0)


def test_a_forked_worker_neither_has_the_lock_nor_keeps_it(tmp_path):
    def worker() -> int:
        if (pid := os.fork()) == 0:
            lock.release()  # what it inherits is not its own
            signal.pause()
        return pid

    assert lock.claim(tmp_path) == ""
    pid = worker()
    time.sleep(0.1)
    assert json.loads((tmp_path / lock.LOCK).read_text())["pid"] == str(os.getpid())
    lock.release()
    other = other_process(tmp_path)
    killed(other), killed(pid)


def test_an_owner_on_another_host_is_named_unless_it_was_the_same_job(tmp_path, monkeypatch):
    written_by_another_host(tmp_path)
    problem = lock.claim(tmp_path)
    assert "process 7 on elsewhere, since 2026-01-01" in problem
    assert problem.endswith(f"if it has ended, remove {tmp_path / lock.LOCK}")
    written_by_another_host(tmp_path, job="SLURM_JOB_ID=12")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert "elsewhere" in lock.claim(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # requeued
    assert lock.claim(tmp_path) == ""


@pytest.mark.parametrize("content", ["", "{", "[]", "\0" * 100, '"x"', "[" * 4096])
def test_a_released_or_damaged_lock_is_free(tmp_path, content):
    (tmp_path / lock.LOCK).write_text(content)
    assert lock.claim(tmp_path) == ""


def test_a_file_system_without_locks_still_knows_other_hosts(tmp_path, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert lock.claim(tmp_path) == ""
    lock.release()
    written_by_another_host(tmp_path)
    assert "elsewhere" in lock.claim(tmp_path)


def test_a_planted_link_is_not_followed(tmp_path):
    (target := tmp_path / "theirs").write_text("precious")
    (tmp_path / lock.LOCK).symlink_to(target)
    with pytest.raises(OSError) as error:
        lock.claim(tmp_path)
    assert error.value.errno == errno.ELOOP
    assert target.read_text() == "precious"
