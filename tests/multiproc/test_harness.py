"""The harness has to tell the truth about ranks that hang, raise, exit or are killed."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megaaccum.lab.verification.testing import RanksFailed, run_ranks, try_ranks


def describe():
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank())], dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "env": (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]),
        "sum": total,
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def test_every_rank_runs_and_returns_its_own_result():
    results = run_ranks(describe, 3)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["env"] for result in results] == [(str(rank), str(rank), "3", "3") for rank in range(3)]
    assert all(result["sum"].item() == 3.0 for result in results)
    assert all(result["threads"] == 1 for result in results)
    assert len({result["pid"] for result in results}) == 3


def arguments(array, *, factor):
    return array * factor, os.environ["MEGAACCUM_TEST"], os.getcwd()


def test_arguments_environment_and_folder_reach_the_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(arguments, 2, np.arange(3), factor=2, init=False, env={"MEGAACCUM_TEST": "here"})
    for array, variable, folder in results:
        np.testing.assert_array_equal(array, [0, 2, 4])
        assert (variable, folder) == ("here", str(tmp_path))


def imported():
    import sys

    import torch

    return "deepspeed" in sys.modules, "megatron.core" in sys.modules, torch.zeros(1, device="cuda").device.type


def test_ranks_start_with_the_libraries_and_the_cpu_lane():
    assert run_ranks(imported, 1, init=False) == [(True, True, "cpu")]


def imported_after_a_step(layout):
    import sys

    from tests.support.parity import Case, gradient

    gradient(Case(1, layout))
    return set(sys.modules)


def test_the_ranks_of_a_test_import_little_but_the_test():
    (before,) = run_ranks(eval, 1, "set(__import__('sys').modules)", init=False)
    (after,) = run_ranks(imported_after_a_step, 1, "--num_layers 1")
    assert "matplotlib.figure" in before
    ours = ("megaaccum.", "deepspeed.module_inject.", "deepspeed.runtime.", "_pytest.")
    new = [name for name in after - before if name.startswith(ours)]
    assert not new, sorted(new)
    assert "tests.support.parity" in after - before


def tensors():
    import torch

    whole = torch.arange(1000)
    return {
        "view": whole[3:5],
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
    }


def test_tensors_come_back_as_they_were():
    import torch

    (result,) = run_ranks(tensors, 1, init=False)
    assert torch.equal(result["view"], torch.tensor([3, 4]))
    assert result["view"].untyped_storage().nbytes() == 16
    assert torch.equal(result["bf16"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert (result["scalar"].shape, result["empty"].shape) == ((), (0, 3))


def leave_a_mark():
    import torch

    before = getattr(torch, "mark_of_a_test", None)
    torch.mark_of_a_test = "left"
    return before


def test_ranks_of_one_test_do_not_see_those_of_another():
    assert run_ranks(leave_a_mark, 1, init=False) == [None]
    assert run_ranks(leave_a_mark, 1, init=False) == [None]


def raise_on(rank, message):
    import torch.distributed as dist

    print("printed by rank", dist.get_rank())
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.barrier()


def test_an_exception_in_one_rank_fails_with_its_traceback():
    with pytest.raises(RanksFailed) as excinfo:
        run_ranks(raise_on, 2, 1, "the number is 41")
    text = str(excinfo.value)
    assert "rank 1 failed first" in text
    assert "ValueError: the number is 41" in text
    assert "raise ValueError(message)" in text  # the line of the traceback
    assert "printed by rank 1" in text
    assert excinfo.value.outcomes[1].error.kind == "ValueError"


def sleep_on(rank, seconds):
    if int(os.environ["RANK"]) == rank:
        a_function_that_hangs(seconds)


def a_function_that_hangs(seconds):
    time.sleep(seconds)


def test_a_hang_is_ended_and_shows_the_stack():
    with pytest.raises(RanksFailed) as excinfo:
        run_ranks(sleep_on, 2, 1, 600.0, timeout=1.0, init=False)
    text = str(excinfo.value)
    assert "not done after 1 s; ranks [1] still ran" in text
    assert "a_function_that_hangs" in text
    outcomes = excinfo.value.outcomes
    assert not outcomes[0].failed
    assert outcomes[1].ended_by_harness
    assert outcomes[1].status == -signal.SIGKILL


def wait_in_a_collective():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        a_function_that_hangs(600)


def test_a_collective_that_waits_is_a_hang_of_every_rank():
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] still ran") as excinfo:
        run_ranks(wait_in_a_collective, 2, timeout=2.0)
    assert "all_reduce" in excinfo.value.outcomes[0].stack


def exit_on(rank, code):
    if int(os.environ["RANK"]) == rank:
        os._exit(code)


@pytest.mark.parametrize(("code", "words"), [(7, "exit code 7"), (0, "exit code 0 before its function returned")])
def test_a_hard_exit_is_a_failure_whatever_its_code(code, words):
    with pytest.raises(RanksFailed, match="rank 1 failed first") as excinfo:
        run_ranks(exit_on, 2, 1, code, init=False)
    assert f"rank 1: {words}" in str(excinfo.value)


def kill_self(rank):
    if int(os.environ["RANK"]) == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_signal_and_last_words():
    with pytest.raises(RanksFailed, match="rank 0: SIGKILL") as excinfo:
        run_ranks(kill_self, 2, 0, init=False)
    assert "last words" in str(excinfo.value)


def grandchild(rank):
    import subprocess

    if int(os.environ["RANK"]) == rank:
        child = subprocess.Popen(["sleep", "600"])
        print("child", child.pid, flush=True)
        child.wait()


def test_what_a_rank_started_ends_with_it():
    outcome = try_ranks(grandchild, 1, 0, timeout=1.0, init=False)[0]
    pid = int(outcome.output.split()[1])
    assert outcome.ended_by_harness
    assert _ends(pid)


def manager():
    """Left to itself, as Megatron-core's asynchronous checkpoints leave theirs."""
    import multiprocessing

    started = multiprocessing.get_context("fork").Manager()
    sys.keeps_it = started
    return started._process.pid


