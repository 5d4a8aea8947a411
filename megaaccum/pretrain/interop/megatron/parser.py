"""Parsing flags of Megatron-LM and Megatron-DeepSpeed with Megatron's own parser.

`megatron.training.arguments` parses and checks the list, and Megatron's own conversion gives the model's configuration;
the tables of `keys` and of `config.megatron_arguments` have the rest. Importing Megatron takes seconds, so it is
imported when the first flag is read.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megaaccum.config.keys import all_keys, canonical
from megaaccum.config.megatron_arguments import fork_flags, listed
from megaaccum.config.source import Source, check_number, flag_groups, meant, parse_yaml, read_command_line
from megaaccum.errors import ConfigError, did_you_mean
from megaaccum.platform import cpu, quiet
from megaaccum.platform.files import installed
from megaaccum.platform.replacing import environment, replaced
from megaaccum.texts import read_text

_ABSENT: Any = object()


@dataclass(slots=True)
class ParsedFlags:
    """A list of flags after Megatron's parser: the arguments that were given, and all of them with Megatron's
    defaults."""

    args: argparse.Namespace
    """Every argument, as parsed."""
    checked: argparse.Namespace | None
    """The same after Megatron's `validate_args`; None where the list is no whole run, or Megatron refused it."""
    written: dict[str, str]
    """The flag with its values, as written, of each destination that was given."""
    own: Source
    """megaaccum's own keys among the flags."""
    locate: Callable[[str], Path]
    """Finds the file that a flag names."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Whether one of these destinations was given."""
        return any(name in self.written for name in names)

    def shown(self, *names: str) -> str:
        """The given flags among the destinations `names`, as written."""
        return ", ".join(self.written[name] for name in names if name in self.written)


@cache
def _arguments() -> ModuleType:
    """Megatron's module of arguments. On a machine without a GPU it needs the CPU lane's stand-ins."""
    quiet.install()
    cpu.install()
    with warnings.catch_warnings(), quiet.root_logger_kept():
        warnings.simplefilter("ignore")
        import megatron.training.arguments as arguments
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


_KINDS: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_true"}, "words": {"nargs": "*"}, "int": {"type": int}, "float": {"type": float},
    "str": {"type": str},
}  # fmt: skip
"""The arguments of `add_argument` for each kind of Megatron-DeepSpeed's flags."""


