"""`megaaccum verify`: prove that the accumulated step of a configuration is exactly the step on the full global batch.

One process takes the full global batch in float64, without pipeline, sharding or accumulation; the ranks of the layout,
started on this machine, take the accumulated step. Both take the first samples of the data that CONFIG names, or random
tokens. Every number of both is compared: loss, weight, each parameter's gradient, norm, change of weights, moments,
loss scale, router biases. More than 8 ranks or a large model are made smaller, with every axis of the layout kept, and
the report says so. A step that differs is traced to the axis, the border of a stage, the parameter and the factor.

Under a launcher (torchrun --nproc-per-node 4 -m megaaccum verify CONFIG) its ranks are those of the layout.

Exit codes: 0 it is the full batch's step, 1 it is not, 2 the configuration is refused, 3 it cannot be verified (the
reason is printed).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaaccum import config as configuration
from megaaccum.cli import verify_weights
from megaaccum.cli.arguments import command_parser, count, fewest_ranks, read_source, refuse_idle
from megaaccum.config.load import given
from megaaccum.errors import ConfigError, problems_of
from megaaccum.lab.verification.shrink import Shrunk
from megaaccum.pretrain.launch import local

_USAGE = """megaaccum verify CONFIG [--layout tp=2,pp=2] [--world-size N] [--shrink] [--steps N] [--key value ...]
       megaaccum verify --weights DIR [--run RUN]     (a Hugging Face folder; `megaaccum verify --weights --help`)"""


def main(argv: Sequence[str]) -> int:
    """Verify, and return the exit code. Raises MegaaccumError."""
    parser = _parser()
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if argv else 2
    if argv[0].partition("=")[0] == "--weights":
        return verify_weights.main(argv)
    from megaaccum.lab.verification import launched, report, user_model

    args, source = read_source(argv).parse(parser)
    refuse_idle(parser, args, {"--dry-run": "--device"})
    num_gpus = _num_gpus(args)
    with replace(source, words=[*source.words, *args.layout]).load() as loaded:
        shrunk = _case(loaded.checked(), loaded.world_size, args)
    if num_gpus is not None:
        shrunk = replace(shrunk, case=replace(shrunk.case, device="gpu"))
        shrunk.notes.append(f"--device gpu: {f'on {num_gpus} GPUs' if num_gpus else 'a dry run, without a GPU'}")
        if launched.num_ranks() == 1 and shrunk.case.world_size > num_gpus > 0:
            raise ConfigError(
                f"the layout that is verified has {shrunk.case.world_size} ranks, but this machine has {num_gpus} GPUs,"
                f" one for each rank: set --world-size to {num_gpus} or less, or start its ranks by torchrun"
            )
    progress = user_model.to_stderr() if launched.is_first() else lambda text: None
    verdict = user_model.run(shrunk.case, args.steps, progress)
    if not launched.is_first():
        return verdict.exit_code
    verdict.notes = shrunk.notes + verdict.notes
    print(report.text(verdict))
    for path in filter(None, (args.json, args.picture)):
        report.write(verdict, path)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("verify", __doc__, _USAGE)
    add = parser.add_argument
    add("--layout", type=_keys, action="extend", default=[], metavar="KEYS", help="other keys, as in pp=2,schedule=zbv")
    add("--world-size", type=count, metavar="N", help="ranks of the layout (the fewest that it allows, twice for dp)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--shrink", action="store_true", help="make it smaller in any case")
    size.add_argument("--whole", action="store_true", help="never make it smaller")
    add("--steps", type=count, default=2, metavar="N", help="optimizer steps (default 2)")
    on_gpu = "gpu: on this machine's GPUs, one rank each, BF16 too: a run's layers (Transformer Engine's where it is"
    add("--device", choices=("cpu", "gpu"), default="cpu", help=f"{on_gpu} installed), kernels, streams and NCCL")
    add("--dry-run", action="store_true", help="take the path of --device gpu without a GPU")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw each parameter's error (.png)")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def _keys(text: str) -> list[str]:
    """The words of keys such as pp=2,schedule=zbv."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise argparse.ArgumentTypeError(f"it takes keys such as pp=2,schedule=zbv, but {wrong[0]!r} is none")
    return [f"--{name.strip()}={value.strip()}" for name, _, value in pairs]


def _num_gpus(args: argparse.Namespace) -> int | None:
    """GPUs of this machine that --device gpu asks for, 0 in a dry run; None without that option. Raises ConfigError if
    there are none."""
    if args.device == "cpu":
        return None
    if args.dry_run:
        return 0
    if not (found := local.num_gpus()):
        raise ConfigError("--device gpu: torch finds no GPU here; add --dry-run to take the same path on the CPU")
    return found


def _case(config: configuration.Config, recorded: int | None, args: argparse.Namespace) -> Shrunk:
    """The case of a configuration in its real layout, made smaller if it is too large."""
    from megaaccum.lab.planner import auto_schedule
    from megaaccum.lab.verification import shrink
    from megaaccum.lab.verification.launched import is_first, num_ranks
    from megaaccum.pretrain.metrics.param_count import count_parameters

    launched = num_ranks()
    world_size = args.world_size or recorded or (launched if launched > 1 else _world_size(config))
    plan = configuration.resolve(config, world_size=world_size)
    if auto_schedule.is_open(plan) or (config.sharding.memory_gib and config.model.vocab_size):
        plan = auto_schedule.choose_schedule(plan)
        assert plan.written is not None
        config = plan.written
    parameters = count_parameters(plan.config, plan.config.model.vocab_size or 1).total
    too_many = world_size > max(shrink.MOST_RANKS, launched)
    large = too_many or parameters > shrink.MOST_PARAMETERS
    if args.whole and too_many:
        raise ConfigError(f"--whole: {world_size} ranks do not start on one machine: at most {shrink.MOST_RANKS}")
    smaller = args.shrink or (large and not args.whole)
    has_kernels = args.device == "gpu" and not args.dry_run
    shrunk = shrink.as_case(config, plan, shrink=smaller, on_gpu=has_kernels)
    if not any(given(config, name) for name in ("data_path", "train_data_path", "mock_data")) or not is_first():
        return shrunk
    from megaaccum.lab.verification.first_samples import with_first_samples

    return with_first_samples(shrunk, plan, args.steps)


def _world_size(config: configuration.Config) -> int:
    """The ranks that the file was made for; else twice the fewest that the layout allows if the batch can be cut for
    them, else the fewest."""
    fewest = fewest_ranks(config)
    settled = config.run.world_size is not None or problems_of(configuration.resolve, config, world_size=2 * fewest)
    return fewest if settled else 2 * fewest
