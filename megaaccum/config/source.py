"""Sources of configuration, YAML files and command lines, read into keys and values.

Names that are no keys are kept apart, for a reader of another program's names (megaaccum.pretrain.interop) to claim.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megaaccum import texts
from megaaccum.config.keys import ALIASES, SECTIONS, all_keys, canonical
from megaaccum.errors import ConfigError, did_you_mean

COMMAND_LINE = "command line"

REPLACED = {"core_metric_every": "text_comparisons_every"}
"""Recipes' names for what is not done here, and the nearest key. Only 0, which switches them off, is accepted."""


_OF_OTHERS = {
    "lr_warmup_iters": "warmup_steps num_warmup_steps lr_warmup_steps", "lr_decay_style": "lr_scheduler_type",
    "train_iters": "epochs num_epochs num_train_epochs num_steps", "nproc_per_node": "num_gpus n_gpus ngpus nproc",
    "micro_batch_size": "batch_size per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size", "seq_length": "context_length block_size", "hidden_size": "d_model n_embd",
    "clip_grad": "grad_clip gradient_clipping max_grad_norm", "weight_decay": "wd", "zero_stage": "zero stage",
    "grad_accum_steps": "gas accumulate_grad_batches", "params_dtype": "dtype precision torch_dtype",
    "load": "resume resume_from_checkpoint", "init_from": "model_name_or_path", "data_path": "data dataset_path",
    "save_interval": "save_steps", "eval_interval": "eval_steps", "log_interval": "logging_steps",
    "recompute_granularity": "activation_checkpointing", "deterministic": "full_determinism",
}  # fmt: skip
MEANT = REPLACED | {name: key for key, names in _OF_OTHERS.items() for name in names.split()}
"""Names of other programs that mean nearly the same as a key; the spelling alone would lead elsewhere."""


_ADAPTERS = re.compile(r"(^|[_-])(q?lora|peft|adapter)($|[_-])", re.IGNORECASE)


def meant(name: str) -> str:
    """' (did you mean --lr_warmup_iters?)', to follow another program's name of a key; '' for any other name."""
    key = MEANT.get(name.removeprefix("--").replace("-", "_"))
    return f" (did you mean {'--' * name.startswith('--')}{key}?)" if key else ""


def nearest_keys(name: str) -> str:
    """' (did you mean lr?)', to follow a name that is no key; '' if no key is near."""
    return meant(name) or did_you_mean(name.replace("-", "_"), [*all_keys(), *ALIASES, "deepspeed"])


@dataclass(frozen=True, slots=True)
class Unknown:
    """A name that is no key."""

    written: str
    """The name: 'rope_scaling', '--rope-scaling'."""
    value: object
    """The YAML value, or the list of words after a flag."""
    place: str
    """The file and line, or the flag, for error texts: 'run.yaml:12', '--rope-scaling'."""
    section: str | None = None
    """The section of the file in which it was written, if any."""

    def problem(self) -> str:
        """The error text, if no other reader knows the name."""
        if self.written == "deepspeed":
            return (
                f"{self.place}: commands read a DeepSpeed JSON, but Plan.of and Plan.load take megaaccum's keys alone:"
                " write those (`megaaccum convert CONFIG` translates the block)."
            )
        if _ADAPTERS.search(self.written):
            return (
                f"{self.place}: {self.written}: LoRA and other adapters are not trained here: leave it out, and choose"
                " what is trained with freeze, lr_mult and wd_mult."
            )
        return f"{self.place}: unknown key {self.written}{nearest_keys(self.written)}."


