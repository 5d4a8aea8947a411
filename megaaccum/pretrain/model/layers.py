"""Kind of the layers of a model: one decision for plan, check, train and checkpoints. No torch.

Transformer Engine's layers run if it is installed, a GPU is found and parameters have 16 bits (or products 8), under
every schedule: under those of megaaccum's executor they leave their weight gradients for W. Otherwise Megatron's own
layers run, with torch's fused core of attention on a GPU, so that no schedule saves scores of sequence length squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megaaccum.config.schema import Config
from megaaccum.schedule.registry import by_executor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Kind of a model's layers. impl: a value of `transformer_impl`. fused_attention: attention saves no scores.
    delays_wgrad: Transformer Engine's layers leave weight gradients to the schedule. on_gpu: kernels are fused."""

    impl: Literal["local", "transformer_engine"]
    fused_attention: bool
    delays_wgrad: bool = False
    on_gpu: bool = False

    @property
    def local(self) -> bool:
        """Megatron-core's own layers."""
        return self.impl == "local"


def choose(config: Config, *, has_te: bool, on_gpu: bool, splits: bool | None = None) -> Layers:
    """The layers of a configuration. has_te: Transformer Engine can run here, which needs a GPU. on_gpu: it has a GPU.
    splits: the schedule splits backwards; None for the configuration's own schedule."""
    model = config.model
    splits = by_executor(config.parallel.schedule) if splits is None else splits
    if _uses_te(config, splits, has_te):
        fused = model.attention_backend != "unfused"
        return Layers(impl="transformer_engine", fused_attention=fused, delays_wgrad=splits, on_gpu=on_gpu)
    cut = max(config.parallel.context_parallel_size, config.sharding.reproducible_context_blocks or 1) > 1
    wanted = "fused" if (on_gpu or cut) and not of_whole_scores(config) else "unfused"
    asked = model.attention_backend if model.attention_backend != "auto" else wanted
    return Layers(impl="local", fused_attention=asked != "unfused", on_gpu=on_gpu)


def of_whole_scores(config: Config) -> list[str]:
    """The keys of windows, and of softmaxes with an offset, which local layers make of whole scores alone."""
    plain = {"window_size": None, "softmax_type": "vanilla"}
    return [name for name, value in plain.items() if config.megatron.get(name, value) != value]


def _uses_te(config: Config, splits: bool, has_te: bool) -> bool:
    if config.model.transformer_impl != "auto":
        return config.model.transformer_impl == "transformer_engine"
    # The other backends' hooks on gradients would run before a delayed weight gradient exists (rules/pipeline.py).
    hears = not splits or config.sharding.backend == "deepspeed"
    # TE 2.20 multiplies FP32 in TF32 whatever torch.backends allows, and takes no FP64.
    exact = config.sharding.params_dtype in ("fp32", "fp64") and config.quantization.fp8_format is None
    return has_te and hears and not exact


def on_a_gpu(config: Config, schedule: str | None = None) -> Layers:
    """The layers on a machine with a GPU and Transformer Engine, for which plans are made."""
    return choose(config, has_te=True, on_gpu=True, splits=None if schedule is None else by_executor(schedule))
