"""How close a pipeline runtime comes to its schedule: stages whose passes are fixed delays, so that what is measured is
the schedule and what runs it, also where ranks share cores.

    python -m benchmarks.schedules [--json FILE] [--trace FOLDER] [--only NAME,...] [--microbatches 8,16]
    python -m benchmarks.schedules --profile FILE [--microbatches 16] [--stages host,device] [--stretch 4]

With --profile: the best named schedule on an even cut of these layers, on its tuned cut, and the searched order, and
how much of what the searched order gains over the first by simulation its wall time keeps. Once on stages that hold the
thread which runs them, as on a CPU, where all that a runtime does and every message comes on top: a constant per pass,
which is printed, and weighs less on stages that are --stretch times as long. And once on stages that a device runs
beside that thread, as a GPU does: it is only late where the runtime launches a pass too late.

Side by side: megaaccum's executor, Megatron-core's 1F1B and interleaved, and the schedules of
torch.distributed.pipelining. F = I = W = `--seconds` (0.06) of a rank's whole work on one micro-batch; two chunks per
rank halve them. Wall time is from the first rank's start to the last one's end, the least of `--repeat` flushes after
two that warm up. It is reported over the work (micro-batches * (F + I + W)), over what the simulator says of the same
schedule with free communication, and as milliseconds over that for each pass of the busiest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megaaccum.executor.timeline import write_trace
from megaaccum.lab.search.cut import price, tune_cut
from megaaccum.lab.search.profile import even_cut, read_profile
from megaaccum.lab.search.search import search_order
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import Costs, Schedule, build, simulate, write_csv
from megaaccum.schedule.exchange import Layer
from megaaccum.schedule.pass_numbers import Problem
from megaaccum.schedule.registry import entry

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}
RUNTIMES = {
    "megaaccum": ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"),
    "megatron": ("1f1b", "interleaved"),
    "torch": ("1f1b", "interleaved", "zbv", "dualpipev"),
}
STAGES = ("host", "device")
"""Processors that may compute passes: `delays.PROCESSORS`."""
WARM_UP = 2
"""Flushes that are not measured: a forked rank copies each page of memory when it first writes to it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One measurement. seconds: of F, of I and of W, of a rank's whole work on one micro-batch."""

    runtime: str
    schedule: str
    pp: int
    num_microbatches: int
    seconds: float
    repeat: int

    stages: str = "host"
    """The processor that computes the stages: one of `delays.PROCESSORS`."""

    by_stage: tuple[tuple[float, float, float], ...] | None = None
    """F, I and W of each stage instead, where these differ."""

    layers: tuple[tuple[Layer, ...], ...] | None = None
    """The layers of each stage, if they exchange tokens."""

    @property
    def chunks(self) -> int:
        return CHUNKS.get(self.schedule) or entry(self.schedule).chunks or 1

    def chunk_seconds(self, rank: int) -> list[tuple[float, float, float]]:
        """F, I and W of each of the rank's chunks."""
        if self.by_stage is None:
            return [(self.seconds / self.chunks,) * 3] * self.chunks
        return [self.by_stage[stage] for stage in self.plan().stages[rank]]

    def chunk_layers(self, rank: int) -> list[tuple[Layer, ...]]:
        """The layers of each of the rank's chunks; nothing where they exchange no tokens."""
        return [() if self.layers is None else self.layers[stage] for stage in self.plan().stages[rank]]

    @property
    def hides_exchanges(self) -> bool:
        """Whether fused pairs run as one."""
        return self.layers is not None and self.plan().has_pairs

    def costs(self) -> Costs:
        if self.by_stage is None:
            return Costs.per_rank(*[self.seconds] * 3, chunks=self.chunks)
        forward, input_grad, weight_grad = zip(*self.by_stage, strict=True)
        return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, layers=self.layers)

    def work(self) -> float:
        """Seconds of the busiest rank's passes."""
        per_microbatch = [sum(map(sum, self.chunk_seconds(rank))) for rank in range(self.pp)]
        return self.num_microbatches * max(per_microbatch)

    def plan(self) -> Schedule:
        return build(self.schedule, pp=self.pp, num_microbatches=self.num_microbatches, chunks=self.chunks)


