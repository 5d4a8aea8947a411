"""Typed arguments of `Plan.of`: the sections of the schema under short names. Defaults count as not written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from megaaccum.config.facts import Facts
from megaaccum.config.schema import BatchConfig, ParallelConfig
from megaaccum.config.schema import OptimizerConfig as Optimizer
from megaaccum.config.schema import QuantizationConfig as Quantization
from megaaccum.config.schema import RunConfig as Run
from megaaccum.config.schema import ShardingConfig as Sharding
from megaaccum.config.schema import StepConfig as Step
from megaaccum.errors import ConfigError

__all__ = ["Batch", "Layout", "Optimizer", "Quantization", "Run", "Section", "Sharding", "Step", "written_keys"]


@dataclass(kw_only=True, slots=True)
class Layout(ParallelConfig):
    """The requested layout of ranks and their schedule: the keys of the section `parallel`, sizes by short names too.
    world = tp * cp * pp * dp."""

    tp: int | None = None
    """Ranks that share each matrix."""
    pp: int | None = None
    """Pipeline ranks."""
    vpp: int | None = None
    """Model chunks per pipeline rank."""
    cp: int | None = None
    """Ranks that share each sequence."""
    ep: int | None = None
    """Ranks over which experts are spread."""
    etp: int | None = None
    """Ranks that share each expert's matrices."""


@dataclass(kw_only=True, slots=True)
class Batch(BatchConfig):
    """The batch of an optimizer step and how it is cut: the keys of the section `batch`, and the length of a
    sequence."""

    seq_length: Annotated[int, Facts(required=True)] = 0
    """Tokens of the longest sequence. Required."""


Section = Layout | Batch | Sharding | Quantization | Step | Optimizer | Run


def written_keys(argument: str, section: Section | Mapping[str, object] | None) -> Mapping[str, object]:
    """The keys that one argument of `Plan.of` gives: all of a mapping, or the fields of a dataclass that differ from
    their defaults. Raises ConfigError if it is neither."""
    if section is None or isinstance(section, Mapping):
        return section or {}
    if not isinstance(section, Section):
        raise ConfigError(f"{argument} is {type(section).__name__}: it must be a {argument.capitalize()} or a dict.")
    defaults = type(section)()
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}