@cache
def parser() -> argparse.ArgumentParser:
    """Megatron's parser, with the flags of Megatron-DeepSpeed added."""
    made = _Parser(allow_abbrev=False, add_help=False, prog="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _arguments().add_megatron_arguments(made)
    for kind, names in fork_flags().items():
        for name in names:
            made.add_argument(*dict.fromkeys((f"--{name}", _dashed(name))), dest=name, **_KINDS[kind])
    return made


@cache
def defaults() -> dict[str, object]:
    """Megatron's default of every destination."""
    return vars(parser().parse_args([]))


@cache
def model_fields() -> dict[str, dataclasses.Field]:
    """The fields of Megatron's model configuration (TransformerConfig, MLATransformerConfig, GPTModelConfig), by
    name."""
    _arguments()
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    classes = (GPTModelConfig, TransformerConfig, MLATransformerConfig)
    return {item.name: item for kind in classes for item in dataclasses.fields(kind)}


def is_flag(name: str) -> bool:
    """Whether a name that is not one of our keys is an argument of Megatron's, such as disable_bias_linear."""
    return _dashed(name) in _spellings()


def _dashed(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


@cache
def _spellings() -> dict[str, str]:
    """The parser's spelling of every flag, by its name with dashes (--override-opt_param-scheduler has dashes and
    underscores)."""
    return {_dashed(option): option for action in parser()._actions for option in action.option_strings}


# --- parsing -----------------------------------------------------------------------------------------------------


def parse(
    argv: Sequence[str], *, locate: Callable[[str], Path] = Path, world_size: int | None = None, whole: bool = True
) -> ParsedFlags:
    """Read a list of flags with Megatron's parser and, for a whole run, check it with Megatron's own rules.

    argv: flags and values; megaaccum's own keys may be among them. world_size: ranks of the run; default the smallest
    that the layout allows. whole: False for a few flags beside a configuration file.
    """
    given = ParsedFlags(argparse.Namespace(**defaults()), None, {}, Source(""), locate)
    own_words: list[str] = []
    for flag, values in _groups(argv, given):
        own_words += _parse_group(flag, values, given)
    given.own = read_command_line(own_words)
    if given.has("yaml_cfg"):
        _read_yaml(given)
    if whole:
        _check(given, world_size)
    return given


def _groups(argv: Sequence[str], given: ParsedFlags) -> Iterator[tuple[str, list[str]]]:
    """The words in groups of a flag and its values, under Megatron-LM's names."""
    groups, first = flag_groups(argv)
    given.problems += [f"unexpected {word}: flags are written --name value." for word in first]
    check_number(len(groups))
    for flag, values in groups:
        yield from _in_todays_names(_as_megatrons(flag, values), values)


RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "encoder_seq_length": "seq_length",
    "fp8": "fp8_format",
    "ckpt_step": "load_step",
}
"""Arguments with the meaning of a key of another name."""
_OWN_NAMES = {key: name for name, key in RENAMED.items()}


def _as_megatrons(flag: str, values: list[str]) -> str:
    """Megatron's spelling of a flag, also of one that is a key's name or alias, such as --tp, and takes values as
    Megatron's does."""
    if _dashed(flag) in _spellings():
        return _spellings()[_dashed(flag)]
    key = canonical(flag.removeprefix("--")) or ""
    name = key if key in defaults() else _OWN_NAMES.get(key)
    actions = [action for action in parser()._actions if action.dest == name and action.nargs != 0]
    return actions[0].option_strings[0] if actions and values else flag


_RENAMED = {
    "--layernorm-epsilon": "--norm-epsilon",
    "--rotary-position-embeddings-theta": "--rotary-base",
    "--moe-expert-parallel-size": "--expert-model-parallel-size",
    "--ds-sequence-parallel-size": "--context-parallel-size",
    "--cpu-optimizer": "--optimizer-cpu-offload",
    "--override-lr-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
}
"""Flags of Megatron-DeepSpeed that Megatron-LM has under another name."""


_IN_WORDS = {
    "--no-pipeline-parallel": "--pipeline-model-parallel-size 1",
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--fp8-hybrid": "--fp8-format hybrid",
}
"""Switches of Megatron-DeepSpeed, and what Megatron-LM's list has in their place."""
_VALUES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "HFTokenizer": "HuggingFaceTokenizer"}
"""Values of Megatron-DeepSpeed that Megatron-LM has under another name."""


def _in_todays_names(flag: str, values: list[str]) -> list[tuple[str, list[str]]]:
    """The groups of a flag and its values that Megatron-LM has for one of Megatron-DeepSpeed."""
    dashed = flag.replace("_", "-")
    if dashed in _IN_WORDS:
        return flag_groups(_IN_WORDS[dashed].split())[0]
    if dashed == "--num-key-value-heads":
        return [("--group-query-attention", []), ("--num-query-groups", values)]
    if dashed in ("--normalization", "--tokenizer-type"):
        values = [_VALUES.get(each, each) for each in values]
    return [(_RENAMED.get(dashed, flag), values)]


def _parse_group(flag: str, values: list[str], given: ParsedFlags) -> list[str]:
    """Put one flag into `given.args`. Returns its words if it is one of megaaccum's own keys."""
    parsed = argparse.Namespace(**dict.fromkeys(defaults(), _ABSENT))
    shown = " ".join((flag, *values))
    try:
        _, rest = parser().parse_known_args([flag, *values], namespace=parsed)
    except ConfigError as error:
        given.problems.append(f"{shown}: {error}.")
        return []
    except KeyError as error:  # an unknown member of one of Megatron's enumerations, which argparse does not catch
        given.problems.append(f"{shown}: Megatron has no {error}.")
        return []
    if rest[:1] == [flag]:
        own = canonical(flag.removeprefix("--")) or canonical(flag.removeprefix("--no-"))
        if own is not None:
            return [flag, *values]
        near = meant(flag) or did_you_mean(flag, [*_spellings().values(), *map(_dashed, all_keys())], cutoff=0.7)
        given.problems.append(f"unknown flag {flag}{near} (megatron-core {installed('megatron-core')}).")
        return []
    if rest:
        given.problems.append(f"{shown}: unexpected {' '.join(rest)}.")
    for name, value in vars(parsed).items():
        if value is not _ABSENT:
            if name in given.written and getattr(given.args, name) != value:
                given.notes.append(f"{given.written[name]} and {shown}: the last one holds, as in Megatron.")
            setattr(given.args, name, value)
            given.written[name] = shown
    return []


