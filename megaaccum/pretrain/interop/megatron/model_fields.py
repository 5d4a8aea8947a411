"""Fields of Megatron's model configuration in a configuration file, checked against the installed version."""

from __future__ import annotations

import typing
from functools import cache

from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.derive import YARN
from megaaccum.config.megatron_arguments import handled, listed
from megaaccum.config.source import Unknown
from megaaccum.errors import shortened
from megaaccum.pretrain.interop.megatron.parser import model_fields


@cache
def _types() -> dict[str, object]:
    """The annotation of every field."""
    from megatron.core.transformer import MLATransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    hints = {**typing.get_type_hints(GPTModelConfig), **typing.get_type_hints(MLATransformerConfig)}
    return hints | {name: type(default) for name, default in YARN.items()}


def accept_model_field(unknown: Unknown, fields: dict[str, object], problems: list[str]) -> bool:
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
        _put(unknown, fields, problems)
    return True


def _put(unknown: Unknown, fields: dict[str, object], problems: list[str]) -> None:
    name = unknown.written
    try:
        fields[name] = coerce(unknown.value, _types()[name])
    except NotOfType as error:
        problems.append(f"{unknown.place}: {name} must be {error}, not {shortened(repr(unknown.value), 80)}.")
    except (KeyError, AssertionError):
        # A type that no configuration file can hold (an enum, a pair): Megatron's own check sees it.
        fields[name] = unknown.value