@dataclass(frozen=True, kw_only=True)
class Result:
    """wall: seconds of the best flush. over_work: over micro-batches * (F + I + W); over_simulated: over makespan.
    seconds_per_pass: of wall over the makespan, by the passes of the busiest rank."""

    runtime: str
    schedule: str
    stages: str
    num_microbatches: int
    wall: float
    all_walls: list[float]
    simulated: float
    over_work: float
    over_simulated: float
    seconds_per_pass: float


# --- on ranks -------------------------------------------------------------------------------------------------------


def measure(setup: Setup) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """((start, end) of each flush, spans of the last flush's actions where the runtime notes them), in seconds of a
    clock that all ranks of a machine share."""
    import torch

    from benchmarks import delays

    torch.set_num_threads(1)
    run, spans = delays.RUNNERS[setup.runtime](setup)
    offset = time.monotonic() - time.perf_counter()
    times = []
    for _ in range(WARM_UP + setup.repeat):
        torch.distributed.barrier()
        start = time.monotonic()
        run()
        times.append((start, time.monotonic()))
    torch.distributed.barrier()
    return times[WARM_UP:], [(start + offset, end + offset) for start, end in spans()]


# --- here -----------------------------------------------------------------------------------------------------------


def evaluate(setup: Setup, trace: Path | None) -> Result:
    """Measure one setup on its ranks."""
    work = setup.work()
    by_rank = run_ranks(measure, setup.pp, setup, timeout=60 + 4 * (WARM_UP + setup.repeat) * work)
    flushes = zip(*(times for times, _ in by_rank), strict=True)
    walls = [max(end for _, end in each) - min(start for start, _ in each) for each in flushes]
    plan = setup.plan()
    simulation = simulate(plan, setup.costs(), early_send=setup.runtime == "megaaccum")
    if trace is not None and setup.runtime == "megaaccum":
        path = trace / f"{Path(setup.schedule).stem}-{setup.num_microbatches}.json"
        write_trace(path, plan, planned=simulation.spans, measured=[spans for _, spans in by_rank])
    best = min(walls)
    busiest = max(range(setup.pp), key=simulation.busy.__getitem__)
    return Result(
        runtime=setup.runtime, schedule=setup.schedule, stages=setup.stages,
        num_microbatches=setup.num_microbatches, wall=best, all_walls=walls, simulated=simulation.makespan,
        over_work=best / work, over_simulated=best / simulation.makespan,
        seconds_per_pass=(best - simulation.makespan) / len(simulation.spans[busiest]),
    )  # fmt: skip


def stages_of(text: str) -> list[str]:
    """The names in an option's value. Raises argparse's error for one that is none."""
    names = text.split(",")
    if wrong := [name for name in names if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {' and '.join(STAGES)}")
    return names


def conditions() -> dict:
    """The conditions of a measurement: machine, versions, commit, date."""
    import importlib.metadata as metadata
    import os

    def version(name: str) -> str:
        return metadata.version(name)

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0], "backend": "gloo", "python": platform.python_version(),
        "torch": version("torch"), "megatron_core": version("megatron-core"),
        "commit": commit.stdout.strip() or "not in a repository", "date": datetime.now(UTC).isoformat("T", "seconds"),
    }  # fmt: skip


def line(result: Result) -> str:
    return (
        f"{result.runtime:<10} {Path(result.schedule).stem:<12} {result.stages:<6} {result.num_microbatches:>4}"
        f" {result.wall:>8.3f} s {result.over_work:>8.4f} {result.over_simulated:>8.4f}"
        f" {result.seconds_per_pass * 1e3:>8.3f}"
    )


def share_kept(named: Result, searched: Result) -> float:
    """The share of the searched order's simulated gain over the named one that wall time shows."""
    return (named.wall - searched.wall) / (named.simulated - searched.simulated)