_ACTIVATIONS = {"swiglu": {"swiglu": True}, "squaredrelu": {"squared_relu": True}, "gelu": {}}


def _read_yaml(given: ParsedFlags) -> None:
    """Read Megatron's own YAML (--yaml-cfg): its keys are the arguments' names, in blocks or not. Flags beside it
    outrank it here; Megatron ignores them."""
    shown = given.written["yaml_cfg"]
    try:
        tree = parse_yaml(read_text(given.locate(given.args.yaml_cfg)), given.args.yaml_cfg)
    except (OSError, ValueError) as error:
        given.problems.append(f"{shown}: cannot be read: {' '.join(str(error).split())}.")
        return
    if not isinstance(tree, dict):
        given.problems.append(f"{shown}: the file holds no keys.")
        return
    flat: dict[str, object] = {}
    for name, value in tree.items():
        flat |= {str(each): held for each, held in (value if isinstance(value, dict) else {name: value}).items()}
    activation = str(flat.pop("activation_func", "gelu"))
    if activation not in _ACTIVATIONS:
        given.problems.append(f"{shown}: activation_func {activation} is none of {', '.join(_ACTIVATIONS)}.")
    flat |= _ACTIVATIONS.get(activation, {})
    flat["num_experts"] = flat.pop("num_moe_experts", None) or flat.get("num_experts")
    flat["group_query_attention"] = flat.get("num_query_groups") is not None
    for name, value in flat.items():
        _read_yaml_key(name, value, given)


def _read_yaml_key(name: str, value: object, given: ParsedFlags) -> None:
    """Put one key of Megatron's YAML into `given.args`."""
    if name not in defaults():
        field = model_fields().get(name)
        if value is not None and (field is None or field.default != value):
            given.problems.append(f"{given.written['yaml_cfg']}: {name}: {value} is no argument of Megatron's.")
        return
    kind = next(action.type for action in parser()._actions if action.dest == name)
    if isinstance(value, str) and kind in (int, float):
        try:
            value = float(value)  # YAML reads 1e-5 as text
        except ValueError:
            given.problems.append(f"{given.written['yaml_cfg']}: {name}: {value} is not a number.")
            return
    if value is not None and value != defaults()[name] and name not in given.written:
        setattr(given.args, name, value)
        given.written[name] = f"{name}: {value}"


# --- Megatron's own check ------------------------------------------------------------------------------------------


