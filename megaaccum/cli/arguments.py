"""Arguments that the commands share: a configuration, from a file, a command line or a recorded script."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from megaaccum.config import Config
from megaaccum.config.batch import DEEPSPEED_SIZES
from megaaccum.config.keys import value
from megaaccum.config.source import COMMAND_LINE, check_number
from megaaccum.errors import ConfigError, raise_problems
from megaaccum.pretrain.interop.load import read

RECORD = "--record"
TRUST = "--trust-script"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration as it was read."""

    config: Config
    problems: list[str]
    """Problems of its sources, one text each."""
    name: str
    """Its source, for error texts."""
    world_size: int | None = None
    """Ranks, if a recorded launcher says how many."""

    def checked(self) -> Config:
        """The configuration. Raises ConfigError with the problems, if there are any."""
        raise_problems(self.problems)
        return self.config


@dataclass(frozen=True, slots=True)
class Source:
    """The words of a command line that name a configuration: CONFIG and overrides, or --record and a command."""

    path: str | None
    words: list[str] = field(default_factory=list)
    """Overrides, and options of the command until `parse` has read them."""
    command: list[str] = field(default_factory=list)
    """The command that starts training, whose flags are recorded."""
    jail: bool = True
    """Whether it is recorded in a jail."""

    def parse(self, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Source]:
        """The command's options, and the source without them; CONFIG may come after them."""
        args, words = parser.parse_known_args(self.words)
        if self.path is None and words and not words[0].startswith("-"):
            return args, replace(self, path=words[0], words=words[1:])
        return args, replace(self, words=words)

    @contextmanager
    def load(self) -> Iterator[LoadedConfig]:
        """The configuration with the overrides over it. A recorded script's files exist inside the context alone."""
        if not self.command:
            yield LoadedConfig(*read(self.path, self.words), name=str(self.path or "the command line"))
            return
        if self.path is not None:
            raise ConfigError(f"{self.path}: no effect beside the command after --, which is recorded: leave it out.")
        from megaaccum.pretrain.interop.launch_script import recorded  # with psutil, which a file does without

        with recorded(self.command, jail=self.jail) as launch:
            read_ = read(None, self.words, launch=launch)
            yield LoadedConfig(*read_, name=launch.script, world_size=launch.world_size)

    def loaded_config(self) -> Config:
        """The configuration. Raises ConfigError with what is wrong with its sources."""
        with self.load() as loaded:
            return loaded.checked()


def read_source(argv: Sequence[str]) -> Source:
    """The source that `argv` names. CONFIG comes first, so that values of overrides cannot be taken for it, or after
    --config. Raises ConfigError for --record without a command, and for too many options."""
    at = argv.index("--") if "--" in argv else len(argv)
    check_number(sum(word.startswith("--") for word in argv[:at]))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument(RECORD, action="store_true")
    parser.add_argument(TRUST, action="store_true")
    args, words = parser.parse_known_args(argv[:at])
    path, command = args.config, list(argv[at + 1 :])
    if not (args.record or args.trust_script):
        words, command = [*words, *argv[at:]], []
    elif not command:
        asked = RECORD if args.record else TRUST
        raise ConfigError(f"{asked} needs the command that starts training after --, as in -- bash train.sh.")
    if path is None and words and not words[0].startswith("-"):
        path, words = words[0], words[1:]
    return Source(path, words, command, not args.trust_script)


def command_parser(command: str, description: str | None, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command. One with a `usage` of its own has keys of the configuration among its flags, and takes
    no abbreviations."""
    return argparse.ArgumentParser(
        prog=f"megaaccum {command}",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=usage is None,
    )


def refuse_idle(parser: argparse.ArgumentParser, args: argparse.Namespace, rules: dict[str, str]) -> None:
    """End the command for an option that would be ignored. rules: of an option those of which it needs one, or after
    `not` those that set it aside, with | between. An option with the value of its default counts as not given."""
    told = [name for name, each in vars(args).items() if each != parser.get_default(name)]
    given = {f"--{spelt}" for name in told for spelt in (name, name.replace("_", "-"))}
    for option, rule in rules.items():
        others = rule.removeprefix("not ").split("|")
        found = [each for each in others if each in given]
        if option in given and bool(found) == rule.startswith("not "):
            without = f"without {' or '.join(others)}: give that, or leave {option} out"
            parser.error(f"{option}: no effect {f'beside {found[0]}: leave one of them out' if found else without}")


def names_in(value: str) -> list[str]:
    """The names that commas separate in `value`."""
    return [name for name in value.split(",") if name]


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    with suppress(ValueError):
        if 1 <= (number := int(text)) < 10**9:
            return number
    raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least 1")


def positive(value: str) -> float:
    """A finite number above 0, for argparse."""
    with suppress(ValueError):
        if 0 < (number := float(value)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{value}: give a finite number above 0")


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that rank layouts: for which machine, by what, and which axes are held."""
    from megaaccum.lab.planner.search import RANKINGS  # with numpy, which other commands start without

    parser.add_argument("--hardware", metavar="F", help="a file of hardware entries, as `megaaccum calibrate` writes")
    parser.add_argument("--rank", choices=RANKINGS, default="default", help="what comes first")
    fix = "hold axes, such as tp=8,recompute=none"
    parser.add_argument("--fix", action="append", default=[], metavar="AXIS=VALUE,...", help=fix)


def held_axes(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The axes that --fix holds. Raises ConfigError for others than there are, and for a key of the command line that a
    plan would set aside: without a global batch its batch follows from these keys."""
    from megaaccum.lab.planner.layout_config import KEYS
    from megaaccum.lab.planner.why_not import parse_axes

    chosen = KEYS | {"recompute": "recompute_granularity"} if config.batch.global_batch_size else {}
    given = [(axis, name) for axis, name in chosen.items() if config.origin.get(name) == COMMAND_LINE]
    text = "{} is chosen by the planner, whatever the configuration has: hold it by --fix {}={}."
    raise_problems([text.format(name, axis, value(config, name)) for axis, name in given])
    return parse_axes(",".join(args.fix))


def fewest_ranks(config: Config) -> int:
    """The ranks that the file was made for, else the smallest number that tp, cp, pp and the experts' layout allow."""
    if config.run.world_size is not None:
        return config.run.world_size
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    smallest = tp * parallel.context_parallel_size * pp
    if config.model.num_experts is None:
        return smallest
    return math.lcm(smallest, (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size * pp)


def ranks_told(config: Config) -> int:
    """Data-parallel ranks that the DeepSpeed block's three batch sizes multiply out to; 1 if they do not tell."""
    whole, micro, steps = (config.deepspeed.get(name) for name in DEEPSPEED_SIZES)
    if not (isinstance(whole, int) and isinstance(micro, int) and isinstance(steps, int)) or micro * steps < 1:
        return 1
    ranks, rest = divmod(whole, micro * steps)
    return ranks if ranks and not rest else 1
