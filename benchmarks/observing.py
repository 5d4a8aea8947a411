"""The cost of a run's observers per step: receipts, log, seconds by phase, counted bytes and memory, checks of ranks.

    python -m benchmarks observing [--config C] [--blocks N] [--steps N] [--json F] [--key value ...]

One engine takes its steps in alternating blocks, with all observers as `megaaccum train` has them and with none. Prints
the ratio of seconds per step: the median over pairs of neighbouring blocks, and the quartiles. Then, since a machine's
own unrest is larger than what is looked for, the seconds of the processor that each observer's code takes of a step, on
the rank where they are most. CPU lane.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.loop import CONFIG, _plan, cost_of_counting, started
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.observe.observer import Measured
from megaaccum.pretrain.interop.load import load
from megaaccum.step.result import StepResult


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks observing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--blocks", type=int, default=24, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args, overrides = parser.parse_known_args(argv)
    world_size = load(args.config, overrides).run.nproc_per_node or 1
    with tempfile.TemporaryDirectory() as folder:
        request = (args.config, [*overrides, "--output_dir", folder], args.blocks, args.steps)
        timeout = 60 + 20 * args.blocks * args.steps
        by_rank = run_ranks(in_turns, world_size, *request, timeout=timeout)
    observed, alone, _ = by_rank[0]
    step_seconds = statistics.median(alone) / args.steps
    own = max((own for *_, own in by_rank), key=lambda own: sum(own.values()))
    ratios = [one / two for one, two in zip(observed, alone, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{Path(args.config).name}, {world_size} ranks: {step_seconds:.4f} s per step without observers; with them"
        f" {middle - 1:+.2%} (quartiles of {len(ratios)} pairs {low - 1:+.2%} to {high - 1:+.2%})\n"
        f"their own code: {sum(own.values()) / step_seconds:.2%} of a step ("
        + ", ".join(f"{name} {seconds / step_seconds:.2%}" for name, seconds in own.items())
        + ")"
    )
    if args.json:
        seconds = {"observed": observed, "alone": alone}
        figures = {"steps": args.steps, "seconds": seconds, "ratio": middle, "own_seconds_per_step": own}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def in_turns(
    path: str, overrides: list[str], blocks: int, steps: int
) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of each block on this rank, with observers and without; every other pair starts with the other one. Then
    `own_seconds`."""
    import torch

    step = _loop(_plan(path, overrides))
    for observed in (True, False):
        for _ in range(steps):
            step(observed)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block in range(blocks):
        for observed in (True, False) if block % 2 else (False, True):
            with nullcontext() if observed else _nothing_is_noted():
                gc.collect()
                torch.distributed.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step(observed)
                torch.distributed.barrier()
                seconds[observed].append(time.perf_counter() - start)
    return seconds[True], seconds[False], own_seconds(lambda: step(True), blocks * steps // 4)


def own_seconds(step: Callable[[], StepResult], steps: int) -> dict[str, float]:
    """Seconds of the processor that this rank spends in the code of each observer, per step."""
    from megaaccum.observe import memory, observer
    from megaaccum.pretrain.metrics import ranks
    from megaaccum.pretrain.training import training_run

    parts: dict[str, tuple[Any, str]] = {
        "memory": (memory.HighWater, "measure"),
        "phases": (observer.Observer, "phase"),
        "log and receipt": (training_run, "log_step"),
        "ranks": (ranks.Ranks, "after"),
    }
    spent, calls = dict.fromkeys(parts, 0.0), 0

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **keys)
            finally:
                spent[name] += time.thread_time() - start

        return call

    with ExitStack() as stack:
        for name, (owner, method) in parts.items():
            stack.enter_context(patch.object(owner, method, timed(name, getattr(owner, method))))
        for _ in range(steps):
            calls += sum(count.calls for count in step().traffic.values())
    per_step = {name: seconds / steps for name, seconds in spent.items()}
    return {**per_step, "counting": calls / steps * cost_of_counting()}


def _loop(plan):
    """One step of `megaaccum train`'s loop, called with whether its observers watch."""
    from megaaccum.lab import advisor
    from megaaccum.pretrain.metrics.ranks import Ranks
    from megaaccum.pretrain.training import training_run

    parts, log, engine, loader = started(plan)
    ranks = Ranks(plan, engine.groups, engine.chunks, advisor.expected_of(plan, parts.data.vocabulary.size))
    observers: dict[bool, Any] = {True: engine.train_steps.observer, False: _NoObserver(engine.observer.trace)}

    def step(observed: bool) -> StepResult:
        engine.train_steps.observer = observers[observed]
        with observers[observed].stopwatch.during("data"):
            microbatches, problem = loader.try_next_step(plan.batch.num_microbatches)
        result = engine.train_step(microbatches, problem=problem)
        loader.commit(plan.batch.global_batch_size)
        if observed:
            training_run.log_step(log, engine, result, plan.batch)
            ranks.after(result, data=loader.read_seconds)
        return result

    return step


@contextmanager
def _nothing_is_noted() -> Iterator[None]:
    """Inside, nothing looks at what a backend holds."""
    from megaaccum.observe.memory import HighWater

    with ExitStack() as stack:
        for method in ("measure", "note"):
            stack.enter_context(patch.object(HighWater, method, lambda *_: None))
        yield


class _NoObserver:
    """An observer that does nothing."""

    def __init__(self, trace: Any):
        self.trace, self.stopwatch = trace, self

    def during(self, name: str) -> nullcontext[None]:
        return nullcontext()

    watching = flushing = lambda self: nullcontext()

    def phase(self, name: str) -> None:
        self.trace.enter(name)  # the watchdog's

    def pop(self) -> Measured:
        return Measured({}, 0.0, {}, {})
