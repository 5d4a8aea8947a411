"""Cuts and orders for measured layers: what they gain over the best named schedule on an even cut, and how far they are
from the least possible.

    python -m benchmarks search --tables DIR [--json FILE] [--model NAME,...] [--microbatches 16]

DIR holds layer_costs.csv: a row per model and kind of layer, with the columns model, pattern, kind, F_ms, I_ms, W_ms.
Memory is counted in micro-batches of a whole rank, until the weight gradient. One core; seeds are fixed, so that all
but the seconds of the search repeat.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.cut import bound_of_cuts, price, tune_cut
from megaaccum.lab.search.profile import LayerCost, Profile, even_cut
from megaaccum.lab.search.search import compare, search_order
from megaaccum.schedule import Costs, Schedule, build, simulate
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.pass_numbers import Problem

NAMED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
SEARCHED = ("zb-h1", "zbv")
"""One chunk, and a V."""


def read_tables(folder: Path) -> dict[str, Profile]:
    """The profiles of layer_costs.csv, by model."""
    patterns: dict[str, str] = {}
    kinds: dict[str, dict[str, LayerCost]] = {}
    with (folder / "layer_costs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = [float(row[name]) / 1e3 for name in ("F_ms", "I_ms", "W_ms")]
            cost = LayerCost(name=row["note"], forward=seconds[0], input_grad=seconds[1], weight_grad=seconds[2])
            patterns[row["model"]] = row["pattern"]
            kinds.setdefault(row["model"], {})[row["kind"]] = cost
    return {model: Profile(pattern=patterns[model], kinds=kinds[model]) for model in patterns}


def tune(profile: Profile, schedule: Schedule) -> tuple[Any, float]:
    """The tuned cut for a named schedule, and the seconds that took."""
    start = time.process_time()
    tuned = tune_cut(profile, schedule)
    return tuned, time.process_time() - start


def cuts(model: str, profile: Profile, pp: int, m: int) -> dict[str, Any]:
    """The best named schedule on the even cut and on its tuned cut."""
    even, tuned, seconds = {}, {}, 0.0
    for name in NAMED:
        schedule = build(name, pp=pp, num_microbatches=m)
        even[name] = price(profile, even_cut(profile, schedule.num_stages), schedule).seconds
        best, took = tune(profile, schedule)
        tuned[name], seconds = best.seconds, max(seconds, took)
    first, then = min(even, key=even.__getitem__), min(tuned, key=tuned.__getitem__)
    known = build(then, pp=pp, num_microbatches=m)
    least = bound_of_cuts(profile, known)
    gain = even[first] / tuned[then] - 1
    print(
        f"{model:<18} even {even[first] * 1e3:8.1f} ms ({first}), tuned {tuned[then] * 1e3:8.1f} ms ({then}):"
        f" {gain:6.2%} faster, {tuned[then] / least - 1:.2%} over the bound of all cuts, {seconds:.2f} s a cut",
        flush=True,
    )
    return dict(model=model, even=even, tuned=tuned, gain=gain, bound_of_cuts=least, seconds=seconds)


def orders(model: str, profile: Profile, pp: int, m: int, share: float) -> Iterator[dict[str, Any]]:
    """The searched order at `share` of the named schedule's peak, on the named one's tuned cut."""
    for name in SEARCHED:
        schedule = build(name, pp=pp, num_microbatches=m)
        best, _ = tune(profile, schedule)
        costs, memory = profile.costs(best.cut), profile.memory(best.cut, chunks=schedule.chunks)
        limit, start = max(best.peaks) * share, time.process_time()
        problem = Problem(costs, stages=schedule.stages, num_microbatches=m, memory=memory, limit=limit)
        found = search_order(problem, start=[schedule])
        took = time.process_time() - start
        verdict = compare(found.schedule, schedule, costs)
        result = dict(
            model=model, schedule=name, limit=limit, named=best.seconds, searched=found.seconds, gap=found.gap,
            peak=max(found.peaks), seconds=took, gain=verdict.gain, wins=verdict.wins, adopted=verdict.adopted,
        )  # fmt: skip
        text = (
            f"{model:<18} {name:<6} limit {limit:g}: named {best.seconds * 1e3:8.1f} ms, searched"
            f" {found.seconds * 1e3:8.1f} ms, gap {found.gap:6.2%}, peak {max(found.peaks):g}, {took:.1f} s"
        )
        if share == 1:
            text += f"; jitter {verdict.gain:+.2%}, wins {verdict.wins:.0%}"
        print(text, flush=True)
        yield result


PUBLISHED = {
    (4, 8): 53, (4, 16): 101, (4, 32): 197, (8, 8): 65, (8, 16): 113, (8, 32): 209,
}  # fmt: skip
"""V-Half of (pp, micro-batches) by the generator that its authors published (sail-sg/zero-bubble-pipeline-parallelism,
zbv_greedy.py, squeezed), in passes of equal length, at 6 and 10 passes held."""


def half() -> Iterator[dict[str, Any]]:
    for (pp, m), published in PUBLISHED.items():
        schedule = build("v-half", pp=pp, num_microbatches=m)
        seconds = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)).makespan
        peak = max(Memory.counted(2 * pp).peaks(schedule))
        print(f"v-half pp {pp} m {m:>2}: {seconds:g} passes, published {published}, held {peak:g}", flush=True)
        yield dict(pp=pp, num_microbatches=m, makespan=seconds, published=published, peak=peak)


def main(argv: list[str] | None = None) -> int:
    """Run the searches that `argv` asks for; returns the exit code."""
    args = _parse(argv)
    try:
        profiles = read_tables(args.tables)
    except OSError as error:
        raise ScheduleError(f"--tables {args.tables}: {error}") from error
    chosen = {name: profile for name, profile in profiles.items() if not args.model or name in args.model}
    report: dict[str, Any] = {"pp": args.pp, "microbatches": args.microbatches}
    print("cut: the best named schedule, even and tuned")
    report["cuts"] = [cuts(model, profile, args.pp, args.microbatches) for model, profile in chosen.items()]
    for share in (1.0, 0.5):
        print(f"order: at {share:g} of the named schedule's peak")
        found = [each for model, profile in chosen.items()
                 for each in orders(model, profile, args.pp, args.microbatches, share)]  # fmt: skip
        report[f"orders at {share:g}"] = found
    print("v-half: passes of equal length")
    report["v-half"] = list(half())
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks search", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder with layer_costs.csv")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--model", type=lambda text: text.split(","), help="models, separated by commas")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    return parser.parse_args(argv)