@dataclass(slots=True)
class Source:
    """The entries of one source, with values as read; `load` converts them to their types."""

    name: str
    """The file's name, or 'command line'."""
    values: dict[str, object] = field(default_factory=dict)
    """Values by key."""
    places: dict[str, str] = field(default_factory=dict)
    """The file and line, or the flag, of each key, for error texts: 'run.yaml:12', '--dbs'."""
    unknown: list[Unknown] = field(default_factory=list)
    """Names that are no keys. Each is a problem unless a reader removes it from this list."""
    problems: list[str] = field(default_factory=list)
    """Errors of reading, one text each."""
    notes: list[str] = field(default_factory=list)
    """Entries without effect, with the reason."""

    def put(self, written: str, value: object, place: str, section: str | None = None) -> None:
        """Store the value under the key that `written` names; a repeated key is a problem."""
        if (name := canonical(written)) is None:
            self.put_unknown(Unknown(written, value, place, section))
        elif name in self.values and not (self.name == COMMAND_LINE and place.startswith("--")):
            first = self.places[name]
            also = "" if name == written.replace("-", "_") else f" (another name of {name})"
            self.problems.append(f"{place}: {written}{also} was already given at {first}; give it once.")
        else:
            if name in self.values and self.values[name] != value:
                self.notes.append(f"{self.places[name]} {self.values[name]} and {place} {value}: the last one holds.")
            self.values[name], self.places[name] = value, place

    def put_unknown(self, unknown: Unknown) -> None:
        """Keep a name that is no key for another reader, unless it switches off something that is not done here."""
        if unknown.written.removeprefix("--").replace("-", "_") not in REPLACED or unknown.value not in (0, ["0"]):
            self.unknown.append(unknown)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a configuration file. Raises ConfigError if it cannot be opened."""
    try:
        return texts.read_text(path, most=2 << 20)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        own = Path(sys.prefix, "share", "megaaccum", "configs", Path(path).name)  # installed by a wheel
        reason += f"; megaaccum's own is {own}" if os.path.isfile(own) else ""
        raise ConfigError(f"cannot read the configuration file {path}: {reason}.") from None


MOST_VALUES = 200_000
"""Limit on the values of a YAML text; one with aliases counts each time."""


def compose(text: str, name: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """A YAML (or JSON) text's root, and the loader that makes values of nodes; `name` is the file's. Raises ConfigError
    with file and line if it is not YAML, or is nested too deeply, or grows too large by its aliases."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None and _num_values(root, {}) > MOST_VALUES:
            raise ConfigError(f"{name}:1: more than {MOST_VALUES} values, with those that aliases repeat.")
    except yaml.YAMLError as error:
        raise ConfigError(_not_yaml(name, error)) from None
    except RecursionError:
        raise ConfigError(f"{name}:{_deep_line(text)}: not valid here: nested too deeply.") from None
    return loader, root


def _not_yaml(name: str, error: yaml.YAMLError) -> str:
    mark, text = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    return f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {' '.join(text.split())}."


_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes of the tree under `node`, without aliases; MOST_VALUES and more if it contains itself."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        below = [each for pair in pairs for each in pair] or (node.value if isinstance(node.value, list) else [])
        known[id(node)] = 1 + sum(_num_values(each, known) for each in below)
    return known[id(node)]


def _deep_line(text: str) -> int:
    """The line at which a YAML text is deeper than any configuration."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 100:
            return event.start_mark.line + 1 if event.start_mark else 1
    return 1


def read_yaml(text: str, name: str) -> Source:
    """The keys of a YAML (or JSON) text; `name` is the file's, for error texts."""
    source = Source(name)
    try:
        loader, root = compose(text, name)
        if root is not None:
            _read_root(loader, root, source)
    except ConfigError as error:
        source.problems += error.problems
    except yaml.YAMLError as error:  # a merge key without a mapping
        source.problems.append(_not_yaml(name, error))
    return source


def _read_root(loader: yaml.SafeLoader, root: yaml.Node, source: Source) -> None:
    if not isinstance(root, yaml.MappingNode):
        source.problems.append(f"{source.name}: expected keys with values such as lr: 1e-4.")
        return
    for name, value_node, place in _pairs(loader, root, source):
        if name in SECTIONS and isinstance(value_node, yaml.MappingNode):
            _read_section(loader, name, value_node, source)
        elif name in SECTIONS and value_node.tag == "tag:yaml.org,2002:null":
            continue
        else:
            _put_value(loader, name, value_node, place, source)


