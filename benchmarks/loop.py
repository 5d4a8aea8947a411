"""The training loop against a bare one: same model, weights, data, schedule and engine, in alternating blocks of steps.

    python -m benchmarks loop [--config C] [--starts N] [--blocks N] [--steps N] [--json F] [--key value ...]

Prints the ratio of seconds per step (loop / bare; the mean over starts of the ratio of their sums, and its standard
error, from how starts differ) and of peak memory over what the process held before the model was built, and what
agreement, verdict and counting take of a step. Both make the same losses, or there is no result. With
`--reproducible layout` the other loop is the same one without it. CPU lane.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaaccum import config as configuration
from megaaccum.config.deepspeed_config import deepspeed_config
from megaaccum.config.load import reset
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.interop.load import load

CONFIG = str(Path(__file__).resolve().parents[1] / "configs" / "tiny_cpu.yaml")
UNTIED = ("--untie_embeddings_and_output_weights",)
"""A tied embedding needs a sum over the first and the last stage, which the bare loop does not make."""
SAME, COMPARED = 1e-6, 10
"""Largest relative difference of the two loops' losses over the first steps. Later ones drift apart: training magnifies
the rounding of sums that are made in another order."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--starts", type=int, default=40, help="times that the ranks are started")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of each loop in each of them")
    parser.add_argument("--steps", type=int, default=1, help="steps in a block")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args, overrides = parser.parse_known_args(argv)
    if args.starts < 2:
        parser.error(f"--starts {args.starts} is too few for an error: 2 at least")
    figures = measure(args.config, [*UNTIED, *overrides], starts=args.starts, blocks=args.blocks, steps=args.steps)
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(path: str, overrides: list[str], *, starts: int, blocks: int, steps: int) -> dict:
    """Figures of both loops: seconds by block, their ratio, bytes at the peak (largest over ranks), their ratio.

    Ranks are started many times: from one start to the next the ratio differs by 3 %, by where tensors then lie, which
    pairs of one start share. In every other start the other loop is built first."""
    config = load(path, overrides)
    world_size, other = config.run.nproc_per_node or 1, other_of(config)
    with tempfile.TemporaryDirectory() as folder:
        request = (path, [*overrides, "--output_dir", folder])
        timeout = 60 + 20 * blocks * steps
        of_starts = [
            run_ranks(in_turns, world_size, *request, blocks, steps, start % 2 == 1, timeout=timeout)[0]
            for start in range(starts)
        ]
        blocks_of_rank0 = {name: [each for start in of_starts for each in start[name]] for name in of_starts[0]}
        told = run_ranks(phases, world_size, *request, 2 + steps * blocks // 2, timeout=60 + 10 * blocks * steps)
        without = (
            run_ranks(phases, world_size, *request, 3, by_default=True, timeout=120) if other == "default" else told
        )
        peaks = _in_a_process_that_returns_pages(world_size, *request)
    by_start = [[one / two for one, two in zip(each["loop"], each[other], strict=True)] for each in of_starts]
    ratios = [sum(each["loop"]) / sum(each[other]) for each in of_starts]
    return {
        "config": Path(path).name,
        "other": other,
        "bytes_ratio": moved_bytes(told) / moved_bytes(without),
        "ranks": world_size,
        "starts": starts,
        "steps_per_block": steps,
        "seconds_per_step": {name: [s / steps for s in seconds] for name, seconds in blocks_of_rank0.items()},
        "step_time_ratio": statistics.mean(ratios),
        "step_time_ratio_error": statistics.stdev(ratios) / math.sqrt(starts),
        "step_time_ratios": by_start,
        "overhead": overhead(told),
        "peak_bytes": peaks,
        "peak_memory_ratio": peaks["loop"] / peaks[other],
    }


def other_of(config) -> str:
    """The loop that a configuration's is compared with: a bare one, or (`reproducible: layout`) the same by default."""
    return "default" if config.sharding.reproducible == "layout" else "bare"


def peaks_of_both(world_size: int, path: str, overrides: list[str]) -> dict[str, int]:
    """Largest over ranks of peak_bytes, the smallest of two tries."""
    names = ("loop", other_of(load(path, overrides)))
    tries = [
        {name: max(run_ranks(peak_bytes, world_size, path, overrides, name, timeout=180)) for name in names}
        for _ in range(2)
    ]
    return {name: min(each[name] for each in tries) for name in names}


def _in_a_process_that_returns_pages(*request) -> dict[str, int]:
    """`peaks_of_both` where the C allocator gives back what is freed, so that the resident set is what is held. It
    reads these settings when a process starts."""
    returning = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    code = f"import json; from benchmarks.loop import peaks_of_both; print(json.dumps(peaks_of_both(*{request!r})))"
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | returning, stdout=subprocess.PIPE, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def report(figures: dict) -> str:
    seconds = {name: statistics.median(values) for name, values in figures["seconds_per_step"].items()}
    ratios, other = sorted(itertools.chain(*figures["step_time_ratios"])), figures["other"]
    peak = {name: value / 2**20 for name, value in figures["peak_bytes"].items()}
    return (
        f"{figures['config']}, {figures['ranks']} ranks\n"
        f"step time    loop {seconds['loop']:.4f} s   {other} {seconds[other]:.4f} s   ratio "
        f"{figures['step_time_ratio']:.4f} +- {figures['step_time_ratio_error']:.4f} "
        f"(blocks {ratios[0]:.3f} to {ratios[-1]:.3f})\n"
        f"agreement {figures['overhead']['agree']:.2%}, verdict {figures['overhead']['verdict']:.2%}, counting "
        f"{figures['overhead']['counting']:.2%} of a step\n"
        f"peak memory  loop {peak['loop']:.1f} MiB   {other} {peak[other]:.1f} MiB   ratio "
        f"{figures['peak_memory_ratio']:.4f}"
        + (f"\nbytes between ranks: ratio {figures['bytes_ratio']:.4f}" if other == "default" else "")
    )


# --- on the ranks ----------------------------------------------------------------------------------------------------


def in_turns(
    path: str, overrides: list[str], blocks: int, steps: int, other_first: bool = False
) -> dict[str, list[float]]:
    """Seconds of each block of each loop; every other pair starts with the other one. Raises AssertionError where the
    losses differ."""
    import torch

    plan, other = _plan(path, overrides), other_of(load(path, overrides))
    build = {
        "loop": lambda: loop_arm(plan),
        "bare": lambda: bare_arm(plan, (blocks + 1) * steps),
        "default": lambda: loop_arm(_plan(path, overrides, by_default=True)),
    }
    step_of = {name: build[name]() for name in ((other, "loop") if other_first else ("loop", other))}
    losses = {name: [step() for _ in range(steps)] for name, step in step_of.items()}  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in step_of}
    for block in range(blocks):
        for name in sorted(step_of, reverse=bool(block % 2)):
            torch.use_deterministic_algorithms(plan.config.sharding.deterministic and name != "default")
            gc.collect()
            torch.distributed.barrier()
            start = time.perf_counter()
            losses[name] += [step_of[name]() for _ in range(steps)]
            torch.distributed.barrier()
            seconds[name].append(time.perf_counter() - start)
    for loop, there in list(zip(losses["loop"], losses[other], strict=True))[:COMPARED]:
        assert there != there or abs(loop - there) <= SAME * there, f"the loops differ: {loop} and {there}"
    return seconds


