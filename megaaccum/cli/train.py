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
from typing import TYPE_CHECKING

from megaaccum import config as configuration
from megaaccum.cli.arguments import asked, smallest_world, split_command
from megaaccum.cli.convert import as_yaml
from megaaccum.distributed import preload
from megaaccum.errors import ConfigError
from megaaccum.pretrain.data.sources import check_files
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.launch import local
from megaaccum.pretrain.metrics.receipts import LAUNCHED
from megaaccum.pretrain.training.run_folder import check_folders, checkpoint_folder

if TYPE_CHECKING:
    from megaaccum.config import Config, Plan


def main(argv: Sequence[str]) -> int:
    """Train, on this rank or on ranks that this process starts. Returns an exit code; raises MegaaccumError."""
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    if "RANK" not in os.environ:
        os.environ.pop(LAUNCHED, None)  # of a start before this one in the same process
    os.environ.setdefault(LAUNCHED, repr(time.time()))
    argv, command, jail = split_command(argv)
    argv, port = take(argv, "--master_port")
    if "RANK" in os.environ:
        return _train(_plan_of_this_rank(argv))
    if command:
        with asked(None, argv, command, jail=jail) as found:
            config = found.checked()
        return _launch([_written(config, found.name)], config, int(port or 0))
    return _launch(argv, load(*_config_path(argv)), int(port or 0))


def _written(config: Config, name: str) -> str:
    """A recorded configuration in a file, for the ranks to read."""
    folder = Path(config.run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recorded.yaml"
    path.write_text(as_yaml(config, name), encoding="utf-8")
    return str(path)


def _plan_of_this_rank(argv: Sequence[str]) -> Plan:
    """The plan, on a rank that a launcher started."""
    try:
        config = load(*_config_path(argv))
        return configuration.resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
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
    nproc = config.run.nproc_per_node or local.num_gpus() or smallest_world(config)
    check_folders(configuration.resolve(config, world_size=nproc).config)
    return local.launch_local(
        list(argv),
        nproc=nproc,
        num_threads=config.run.num_threads,
        master_port=port,
        imports=("megaaccum.pretrain.training.loop", "megaaccum.lab.advisor"),
        resume_hint=lambda: _resume_hint(argv, config),
    )


def _resume_hint(argv: Sequence[str], config: Config) -> str:
    """How the run of this command line goes on."""
    pointer = checkpoint_folder(config) / "latest"
    if not pointer.exists():
        return "There is no checkpoint of this run."
    current = pointer.parent / pointer.read_text().strip()
    return f"The last checkpoint is {current}; go on from it with: megaaccum train {shlex.join(argv)}"


def _config_path(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file, as first argument or after --config, and the overrides."""
    rest, path = take(argv, "--config")
    if path is None and rest and not rest[0].startswith("-"):
        return rest[0], rest[1:]
    return path, rest


def take(argv: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """`argv` without `flag VALUE` or `flag=VALUE`, and the value."""
    rest, value, words = [], None, iter(argv)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{flag} needs a value")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return rest, value
