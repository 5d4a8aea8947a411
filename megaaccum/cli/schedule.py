"""`megaaccum schedule`: what a pipeline schedule costs, beside others, on a terminal and as a picture."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.build import build, names
from megaaccum.schedule.render import check_format, draw, text
from megaaccum.schedule.simulate import Costs, Simulation, simulate
from megaaccum.schedule.table import write_csv
from megaaccum.schedule.timeline import write_trace
from megaaccum.schedule.validate import Footprint, validate

_DESCRIPTION = """\
Build a pipeline schedule, prove that it runs, and print what it costs beside others. Durations are those of a rank's
whole work on one micro-batch, in any unit; a schedule with two chunks per rank halves them per chunk."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum schedule`; returns the exit code. Raises ScheduleError."""
    args = _parse(argv)
    results = [_evaluate(args.schedule, args)]
    others, refused = _evaluate_others(args)
    schedule, simulation, _ = results[0]
    if args.timeline:
        print(text(schedule, simulation, width=args.width or shutil.get_terminal_size((120, 40)).columns), end="\n\n")
    print("\n".join([comparison(results + others), *refused]))
    if args.png:
        draw(schedule, simulation, args.png)
        print(f"picture: {args.png}")
    if args.csv:
        write_csv(schedule, args.csv)
        print(f"table: {args.csv}")
    if args.trace:
        write_trace(args.trace, schedule, planned=simulation.spans, measured=None)
        print(f"trace: {args.trace} (open in ui.perfetto.dev)")
    return 0


def _evaluate_others(args: argparse.Namespace) -> tuple[list[tuple[Schedule, Simulation, Footprint]], list[str]]:
    """What can be compared, and for each schedule that does not exist at these sizes the reason."""
    results, refused = [], []
    for name in args.compare:
        if name == args.schedule:
            continue
        try:
            results.append(_evaluate(name, args))
        except ScheduleError as error:
            refused.append(f"{name}: {error}")
    return results, refused


def _evaluate(name: str, args: argparse.Namespace) -> tuple[Schedule, Simulation, Footprint]:
    chunks = args.vpp if name == "interleaved" else None
    group_size = args.group_size if name == "interleaved" else None
    schedule = build(name, pp=args.pp, num_microbatches=args.microbatches, chunks=chunks, group_size=group_size)
    costs = Costs.per_rank(*args.cost, chunks=schedule.chunks, p2p=args.p2p)
    return schedule, simulate(schedule, costs), validate(schedule)


def comparison(results: Sequence[tuple[Schedule, Simulation, Footprint]]) -> str:
    """A table, a line per schedule: time, idle share, and what the fullest rank holds, in micro-batches of a whole
    rank's activations."""
    head = ("schedule", "chunks", "makespan", "bubble", "idle", "activations", "deferred W")
    lines = [head]
    for schedule, simulation, footprint in results:
        lines.append(
            (
                schedule.name,
                str(schedule.chunks),
                f"{simulation.makespan:.6g}",
                f"{simulation.bubble:.6g}",
                f"{1 - simulation.utilisation:.2%}",
                f"{max(footprint.in_flight) / schedule.chunks:g}",
                f"{max(footprint.deferred) / schedule.chunks:g}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megaaccum schedule", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pp", type=int, required=True, help="pipeline ranks")
    add("--microbatches", "-m", type=int, required=True, help="micro-batches of a flush")
    add("--schedule", required=True, metavar="NAME", help=f"{', '.join(names())}, or a .csv file")
    add("--compare", type=_words, default=[], metavar="NAMES", help="other schedules, separated by commas")
    add("--cost", type=_cost, default=(1.0, 1.0, 1.0), metavar="F,I,W", help="forward, input and weight gradient")
    add("--p2p", type=float, default=0.0, metavar="T", help="from one rank to the next")
    add("--vpp", type=int, metavar="N", help="chunks per rank of the interleaved schedule (2)")
    add("--group-size", type=int, metavar="N", help="its microbatch_group_size_per_vp_stage (pp)")
    add("--png", type=Path, metavar="FILE", help="draw timeline and memory (.png, .svg or .pdf)")
    add("--csv", type=Path, metavar="FILE", help="write the table, with stage numbers, as torch reads it")
    add("--trace", type=Path, metavar="FILE", help="write the planned timeline in Chrome's trace format")
    add("--no-timeline", dest="timeline", action="store_false", help="print only the table")
    add("--width", type=int, metavar="N", help="columns of the printed timeline (the terminal's)")
    args = parser.parse_args(list(argv))
    if args.png:
        check_format(args.png)
    return args


def _words(value: str) -> list[str]:
    return [word for word in value.split(",") if word]


def _cost(value: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = map(float, value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value}: three numbers separated by commas, as in 1,1,1") from None
    if min(forward, input_grad, weight_grad) < 0 or not forward + input_grad + weight_grad > 0:
        raise argparse.ArgumentTypeError(f"{value}: durations are not negative, and not all zero")
    return forward, input_grad, weight_grad
