"""One source of configuration, a file or a command line, read into keys and values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megaaccum.config.keys import SECTIONS, all_keys, canonical, did_you_mean
from megaaccum.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(slots=True)
class Source:
    """What one source says. Values are as they were read; `load` gives them their types."""

    name: str
    """The file's name, or 'command line'."""
    values: dict[str, object] = field(default_factory=dict)
    """Values by key."""
    places: dict[str, str] = field(default_factory=dict)
    """Where each key stands, for error texts: 'run.yaml:12', '--dbs'."""
    deepspeed: dict[str, object] | None = None
    """A DeepSpeed JSON, where the source has one."""
    problems: list[str] = field(default_factory=list)
    """What could not be read."""
    notes: list[str] = field(default_factory=list)
    """What was read and has no effect, and why."""

    def put(self, written: str, value: object, place: str) -> None:
        """Store the value under the key that `written` names; an unknown or repeated key is a problem."""
        name = canonical(written)
        if name is None:
            hint = did_you_mean(written, extra=("deepspeed",))
            self.problems.append(f"{place}: unknown key {written}{hint}.")
        elif name in self.values:
            first = self.places[name]
            also = "" if name == written.replace("-", "_") else f" (another name of {name})"
            self.problems.append(f"{place}: {written}{also} was already given at {first}; give it once.")
        else:
            self.values[name] = value
            self.places[name] = place


def read_file(path: str | os.PathLike[str]) -> Source:
    """The configuration file at `path`: YAML (or JSON), else a Megatron argument list or shell script.

    Raises:
        ConfigError: the file cannot be opened.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the configuration file {path}: {reason}.") from None
    if Path(path).suffix.lower() in (".yaml", ".yml", ".json") or _is_mapping(text):
        return _read_yaml(text, Path(path))
    return _read_argument_file(Path(path))


def _is_mapping(text: str) -> bool:
    """Whether a file without a telling suffix is YAML keys rather than a list of flags or a script."""
    try:
        return isinstance(yaml.compose(text), yaml.MappingNode)
    except yaml.YAMLError:
        return False


def _read_yaml(text: str, path: Path) -> Source:
    source = Source(path.name)
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            _read_root(loader, root, path, source)
    except yaml.YAMLError as error:
        source.problems.append(f"{path.name}: not valid YAML: {' '.join(str(error).split())}")
    finally:
        loader.dispose()
    return source


def _read_root(loader: yaml.SafeLoader, root: yaml.Node, path: Path, source: Source) -> None:
    if not isinstance(root, yaml.MappingNode):
        source.problems.append(f"{path.name}: expected keys with values such as lr: 1e-4.")
        return
    megatron: list[str] = []
    for name, value_node, place in _pairs(loader, root, source):
        if canonical(name) is None and _is_megatron_flag(name):
            megatron += _as_flag(name, loader.construct_object(value_node, deep=True))
        elif name == "deepspeed":
            source.deepspeed = _deepspeed_block(loader, value_node, path, place, source)
        elif name in SECTIONS and isinstance(value_node, yaml.MappingNode):
            _read_section(loader, name, value_node, source)
        elif name in SECTIONS and value_node.tag == "tag:yaml.org,2002:null":
            continue
        else:
            source.put(name, loader.construct_object(value_node, deep=True), place)
    if megatron:
        _put_megatron(megatron, source, base_dir=path.parent, place=source.name)


def _is_megatron_flag(name: str) -> bool:
    """Whether a name that is no key is a flag of Megatron's, such as disable_bias_linear."""
    from megaaccum.interop.megatron_table import flags, spelling

    return name not in ("deepspeed", *SECTIONS) and spelling(name) in flags()


def _as_flag(name: str, value: object) -> list[str]:
    """A flag and its value as words; a switch that is false, or a value of null, is a flag that is not given."""
    if value is None or value is False:
        return []
    values = value if isinstance(value, list) else [] if value is True else [value]
    return [f"--{name}", *map(str, values)]


def _read_section(loader: yaml.SafeLoader, section: str, node: yaml.MappingNode, source: Source) -> None:
    for name, value_node, place in _pairs(loader, node, source):
        key = canonical(name)
        home = all_keys()[key].section if key else section
        if home != section:
            source.problems.append(f"{place}: {name} belongs to section {home}, not {section}.")
            continue
        source.put(name, loader.construct_object(value_node, deep=True), place)


