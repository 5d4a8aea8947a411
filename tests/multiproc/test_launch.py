"""The launcher, run inside a rank of the harness: DeepSpeed and Megatron are imported there already."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.errors import ConfigError
from megaaccum.lab.verification.testing import try_ranks
from megaaccum.pretrain.launch import local


def launch_here(worker, argv, nproc, options):
    local.GRACE_SECONDS = options.pop("grace", local.GRACE_SECONDS)
    os.chdir(options.pop("folder", "."))
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"  # of `mpirun -n 1`
    if options.pop("nohup", False):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = local.launch_local(argv, nproc=nproc, worker=f"{__name__}:{worker}", **{"fork": True, **options})
    except local.LaunchError as error:
        code = cli.complain(error, cli.exit_code_of(error))
    print("exit code", code, flush=True)
    return code


def launched(worker, *argv, nproc=2, **options):
    """The exit code and all output of a launch of `worker`, a function of this file."""
    # The ranks of the launch have RANK of their own; the launcher itself is none.
    (outcome,) = try_ranks(launch_here, 1, worker.__name__, list(argv), nproc, options, init=False, timeout=60)
    assert not outcome.failed, f"{outcome.error}\n{outcome.stack}\n{outcome.output}"
    return int(outcome.output.rsplit("exit code", 1)[1]), outcome.output


def meet(argv):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ, "DeepSpeed compares mpirun's number with LOCAL_RANK"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    Path(argv[0], str(dist.get_rank())).write_text(
        f"{int(number)} {[os.environ[name] for name in names]} {torch.get_num_threads()} {argv[1:]}"
    )
    print("rank", dist.get_rank(), "speaks")
    dist.destroy_process_group()


@pytest.mark.parametrize("fork", [True, False])
def test_ranks_meet_and_only_rank_0_is_heard(tmp_path, fork):
    code, output = launched(meet, str(tmp_path), "--lr", "1", nproc=2, num_threads=2, fork=fork)
    assert code == 0
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert text == f"2 {[str(rank), str(rank), '2', '2', '2']} {2} {['--lr', '1']}"
    assert "rank 0 speaks" in output
    assert "rank 1 speaks" not in output


def import_megatron(argv):
    import megatron.core

    assert megatron.core.__version__


@pytest.mark.parametrize("fork", [True, False])
def test_ranks_import_the_installed_megatron_from_a_checkout_too(tmp_path, fork):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('the one of the folder')")
    code, output = launched(import_megatron, nproc=1, fork=fork, folder=tmp_path)
    assert code == 0, output


def bad_config(argv):
    raise ConfigError("micro_batch_size: 3 does not divide 8; the nearest that does is 2 or 4")


def test_an_error_of_every_rank_is_printed_once():
    code, output = launched(bad_config, nproc=3)
    assert code == 2
    assert output.count("megaaccum: error: micro_batch_size: 3 does not divide 8") == 1
    assert "Traceback" not in output


def bad_config_on_rank_1(argv):
    if os.environ["RANK"] == "1":
        raise ConfigError("only rank 1 sees this")
    time.sleep(600)


def test_an_error_of_one_rank_ends_the_others():
    code, output = launched(bad_config_on_rank_1, grace=0.2)
    assert code == 2
    assert "megaaccum: error: only rank 1 sees this" in output
    assert "were ended: 0" in output


def bug_on_rank_1(argv):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        print("last words of rank 1", flush=True)
        raise ZeroDivisionError("a bug")
    dist.barrier()


def test_a_bug_shows_its_traceback_once_and_its_echoes_shortly():
    code, output = launched(bug_on_rank_1, nproc=3, grace=5.0)
    assert code == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert "rank 1 ended with exit code 1" in output
    assert "ZeroDivisionError: a bug" in output


def killed(argv):
    if os.environ["RANK"] == "1":
        print("last words of rank 1", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_killed_rank_is_named_with_its_signal_and_last_words():
    code, output = launched(killed, grace=0.2)
    assert code == 128 + signal.SIGKILL
    assert "megaaccum: rank 1 ended with SIGKILL:\nlast words of rank 1" in output


def killed_in_a_collective(argv):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_what_the_others_report_of_a_killed_rank_is_one_line():
    code, output = launched(killed_in_a_collective, nproc=3, grace=5.0)
    lines = [line for line in output.splitlines() if line.startswith("megaaccum: ")]
    assert code == 128 + signal.SIGKILL
    assert lines[0].startswith("megaaccum: rank 1 ended with SIGKILL")
    assert lines[1] == "megaaccum: ranks that then lost their connection: 0, 2"
    assert "most likely killed by the system for want of memory" in lines[2]
    assert len(lines) == 3
    assert "Connection closed by peer" not in output


def exits_early(argv):
    os._exit(5 if os.environ["RANK"] == "0" else 0)


def test_a_hard_exit_is_not_taken_for_success():
    code, output = launched(exits_early)
    assert code == 5
    assert "rank 0 ended with exit code 5" in output


def meet_others():
    """Return once all ranks run and the launcher has noted each: it serves the store after the last has started."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def saves_on_signal(argv):
    """Counts signals; exits a little after the first. Rank 0 sends the launcher one."""
    folder, signum = Path(argv[0]), int(argv[1])
    seen = []
    signal.signal(signum, lambda number, frame: seen.append(number))
    meet_others()
    if os.environ["RANK"] == "0":
        for _ in range(2 if signum == signal.SIGHUP else 1):  # a terminal that closes sends more than one
            os.kill(os.getppid(), signum)
            time.sleep(0.1)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.3)
    (folder / f"saved{os.environ['RANK']}").write_text(str(len(seen)))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once_and_all_may_save(tmp_path, signum):
    code, _ = launched(saves_on_signal, str(tmp_path), str(int(signum)))
    assert code == 0
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["1", "1"]