def _check(given: ParsedFlags, world_size: int | None) -> None:
    """Run Megatron's `validate_args` on a copy; if it refuses the list, that is a problem."""
    args = copy.deepcopy(given.args)
    for name in given.written.keys() & all_keys().keys():
        value, most = getattr(args, name, None), all_keys()[name].facts.at_most
        if isinstance(value, int | float) and most is not None and value > most:  # Megatron would count up to it
            given.problems.append(f"{given.written[name]}: it must be at most {most:g}.")
            return
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    smallest = tp * args.context_parallel_size * pp
    if args.num_experts:
        smallest = math.lcm(smallest, (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size * pp)
    args.yaml_cfg = None  # its keys are among the arguments already
    args.optimizer_cpu_offload = False  # DeepSpeed's, which needs no precision-aware optimizer of Megatron's
    args.rank, args.world_size = 0, world_size or smallest
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    if given.has("train_tokens") and not (args.train_iters or args.train_samples):
        args.train_samples = max(1, args.train_tokens // max(args.seq_length or 1, 1))
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.micro_batch_size is None and given.own.values.keys() & {"device_batch_size", "pp_microbatches"}:
        args.micro_batch_size = 1
    fsdp = args.use_torch_fsdp2 or args.use_megatron_fsdp
    try:
        with _as_on_a_gpu({"CUDA_DEVICE_MAX_CONNECTIONS": "32" if fsdp else "1", "NVTE_CPU_OFFLOAD_V1": "1"}):
            _arguments().validate_args(args, {})
    except ZeroDivisionError:
        zeros = [name for name in given.written if vars(args).get(name) == 0 and re.search("size|heads|stage", name)]
        given.problems.append(f"Megatron refuses this list: {given.shown(*zeros)}: a size is at least 1.")
    except (Exception, SystemExit) as error:  # assertions, most of them; of numbers out of range, anything
        reason = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        given.problems.append(f"Megatron refuses this list: {(reason or type(error).__name__).rstrip('.')}.")
    else:
        given.checked = args


@contextlib.contextmanager
def _as_on_a_gpu(variables: dict[str, str]) -> Iterator[None]:
    """Context in which `validate_args` finds a Hopper GPU and a new Transformer Engine. Suppresses output."""
    import torch

    gpu = replaced(torch.cuda, get_device_capability=lambda *_: (9, 0))
    te = replaced(_arguments(), get_device_arch_version=lambda: 9, is_te_min_version=lambda *_, **__: True)
    silence = contextlib.redirect_stdout(io.StringIO())
    with environment(variables), gpu, te, warnings.catch_warnings(), silence:
        warnings.simplefilter("ignore")
        yield


# --- what neither is a key nor has a rule ---------------------------------------------------------------------------


def is_default(name: str, value: object) -> bool:
    """Whether a value only repeats what Megatron does without it."""
    return value == defaults()[name] or (name, value) == ("dataloader_type", "single")


def refuse_and_note_listed(given: ParsedFlags) -> None:
    """Turn the given flags whose verdict in config/megatron_arguments.yaml is `note` or `refuse` into notes and
    problems, one text per reason."""
    rows: dict[str, list[str]] = {}
    for name in given.written:
        row = None if name in all_keys() else listed().get(name)
        if row is not None and row.verdict != "run" and not is_default(name, getattr(given.args, name)):
            rows.setdefault(row.title, []).append(name)
    for names in rows.values():
        row = listed()[names[0]]
        (given.notes if row.verdict == "note" else given.problems).append(row.text(given.shown(*names)))


def built_fields(given: ParsedFlags) -> dict[str, object]:
    """The plain fields of the model configuration that Megatron's own conversion of the checked arguments sets to other
    values than the defaults."""
    assert given.checked is not None
    from megatron.training.argument_utils import gpt_config_from_args

    args = copy.deepcopy(given.checked)
    args.spec = None
    args.swiglu &= not args.quick_geglu  # Megatron asserts that they are not both given
    if args.padded_vocab_size is None and args.vocab_size is None:
        args.vocab_size = 1
    with _as_on_a_gpu({}), _without_post_init():
        built = gpt_config_from_args(args)
    # megatron-core 0.19 drops --rope-scaling-factor: the model would always be built with 8.0.
    built.rope_scaling_factor = args.rope_scaling_factor
    plain = (bool, int, float, str, tuple, list)
    usual = {item.name: item.default for kind in (built, built.transformer) for item in dataclasses.fields(kind)}
    theirs = {**vars(built), **vars(built.transformer)}
    return {name: value for name, value in theirs.items() if isinstance(value, plain) and usual.get(name) != value}


@contextlib.contextmanager
def _without_post_init() -> Iterator[None]:
    """Context in which Megatron's configurations keep the values given: derived values and requirements on the machine
    concern the ranks that build the model."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    with contextlib.ExitStack() as stack:
        for kind in (MLATransformerConfig, TransformerConfig, ModelParallelConfig):  # a base class last
            stack.enter_context(replaced(kind, __post_init__=lambda self: None))
        yield
