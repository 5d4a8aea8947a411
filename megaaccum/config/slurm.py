"""torchrun's variables for tasks that Slurm's `srun` starts, which know theirs by other names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Ports below Linux's ephemeral ones; jobs that share a host get different ones."""


def adopt() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process if it is one of
    several tasks of a Slurm step and no launcher has set RANK. Variables that are set already stay."""
    for name, value in variables(os.environ).items():
        os.environ.setdefault(name, value)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables of this task by Slurm's (man srun, output environment variables); none outside a step of
    several tasks.

    A batch script has SLURM_PROCID too, but no step of its own: SLURM_STEP_NUM_TASKS tells them apart. A step of one
    task starts its ranks itself, as an interactive shell does, or by torchrun or deepspeed.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environ or tasks == "1" or "SLURM_PROCID" not in environ:
        return {}
    here = int(environ.get("SLURM_NODEID", "0"))
    step = int(environ.get("SLURM_JOB_ID", "0")) + int(environ.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", tasks))[here]),
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": str(_FIRST_PORT + step % _PORTS),
    }


def tasks_per_node(text: str) -> list[int]:
    """[4, 4, 2] of Slurm's `4(x2),2`."""
    return [int(tasks) for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(nodes or 1))]


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `gpu03` of `gpu[03-07,12],login1`."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]