def hung_up(argv):
    """The terminal of a launcher and its rank closes."""
    os.kill(os.getppid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.5)
    Path(argv[0], "went on").touch()


def test_nohup_is_honoured_by_launcher_and_ranks(tmp_path):
    code, _ = launched(hung_up, str(tmp_path), nproc=1, nohup=True)
    assert (code, (tmp_path / "went on").exists()) == (0, True)
    assert launched(hung_up, str(tmp_path), nproc=1)[0] == 128 + signal.SIGHUP


def deaf(argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meet_others()
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path):
    code, output = launched(deaf, str(tmp_path))
    assert code == 128 + signal.SIGTERM
    assert "ended at once, without saving" in output


def unprepared(argv):
    """Has no handler for the signal, as a rank that is still starting."""
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), int(argv[0]))
    time.sleep(600)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ranks_start_is_one_calm_line(signum):
    code, output = launched(unprepared, str(int(signum)))
    assert code == 128 + signum
    assert output.count("megaaccum: interrupted") == 1
    assert "Traceback" not in output


def nothing(argv):
    return None


def test_a_port_in_use_is_one_clear_message():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code, output = launched(nothing, master_port=port)
    assert code == 1
    assert f"--master_port {port}: this port of 127.0.0.1 cannot be used" in output
    assert "Traceback" not in output


def test_a_worker_that_cannot_be_imported_is_reported():
    (outcome,) = try_ranks(launch_here, 1, "no_such_worker", [], 2, {}, init=False)
    assert "has no attribute 'no_such_worker'" in outcome.output
    assert outcome.output.count("Traceback") == 1
    assert outcome.output.rstrip().endswith("exit code 1")


def returns_3(argv):
    return 3


def test_the_number_a_worker_returns_is_its_exit_code():
    assert launched(returns_3)[0] == 3


def orphan_watch(argv):
    Path(argv[0], os.environ["RANK"]).write_text(str(os.getpid()))
    while len(list(Path(argv[0]).iterdir())) < 2:
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    (outcome,) = try_ranks(launch_here, 1, "orphan_watch", [str(tmp_path)], 2, {}, init=False)
    assert outcome.status == -signal.SIGKILL
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
