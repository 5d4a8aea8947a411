"""Which layers a model is built of: the one answer that plan, check, train and checkpoints share. No torch.

Transformer Engine's layers run where it is installed and a GPU is there, under every schedule: those of megaaccum's
executor have them leave their weight gradients for W. Megatron's own layers run elsewhere, with a core of attention
that is torch's fused one on a GPU, so that no schedule keeps scores of sequence length squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megaaccum.schedule.build import by_executor

if TYPE_CHECKING:
    from megaaccum.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """impl: whose layers, as `transformer_impl` names them. fused_attention: attention keeps no scores.
    delays_wgrad: Transformer Engine's layers leave weight gradients to the schedule."""

    impl: Literal["local", "transformer_engine"]
    fused_attention: bool
    delays_wgrad: bool = False

    @property
    def local(self) -> bool:
        """Megatron-core's own layers."""
        return self.impl == "local"


def choose(config: Config, *, has_te: bool, on_gpu: bool, splits: bool | None = None) -> Layers:
    """The layers of a configuration. has_te: Transformer Engine can run here, which takes a GPU; on_gpu: there is one.
    splits: the schedule splits backwards; None where it is the configuration's own."""
    model = config.model
    splits = by_executor(config.parallel.schedule) if splits is None else splits
    if _takes_te(config, splits, has_te):
        fused = model.attention_backend != "unfused"
        return Layers(impl="transformer_engine", fused_attention=fused, delays_wgrad=splits)
    # Windows, and softmaxes with an offset, are made of whole scores by Megatron's own core of attention.
    whole = bool(config.megatron.keys() & {"window_size", "softmax_type"})
    wanted = "fused" if (on_gpu or config.parallel.context_parallel_size > 1) and not whole else "unfused"
    asked = model.attention_backend if model.attention_backend != "auto" else wanted
    return Layers(impl="local", fused_attention=asked != "unfused")


def _takes_te(config: Config, splits: bool, has_te: bool) -> bool:
    if config.model.transformer_impl != "auto":
        return config.model.transformer_impl == "transformer_engine"
    # The other backends' hooks on gradients would hear of weight gradients that have not come yet (rules/pipeline.py).
    hears = not splits or config.sharding.backend == "deepspeed"
    return has_te and hears


def on_a_gpu(config: Config, schedule: str | None = None) -> Layers:
    """The layers where a GPU and Transformer Engine are taken for granted: what is planned for."""
    return choose(config, has_te=True, on_gpu=True, splits=None if schedule is None else by_executor(schedule))
