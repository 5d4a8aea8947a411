"""`megaaccum tune` over real runs that go wrong, against its rules. It measures no speed.

    python -m benchmarks tune_faults [--ranks 2] [--top 6]

The model of configs/tiny_cpu.yaml. The first run asks for more memory than there is, the gradient of the second is not
finite, at the fourth the tuning is killed, and the first step of all others takes longer by `SLOW` seconds. Started
again, the tuning has to measure `--top` layouts, by the medians of steps 1 to 3, and to run none twice but the one that
was running when it was killed. Ends with an error where a rule does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaaccum import cli
from megaaccum.cli import tune
from megaaccum.lab.planner.fallbacks import MEASURED, NOT_FINITE, OUT_OF_MEMORY, Candidate
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.trial import candidates_of
from megaaccum.lab.planner.workload import make_workload
from megaaccum.pretrain.interop.load import load

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny_cpu.yaml"
SLOW = 5.0
FAULTS = {1: "runs_out_of_memory", 2: "is_not_finite"}
"""By the number of the run; the others begin slowly."""
KILLED = 4
ROWS = "TUNE_FAULTS_ROWS"
"""Environment variable: the file that has the row of each run."""


def main(argv: list[str] | None = None) -> int:
    """Tune twice as `argv` asks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tune_faults", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--top", type=int, default=6)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megaaccum-tune-") as name:
        folder = Path(name)
        batch = ["--global_batch_size", str(8 * args.ranks)]
        words = f"{CONFIG} --num_threads 1 --gpus {args.ranks} --top {args.top} --output {folder}/tune".split() + batch
        codes = [_tuning([*words, "--write", str(folder / "best.yaml")], folder / "rows") for _ in range(2)]
        rows = [int(row) for row in (folder / "rows").read_text().split()]
        outcomes = json.loads((folder / "tune" / "results.json").read_text())["outcomes"]
        written = (folder / "best.yaml").read_text()
    assert codes == [-signal.SIGKILL, 0], f"exit codes {codes}"
    workload = make_workload(load(CONFIG, batch), world_size=args.ranks, hardware=load_hardware("h100"))
    ranked = {each.row: each for each in candidates_of(search(workload))}
    _check(rows, {row: outcomes[each.name] for row, each in ranked.items() if each.name in outcomes}, ranked, args.top)
    best = min(rows[2:], key=lambda row: outcomes[ranked[row].name]["seconds"])
    assert f"{outcomes[ranked[best].name]['seconds']:.4g} s per step" in written
    print(f"{len(set(rows))} layouts in {len(rows)} runs: the rules hold, and row {best} is written")
    return 0


def _tuning(words: Sequence[str], rows: Path) -> int:
    code = "import sys; from benchmarks import tune_faults as it; sys.exit(it.start(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *words], env=os.environ | {ROWS: str(rows)}).returncode


def _check(rows: list[int], outcomes: dict[int, dict[str, Any]], ranked: dict[int, Candidate], top: int) -> None:
    """rows: of each run, in order. outcomes: by row."""
    first = ranked[1]
    smaller = [each for each in ranked.values() if each.bytes < first.bytes]
    kept = [each.row for each in smaller if each.axes["recompute"] == first.axes["recompute"]]
    assert rows[:2] == [1, kept[0]], f"runs {rows}, and after row 1 row {kept[0]} needs less with the same recompute"
    assert rows[KILLED - 1] == rows[KILLED], f"runs {rows}"
    done = rows[: KILLED - 1] + rows[KILLED:]
    assert len(set(done)) == len(done) == top + 2, f"runs {rows}"
    verdicts = [outcomes[row]["verdict"] for row in done]
    assert verdicts == [OUT_OF_MEMORY, NOT_FINITE, *[MEASURED] * top], f"verdicts {verdicts}"
    for row in done[2:]:
        slow, *steps = outcomes[row]["steps"]
        print(f"row {row}: step 0 {slow:.4g} s, then {' '.join(f'{each:.4g}' for each in steps)}")
        assert slow > SLOW
        assert outcomes[row]["seconds"] == statistics.median(steps)


# --- in other processes -----------------------------------------------------------------------------------------------


def start(words: list[str]) -> int:
    """`megaaccum tune` whose runs are `run`s."""
    code = "import sys; from benchmarks import tune_faults as it; sys.exit(it.run(sys.argv[1]))"
    tune.launch_command = lambda args: [sys.executable, "-c", code]
    return cli.main(["tune", *words])


def run(path: str) -> int:
    """`megaaccum train` with the fault of its turn."""
    from megaaccum.pretrain.launch import local

    rows = Path(os.environ[ROWS])
    with rows.open("a") as file:
        print(Path(path).parent.name.removeprefix("row_"), file=file)
    turn = len(rows.read_text().splitlines())
    if turn == KILLED:
        os.kill(os.getppid(), signal.SIGKILL)
    worker = FAULTS.get(turn, "begins_slowly")
    local.launch_local.__kwdefaults__.update(worker=f"{__name__}:{worker}")
    return cli.main(["train", path])


def runs_out_of_memory(argv: list[str]) -> int:
    import torch

    return _train(argv, lambda: torch.ones(2**44, dtype=torch.uint8))


def begins_slowly(argv: list[str]) -> int:
    return _train(argv, lambda: time.sleep(SLOW))


def is_not_finite(argv: list[str]) -> int:
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    loss = GptForwardStep.loss

    def spoiled(*args: Any) -> Any:
        total, *rest = loss(*args)
        return total * float("nan"), *rest

    GptForwardStep.loss = spoiled
    return _train(argv, lambda: None)


def _train(argv: list[str], at_first: Any) -> int:
    """at_first: called in the first forward of a rank."""
    from megaaccum.cli import train
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    forward, calls = GptForwardStep.__call__, []

    def watched(*args: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            at_first()
        return forward(*args, **how)

    GptForwardStep.__call__ = watched
    return train.main(argv)
