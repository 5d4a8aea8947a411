"""`megaaccum train`: pretraining, on the ranks of this machine or as a rank that a launcher started.

    megaaccum train CONFIG [--key value ...]
    megaaccum train --record [--key value ...] -- bash train.sh ARGUMENTS
    python -m megaaccum.train --config CONFIG [--key value ...]

Started by hand it starts the ranks of this machine itself; started by torchrun, deepspeed or itself (RANK is set) it is
one of them.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megaaccum import config as configuration
from megaaccum.cli import keys
from megaaccum.cli.arguments import Source, command_parser, fewest_ranks, read_source
from megaaccum.cli.convert import as_yaml
from megaaccum.config import Config, Plan
from megaaccum.distributed import preload
from megaaccum.errors import ConfigError, LaunchError
from megaaccum.pretrain.data.sources import check_files
from megaaccum.pretrain.launch import local, output
from megaaccum.pretrain.metrics.receipts import LAUNCHED
from megaaccum.pretrain.training.run_folder import check_folders, checkpoint_folder
from megaaccum.texts import write_text


def main(argv: Sequence[str]) -> int:
    """Train, on this rank or on ranks that this process starts. Returns an exit code; raises MegaaccumError."""
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip(), keys.listing(), sep="\n\n")
        return 0 if argv else 2
    output.protect()
    _check_launcher()
    if "RANK" in os.environ and LAUNCHED in os.environ:  # `_launch` has started this rank
        return _run(argv, announces=False)
    os.environ[LAUNCHED] = repr(time.time())
    try:
        return _run(argv, announces=True)
    finally:
        del os.environ[LAUNCHED]


def _run(argv: Sequence[str], *, announces: bool) -> int:
    parser = command_parser("train", __doc__, "megaaccum train CONFIG [--master_port N] [--key value ...]")
    parser.add_argument("--master_port", type=int, default=0, metavar="N", help="of the ranks (default: a free one)")
    args, source = read_source(argv).parse(parser)
    if "RANK" in os.environ:
        if os.environ["RANK"] == "0" and announces:
            _announce(int(os.environ["WORLD_SIZE"]))
        return _train(_plan_of_this_rank(source))
    with source.load() as loaded:
        config = loaded.checked()
    return _launch([_written(config, loaded.name)] if source.command else argv, config, args.master_port)


def _check_launcher() -> None:
    """Raises LaunchError for a process that a launcher has told half of what a rank needs: it would wait for others."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name, "") for name in names}
    world = int(given["WORLD_SIZE"]) if given["WORLD_SIZE"].isdecimal() else 0
    is_rank = all(given.values()) and given["RANK"] in map(str, range(world))
    if not is_rank and ("RANK" in os.environ or os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"):
        raise LaunchError(
            f"a launcher has started this process with {' '.join(f'{name}={each}' for name, each in given.items())}: a"
            " rank needs all of them, and RANK below WORLD_SIZE; without RANK this machine's ranks are started. mpirun"
            " has them as OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, and MASTER_ADDR is the host of rank 0."
        )


def _announce(ranks: int | None) -> None:
    """Say at once that ranks start, before the seconds of imports. None: how many is not known yet."""
    print(f"starting {ranks or 'the'} rank{'s' * (ranks != 1)}, importing torch, DeepSpeed and Megatron", flush=True)


def _written(config: Config, name: str) -> str:
    """A recorded configuration in a file, for the ranks to read."""
    path = Path(config.run.output_dir) / "recorded.yaml"
    write_text(path, as_yaml(config, name))
    return str(path)


def _plan_of_this_rank(source: Source) -> Plan:
    """The plan, on a rank that a launcher started."""
    try:
        return configuration.resolve(source.loaded_config(), world_size=int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        error.printed_by = "one rank per host"  # they have read the same file and the same command line
        raise


def _train(plan: Plan) -> int:
    preload.libraries()  # the CPU lane's stand-ins have to be there before Megatron is imported
    from megaaccum.lab import advisor
    from megaaccum.pretrain.training.loop import train

    return train(plan, advisor)


def _launch(argv: Sequence[str], config: Config, port: int) -> int:
    """Check the plan and what it reads, then start this machine's ranks."""
    check_files(config)  # first: to count GPUs imports torch
    _announce(config.run.nproc_per_node)
    nproc = ranks_here(config)
    check_folders(configuration.resolve(config, world_size=nproc).config)
    return local.launch_local(
        list(argv),
        nproc=nproc,
        num_threads=config.run.num_threads,
        master_port=port,
        imports=("megaaccum.pretrain.training.loop", "megaaccum.lab.advisor"),
        resume_hint=lambda: _resume_hint(argv, config),
    )


def ranks_here(config: Config) -> int:
    """Ranks that start on this machine. Raises ConfigError if the file was made for another number."""
    nproc = config.run.nproc_per_node or local.num_gpus() or fewest_ranks(config)
    if config.run.world_size not in (None, nproc):
        raise ConfigError(
            f"the configuration is made for {config.run.world_size} ranks (world_size), and {nproc} would start on this"
            f" machine: start it on all hosts with their launcher, or set world_size to {nproc}."
        )
    return nproc


def _resume_hint(argv: Sequence[str], config: Config) -> str:
    """The command that resumes this run, or a sentence that says that there is no checkpoint."""
    from megaaccum.checkpoint.folders import latest  # imports torch, as the ranks have

    if (current := latest(checkpoint_folder(config))) is None:
        return "There is no checkpoint of this run."
    return f"The last checkpoint is {current}; go on from it with: megaaccum train {shlex.join(argv)}"