def test_what_a_rank_started_by_multiprocessing_ends_with_it():
    assert all(map(_ends, run_ranks(manager, 2, timeout=30)))


def _ends(pid):
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}") or _is_zombie(pid)


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def unpicklable():
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_that_ranks_error():
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(unpicklable, 1, init=False)


def test_a_nested_function_is_refused():
    def nested():
        return None

    with pytest.raises(TypeError, match="top level"):
        run_ranks(nested, 1)


def test_after_a_failure_the_next_ranks_run():
    with pytest.raises(RanksFailed):
        run_ranks(exit_on, 1, 0, 3, init=False)
    assert len(run_ranks(describe, 2)) == 2


def threads_of_gloo() -> tuple[int, set[int], int]:
    """(number of threads, their scheduling policies, this thread's) with a second group."""
    import torch.distributed as dist

    before = {each.name for each in Path("/proc/self/task").iterdir()}
    dist.new_group([0, 1])
    new = {each.name for each in Path("/proc/self/task").iterdir()} - before
    dist.barrier()  # a rank that ends here would close connections that the other is still making
    return len(new), {os.sched_getscheduler(int(each)) for each in new}, os.sched_getscheduler(0)


def test_threads_of_gloo_wake_without_preempting_and_share_a_device():
    """A group has two threads for its operations, and none of its own for the device."""
    assert run_ranks(threads_of_gloo, 2, timeout=60) == [(2, {os.SCHED_BATCH}, os.SCHED_OTHER)] * 2


def compiler_is_imported() -> bool:
    return "torch._inductor.compile_fx" in sys.modules


def test_ranks_start_without_torch_s_compiler():
    assert run_ranks(compiler_is_imported, 1, init=False) == [False]
