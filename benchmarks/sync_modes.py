"""Step time of each sync mode against stock DeepSpeed ZeRO-3: same model, data, ranks and micro-batches, no pipeline.

    python -m benchmarks sync_modes [--blocks N] [--steps N] [--microbatches M] [--megabits R] [--only WORDS] [--json F]

All run in the same processes, in blocks of steps in turns; a sync mode's ratio is the median over rounds of its
seconds by stock's in the same round. Once on the loopback interface, and once with half of the ranks across a link of
R megabits per second (two network namespaces; root), so that bytes show up as time. All start with the same loss, or
there is no result.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import bytes as loops
from benchmarks import cable
from benchmarks.schedules import conditions
from megaaccum.lab.verification.testing import run_ranks

STOCK = loops.STOCK[0]
BUCKETS = "--reduce_bucket_size 1000000"
"""DeepSpeed allocates its default bucket in full, 2 GB for each engine."""
ARMS = {
    "deepspeed zero-3 resident": BUCKETS,
    "deepspeed zero-3 streaming": f"{BUCKETS} --sync streaming",
    "deepspeed zero-2 resident": f"{BUCKETS} --zero_stage 2",
    "deepspeed zero-1 resident": f"{BUCKETS} --zero_stage 1",
    "fsdp2 resident": "--backend fsdp2",
    "fsdp2 streaming": "--backend fsdp2 --sync streaming",
    "megatron resident": "--backend megatron",
    "ddp resident": "--backend ddp",
}
SAME = 1e-5
"""Largest relative difference of the first losses."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sync_modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each")
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step on each rank")
    parser.add_argument("--megabits", type=float, default=200, help="of the limited link; 0 leaves it out")
    parser.add_argument("--only", type=lambda text: text.split(","), help="modes, as the table names them")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.megabits and (why := cable.why_not()):
        parser.error(f"no limited link here: {why}; --megabits 0 leaves it out")
    if strangers := set(args.only or ()) - ARMS.keys():
        parser.error(f"--only {', '.join(sorted(strangers))}: there are {', '.join(ARMS)}")
    figures = measure(args.only or list(ARMS), args.microbatches, args.blocks, args.steps, args.megabits)
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(names: list[str], microbatches: int, blocks: int, steps: int, megabits: float) -> dict:
    """Figures of both links: seconds per step by block of each sync mode, and ratios to stock ZeRO-3."""
    before = os.getloadavg()[0]
    request = (names, microbatches, blocks, steps)
    links = {"loopback": run_ranks(in_turns, loops.RANKS, *request, timeout=900)[0]}
    if megabits:
        with cable.cable(megabits):
            printed = cable.run_on_both(_RANK, [json.dumps(request)], loops.RANKS, timeout=1500)
        links[f"{megabits:g} Mbit/s"] = json.loads(printed.splitlines()[-1])
    return {
        "conditions": conditions() | {"load_average_before": before},
        "ranks": loops.RANKS,
        "microbatches": microbatches,
        "steps_per_block": steps,
        "model": " ".join(loops.MODEL),
        "links": {link: _with_ratios(seconds) for link, seconds in links.items()},
    }


def _with_ratios(seconds: dict[str, list[float]]) -> dict:
    rows = {}
    for name, values in seconds.items():
        ratios = [mine / stock for mine, stock in zip(values, seconds[STOCK], strict=True)]
        rows[name] = {"seconds_per_step": values, "ratios": ratios, "ratio": statistics.median(ratios)}
    return rows


def report(figures: dict) -> str:
    at = figures["conditions"]
    lines = [
        f"{figures['ranks']} ranks, {figures['microbatches']} micro-batches; load {at['load_average_before']:.1f} to "
        f"{at['load_average']:.1f} on {at['cores']} cores"
    ]
    for link, rows in figures["links"].items():
        lines.append(f"{link:<28}{'s/step':>10}{'of stock':>10}   in rounds")
        for name, row in rows.items():
            spread = f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
            median = statistics.median(row["seconds_per_step"])
            lines.append(f"  {name:<26}{median:>10.4f}{row['ratio']:>10.3f}   {spread}")
    return "\n".join(lines)


# --- on the ranks ----------------------------------------------------------------------------------------------------

_RANK = """
import json, sys
from megaaccum.distributed import preload
preload.libraries()
import torch
torch.distributed.init_process_group("gloo")
from benchmarks.sync_modes import in_turns
seconds = in_turns(*json.loads(sys.argv[1]))
torch.distributed.barrier()
print(json.dumps(seconds))
torch.distributed.destroy_process_group()
"""


def in_turns(names: list[str], microbatches: int, blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each block of stock ZeRO-3 and of the sync modes `names`, one after the other in each round;
    every other round goes backwards. Raises AssertionError where the first losses differ."""
    import torch

    arms = {STOCK: stock_arm(microbatches)} | {name: our_arm(ARMS[name], microbatches) for name in names}
    first = {name: step() for name, step in arms.items()}
    for name, loss in first.items():
        assert math.isclose(loss, first[STOCK], rel_tol=SAME), f"{name} starts with {loss}, stock with {first[STOCK]}"
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks):
        for name in list(arms)[:: -1 if block % 2 else 1]:
            gc.collect()
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                arms[name]()
            torch.distributed.barrier()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def stock_arm(microbatches: int) -> Callable[[], float]:
    """One step of the engine's own accumulation."""
    _, _, (chunk,) = loops.build([], microbatches)
    return loops.stock_step(STOCK, chunk, microbatches)


def our_arm(keys: str, microbatches: int) -> Callable[[], float]:
    """One step of megaaccum under the sync mode that `keys` name."""
    train_step = loops.stepper_of(*loops.build(keys.split(), microbatches))
    batches = [loops.batch(index) for index in range(microbatches)]
    return lambda: train_step.train(batches, step=0).loss
