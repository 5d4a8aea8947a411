"""Arguments that the commands share: a configuration, from a file, a command line or a recorded script."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megaaccum.config import Config
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.launch_script import recorded
from megaaccum.pretrain.interop.load import read

RECORD = "--record"
WITHOUT_JAIL = "--record-without-jail"


@dataclass(frozen=True, slots=True)
class Asked:
    """A configuration as it was read."""

    config: Config
    problems: list[str]
    """What is wrong with its sources."""
    name: str
    """Its source, for error texts."""
    world_size: int | None = None
    """Ranks, where a recorded launcher says how many."""

    def checked(self) -> Config:
        """The configuration. Raises ConfigError with the problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.config


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """`argv` without --record and the command after --, that command, and whether it runs in a jail."""
    words = list(argv)
    asked = [word for word in (RECORD, WITHOUT_JAIL) if word in words[: _end(words)]]
    if not asked:
        return words, [], True
    if "--" not in words:
        raise ConfigError(f"{asked[0]} needs the command that starts training after --, as in -- bash train.sh.")
    at = words.index("--")
    return [word for word in words[:at] if word not in asked], words[at + 1 :], WITHOUT_JAIL not in asked


def _end(words: Sequence[str]) -> int:
    return words.index("--") if "--" in words else len(words)


def take_path(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file, which comes first so that values of overrides cannot be taken for it, and the rest."""
    return (argv[0], list(argv[1:])) if argv and not argv[0].startswith("-") else (None, list(argv))


def command_parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command whose unknown flags are keys of the configuration: it takes no abbreviations."""
    return argparse.ArgumentParser(
        prog=f"megaaccum {command}",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that rank layouts: for which machine, by what, and which axes are held."""
    from megaaccum.lab.planner.search import RANKINGS  # with numpy, which other commands start without

    parser.add_argument("--hardware", metavar="F", help="a file of hardware entries, as `megaaccum calibrate` writes")
    parser.add_argument("--rank", choices=RANKINGS, default="default", help="what comes first")
    parser.add_argument("--fix", default="", metavar="AXIS=VALUE,...", help="hold axes, such as tp=8,recompute=none")


@contextmanager
def asked(
    path: str | None, overrides: Sequence[str], command: Sequence[str] = (), *, jail: bool = True
) -> Iterator[Asked]:
    """The configuration at `path`, or of the script that `command` runs, with `overrides` over it."""
    if not command:
        yield Asked(*read(path, overrides), name=str(path or "the command line"))
        return
    with recorded(command, jail=jail) as launch:
        yield Asked(*read(None, overrides, launch=launch), name=launch.script, world_size=launch.world_size)


def smallest_world(config: Config) -> int:
    """The smallest number of ranks that tp, cp, pp and the experts' layout allow."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    smallest = tp * parallel.context_parallel_size * pp
    if config.model.num_experts is None:
        return smallest
    return math.lcm(smallest, (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size * pp)
