"""The one place that touches private names of DeepSpeed, Megatron-core, torch and Transformer Engine: a module each.

Written against deepspeed 0.19.8, megatron-core 0.19.2, torch 2.13 and transformer-engine 2.20.2. Each function says
what it does that no public name does. `check()` looks the names up, so that another version fails at start with a list
instead of in the middle of a step.
"""

from __future__ import annotations

from megaaccum.upstream import fsdp2, megatron, megatron_training, pytorch, te, zero
from megaaccum.upstream.adam import UpdateCount, adam_views, optimizer_tensors, set_adam_step
from megaaccum.upstream.fsdp2 import (
    Fsdp2WeightGrads,
    drop_unreduced,
    first_element,
    fsdp2_before_reduce,
    fsdp2_even_out,
    fsdp2_give,
    fsdp2_on_gradient,
    fsdp2_reduced,
    fsdp2_tensors,
    fsdp2_units,
    watch_fsdp2,
)
from megaaccum.upstream.megatron import (
    has_fused_softmax,
    has_transformer_engine,
    is_parallel_linear,
    linear_forward,
    megatron_adopt,
    megatron_before_reduce,
    megatron_give_zeros,
    megatron_params_of,
    megatron_reduce_scatter,
    megatron_scales_side_losses,
    megatron_share,
    megatron_state,
    megatron_tensors,
    mtp_spec_of_builder,
    set_linear_forward,
    sum_rotated_key,
)
from megaaccum.upstream.pytorch import (
    CHECKPOINT_METADATA_CLASSES,
    OnGradient,
    add_by_autograd,
    ddp_expect_gradients,
    in_backward,
    note_failure,
    noted_failure,
    on_gradient,
    one_gloo_device,
    watched_collectives,
)
from megaaccum.upstream.zero import Zero3, place_experts, without_shared_memory_operator
from megaaccum.upstream.zero12 import Zero12, deepspeed_parts, keep_gradient_lists, zero1_config

__all__ = [
    "CHECKPOINT_METADATA_CLASSES",
    "Fsdp2WeightGrads",
    "OnGradient",
    "UpdateCount",
    "Zero3",
    "Zero12",
    "adam_views",
    "add_by_autograd",
    "check",
    "ddp_expect_gradients",
    "deepspeed_parts",
    "drop_unreduced",
    "first_element",
    "fsdp2_before_reduce",
    "fsdp2_even_out",
    "fsdp2_give",
    "fsdp2_on_gradient",
    "fsdp2_reduced",
    "fsdp2_tensors",
    "fsdp2_units",
    "has_fused_softmax",
    "has_transformer_engine",
    "in_backward",
    "is_parallel_linear",
    "keep_gradient_lists",
    "linear_forward",
    "megatron_adopt",
    "megatron_before_reduce",
    "megatron_give_zeros",
    "megatron_params_of",
    "megatron_reduce_scatter",
    "megatron_scales_side_losses",
    "megatron_share",
    "megatron_state",
    "megatron_tensors",
    "mtp_spec_of_builder",
    "note_failure",
    "noted_failure",
    "on_gradient",
    "one_gloo_device",
    "optimizer_tensors",
    "place_experts",
    "set_adam_step",
    "set_linear_forward",
    "sum_rotated_key",
    "te",
    "watch_fsdp2",
    "watched_collectives",
    "without_shared_memory_operator",
    "zero1_config",
]


def check() -> list[str]:
    """Names that these versions of the libraries lack, as sentences; empty when all is well."""
    problems = zero.check() + megatron.check() + megatron_training.check() + fsdp2.check() + pytorch.check()
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:  # not installed, or hidden by the CPU lane
        return problems
    return problems + te.check()
