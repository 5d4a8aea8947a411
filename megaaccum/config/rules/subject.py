"""The subject of a rule: a configuration, as written and with every key derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Self

from megaaccum.config.load import given as is_given
from megaaccum.config.schema import Config


@dataclass(kw_only=True, slots=True)
class Subject(Config):
    """A configuration under examination, with every derivable key filled in."""

    written: Config
    """The configuration that the user wrote, with the values of a DeepSpeed JSON."""
    world_size: int
    """Ranks of the run."""
    own_model: bool = False
    """Whether the user provides model, data and training, so that their keys are not required."""

    @classmethod
    def from_config(cls, config: Config, *, written: Config, world_size: int, own_model: bool = False) -> Self:
        """The subject that shares the sections of `config`."""
        sections = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(**sections, written=written, world_size=world_size, own_model=own_model)

    @property
    def schedule(self) -> str:
        """The schedule's name, which derive has filled in."""
        assert self.parallel.schedule is not None
        return self.parallel.schedule

    @property
    def to_bf16(self) -> str:
        """The change of the written keys that makes parameters BF16, for a message."""
        if self.written.sharding.params_dtype is not None:
            return "params_dtype to bf16"
        return "bf16 instead of fp16 to true" if self.sharding.fp16 else "bf16 to true"

    def given(self, *names: str) -> list[str]:
        """The keys among `names` that the user wrote."""
        return [name for name in names if is_given(self.written, name)]


def them(names: list[str]) -> str:
    """The pronoun for the keys `names` in a message."""
    return "it" if len(names) == 1 else "them"


Rule = Callable[[Subject], Iterator[str]]