Phases = list[tuple[dict[str, float], float, int, int]]
"""For each step: seconds by phase, seconds of the whole step, its counted collectives and their bytes."""


def phases(path: str, overrides: list[str], steps: int, by_default: bool = False) -> tuple[Phases, float]:
    """Phases of each step of the loop on this rank, and the seconds that counting adds to one collective."""
    step, seen = loop_arm(_plan(path, overrides, by_default=by_default), lambda result: result), []
    for _ in range(steps):
        start = time.perf_counter()
        result: Any = step()
        calls, moved = (sum(getattr(each, name) for each in result.traffic.values()) for name in ("calls", "num_bytes"))
        seen.append((result.seconds, time.perf_counter() - start, calls, moved))
    return seen[2:], cost_of_counting()


def cost_of_counting(calls: int = 10_000) -> float:
    """Seconds that the meter adds to one collective: its own code around one that does nothing."""
    import torch

    from megaaccum.observe.traffic import Meter
    from megaaccum.upstream import pytorch

    with Meter(None).counting():
        group, tensors = _PairOfRanks(), [torch.zeros(1)]
        counted = pytorch.noting(lambda *_: None, "all_reduce", 0)
        start = time.perf_counter()
        for _ in range(calls):
            counted(group, tensors)
        return (time.perf_counter() - start) / calls


class _PairOfRanks:
    """A process group, as far as the meter reads one."""

    group_name = "dp"

    def size(self) -> int:
        return 2


def moved_bytes(by_rank: list[tuple[Phases, float]]) -> float:
    """Bytes that all ranks together moved in the last step."""
    return sum(seen[-1][3] for seen, _ in by_rank)


def overhead(by_rank: list[tuple[Phases, float]]) -> dict[str, float]:
    """Shares of a step's time, medians over steps. Of a phase in which ranks wait for each other the shortest over
    ranks: the rank that comes last does not wait."""
    steps = list(zip(*(seen for seen, _ in by_rank), strict=True))
    per_call = statistics.median(cost for _, cost in by_rank)

    def share(of: Callable[[tuple], float]) -> float:
        return statistics.median(min(of(each) / each[1] for each in ranks) for ranks in steps)

    return {
        "agree": share(lambda each: each[0]["agree"]),
        "verdict": share(lambda each: each[0]["verdict"]),
        "counting": share(lambda each: each[2] * per_call),
    }


