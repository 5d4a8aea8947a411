"""`megaaccum plan`: predict memory and step time of every legal layout of a configuration, and rank those that fit.
What the file says about layout and micro-batches is set aside; global_batch_size stays. Any key may be overridden, as
in --seq_length 4096.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megaaccum.cli.arguments import add_search_flags, command_parser, count, held_axes, read_source, refuse_idle
from megaaccum.config import Config, precision
from megaaccum.errors import ConfigError, printable
from megaaccum.lab.planner import layout_config, report
from megaaccum.lab.planner.candidates import Limits
from megaaccum.lab.planner.cut import cut_of, searched_seconds
from megaaccum.lab.planner.from_run import fitted_to
from megaaccum.lab.planner.hardware import load_hardware, names
from megaaccum.lab.planner.search import Ranked, search
from megaaccum.lab.planner.why_not import parse_axes, why_not
from megaaccum.lab.planner.workload import make_workload
from megaaccum.lab.search.profile import read_profile
from megaaccum.pretrain.launch.hostfile import read_hostfile
from megaaccum.units import GIB

_ONE = "not --why-not|--explain"
_RULES = {"--row": "--write", "--even": "--write", "--profile": "--search|--write", "--gpus": "not --hostfile"}
_RULES |= {"--top": _ONE, "--search": _ONE, "--explain": "not --why-not|--json", "--wide": f"{_ONE}|--json"}
_RULES |= {"--json": "not --why-not", "--write": "not --why-not"}
"""Options that need others, or that answers of one layout set aside (`refuse_idle`)."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum plan` with these arguments; returns the exit code.

    Raises:
        ConfigError: no layout is legal or fits, or an argument cannot be used.
    """
    parser = _parser()
    args, source = read_source(argv).parse(parser)
    refuse_idle(parser, args, _RULES)
    config = source.loaded_config()
    world_size, per_node = _gpus(args, config)
    hardware = load_hardware(args.gpu, file=args.hardware, gpus_per_node=per_node)
    if not precision.is_given(config):
        layout_config.put(config, {"bf16": True})  # of the GPUs that are planned for, whatever this machine has
    workload = make_workload(config, world_size=world_size, hardware=hardware)
    if args.from_run:
        workload = fitted_to(workload, args.from_run, file=args.hardware)
    limits = Limits(fixed=held_axes(args, config), most={"tp": args.max_tp, "pp": args.max_pp, "cp": args.max_cp})
    start = time.monotonic()
    ranked = search(workload, limits, rank=args.rank)
    seconds = time.monotonic() - start
    if args.why_not:
        print(why_not(workload, parse_axes(args.why_not), limits, ranked, rank=args.rank))
        return 0
    _print(args, ranked, seconds)
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = "megaaccum plan CONFIG [--hostfile F | --gpus N] [--gpu NAME] [options] [--key value ...]"
    parser = command_parser("plan", __doc__, usage)
    add_search_flags(parser)
    parser.add_argument("--gpus", type=count, metavar="N", help="GPUs in all (default: the file's world_size)")
    parser.add_argument("--hostfile", metavar="F", help="count the GPUs of this DeepSpeed hostfile (host slots=N)")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(names())} (default h100)")
    parser.add_argument("--from-run", metavar="RECEIPT", help="scale times by what a run of this model measured")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="GPUs of a node (default: the hardware's)")
    of = "schedule={}".format
    parser.add_argument("--schedule", dest="fix", action="append", type=of, metavar="NAME", help="hold the schedule")
    for axis in ("tp", "pp", "cp"):
        parser.add_argument(f"--max-{axis}", type=count, metavar="N", help=f"largest {axis}")
    parser.add_argument("--top", type=count, default=10, metavar="N", help="rows of the table (default 10)")
    parser.add_argument("--wide", action="store_true", help="every axis, kind of memory and share of time")
    parser.add_argument("--search", action="store_true", help="seconds of each row in a searched order of its passes")
    parser.add_argument("--explain", type=int, metavar="ROW", help="write out the arithmetic of a row of the table")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--why-not", metavar="AXIS=VALUE,...", help="what keeps a layout from the top")
    parser.add_argument("--write", metavar="F", help="write the configuration of --row as YAML")
    parser.add_argument("--row", type=int, default=1, metavar="N", help="the row that --write writes (default 1)")
    parser.add_argument("--profile", metavar="F", help="measured costs of the layers, for --search and --write")
    parser.add_argument("--even", action="store_true", help="--write splits the layers evenly")
    return parser


def _gpus(args: argparse.Namespace, config: Config) -> tuple[int, int | None]:
    """(GPUs in all, GPUs of a node if that is said)."""
    if args.hostfile is None:
        return args.gpus or config.run.world_size or config.run.nproc_per_node or 0, args.gpus_per_node
    slots = read_hostfile(args.hostfile)
    if len(set(slots.values())) > 1:
        raise ConfigError(
            f"the hosts of {args.hostfile} have {sorted(set(slots.values()))} slots: the planner wants them equal; plan"
            " for the hosts of one kind with --gpus and --gpus-per-node."
        )
    return sum(slots.values()), args.gpus_per_node or next(iter(slots.values()))


def _print(args: argparse.Namespace, ranked: Ranked, seconds: float) -> None:
    """Print the ranking in the form that the options select, and write the chosen row."""
    for name, row in (("--explain", args.explain), ("--row", args.row)):
        if row is not None and not 1 <= row <= len(ranked):
            raise ConfigError(f"{name} {row}: {len(ranked)} layouts fit; give a number from 1 to {len(ranked)}.")
    profile = None if args.profile is None else read_profile(args.profile)
    shown = range(min(args.top, len(ranked) if args.json else ranked.num_unbeaten))
    searched = [searched_seconds(ranked, index, profile) for index in shown] if args.search else None
    if args.json:
        print(json.dumps(report.as_json(ranked, args.top, searched), indent=2))
    elif args.explain is not None:
        print(report.explain(ranked, args.explain - 1))
    else:
        _print_table(args, ranked, seconds, searched)
    if args.write:
        _write(ranked, args.row - 1, Path(args.write), args)
        print(f"wrote {args.write}", file=sys.stderr)


def _write(ranked: Ranked, index: int, path: Path, args: argparse.Namespace) -> None:
    """Write a row's configuration, with its layers cut by their costs, and with what is predicted for it."""
    work, at = ranked.workload, ranked.name_of(index)
    if at["pp"] > 1 and not args.even:
        at["stages"], how = cut_of(ranked, index, None if args.profile is None else read_profile(args.profile))
        print(f"layers: {how}", file=sys.stderr)
    comment = (
        f"Planned for {work.hardware.name}: {ranked.memory.total[index] / GIB:.1f} GiB on the most loaded rank,"
        f" {ranked.time.total[index]:.3g} s per step (predicted)."
    )
    layout_config.write(work, at, path, comment=comment)


def _print_table(
    args: argparse.Namespace, ranked: Ranked, seconds: float, searched: Sequence[float | None] | None
) -> None:
    from rich.console import Console

    work, hardware = ranked.workload, ranked.workload.hardware
    print(
        f"{work.world_size:,} x {hardware.name_of_peak}, {work.tokens_per_step:,} tokens per step, --rank {args.rank}\n"
        f"{ranked.num_legal:,} legal layouts, {len(ranked):,} fit, {ranked.num_unbeaten:,} unbeaten; {seconds:.1f} s"
    )
    make, width = (report.wide_table, 200) if args.wide else (report.table, 80)
    Console(width=None if sys.stdout.isatty() else width).print(make(ranked, args.top, searched))
    print("GiB of the most loaded rank; * parameters stream; --wide shows every axis.")
    print("--explain ROW writes the arithmetic out; --write F --row N a configuration.")
    print(printable(f"Figures of {hardware.name}: {hardware.source}"))
