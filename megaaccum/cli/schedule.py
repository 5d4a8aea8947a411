"""`megaaccum schedule`: build a pipeline schedule, prove that it runs, and print what it costs beside others and beside
the least that any order of its stages can take (gap). Durations are those of a rank's whole work on one micro-batch, in
any unit (--cost; a schedule with two chunks per rank halves them per chunk), or of each kind of layer (--profile).
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaaccum.cli.arguments import command_parser, count, fewest_ranks, names_in, positive, read_source, refuse_idle
from megaaccum.config import resolve
from megaaccum.config.keys import names_where
from megaaccum.errors import ConfigError, ScheduleError, printable
from megaaccum.executor.timeline import write_trace
from megaaccum.lab.planner.layout_config import put, set_aside, write_config
from megaaccum.lab.planner.pipeline import seconds_without_barrier
from megaaccum.lab.search.bound import Bound
from megaaccum.lab.search.cut import bound_of_cuts, tune_cut
from megaaccum.lab.search.profile import Cut, Profile, describe_cut, even_cut, layout_of_cut, read_profile
from megaaccum.lab.search.search import ITERATIONS, Comparison, compare, search_order
from megaaccum.pretrain.metrics.schedule_plots import check_format, figure, save, text
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.memory import TINY, Memory
from megaaccum.schedule.pass_numbers import Problem
from megaaccum.schedule.registry import BUILT_IN, build, entry, names
from megaaccum.schedule.simulate import Costs, Simulation, simulate
from megaaccum.schedule.table import write_csv
from megaaccum.schedule.validate import Footprint, validate
from megaaccum.units import GIB

_OF_A_PIPELINE = {
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "schedule", "microbatch_group_size_per_vp_stage", "decoder_first_pipeline_num_layers", "flush",
    "decoder_last_pipeline_num_layers", "global_batch_size", "total_batch_size", "device_batch_size",
    "pp_microbatches", "grad_accum_steps", "world_size",
}  # fmt: skip
"""Keys that --write replaces, and those that follow from them."""
_OPTIONS = {
    "pp_microbatches or grad_accum_steps": "--microbatches", "pipeline_model_parallel_size": "--pp",
    "microbatch_group_size_per_vp_stage": "--group-size",
}  # fmt: skip
"""Options of this command for what a configuration has by keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule, priced. cut: None without a profile."""

    schedule: Schedule
    costs: Costs
    memory: Memory
    simulation: Simulation
    footprint: Footprint
    peak: float
    bound: float
    cut: Cut | None = None

    @property
    def gap(self) -> float:
        return self.simulation.makespan / self.bound - 1

    @property
    def without_barrier(self) -> float:
        """From one step's flush to the next with `speculative_step`, which only the executor has."""
        if self.schedule.by_megatron:
            return self.simulation.makespan
        return seconds_without_barrier(self.schedule, self.costs)


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum schedule`; returns the exit code. Raises ScheduleError."""
    args = _parse(argv)
    profile = None if args.profile is None else read_profile(args.profile)
    limit = _limit(args, profile)
    rows, refused = _rows(args, profile, limit)
    row = rows[0]
    said = list(_about_cuts(rows, profile, args))
    if args.search:
        searched, verdict = _search(row, args, limit)
        rows.insert(1, searched)
        said.append(_about(verdict, searched, row))
        row = searched if verdict.adopted else row
    if not args.no_timeline:
        width = args.width or shutil.get_terminal_size((120, 40)).columns
        print(text(row.schedule, row.simulation, width=width, costs=row.costs), end="\n\n")
    print(printable("\n".join([comparison(rows, barrier=args.barrier), *said, *refused])))
    _write(row, rows, args)
    return 0


def _write(row: Row, rows: Sequence[Row], args: argparse.Namespace) -> None:
    if args.write:
        _write_run(row, args)
    if args.png:
        others = [(each.schedule, each.simulation) for each in rows[:2] if args.search and each is not row]
        drawn = figure(row.schedule, row.simulation, beside=others, bound=row.bound if args.search else None,
                       costs=row.costs)  # fmt: skip
        save(drawn, args.png)
        print(f"picture: {args.png}")
    if args.csv:
        write_csv(row.schedule, args.csv)
        print(f"table: {args.csv}")
    if args.trace:
        write_trace(args.trace, row.schedule, planned=row.simulation.spans, measured=None)
        print(f"trace: {args.trace} (open in ui.perfetto.dev)")


def _write_run(row: Row, args: argparse.Namespace) -> None:
    """Write --config with the row's schedule, cut and micro-batches, as `megaaccum train` runs it; a searched order is
    a table beside it. Raises ConfigError if `check` would refuse it (nothing is written)."""
    config, name = read_source([args.config]).loaded_config(), row.schedule.name
    set_aside(config, set(names_where(lambda facts: facts.planned)) & _OF_A_PIPELINE)
    table = args.write.with_suffix(".csv")
    before, is_built_in = table.read_bytes() if table.exists() else None, name in BUILT_IN
    keys: dict[str, Any] = dict(
        pipeline_model_parallel_size=args.pp, schedule=name if is_built_in else str(table.absolute()),
        pp_microbatches=args.microbatches, grad_accum_steps=1,
    )  # fmt: skip
    if row.cut is not None and args.cut:
        keys["pipeline_model_parallel_layout"] = layout_of_cut(read_profile(args.profile), row.cut)
    elif name == "interleaved" and config.parallel.pipeline_model_parallel_layout is None:
        keys["virtual_pipeline_model_parallel_size"] = row.schedule.chunks
    if name == "interleaved" and args.group_size:
        keys["microbatch_group_size_per_vp_stage"] = args.group_size
    if row.costs.layers is not None and row.schedule.has_pairs:
        keys["overlap_moe_expert_parallel_comm"] = True
    put(config, keys)
    if not is_built_in:
        write_csv(row.schedule, table)
    try:
        resolve(config, world_size=fewest_ranks(config))
    except ConfigError:
        if before is not None:
            table.write_bytes(before)
        elif not is_built_in:
            table.unlink()
        raise
    write_config(config, args.write, f"{name}: {row.simulation.makespan:.6g} per flush, simulated.")
    print(f"configuration: {args.write}" + f", with its table {table}" * (not is_built_in))


def _limit(args: argparse.Namespace, profile: Profile | None) -> float | None:
    """In the profile's bytes, or in micro-batches of a whole rank."""
    if args.memory_gib is None:
        return None if args.memory_limit is None else float(args.memory_limit)
    if profile is None or not profile.has_bytes:
        raise ScheduleError(
            "--memory-gib needs a --profile with the bytes that layers hold (activation, deferred, state): add"
            " them, or count micro-batches of a whole rank with --memory-limit"
        )
    return float(args.memory_gib) * GIB


def _rows(args: argparse.Namespace, profile: Profile | None, limit: float | None) -> tuple[list[Row], list[str]]:
    """The schedule asked for and what can be compared; for each that does not exist at these sizes the reason."""
    if args.schedule != "auto":
        rows, others = [_row(args.schedule, args, profile, limit)], [n for n in args.compare if n != args.schedule]
    else:
        rows, others = [], sorted({*BUILT_IN, *args.compare})
    for name in args.compare:
        entry(name)  # a name that no schedule has
    refused = []
    for name in others:
        try:
            rows.append(_row(name, args, profile, limit))
        except ScheduleError as error:
            refused.append(f"{name}: {error}")
    over = [row for row in rows if limit is not None and row.peak > limit * (1 + TINY)]
    if args.schedule == "auto":
        rows = _fastest_first(rows, over, limit, refused, barrier=args.barrier)
    return rows, refused + [f"{row.schedule.name}: it holds {row.peak:.6g}, over the limit" for row in over]


def _fastest_first(
    rows: list[Row], over: list[Row], limit: float | None, refused: list[str], *, barrier: bool
) -> list[Row]:
    """The rows that are not `over` the limit, fastest first. Raises ScheduleError if there are none."""
    fitting = [row for row in rows if row not in over]
    if not fitting:
        row = min(rows, key=lambda row: row.peak, default=None)
        why = (
            ":" if row is None else f" in {limit:.6g}. The one that holds least is {row.schedule.name}, {row.peak:.6g}."
        )
        raise ScheduleError(f"no schedule fits{why} {' '.join(refused)}".strip())
    return sorted(fitting, key=lambda row: row.simulation.makespan if barrier else row.without_barrier)


@contextmanager
def _naming_options() -> Iterator[None]:
    """Context whose errors name the options of this command."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(re.sub("|".join(_OPTIONS), lambda key: _OPTIONS[key[0]], str(error))) from None


@_naming_options()
def _row(name: str, args: argparse.Namespace, profile: Profile | None, limit: float | None) -> Row:
    chunks, group_size = (args.vpp, args.group_size) if name == "interleaved" else (None, None)
    schedule = build(name, pp=args.pp, num_microbatches=args.microbatches, chunks=chunks, group_size=group_size)
    if profile is None:
        costs = Costs.per_rank(*(args.cost or (1.0, 1.0, 1.0)), chunks=schedule.chunks, p2p=args.p2p)
        return _priced(schedule, costs, Memory.counted(schedule.num_stages, chunks=schedule.chunks), limit)
    cut = even_cut(profile, schedule.num_stages)
    if args.cut:
        cut = tune_cut(profile, schedule, limit=limit, p2p=args.p2p).cut
    row = _priced(schedule, profile.costs(cut, p2p=args.p2p), profile.memory(cut, chunks=schedule.chunks), limit)
    return replace(row, cut=cut)


def _priced(schedule: Schedule, costs: Costs, memory: Memory, limit: float | None) -> Row:
    """limit: None for the schedule's own peak, which then is the bound's."""
    peak = max(memory.peaks(schedule))
    limit = max(peak, limit or 0.0)
    problem = Problem(
        costs, stages=schedule.stages, num_microbatches=schedule.num_microbatches, memory=memory, limit=limit
    )
    return Row(
        schedule=schedule, costs=costs, memory=memory, simulation=simulate(schedule, costs),
        footprint=validate(schedule), peak=peak, bound=Bound(problem).seconds,
    )  # fmt: skip


def _search(row: Row, args: argparse.Namespace, limit: float | None) -> tuple[Row, Comparison]:
    """The searched order of the row's stages, and how it compares."""
    limit = row.peak if limit is None else limit
    problem = Problem(
        row.costs, stages=row.schedule.stages, num_microbatches=args.microbatches, memory=row.memory, limit=limit
    )
    name = f"{row.schedule.name}, searched"
    found = search_order(problem, start=[row.schedule], iterations=args.iterations, seed=args.seed, name=name)
    searched = replace(
        row, schedule=found.schedule, simulation=simulate(found.schedule, row.costs),
        footprint=validate(found.schedule), peak=max(found.peaks), bound=found.bound,
    )  # fmt: skip
    verdict = compare(found.schedule, row.schedule, row.costs, seed=args.seed)
    if row.peak > limit * (1 + TINY):  # the named one cannot run at all
        verdict = Comparison(gain=1.0, wins=1.0)
    return searched, verdict


def _about(verdict: Comparison, searched: Row, named: Row) -> str:
    """Whether the searched order is taken, and why."""
    name = named.schedule.name
    if verdict.gain == 1.0:
        return f"searched order taken: {name} holds {named.peak:.6g}, which is over the limit"
    figures = (
        f"{verdict.gain:+.2%} on average over 50 samples of +-10 % jitter, faster in {verdict.wins:.0%} of them"
        f" (wanted: at least +1 % and 90 %)"
    )
    return f"searched order taken: {figures}" if verdict.adopted else f"searched order left, {name} stays: {figures}"


def _about_cuts(rows: Sequence[Row], profile: Profile | None, args: argparse.Namespace) -> Iterator[str]:
    """The cut of each schedule, and how far it is from the least of all cuts."""
    for row in rows:
        if profile is not None and row.cut is not None and args.cut:
            least = bound_of_cuts(profile, row.schedule)
            yield (
                f"cut for {row.schedule.name}: {'-'.join(map(str, row.cut))} = {describe_cut(profile, row.cut)}"
                f" ({row.simulation.makespan / least - 1:.2%} over the bound of all cuts)"
            )


def comparison(rows: Sequence[Row], *, barrier: bool = True) -> str:
    """A table, a line per schedule: time, idle share, what the fullest rank holds in micro-batches of a whole rank's
    activations, the most of all that it holds together, and the gap. Without a barrier, also the time from one step's
    flush to the next."""
    names = "schedule,chunks,makespan,bubble,idle,activations,deferred W,peak,gap" + ("" if barrier else ",no barrier")
    head = tuple(names.split(","))
    lines = [head]
    for row in rows:
        chunks, simulation = row.schedule.chunks, row.simulation
        lines.append((
            row.schedule.name, str(chunks), f"{simulation.makespan:.6g}", f"{simulation.bubble:.6g}",
            f"{1 - simulation.utilisation:.2%}", f"{max(row.footprint.in_flight) / chunks:g}",
            f"{max(row.footprint.deferred) / chunks:g}", f"{row.peak:.6g}", f"{max(0.0, row.gap):.2%}",
            *(() if barrier else (f"{row.without_barrier:.6g}",)),
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("schedule", __doc__)
    add = parser.add_argument
    add("--pp", type=count, required=True, help="pipeline ranks")
    add("--microbatches", "-m", type=count, required=True, help="micro-batches of a flush")
    add("--schedule", required=True, metavar="NAME", help=f"auto (fastest that fits), {', '.join(names())}, or .csv")
    add("--compare", type=names_in, default=[], metavar="NAMES", help="other schedules, separated by commas")
    add("--cost", type=_cost, metavar="F,I,W", help="forward, input and weight gradient (1,1,1)")
    add("--p2p", type=float, default=0.0, metavar="T", help="from one rank to the next")
    add("--no-barrier", dest="barrier", action="store_false", help="also the time per step with speculative_step")
    add("--vpp", type=count, metavar="N", help="chunks per rank of the interleaved schedule (2)")
    add("--group-size", type=count, metavar="N", help="its microbatch_group_size_per_vp_stage (pp)")
    stages = parser.add_argument_group("stages that differ, and memory")
    stages.add_argument("--profile", type=Path, metavar="FILE", help="costs of every kind of layer (JSON)")
    stages.add_argument("--cut", action="store_true", help="search for the cut of the layers; else it is even")
    held = stages.add_mutually_exclusive_group()
    held.add_argument("--memory-gib", type=positive, metavar="G", help="that a rank may hold; the profile has bytes")
    held.add_argument("--memory-limit", type=positive, metavar="N", help="the same in micro-batches (or bytes)")
    orders = parser.add_argument_group("orders")
    orders.add_argument("--search", action="store_true", help="search for a faster order of the same stages")
    orders.add_argument("--iterations", type=count, default=ITERATIONS, metavar="N", help=f"orders ({ITERATIONS})")
    orders.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")
    add("--png", type=Path, metavar="FILE", help="draw timeline and memory (.png, .svg or .pdf)")
    add("--csv", type=Path, metavar="FILE", help="write the table, with stage numbers, as torch reads it")
    add("--config", metavar="CONFIG", help="configuration that --write takes everything else from")
    add("--write", type=Path, metavar="FILE", help="write a configuration with this schedule, cut and micro-batches")
    add("--trace", type=Path, metavar="FILE", help="write the planned timeline in Chrome's trace format")
    add("--no-timeline", action="store_true", help="print only the table")
    add("--width", type=count, metavar="N", help="columns of the printed timeline (the terminal's)")
    args = parser.parse_args(list(argv))
    if args.write and (args.config is None or args.write.suffix == ".csv"):
        parser.error("--write needs --config CONFIG, whose model, data and other keys the YAML file has")
    if (args.vpp or args.group_size) and not {"interleaved", "auto"} & {args.schedule, *args.compare}:
        parser.error("--vpp and --group-size are the interleaved schedule's: name it in --schedule or --compare")
    if args.cost and args.profile:
        parser.error("--profile FILE has the costs of every layer: leave --cost out")
    needs = {"--cut": "--profile", "--config": "--write", "--iterations": "--search", "--seed": "--search"}
    refuse_idle(parser, args, needs | {"--width": "not --no-timeline"})
    if not 0 <= args.p2p < float("inf"):
        parser.error(f"--p2p {args.p2p:g}: a time from 0 on")
    if args.png:
        check_format(args.png)
    return args


def _cost(value: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = map(float, value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value}: three numbers separated by commas, as in 1,1,1") from None
    if min(forward, input_grad, weight_grad) < 0 or not 0 < forward + input_grad + weight_grad < float("inf"):
        raise argparse.ArgumentTypeError(f"{value}: durations are finite, not negative, and not all zero")
    return forward, input_grad, weight_grad
