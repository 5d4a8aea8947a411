"""`megaaccum calibrate`: measure this machine and write a hardware entry for the planner, or with --layers measure the
layers of a configuration and write their profile.

It needs torch. Matrix products over a sweep of shapes give the rate of large ones and how it falls for small ones;
copies give the memory's bandwidth; collectives over the ranks of this start give latency and bandwidth. Start it alone,
or under torchrun on every GPU of a node (and of several nodes) to measure the links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import yaml

from megaaccum.cli.arguments import Source, command_parser, count, fewest_ranks, positive, refuse_idle
from megaaccum.config import resolve
from megaaccum.lab.search.profile import write_profile
from megaaccum.texts import write_text

_RULES = {"--repeats": "--layers", "--dp": "--layers", "--like": "not --layers", "--seconds": "not --layers"}
"""Options of one of the two kinds of measurement (`refuse_idle`)."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum calibrate` with these arguments; returns the exit code.

    Raises:
        ConfigError: the file cannot be written, or --like names no entry.
    """
    args, overrides = _parse(argv)
    if args.layers is not None:
        return _layers(args, overrides)
    from megaaccum.lab.planner.calibration import measure

    if (entry := measure(args.like, seconds=args.seconds)) is None:  # a rank other than the first
        return 0
    text = yaml.safe_dump({args.name: entry}, sort_keys=False, width=100)
    write_text(args.output, text)
    print(text, end="")
    print(f"wrote {args.output}: plan with --gpu {args.name} --hardware {args.output}", file=sys.stderr)
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    usage = "megaaccum calibrate (NAME [options] | --layers CONFIG [options] [--key value ...])"
    parser = command_parser("calibrate", __doc__, usage)
    parser.set_defaults(name=None)
    if not any(word.split("=")[0] == "--layers" for word in argv):  # with it, words are values of the file's keys
        parser.add_argument("name", nargs="?", help="name of the entry, for --gpu")
    parser.add_argument("--like", default="h100", help="entry that says what is not measured (default h100)")
    parser.add_argument("--output", metavar="F", help="file to write (default hardware.yaml, or layers.json)")
    parser.add_argument("--seconds", type=positive, default=0.2, help="how long each point is repeated")
    layers = parser.add_argument_group("the layers of a configuration")
    layers.add_argument("--layers", metavar="CONFIG", help="write a profile for `megaaccum schedule --profile`")
    layers.add_argument("--repeats", type=count, default=10, metavar="N", help="micro-batches that are timed (10)")
    layers.add_argument("--dp", type=count, default=1, metavar="N", help="ranks that share sharded state (1)")
    args, overrides = parser.parse_known_args(list(argv))
    if (args.name is None) == (args.layers is None):
        parser.error("give NAME to measure this machine, or --layers CONFIG to measure a model's layers")
    refuse_idle(parser, args, _RULES)
    if overrides and args.layers is None:
        parser.error(f"unknown option {overrides[0]}")
    args.output = args.output or ("hardware.yaml" if args.layers is None else "layers.json")
    return args, overrides


def _layers(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Measure the layers of a configuration and write their profile."""
    from megaaccum.distributed import preload

    preload.libraries()
    import torch
    import torch.distributed as dist
    from rich.console import Console

    from megaaccum.distributed import start
    from megaaccum.lab.planner import layer_costs
    from megaaccum.lab.planner.workload import vocabulary
    from megaaccum.platform import cpu

    config = Source(args.layers, list(overrides)).loaded_config()
    plan, ranks = resolve(config, world_size=fewest_ranks(config), own_model=True), args.dp
    start.start_process_group(plan)
    vocab = vocabulary(plan.config)
    profile = layer_costs.measure(plan, vocab_size=vocab, repeats=args.repeats, data_parallel_size=ranks)
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if cpu.has_accelerator() else "a CPU"
        write_profile(profile, args.output, source=f"{args.layers}, measured on {device}")
        Console().print(layer_costs.table(profile))
        print(f"wrote {args.output}: megaaccum schedule --profile {args.output}", file=sys.stderr)
    start.end_process_group()
    return 0