def peak_bytes(path: str, overrides: list[str], name: str, steps: int = 6) -> int:
    """Most memory that this rank held at once while it built one loop and made `steps` steps, over what it held
    before (Linux: resident set)."""
    plan = _plan(path, overrides, by_default=name == "default")
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    step = bare_arm(plan, steps) if name == "bare" else loop_arm(plan)
    for _ in range(steps):
        step()
    return _resident("VmHWM") - before


def started(plan) -> tuple[_Parts, Any, Any, Any]:
    """(parts, log that prints nothing, engine, loader) of `megaaccum train`'s own loop."""
    from megaaccum.engine import initialize
    from megaaccum.lab import advisor
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
    from megaaccum.pretrain.training.evaluation import loader_of
    from megaaccum.pretrain.training.training_run import open_log

    parts = _Parts(plan)
    log = open_log(plan, parts.data, advisor, start_step=0)
    log.note = lambda text: None  # type: ignore[method-assign]
    forward_step = GptForwardStep(parts.groups, plan.batch.loss_norm)
    engine = initialize(plan, parts.chunks, groups=parts.groups, forward_step_func=forward_step, reports=REPORTS)
    return parts, log, engine, loader_of(engine, parts.data.train, parts.data, consumed_samples=0)


def loop_arm(plan, of: Callable[[Any], Any] = lambda result: result.loss) -> Callable[[], Any]:
    """One step of megaaccum's own loop: loader, step, commit, schedule, log. Returns what `of` makes of its result."""
    from megaaccum.pretrain.training import training_run

    _, log, engine, loader = started(plan)
    watchdog = training_run.watchdog_of(engine)

    def step() -> Any:
        microbatches, problem = loader.try_next_step(plan.batch.num_microbatches)
        with watchdog.step(engine.step + 1):
            result = engine.train_step(microbatches, problem=problem)
        engine.gather_ahead()
        loader.commit(plan.batch.global_batch_size)
        training_run.log_step(log, engine, result, plan.batch)
        return of(result)

    return step


def bare_arm(plan, steps: int) -> Callable[[], float]:
    """One step of the bare loop."""
    from benchmarks.bare import BareLoop
    from megaaccum.optim import adamw, lr_schedule

    parts = _Parts(plan)
    microbatches = _plain_loader(plan, parts, steps)
    adam = adamw.build(plan, parts.chunks)
    rates = _learning_rates(plan, lr_schedule, steps)
    bare = BareLoop(
        parts.chunks,
        parts.groups,
        deepspeed_config(plan),
        adam,
        num_tokens=plan.batch.tokens_per_step,
        clip_grad=plan.config.optimizer.clip_grad,
    )

    def step() -> float:
        for group in bare.param_groups:
            group["lr"] = rates[0]
        rates.pop(0)
        return bare.step([next(microbatches) for _ in range(plan.batch.num_microbatches)])

    return step


def _plain_loader(plan, parts: _Parts, steps: int):
    """This rank's micro-batches of the first steps, as torch's own DataLoader gives them."""
    import torch

    size, places = plan.batch.micro_batch_size, parts.groups.dp
    stride, count = size * places.size(), steps * plan.batch.num_microbatches
    samples = [at * stride + places.rank() * size + index for at in range(count) for index in range(size)]
    loader = torch.utils.data.DataLoader(parts.data.train, batch_size=size, sampler=samples)  # type: ignore[arg-type]
    return iter(loader)


def _learning_rates(plan, lr_schedule, steps: int) -> list[float]:
    """The rates of the first steps, so that both loops take the same ones."""
    import torch

    weights = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(lr_schedule.param_groups(list(weights.named_parameters()), 0.0), lr=1.0)
    schedule, rates = lr_schedule.build(adam, plan.config, plan.ramp), []
    for _ in range(steps):
        rates.append(schedule.lr)
        schedule.step(plan.batch.global_batch_size)
    return rates


class _Parts:
    """Groups, data and model of one loop. Groups are made once per process."""

    _groups = None

    def __init__(self, plan):
        from megaaccum.distributed import groups
        from megaaccum.pretrain.data.dataset import build_datasets
        from megaaccum.pretrain.model import gpt

        if _Parts._groups is None:
            _Parts._groups = groups.build(plan.layout, timeout_minutes=5)
        self.plan, self.groups, self.data = plan, _Parts._groups, build_datasets(plan)
        self.chunks = gpt.build_chunks(plan, self.groups, vocab_size=self.data.vocabulary.size)


def _plan(path: str, overrides: list[str], *, by_default: bool = False):
    """by_default: with sums in any order, whatever is asked for."""
    import torch

    config = load(path, overrides)
    if by_default:
        for name in ("reproducible", "reproducible_tensor_blocks", "reproducible_context_blocks"):
            reset(config, name)
    return configuration.resolve(config, world_size=torch.distributed.get_world_size())


def _resident(field: str) -> int:
    """Bytes: VmRSS (now) or VmHWM (the most so far)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