def setups_of_profile(args: argparse.Namespace, folder: Path) -> list[Setup]:
    """The best named schedule on the even cut and on its tuned cut, and the order that a search finds from there."""
    profile, found = read_profile(args.profile), []
    named = [name for name in CHUNKS if not args.only or name in args.only]
    for m in args.microbatches:
        priced = []
        for name in named:
            schedule = build(name, pp=args.pp, num_microbatches=m)
            even = price(profile, even_cut(profile, schedule.num_stages), schedule)
            tuned = tune_cut(profile, schedule)
            priced.append((name, schedule, even, tuned))
        first, then = min(priced, key=lambda each: each[2].seconds), min(priced, key=lambda each: each[3].seconds)
        _, schedule, _, tuned = then
        problem = Problem(
            profile.costs(tuned.cut), stages=schedule.stages, num_microbatches=m,
            memory=profile.memory(tuned.cut, chunks=schedule.chunks), limit=max(tuned.peaks),
        )  # fmt: skip
        searched = search_order(problem, start=[schedule])
        table = folder / f"searched-{m}.csv"
        write_csv(searched.schedule, table)
        cuts = ((first[0], first[2].cut), (then[0], tuned.cut), (str(table), tuned.cut))
        for stages, (name, cut) in itertools.product(args.stages, cuts):
            passes = [[seconds * args.stretch for seconds in each] for each in profile.costs(cut).by_stage(len(cut))]
            by_stage = tuple(zip(*passes, strict=True))
            found.append(
                Setup(runtime="megaaccum", schedule=name, pp=args.pp, num_microbatches=m, seconds=0.0,
                      repeat=args.repeat, stages=stages, by_stage=by_stage)
            )  # fmt: skip
    return found


def setups(args: argparse.Namespace) -> list[Setup]:
    chosen = [
        Setup(runtime=runtime, schedule=name, pp=args.pp, num_microbatches=m, seconds=args.seconds, repeat=args.repeat)
        for m in args.microbatches
        for name in CHUNKS
        for runtime, known in RUNTIMES.items()
        if name in known
    ]
    return [each for each in chosen if not args.only or each.schedule in args.only or each.runtime in args.only]


def main(argv: list[str] | None = None) -> int:
    """Run the measurements that `argv` asks for; returns the exit code."""
    args = _parse(argv)
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    print(
        f"{'runtime':<10} {'schedule':<12} {'stages':<6} {'m':>4} {'wall':>10} {'/work':>8} {'/simul.':>8}"
        f" {'ms/pass':>8}"
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for setup in setups_of_profile(args, Path(folder)) if args.profile else setups(args):
            results.append(evaluate(setup, args.trace))
            print(line(results[-1]), flush=True)
            if args.profile and len(results) % 3 == 0 and results[-3].simulated > results[-1].simulated:
                kept = share_kept(results[-3], results[-1])
                print(f"the searched order keeps {kept:.0%} of its simulated gain over the first", flush=True)
    if args.json is not None:
        report = {"conditions": conditions(), "pp": args.pp, "seconds": args.seconds, "repeat": args.repeat}
        report["stretch"] = args.stretch
        args.json.write_text(json.dumps(report | {"results": [asdict(each) for each in results]}, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedules", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--json", type=Path, help="write conditions and results here")
    parser.add_argument("--trace", type=Path, help="folder for planned and measured timelines in Chrome's format")
    parser.add_argument("--profile", type=Path, help="stages of these measured layers instead of equal ones")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="stages N times as long as the profile says", metavar="N"
    )
    parser.add_argument(
        "--stages", type=stages_of, default=STAGES, metavar="host,device",
        help="with --profile: what computes their passes",
    )  # fmt: skip
    parser.add_argument("--only", type=lambda text: text.split(","), help="schedules or runtimes")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=lambda text: [int(m) for m in text.split(",")], default=[8, 16])
    parser.add_argument("--seconds", type=float, default=0.06, help="F, I and W of a rank's whole work")
    parser.add_argument("--repeat", type=int, default=6, help="flushes that are measured; the least counts")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # By its own name: ranks look up what they run by it.
    from benchmarks.schedules import main as main_by_name

    sys.exit(main_by_name())
