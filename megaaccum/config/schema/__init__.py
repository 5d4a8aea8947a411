"""The configuration: one dataclass per subject, one field per key.

Names are Megatron-LM's where it has one. Keys are unique across the sections, so a YAML file may list them flat or
under their section's name. A field that is None after reading is derived in `resolve`, after every override.
"""

from dataclasses import dataclass, field

from megaaccum.config.schema.batch import BatchConfig, ParallelConfig
from megaaccum.config.schema.model import ModelConfig
from megaaccum.config.schema.run import DataConfig, OptimizerConfig, RunConfig, StepConfig
from megaaccum.config.schema.sharding import QuantizationConfig, ShardingConfig

__all__ = [
    "BatchConfig", "Config", "DataConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig", "QuantizationConfig",
    "RunConfig", "ShardingConfig", "StepConfig",
]  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything a run needs. Build one with `megaaccum.config.load`, not by hand."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    deepspeed: dict[str, object] = field(default_factory=dict)
    """The user's own DeepSpeed JSON; its batch, precision and clipping must agree with the keys above."""
    megatron: dict[str, object] = field(default_factory=dict)
    """Fields of Megatron's model configuration that are no keys, written under `model:` or as Megatron's flags."""
    origin: dict[str, str] = field(default_factory=dict)
    """The source of each key that was written: a file's name or 'command line'. `load` fills it; not a key."""
    notes: list[str] = field(default_factory=list)
    """The keys of the file that the command line overrides, one sentence each; `load` fills it. Not a key."""
