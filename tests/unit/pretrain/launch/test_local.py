"""The parts of starting and watching ranks that need no torch."""

import os
import signal
import socket

import pytest

from megaaccum.errors import ConfigError, LaunchError
from megaaccum.pretrain.launch import local, processes


@pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 4, 2), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_cores_are_shared_out(monkeypatch, cores, nproc, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert local.threads_per_rank(nproc) == threads


def test_no_rank_is_an_error():
    with pytest.raises(LaunchError, match="nproc_per_node: 0 ranks"):
        local.launch_local([], nproc=0)


def test_a_port_in_use_names_the_option():
    with processes.listen() as sock:
        port = sock.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"--master_port {port}: .*cannot be used"):
            processes.listen(port)


def test_a_port_that_is_none_is_an_error():
    with pytest.raises(LaunchError, match="--master_port 70000"):
        processes.listen(70000)


def test_a_free_port_is_listened_on_from_the_start():
    with processes.listen() as sock:
        socket.create_connection(sock.getsockname(), timeout=5).close()


@pytest.mark.parametrize(
    ("status", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-62, "signal 62")]
)
def test_an_end_in_words(status, words):
    assert processes.describe_status(status) == words


def test_a_users_error_carries_no_traceback_and_a_bug_does(tmp_path):
    assert processes.run_and_report(_raiser(ConfigError(["a", "b"])), tmp_path / "user") == 2
    report = processes.RankError.read(tmp_path / "user")
    assert (report.text, report.traceback, report.exit_code) == ("a\nb", None, 2)
    assert processes.run_and_report(_raiser(ZeroDivisionError("bug")), tmp_path / "bug") == 1
    assert "Traceback" in processes.RankError.read(tmp_path / "bug").traceback
    assert processes.run_and_report(_raiser(SystemExit(5)), tmp_path / "exit") == 5
    assert processes.RankError.read(tmp_path / "exit") is None
    assert processes.run_and_report(_raiser(SystemExit("sorry")), tmp_path / "text") == 1
    assert processes.RankError.read(tmp_path / "text").text == "sorry"


def _raiser(error):
    def body():
        raise error

    return body


def test_ranks_that_do_not_end_are_ended(tmp_path):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()

    rank = processes.start(0, body, env={}, output=tmp_path / "out", error=tmp_path / "error")
    assert processes.wait([rank], 0.2) == []
    assert processes.end([rank]) == [rank]
    assert rank.status == -signal.SIGKILL


def test_a_rank_has_its_own_environment_session_and_output(tmp_path):
    def body():
        text = f"{os.environ['MARK']} {os.getsid(0) == os.getpid()} {os.read(0, 1)!r}\n"
        os.write(1, text.encode())  # sys.stdout is pytest's in this fork

    rank = processes.start(0, body, env={"MARK": "here"}, output=tmp_path / "out", error=tmp_path / "error")
    assert processes.wait([rank], 30) == [rank]
    assert rank.status == 0
    assert (tmp_path / "out").read_text() == "here True b''\n"
    assert "MARK" not in os.environ


def test_the_exit_handlers_of_the_parent_are_not_the_ranks(tmp_path):
    import atexit

    def leave_a_file():
        (tmp_path / "left").touch()

    atexit.register(leave_a_file)
    try:
        rank = processes.start(0, lambda: None, env={}, output=tmp_path / "out", error=tmp_path / "error")
        assert processes.wait([rank], 30) == [rank]
    finally:
        atexit.unregister(leave_a_file)
    assert not (tmp_path / "left").exists()