def _read_section(loader: yaml.SafeLoader, section: str, node: yaml.MappingNode, source: Source) -> None:
    for name, value_node, place in _pairs(loader, node, source):
        key = canonical(name)
        home = all_keys()[key].section if key else section
        if home != section:
            source.problems.append(f"{place}: {name} belongs to section {home}, not {section}.")
            continue
        _put_value(loader, name, value_node, place, source, section)


def _put_value(
    loader: yaml.SafeLoader, name: str, node: yaml.Node, place: str, source: Source, section: str | None = None
) -> None:
    try:
        _check_repeats(loader, node, source)
        source.put(name, construct(loader, node, place), place, section)
    except ConfigError as error:
        source.problems += error.problems


def construct(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> object:
    """The value of a node. Raises ConfigError if it has none."""
    try:
        return loader.construct_object(node, deep=True)
    except Exception as error:  # constructors raise anything: of a date, a tag, a number of 5,000 digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None) or error
        raise ConfigError(f"{place}: the value cannot be read: {' '.join(str(reason).split())}.") from None


def parse_yaml(text: str, name: str) -> object:
    """The content of a YAML text. Raises ConfigError."""
    loader, root = compose(text, name)
    return None if root is None else construct(loader, root, f"{name}:1")


def _check_repeats(loader: yaml.SafeLoader, node: yaml.Node, source: Source) -> None:
    if isinstance(node, yaml.MappingNode):
        for _, value_node, _ in _pairs(loader, node, source):
            _check_repeats(loader, value_node, source)


def _pairs(loader: yaml.SafeLoader, node: yaml.MappingNode, source: Source) -> Iterable[tuple[str, yaml.Node, str]]:
    """(key, value node, place) of a mapping; a key written twice, forbidden in YAML but not in PyYAML, is a problem."""
    loader.flatten_mapping(node)
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        place = f"{source.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a key is a name, not a list or a mapping.")
        name = str(key_node.value)
        if name in seen:
            source.problems.append(f"{place}: {name} was already given at {seen[name]}; give it once.")
            continue
        seen[name] = place
        yield name, value_node, place


def read_command_line(argv: Sequence[str]) -> Source:
    """`--key value`, `--key=value`, `--flag` and `--no-flag`, which outrank a file."""
    source = Source(COMMAND_LINE)
    groups, first = flag_groups(argv)
    source.problems += [f"{COMMAND_LINE}: unexpected {word}; keys are written --key value." for word in first]
    for flag, values in groups:
        written = flag.removeprefix("--")
        name = canonical(written)
        if name is None and _is_negation(written) and not values:
            source.put(written.replace("-", "_").removeprefix("no_"), False, flag)
        elif name is None:
            source.put_unknown(Unknown(flag, values, COMMAND_LINE))
        else:
            _put_flag(name, written, flag, values, source)
    return source


MOST_FLAGS = 2_000
"""Limit on the flags of a list, since argparse's time grows with their square; Megatron has 815."""


def check_number(count: int) -> None:
    """Raise ConfigError for more flags than are read."""
    if count > MOST_FLAGS:
        raise ConfigError(f"{count} flags are given: the most that are read are {MOST_FLAGS}.")


def flag_groups(argv: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(groups of a flag and the words up to the next flag, the words before the first flag) of a command line."""
    groups: list[tuple[str, list[str]]] = []
    first: list[str] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            (groups[-1][1] if groups else first).append(word)
    return groups, first


_SWITCHES = (bool, bool | None)


def _is_negation(written: str) -> bool:
    plain = written.replace("-", "_")
    positive = canonical(plain.removeprefix("no_"))
    return plain.startswith("no_") and positive is not None and all_keys()[positive].annotation in _SWITCHES


def _put_flag(name: str, written: str, flag: str, values: list[str], source: Source) -> None:
    annotation = all_keys()[name].annotation
    if annotation in _SWITCHES and not values:
        source.put(written, True, flag)
    elif not values:
        source.problems.append(f"{flag} needs a value.")
    elif len(values) == 1:
        source.put(written, values[0], flag)
    elif "list[" in str(annotation):
        source.put(written, list(values), flag)
    else:
        source.problems.append(f"{flag} takes one value, not {len(values)}: {' '.join(values)}.")
