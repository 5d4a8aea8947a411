"""The front door: a configuration in any dialect that megaaccum reads, made into megaaccum's own keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megaaccum.config.load import assemble
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE, Source, Unknown, is_yaml, read_command_line, read_text, read_yaml
from megaaccum.errors import ConfigError
from megaaccum.interop import deepspeed_json, megatron_args
from megaaccum.interop.megatron_table import flags, spelling


def load(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, as written: nothing is derived yet (see `megaaccum.config.resolve`).

    Args:
        path: a YAML or JSON file of keys, or a file of Megatron's flags.
        overrides: command-line arguments (keys or Megatron's flags), which outrank the file.

    Raises:
        ConfigError: with everything that is wrong in both sources.
    """
    config, problems = read(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def read(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """As `load`, but gives back what could be read together with the problems.

    Raises:
        ConfigError: the file cannot be opened at all.
    """
    sources: list[Source] = []
    blocks: list[tuple[dict[str, object], str]] = []
    if path is not None:
        text = read_text(path)
        file = read_yaml(text, Path(path).name) if is_yaml(text, path) else Source(Path(path).name)
        argv = [] if is_yaml(text, path) else megatron_args.read_argument_file(path)
        blocks += _claim(file, Path(path).parent, argv)
        sources.append(file)
    if overrides:
        source = read_command_line(overrides)
        blocks += _claim(source, Path("."))
        sources.append(source)
    config, problems = assemble(sources)
    if blocks:
        block, origin = blocks[-1]
        problems += deepspeed_json.adopt(config, block, origin)
    return config, problems


def _claim(source: Source, base_dir: Path, argv: Sequence[str] = ()) -> list[tuple[dict[str, object], str]]:
    """Take the names of other programs out of `source.unknown`, in place, and put what they mean into its keys.
    Returns the DeepSpeed block, if there is one, with the source's name."""
    blocks: list[tuple[dict[str, object], str]] = []
    words, left = list(argv), []
    for unknown in source.unknown:
        name = unknown.written.removeprefix("--").replace("-", "_")
        if name == "deepspeed" and source.name != COMMAND_LINE:
            block = _deepspeed_block(unknown, base_dir, source.problems)
            blocks += [] if block is None else [(block, source.name)]
        elif source.name == COMMAND_LINE or spelling(name) in flags():
            words += _as_words(unknown)
        else:
            left.append(unknown)
    source.unknown = left
    if words:
        reading = megatron_args.read_flags(words, base_dir=base_dir, beside=dict(source.values))
        source.problems.extend(f"{source.name}: {text}" for text in reading.problems)
        source.notes.extend(reading.notes)
        theirs = reading.values.pop("deepspeed", None)
        if isinstance(theirs, dict):
            blocks.append((theirs, source.name))
        for key, value in reading.values.items():
            source.put(key, value, source.name)
    return blocks


def _as_words(unknown: Unknown) -> list[str]:
    """A flag and its values; a switch that is false, or a value of null, is a flag that is not given."""
    if unknown.value is None or unknown.value is False:
        return []
    value = unknown.value
    values = value if isinstance(value, list) else [] if value is True else [value]
    flag = unknown.written if unknown.written.startswith("--") else f"--{unknown.written}"
    return [flag, *map(str, values)]


def _deepspeed_block(unknown: Unknown, base_dir: Path, problems: list[str]) -> dict[str, object] | None:
    if isinstance(unknown.value, dict):
        return unknown.value
    if isinstance(unknown.value, str):
        return deepspeed_json.read_json(base_dir / unknown.value, unknown.place, problems)
    if unknown.value is not None:
        problems.append(f"{unknown.place}: deepspeed must be a mapping, or the path of a DeepSpeed JSON file.")
    return None
