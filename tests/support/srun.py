"""A stand-in for Slurm's srun on one host: two tasks of a command, with the variables that srun gives them. A signal is
passed on to the tasks, as srun does; the exit code is the largest.

    python -m tests.support.srun [--option ...] COMMAND ARGUMENT ...
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys

TASKS, FIRST_PORT, PORTS = 2, 20_000, 12_000
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": str(TASKS),
    "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
    "SLURM_STEP_NODELIST": "127.0.0.1",
}


def main(argv: list[str]) -> int:
    while argv[0].startswith("--"):
        argv = argv[1:]
    step = os.environ | STEP | {"SLURM_JOB_ID": str(next(filter(_is_free, random.sample(range(PORTS), PORTS))))}
    tasks = [
        subprocess.Popen(argv, env=step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(TASKS)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    return max(task.wait() for task in tasks)


def _is_free(job: int) -> bool:
    """Whether the port that a job's number chooses (config/slurm.py) is free here."""
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.bind(("127.0.0.1", FIRST_PORT + job))
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
