"""Variables of a Slurm task, by Slurm's own documentation of srun's output environment."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest

from megaaccum.config import slurm

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "10",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[03-04,07]",
}


def test_a_task_of_a_step_is_a_rank():
    assert slurm.variables(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "24243",
    }


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"RANK": "0"}, "torchrun or deepspeed has set its own"),
        ({"SLURM_STEP_NUM_TASKS": "1"}, "an interactive shell: the ranks are started from it"),
        ({"SLURM_STEP_NUM_TASKS": None}, "a batch script, which has SLURM_PROCID 0 and the job's SLURM_NTASKS"),
        ({"SLURM_PROCID": None}, "no task"),
    ],
)
def test_other_processes_of_a_job_are_left_alone(more, why):
    environ = {name: value for name, value in (STEP | more).items() if value is not None}
    assert slurm.variables(environ) == {}, why


def test_what_is_set_stays():
    with patch.dict(os.environ, STEP | {"MASTER_PORT": "5000"}, clear=True):
        slurm.adopt()
        assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("9", "5000")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[03-07,12],login1", "gpu03"),
        ("a-b[1,3]", "a-b1"),
        ("r[1-2]n[01-16].cluster", "r1n01.cluster"),
        ("login1,gpu[1-2]", "login1"),
    ],
)
def test_the_first_host_meets_the_others(nodes, first):
    assert slurm.first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x3)", [4, 4, 4]), ("2,1(x2),8", [2, 1, 1, 8])])
def test_tasks_per_node(text, counts):
    assert slurm.tasks_per_node(text) == counts
