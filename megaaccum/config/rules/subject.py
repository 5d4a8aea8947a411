"""The subject of a rule: a configuration, as written and with every key derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaaccum.config.load import given
from megaaccum.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    QuantizationConfig,
    RunConfig,
    ShardingConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A configuration under examination."""

    config: Config
    """With every derivable key filled in."""
    written: Config
    """As the user wrote it, the DeepSpeed JSON's values taken over."""
    world_size: int
    """Ranks of the run."""
    own_model: bool = False
    """Whether model, data and training are the user's own: their keys are not required."""

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def sharding(self) -> ShardingConfig:
        return self.config.sharding

    @property
    def quantization(self) -> QuantizationConfig:
        return self.config.quantization

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.optimizer

    @property
    def data(self) -> DataConfig:
        return self.config.data

    @property
    def run(self) -> RunConfig:
        return self.config.run

    @property
    def schedule(self) -> str:
        """The schedule's name, which derive has filled in."""
        assert self.config.parallel.schedule is not None
        return self.config.parallel.schedule

    def given(self, *names: str) -> list[str]:
        """The keys among `names` that the user wrote."""
        return [name for name in names if given(self.written, name)]


def them(names: list[str]) -> str:
    """The pronoun for the keys `names` in a message."""
    return "it" if len(names) == 1 else "them"


Rule = Callable[[Subject], Iterator[str]]
