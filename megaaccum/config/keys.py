"""The keys of a configuration, which are the fields of the schema's sections, and other names for them."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from megaaccum.config import schema
from megaaccum.config.facts import Facts

SECTIONS: dict[str, type] = {
    name: cls
    for name, cls in typing.get_type_hints(schema.Config).items()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
"""The dataclass of each section, by its name in a file."""

ALIASES: dict[str, str] = {
    "dbs": "device_batch_size", "ga": "grad_accum_steps", "gradient_accumulation_steps": "grad_accum_steps",
    "grad_accumulation_steps": "grad_accum_steps", "num_chunks": "pp_microbatches", "mbs": "micro_batch_size",
    "gbs": "global_batch_size", "max_grad_accum_steps": "grad_accum_steps", "max_seq_len": "seq_length",
    "warmup_ratio": "lr_warmup_fraction", "save_every": "save_interval", "eval_every": "eval_interval",
    "log_every": "log_interval", "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size", "learning_rate": "lr", "beta1": "adam_beta1", "beta2": "adam_beta2",
    "warmup_iters": "lr_warmup_iters", "max_iters": "train_iters", "num_moe_experts": "num_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "num_key_value_heads": "num_query_groups", "fp8": "fp8_format",
}  # fmt: skip
"""Other names of keys, from Megatron-core, DeepSpeed or habit, each with its key."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its section, the type of its values (with None if it may be derived), and its facts."""

    name: str
    section: str
    annotation: object
    facts: Facts


@cache
def all_keys() -> dict[str, Key]:
    """Every key by name, in the schema's order. Names are unique across the sections."""
    keys: dict[str, Key] = {}
    for section, cls in SECTIONS.items():
        for item in dataclasses.fields(cls):
            assert item.name not in keys, f"{item.name} is in two sections"
            has_facts = typing.get_origin(item.type) is Annotated
            annotation, facts = typing.get_args(item.type) if has_facts else (item.type, Facts())
            keys[item.name] = Key(item.name, section, annotation, facts)
    return keys


def choices(name: str) -> tuple[str, ...]:
    """The words that the key `name` may have: those of the Literal in its annotation."""
    annotation = all_keys()[name].annotation
    literals = [each for each in (annotation, *typing.get_args(annotation)) if typing.get_origin(each) is Literal]
    return tuple(map(str, typing.get_args(literals[0]))) if literals else ()


def names_where(holds: Callable[[Facts], object]) -> tuple[str, ...]:
    """The keys whose facts fulfil `holds`, in the schema's order."""
    return tuple(key.name for key in all_keys().values() if holds(key.facts))


def values_where(config: schema.Config, holds: Callable[[Facts], object]) -> dict[str, Any]:
    """The values in `config` of the keys whose facts fulfil `holds`."""
    return {name: value(config, name) for name in names_where(holds)}


_ONLY_SPEED = re.compile("backend|cach|chunks|dispatch|fus|graph|impl|memory|num_sms|offload|overlap|paged|recompute")


def unseen(config: schema.Config) -> dict[str, Any]:
    """The part of a model that no weight's shape shows: keys, and under `megatron` those fields that do more than save
    time or memory, as JSON has them."""
    fields = {name: each for name, each in config.megatron.items() if not _ONLY_SPEED.search(name)}
    return values_where(config, lambda facts: facts.unseen) | {"megatron": json.loads(json.dumps(fields, default=str))}


def group_rates(config: schema.Config) -> dict[str, Any]:
    """The keys that decide the rate of some of the parameters, which the schedule's state does not show."""
    return values_where(config, lambda facts: facts.group_rate)


def keys_that_need(other: str) -> tuple[str, ...]:
    """The keys that have no effect without `other` (`Facts.needs`), in the schema's order."""
    return names_where(lambda facts: facts.needs == other)


def unmet_need(name: str, setting: Callable[[str], object]) -> str:
    """The first thing that the key `name` needs, directly or not, and that is off; empty if nothing is. setting: the
    value of a key."""
    needed = all_keys()[name].facts.needs
    if not needed:
        return ""
    key, _, words = needed.partition(" ")
    if unmet := unmet_need(key, setting):
        return unmet
    found = setting(key)
    is_met = found in words.split("|") if words else found not in (None, False, "none", "off")
    return "" if is_met else needed


def value(config: schema.Config, name: str) -> Any:
    """The value of a key in `config`."""
    return getattr(getattr(config, all_keys()[name].section), name)


def canonical(name: str) -> str | None:
    """The key that `name` means (dashes or underscores, an alias, `section.key`), or None if there is none."""
    plain = name.replace("-", "_")
    section, _, rest = plain.partition(".")
    rest = ALIASES.get(rest, rest)
    if section in SECTIONS and rest in all_keys() and all_keys()[rest].section == section:
        return rest
    plain = ALIASES.get(plain, plain)
    return plain if plain in all_keys() else None
