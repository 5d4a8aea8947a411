"""The Python blocks of the documentation."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megaaccum.lab.verification.testing import Outcome, try_ranks

ROOT = Path(__file__).parents[2]

TOGETHER = [
    ("docs/start/your-model.md", "docs/guides/checkpoints.md"),
    ("docs/guides/schedules.md",),
    ("docs/migrating/deepspeed.md",),
    ("docs/migrating/huggingface.md",),
    ("docs/migrating/megatron-loop.md",),
]
"""Pages whose blocks are run, in order; those of one line share their names."""

ON_THEIR_OWN = ("README.md", "docs/concepts/found.md")
"""Pages whose blocks are whole programs, which other tests run in processes of their own."""

NOT_RUN = "<!-- not run -->"
"""The line before a block that is compiled only: what a reader has before, or would have to fill in."""


@dataclass(frozen=True)
class Block:
    """source: of a fenced block of Python. line: where it starts in its page. runs: whether a test may execute it."""

    source: str
    line: int
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        Block(
            source=each[1],
            line=text.count("\n", 0, each.start()) + 2,
            runs=not text[: each.start()].rstrip().endswith(NOT_RUN),
        )
        for each in found
    ]


def run_command(command: str, folder: Path) -> str:
    """Run a command as a reader would in `folder`, with this environment's programs. Returns its output. Fails if it
    ends with an error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=200, cwd=folder, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_on_ranks(command: str, folder: Path) -> str:
    """Run the program of a `torchrun --nproc-per-node N` command in `folder`, on N ranks that have the libraries
    imported: a start by torchrun itself takes three core seconds more for each. Returns its output."""
    ranks = try_on_ranks(command, folder)
    assert not any(rank.failed for rank in ranks), "\n".join(f"{rank.error}\n{rank.output}" for rank in ranks)
    return "".join(rank.output for rank in ranks)


def try_on_ranks(command: str, folder: Path) -> list[Outcome]:
    """How each rank of `run_on_ranks` ended, for commands that are meant to fail."""
    launcher, option, num_ranks, *argv = shlex.split(command)
    assert (launcher, option) == ("torchrun", "--nproc-per-node"), command
    return try_ranks(_run_program, int(num_ranks), argv, str(folder), init=False, timeout=200)


def _run_program(argv: list[str], folder: str) -> None:
    os.chdir(folder)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent.absolute()))  # as Python does for a program
    runpy.run_path(argv[0], run_name="__main__")


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (-?[\d.]+)", output, re.MULTILINE)]
