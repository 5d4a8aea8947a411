"""Keys that must be there, and numbers out of range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megaaccum.config.keys import all_keys, names_where, unmet_need, value
from megaaccum.config.load import UNREADABLE
from megaaccum.config.rules.subject import Subject, them

NEEDED = {
    "num_experts": "outside a mixture of experts: set num_experts",
    "moe_expert_capacity_factor": "without a capacity: set moe_expert_capacity_factor",
    "multi_latent_attention": "without multi_latent_attention: set it to true",
    "recompute_granularity": "without recompute_granularity: set it to full or selective",
    "fp8_format": "without FP8: set fp8_format to hybrid",
    "fp8_recipe delayed": "with fp8_recipe {}, which keeps no history: set fp8_recipe to delayed",
    "first_last_layers_bf16": "without first_last_layers_bf16: set it to true",
    "fp16": "without fp16, as gradients do not underflow in the range of FP32 and BF16: set fp16 to true",
    "grad_norm_guard": "without a guard: set grad_norm_guard to warn, skip or stop",
    "lr_scaling": "with lr_scaling {}: set lr_scaling to linear or sqrt",
    "sft": "without conversations: set sft to true",
    "cold_expert_offload": "without cold_expert_offload: set cold_expert_offload to true",
}
"""When keys have no effect, by the key that they need (`Facts.needs`), and the remedy; {} is that key's value.
Default: to set the key to a word that they need."""


def required(subject: Subject) -> Iterator[str]:
    """A model and its training need some keys."""
    for name in names_where(lambda facts: facts.required):
        number, facts = value(subject, name), all_keys()[name].facts
        if subject.own_model and name != "seq_length":
            continue
        if subject.written.origin.get(name) == UNREADABLE or (isinstance(number, int | float) and facts.allow(number)):
            continue
        if name in subject.given(name):
            yield f"{name} is {number}: it must be {facts.range}."
        else:
            where = "give it to Plan.of" if subject.own_model else f"add it to the file, or give --{name}"
            yield f"{name} is required: {where}."


def ranges(subject: Subject) -> Iterator[str]:
    """Each number lies in its key's range."""
    for name in names_where(lambda facts: facts.range and not facts.required):
        # A value derived from a missing key would only repeat that it is missing.
        number, facts = value(subject, name) if subject.given(name) else None, all_keys()[name].facts
        if number is not None and not all(map(facts.allow, number if isinstance(number, list) else [number])):
            yield f"{name} is {number}: it must be {facts.range}."


def without_effect(subject: Subject) -> Iterator[str]:
    """A key that was written has an effect."""
    unused: dict[str, list[str]] = {}
    for name in subject.given(*names_where(lambda facts: facts.needs)):
        off = unmet_need(name, partial(value, subject))
        # A size of 1, which launch scripts spell out, says nothing about experts.
        if (off in NEEDED or " " in off) and getattr(subject.parallel, name, None) != 1:
            unused.setdefault(off, []).append(name)
    for off, names in unused.items():
        key, _, words = off.partition(" ")
        why = NEEDED.get(off, f"with {key} {{}}: set {key} to {words.replace('|', ' or ')}")
        yield f"{', '.join(names)}: no effect {why.format(value(subject, key))}, or leave {them(names)} out."


def world_size(subject: Subject) -> Iterator[str]:
    """A run has ranks."""
    if subject.world_size < 1:
        yield f"the run has {subject.world_size} ranks: it needs at least 1."
