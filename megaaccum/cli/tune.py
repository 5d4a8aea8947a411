"""`megaaccum tune`: run the planner's best layouts for some steps each, and take the fastest."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from rich.table import Table

from megaaccum.cli import arguments
from megaaccum.cli.arguments import Source, add_search_flags, command_parser, count, held_axes, names_in, read_source
from megaaccum.cli.train import ranks_here
from megaaccum.config import Config
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import layout_config, report
from megaaccum.lab.planner.candidates import Limits
from megaaccum.lab.planner.fallbacks import KNOBS, MEASURED, Candidate, Fallbacks, Outcome
from megaaccum.lab.planner.hardware import Hardware, entry_of, load_hardware, names, slowed
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.trial import STEPS, Results, Trials, candidates_of
from megaaccum.lab.planner.workload import make_workload
from megaaccum.pretrain.data.sources import check_files
from megaaccum.pretrain.launch import local
from megaaccum.pretrain.launch.hostfile import read_hostfile
from megaaccum.texts import write_text

_DESCRIPTION = f"""\
Take the planner's ranked layouts of a configuration and run them, each in processes of its own, for {STEPS} steps with
saving, evaluation and metrics off; a layout's time is the median of steps 1 to 3. Layouts that run out of memory, hang,
or whose gradient is not finite are dropped, and the next one is chosen by rule. Started again, it resumes after the
last layout that was run."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum tune` with these arguments; returns the exit code.

    Raises:
        ConfigError: no layout fits or could be measured, an argument cannot be used, or the folder holds the results of
            another configuration.
    """
    args, source = _parse(argv)
    config = source.loaded_config()
    if args.hostfile is None:
        check_files(config)  # what no layout could read
    world_size = _world_size(args, config)
    workload = make_workload(config, world_size=world_size, hardware=_hardware(args))
    ranked = search(workload, Limits(fixed=held_axes(args, config)), rank=args.rank)
    folder = Path(args.output or Path(config.run.output_dir) / "tune")
    trials = Trials(
        workload=workload, folder=folder, command=launch_command(args), time_limit=args.time_limit,
        steps=max(STEPS, args.settle), band=args.band,
    )  # fmt: skip
    # Everything that results have to have in common to be compared.
    identity = {"configuration": layout_config.as_sections(config), "world_size": world_size, "steps": trials.steps}
    results = Results(folder / "results.json", identity)
    fallbacks = Fallbacks(candidates_of(ranked), top=args.top)

    def measure(candidate: Candidate, number: int = 1) -> Outcome:
        done = results.outcomes.get(candidate.name)
        if done is not None and (number == 1 or done.verdict != MEASURED or len(done.runs) >= number):
            return done
        print(f"row {candidate.row}: {candidate.name}", file=sys.stderr, flush=True)
        outcome = trials.run(candidate)
        outcome = outcome if done is None else done.then(outcome)
        results.add(candidate, outcome)
        print(f"row {candidate.row}: {_short(outcome)}", file=sys.stderr, flush=True)
        return outcome

    fallbacks.run(measure, args.knob)
    best = fallbacks.run_again(measure, args.rounds)
    _report(fallbacks, best, folder, report.wide_tuning_table if args.wide else report.tuning_table)
    if best is None:
        tried = len(fallbacks.tried)
        raise ConfigError(f"none of the {tried} layouts that were tried could be measured: see {folder}.")
    _write(args, trials, fallbacks, best)
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Source]:
    usage = "megaaccum tune CONFIG [--gpus N | --hostfile F] [options] [--key value ...]"
    parser = command_parser("tune", _DESCRIPTION, usage)
    add_search_flags(parser)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", type=count, metavar="N", help="ranks of this machine (default: its GPUs)")
    where.add_argument("--hostfile", metavar="F", help="run each layout by `deepspeed --hostfile F`")
    add("--gpu", metavar="NAME", help=f"{', '.join(names())} (default: the GPU that is found)")
    add("--top", type=count, default=3, metavar="K", help="layouts to measure (default 3)")
    add("--knob", type=names_in, default=[], metavar="NAME,...", help=f"then vary, one at a time: {', '.join(KNOBS)}")
    add("--rounds", type=count, default=1, metavar="N", help="run the layouts near the best N times, in turns (1)")
    add("--settle", type=int, default=0, metavar="N", help="run N steps each and watch the gradient's norm")
    add("--band", type=arguments.positive, default=4.0, metavar="R", help="drop a layout at R times its mean norm (4)")
    add("--time-limit", type=arguments.positive, default=1800.0, metavar="S", help="seconds of a layout at most (1800)")
    add("--wide", action="store_true", help="every axis, and bytes, in the table")
    add("--output", metavar="FOLDER", help="results and runs (default: output_dir/tune)")
    add("--write", metavar="F", help="write the winner's configuration as YAML")
    add("--calibrate", metavar="F", help="write the hardware's entry, corrected by what was measured")
    args, source = read_source(argv).parse(parser)
    if not (0 < args.time_limit < 1e9 and 1 < args.band < 1e9):  # nan is neither
        parser.error("--time-limit is above 0, and --band above 1, and neither is infinite")
    arguments.refuse_idle(parser, args, {"--band": "--settle"})
    return args, source


def _world_size(args: argparse.Namespace, config: Config) -> int:
    if args.hostfile is not None:
        return sum(read_hostfile(args.hostfile).values())
    return args.gpus or ranks_here(config)


def _hardware(args: argparse.Namespace) -> Hardware:
    name = args.gpu
    if name is None and local.num_gpus():
        import torch

        device = torch.cuda.get_device_properties(0)
        name = entry_of(device.name, device.total_memory)
    return load_hardware(name or "h100", file=args.hardware)


def launch_command(args: argparse.Namespace) -> list[str]:
    """The command that starts a run, without its configuration."""
    if args.hostfile is None:
        return [*local.interpreter(), "-m", "megaaccum", "train"]
    if shutil.which("deepspeed") is None:
        raise ConfigError("--hostfile starts each layout by `deepspeed`, which is not on PATH: add its folder to PATH.")
    return ["deepspeed", "--hostfile", args.hostfile, "--module", "megaaccum.train", "--config"]


# --- what is printed and written -------------------------------------------------------------------------------------


def _report(fallbacks: Fallbacks, best: Candidate | None, folder: Path, table: Callable[..., Table]) -> None:
    from rich.console import Console

    width = 200 if table is report.wide_tuning_table else 80
    Console(width=None if sys.stdout.isatty() else width).print(table(fallbacks, best))
    for note in fallbacks.notes:
        print(note)
    for each in fallbacks.tried:
        outcome = fallbacks.outcomes[each.name]
        if outcome.verdict != MEASURED:
            first, *rest = outcome.text.splitlines() or [""]
            cause = f" ({rest[-1]})" if rest else ""
            print(f"row {each.row} was dropped: {outcome.verdict}: {first}{cause}")
    print(f"Results, configurations and receipts: {folder}")


def _short(outcome: Outcome) -> str:
    if outcome.verdict == MEASURED:
        return f"{outcome.seconds:.4g} s"
    return ": ".join([outcome.verdict, *outcome.text.splitlines()[-1:]])


def _write(args: argparse.Namespace, trials: Trials, fallbacks: Fallbacks, best: Candidate) -> None:
    seconds = fallbacks.seconds_of(best)
    if args.write:
        comment = f"Measured by `megaaccum tune`: {seconds:.4g} s per step, the median of steps 1 to 3."
        ran = dict(transformer_impl=trials.workload.config.model.transformer_impl)
        layout_config.write(trials.workload, dict(best.axes), Path(args.write), comment=comment, **ran)
        print(f"wrote {args.write}", file=sys.stderr)
    if args.calibrate:
        ratios = [fallbacks.seconds_of(each) / each.seconds for each in fallbacks.measured]
        factor = statistics.geometric_mean(ratios)
        name = trials.workload.hardware.name
        entry = slowed(name, factor, file=args.hardware, source=f"{len(ratios)} layouts measured by `megaaccum tune`")
        write_text(args.calibrate, yaml.safe_dump({f"{name}_tuned": entry}, sort_keys=False, width=100))
        print(
            f"wrote {args.calibrate}: steps took {factor:.3g} times what was predicted; plan with --gpu {name}_tuned"
            f" --hardware {args.calibrate}",
            file=sys.stderr,
        )
