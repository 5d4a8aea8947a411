"""Optimizer steps that follow each other, on stages whose passes are fixed delays: what the end of a step costs.

    python -m benchmarks.steps [--steps 10] [--pp 4] [--microbatches 8] [--stages host,device] [--json FILE]

Each line is an engine over torch DDP, first with the verdict as a barrier, then with `speculative_step`: on stages that
hold the thread which runs them, as on a CPU, and on stages that a device runs beside it, as a GPU does (`delays`), for
which a step waits once, before it reads the norm. Wall time is
from the first rank's start of the first step to the last one's end of the last, over the work of the steps
(micro-batches * (F + I + W) of each), beside the simulator's time of a flush, or from one flush to the next without a
barrier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.schedules import STAGES, Setup, conditions, stages_of
from megaaccum.lab.planner.pipeline import seconds_without_barrier
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import simulate

WARM_UP = 3
"""Steps that are not measured: the first sets up, and a step ends early only after one that was not clipped."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """wall: seconds of the best run of all steps. over_work, simulated: over the work of the steps."""

    schedule: str
    stages: str
    speculative_step: bool
    num_steps: int
    wall: float
    all_walls: list[float]
    over_work: float
    simulated: float


def measure(setup: Setup, speculative: bool, num_steps: int) -> list[tuple[float, float]]:
    """On ranks: (start, end) of each run of `num_steps` steps, in seconds of a clock that they share."""
    import torch

    from benchmarks import delays

    torch.set_num_threads(1)
    engine = delays.engine(setup, speculative_step=speculative)
    batches = [[{} for _ in range(setup.num_microbatches)] for _ in range(max(WARM_UP, num_steps))]
    times = []
    for _ in range(setup.repeat + 1):  # the first run warms up
        torch.distributed.barrier()
        start = time.monotonic()
        count = num_steps if times else WARM_UP
        for batch, upcoming in zip(batches[:count], [*batches[1:count], None], strict=True):
            engine.train_step(batch, upcoming=upcoming)
        engine.train_steps.drop_begun()
        times.append((start, time.monotonic()))
    return times[1:]


def evaluate(setup: Setup, speculative: bool, num_steps: int) -> Result:
    """Measure one engine on its ranks."""
    work = setup.work() * num_steps
    by_rank = run_ranks(measure, setup.pp, setup, speculative, num_steps, timeout=60 + 3 * (1 + setup.repeat) * work)
    walls = [max(end for _, end in run) - min(start for start, _ in run) for run in zip(*by_rank, strict=True)]
    plan, costs = setup.plan(), setup.costs()
    simulated = seconds_without_barrier(plan, costs) if speculative else simulate(plan, costs).makespan
    return Result(
        schedule=setup.schedule, stages=setup.stages, speculative_step=speculative, num_steps=num_steps,
        wall=min(walls), all_walls=walls, over_work=min(walls) / work, simulated=simulated / setup.work(),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the measurements that `argv` asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write conditions and results here")
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.06, help="F, I and W of a rank's whole work")
    parser.add_argument("--stages", type=stages_of, default=STAGES, help="what runs the passes")
    parser.add_argument("--repeat", type=int, default=2, help="runs that are measured; the least counts")
    args = parser.parse_args(argv)
    print(f"{'schedule':<12} {'stages':<8} {'ends':<12} {'steps':>5} {'wall':>10} {'/work':>8} {'simul.':>8}")
    results = []
    for stages, speculative in itertools.product(args.stages, (False, True)):
        setup = Setup(
            runtime="megaaccum", schedule=args.schedule, pp=args.pp, num_microbatches=args.microbatches,
            seconds=args.seconds, repeat=args.repeat, stages=stages,
        )  # fmt: skip
        results.append(result := evaluate(setup, speculative, args.steps))
        ends = "speculative" if speculative else "barrier"
        print(
            f"{result.schedule:<12} {result.stages:<8} {ends:<12} {result.num_steps:>5} {result.wall:>8.3f} s"
            f" {result.over_work:>8.4f} {result.simulated:>8.4f}",
            flush=True,
        )
    if args.json is not None:
        report = {"conditions": conditions(), "pp": args.pp, "microbatches": args.microbatches, "seconds": args.seconds}
        args.json.write_text(json.dumps(report | {"results": [asdict(each) for each in results]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    # By its own name: ranks look up what they run by it.
    from benchmarks.steps import main as main_by_name

    sys.exit(main_by_name())