def _pairs(loader: yaml.SafeLoader, node: yaml.MappingNode, source: Source) -> Iterable[tuple[str, yaml.Node, str]]:
    """(key, value node, place) of a mapping; a key written twice, which YAML forbids and PyYAML takes, is a problem."""
    loader.flatten_mapping(node)
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        name = str(key_node.value)
        place = f"{source.name}:{key_node.start_mark.line + 1}"
        if name in seen:
            source.problems.append(f"{place}: {name} was already given at {seen[name]}; give it once.")
            continue
        seen[name] = place
        yield name, value_node, place


def _deepspeed_block(
    loader: yaml.SafeLoader, node: yaml.Node, path: Path, place: str, source: Source
) -> dict[str, object] | None:
    if isinstance(node, yaml.MappingNode):
        _check_repeats(loader, node, source)
        return loader.construct_object(node, deep=True)
    value = loader.construct_object(node, deep=True)
    if isinstance(value, str):
        return read_deepspeed_json(path.parent / value, place, source.problems)
    if value is not None:
        source.problems.append(f"{place}: deepspeed must be a mapping, or the path of a DeepSpeed JSON file.")
    return None


def _check_repeats(loader: yaml.SafeLoader, node: yaml.Node, source: Source) -> None:
    if isinstance(node, yaml.MappingNode):
        for _, value_node, _ in _pairs(loader, node, source):
            _check_repeats(loader, value_node, source)


def read_deepspeed_json(path: str | os.PathLike[str], place: str, problems: list[str]) -> dict[str, object] | None:
    """The DeepSpeed configuration at `path`, or None with a text added to `problems`."""
    repeated: list[str] = []

    def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        block = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except OSError as error:
        problems.append(f"{place}: cannot read the DeepSpeed configuration {path}: {error.strerror}.")
        return None
    except ValueError as error:
        problems.append(f"{place}: {path} is not valid JSON: {error}.")
        return None
    problems.extend(f"{place}: {path} gives {name} more than once." for name in repeated)
    if not isinstance(block, dict):
        problems.append(f"{place}: {path} must hold a JSON object.")
        return None
    return block


def _read_argument_file(path: Path) -> Source:
    from megaaccum.interop import megatron_args

    source = Source(path.name)
    _put_megatron(megatron_args.read_argument_file(path), source, base_dir=path.parent, place=path.name)
    return source


def _put_megatron(argv: Sequence[str], source: Source, *, base_dir: Path, place: str) -> None:
    from megaaccum.interop import megatron_args

    reading = megatron_args.read_flags(argv, base_dir=base_dir, beside=dict(source.values))
    source.problems.extend(f"{place}: {text}" for text in reading.problems)
    source.notes.extend(reading.notes)
    for name, value in reading.values.items():
        if name == "deepspeed":
            assert isinstance(value, dict)
            source.deepspeed = value
        else:
            source.put(name, value, place)


def read_command_line(argv: Sequence[str]) -> Source:
    """`--key value`, `--key=value`, `--flag`, `--no-flag`, and Megatron's own flags, as the last word on a run."""
    source = Source(COMMAND_LINE)
    megatron: list[str] = []
    for flag, values in _flags(argv, source):
        written = flag.removeprefix("--")
        name = canonical(written)
        if written.replace("-", "_") == "deepspeed_config" and len(values) == 1:
            source.deepspeed = read_deepspeed_json(values[0], flag, source.problems)
        elif name is None and _is_negation(written) and not values:
            source.put(written.replace("-", "_").removeprefix("no_"), False, flag)
        elif name is None:
            megatron += [flag, *values]
        else:
            _put_flag(name, written, flag, values, source)
    if megatron:
        _put_megatron(megatron, source, base_dir=Path("."), place=COMMAND_LINE)
    return source


def _flags(argv: Sequence[str], source: Source) -> list[tuple[str, list[str]]]:
    """The arguments in groups of a flag and the words up to the next flag."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            source.problems.append(f"{COMMAND_LINE}: unexpected {word}; keys are written --key value.")
    return groups


def _is_negation(written: str) -> bool:
    plain = written.replace("-", "_")
    positive = canonical(plain.removeprefix("no_"))
    return plain.startswith("no_") and positive is not None and all_keys()[positive].annotation is bool


def _put_flag(name: str, written: str, flag: str, values: list[str], source: Source) -> None:
    annotation = all_keys()[name].annotation
    if annotation is bool and not values:
        source.put(written, True, flag)
    elif not values:
        source.problems.append(f"{flag} needs a value.")
    elif len(values) == 1:
        source.put(written, values[0], flag)
    elif "list[" in str(annotation):
        source.put(written, list(values), flag)
    else:
        source.problems.append(f"{flag} takes one value, not {len(values)}: {' '.join(values)}.")
