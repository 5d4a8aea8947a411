"""Reading a configuration in any supported format into megaaccum's own keys."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.derive import YARN
from megaaccum.config.keys import SECTIONS
from megaaccum.config.load import assemble
from megaaccum.config.megatron_arguments import handled, listed
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE, Source, Unknown, compose, read_command_line, read_text, read_yaml
from megaaccum.errors import ConfigError, raise_problems, shortened
from megaaccum.pretrain.interop.deepspeed.reconcile import read_json, reconcile
from megaaccum.pretrain.interop.megatron.parser import is_flag, model_fields
from megaaccum.pretrain.interop.megatron.read_flags import read_flags
from megaaccum.pretrain.interop.megatron.several_flags import Reading

if TYPE_CHECKING:
    from megaaccum.pretrain.interop.launch_script import Launch


def load(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (), *, launch: Launch | None = None
) -> Config:
    """The configuration of a run, as written: nothing is derived yet (see `megaaccum.config.resolve`). path: a YAML or
    JSON file of keys (which may hold fields of Megatron's model configuration under `model`), or a file of Megatron's
    flags. overrides: command-line arguments (keys or Megatron's flags), which outrank the file. launch: a recorded
    launch, in place of a file. Raises ConfigError with every problem of both sources."""
    config, problems = read(path, overrides, launch=launch)
    raise_problems(problems)
    return config


def read(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (), *, launch: Launch | None = None
) -> tuple[Config, list[str]]:
    """The configuration as `load` returns it, and its problems, which are not raised. Raises ConfigError only if the
    file cannot be opened or is another program's."""
    contents = _Contents()
    if launch is not None:
        contents.sources += _of_another_program(launch)
        _read_words(launch.argv, overrides, launch.script, launch.path, contents, world_size=launch.world_size)
        _relocate(contents.sources[-2], launch.folder)
    elif path is None:
        _read_overrides(overrides, contents, whole=True)
    else:
        text, path = read_text(path), Path(path)
        if _is_yaml(text, path):
            _read_keys(text, path, contents)
            _read_overrides(overrides, contents, whole=False)
        else:
            _read_words(words_of(text), overrides, path.name, path.parent.joinpath, contents)
    config, problems = assemble(contents.sources)
    config.megatron = contents.megatron
    for block, origin, by_flags in contents.blocks[-1:]:  # the last one holds
        problems += reconcile(config, block, origin, by_flags=by_flags)
    return config, problems


def _is_yaml(text: str, path: Path) -> bool:
    """Whether a file is YAML (or JSON) keys, by its suffix or, without a telling one, by its text."""
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return True
    try:
        return isinstance(compose(text, "")[1], yaml.MappingNode)
    except ConfigError:
        return False


_PROGRAMS = re.compile(r"pretrain_(gpt|hybrid|mamba)\.py")
_OTHERS = re.compile(r"(pretrain_|finetune|train_rl|main_).*\.py")


def _of_another_program(launch: Launch) -> list[Source]:
    """A source with the problem, or the note, that the launched program is not Megatron's pretraining of a GPT."""
    name = Path(launch.program).name
    source = Source(launch.script)
    if _PROGRAMS.fullmatch(name):
        return []
    if _OTHERS.fullmatch(name):
        source.problems.append(f"{launch.script}: {name} is not pretrain_gpt.py, the script that is read here.")
    else:
        source.notes.append(f"{name} is read as Megatron's pretrain_gpt.py: what else it does is not.")
    return [source]


_PATHS = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path", "tokenizer_model"}
_PATHS |= {"vocab_file", "merge_file", "save", "load", "tensorboard_dir"}


def _relocate(script: Source, folder: Path) -> None:
    """Make a script's paths absolute if it starts training in another folder than this command's."""
    if folder.resolve() == Path.cwd():
        return
    for key in _PATHS & script.values.keys():
        given = script.values[key]
        words = map(str, given if isinstance(given, list) else [given])
        paths = [word if re.fullmatch(r"[\d.eE+-]+", word) else str(folder / word) for word in words]
        script.values[key] = paths if isinstance(given, list) else paths[0]


def words_of(text: str) -> list[str]:
    """The flags of an argument file: words, with quotes as in a shell, and comments from # on."""
    import shlex

    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"the argument file cannot be read: {error}.") from None
    if not any(word.startswith("--") for word in words):
        raise ConfigError("the file holds neither keys (name: value) nor flags (--name value).")
    if words[0].startswith("--"):
        return words
    raise ConfigError(
        f"the file starts with {words[0]!r}, which is no flag. A script is not read but recorded while it runs:"
        " megaaccum check --record -- bash SCRIPT ARGUMENTS."
    )


@dataclass(slots=True)
class _Contents:
    """The contents of one configuration's sources."""

    sources: list[Source] = field(default_factory=list)
    blocks: list[tuple[dict[str, object], str, bool]] = field(default_factory=list)
    """DeepSpeed blocks, with the source's name and whether that is a whole list of flags; the last one holds."""
    megatron: dict[str, object] = field(default_factory=dict)


_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
"""Keys that only a DeepSpeed configuration has at its top."""


def _read_keys(text: str, path: Path, contents: _Contents) -> None:
    """Read a YAML file: keys, a DeepSpeed block, fields of Megatron's model configuration, and flags without dashes."""
    source = read_yaml(text, path.name)
    left, words = [], []
    if _DEEPSPEED & {unknown.written for unknown in source.unknown}:
        raise ConfigError(
            f"{path.name} is a DeepSpeed configuration, which names no model: write a YAML file beside it with"
            f" `deepspeed: {path.name}` and the run's keys (num_layers, hidden_size, num_attention_heads, seq_length,"
            " lr, train_iters)."
        )
    for unknown in source.unknown:
        if unknown.written == "deepspeed":
            block = _deepspeed_block(unknown, path.parent, source.problems)
            contents.blocks += [] if block is None else [(block, source.name, False)]
        elif unknown.written in SECTIONS:
            left.append(unknown)
        elif _accept_model_field(unknown, contents.megatron, source.problems):
            continue
        elif is_flag(unknown.written):
            words += _as_words(unknown)
        else:
            left.append(unknown)
    source.unknown = left
    if words:
        _put(read_flags(words, locate=path.parent.joinpath, whole=False), source, contents)
    contents.sources.append(source)


def _read_overrides(overrides: Sequence[str], contents: _Contents, *, whole: bool) -> None:
    """Read a command line: keys, possibly with Megatron's flags among them. whole: there is no file beside it."""
    source = read_command_line(overrides)
    foreign, source.unknown = source.unknown, []
    # A whole run in Megatron's spelling is Megatron's, with its defaults, also where each flag has the name of a key;
    # values of these that Megatron does not read (`--bf16 true`) are ours, but not a list that it reads and refuses.
    megatrons = any(word.partition("=")[0] == "--num-layers" for word in overrides)
    reading = read_flags(overrides) if whole and (foreign or megatrons) else None
    if reading is not None and (foreign or not read_flags(overrides, whole=False).problems):
        source = Source(COMMAND_LINE)
        if not foreign:
            texts = reading.problems or reading.notes
            texts.append("the command line is read as Megatron's, with its defaults: --num_layers has ours.")
        _put(reading, source, contents)
    elif foreign:
        words = [word for unknown in foreign for word in _as_words(unknown)]
        _put(read_flags(words, whole=False), source, contents)
    contents.sources.append(source)


def _read_words(
    words: Sequence[str],
    overrides: Sequence[str],
    name: str,
    locate: Callable[[str], Path],
    contents: _Contents,
    *,
    world_size: int | None = None,
) -> None:
    """Read a list of flags and the command line after it as one list: the last of two equal flags holds."""
    own = read_command_line(overrides).values
    reading = read_flags([*words, *overrides], locate=locate, world_size=world_size, outranking=own.keys())
    file, line = Source(name), Source(COMMAND_LINE)
    again = read_flags(overrides, locate=locate, whole=False).values if overrides else {}
    for key in again.keys() & reading.values.keys():
        line.put(key, reading.values.pop(key), COMMAND_LINE)
    _put(reading, file, contents)
    contents.sources += [file, line]


def _put(reading: Reading, source: Source, contents: _Contents) -> None:
    source.problems += [f"{source.name}: {text}" for text in reading.problems]
    source.notes += reading.notes
    contents.megatron |= reading.megatron
    if reading.deepspeed is not None:
        contents.blocks.append((reading.deepspeed, source.name, reading.whole))
    for key, value in reading.values.items():
        source.put(key, value, source.name)


def _as_words(unknown: Unknown) -> list[str]:
    """A flag and its values; a switch that is false, or a value of null, is a flag that is not given."""
    value = unknown.value
    if value is None or value is False:
        return []
    values = value if isinstance(value, list) else [] if value is True else [value]
    return ["--" + unknown.written.removeprefix("--"), *map(str, values)]


def _deepspeed_block(unknown: Unknown, base_dir: Path, problems: list[str]) -> dict[str, object] | None:
    if isinstance(unknown.value, dict):
        return unknown.value
    if isinstance(unknown.value, str):
        return read_json(base_dir / unknown.value, unknown.place, problems)
    if unknown.value is not None:
        problems.append(f"{unknown.place}: deepspeed must be a mapping, or the path of a DeepSpeed JSON file.")
    return None


# --- fields of Megatron's model configuration, checked against the installed version ----------------------------------


@cache
def _types_of_fields() -> dict[str, object]:
    """The annotation of every field."""
    from megatron.core.transformer import MLATransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    hints = {**typing.get_type_hints(GPTModelConfig), **typing.get_type_hints(MLATransformerConfig)}
    return hints | {name: type(default) for name, default in YARN.items()}


def _accept_model_field(unknown: Unknown, fields: dict[str, object], problems: list[str]) -> bool:
    """Put the value of an unknown name into `fields`, or a text into `problems`, if it is a field of Megatron's model
    configuration. Returns whether it is."""
    name = unknown.written
    if unknown.section not in (None, "model") or name not in model_fields().keys() | YARN.keys():
        return False
    row = listed().get(name)
    if row is not None and row.verdict == "refuse":
        problems.append(f"{unknown.place}: {name}: {row.why}; {row.instead}.")
    elif row is not None or name in handled("owned_fields"):
        problems.append(f"{unknown.place}: {name} is set by megaaccum itself; leave it out.")
    else:
        _put_field(unknown, fields, problems)
    return True


def _put_field(unknown: Unknown, fields: dict[str, object], problems: list[str]) -> None:
    name = unknown.written
    try:
        fields[name] = coerce(unknown.value, _types_of_fields()[name])
    except NotOfType as error:
        problems.append(f"{unknown.place}: {name} must be {error}, not {shortened(repr(unknown.value), 80)}.")
    except (KeyError, AssertionError):
        # A type that no configuration file can hold (an enum, a pair): Megatron's own check sees it.
        fields[name] = unknown.value
