"""The configuration that DeepSpeed is given, as its JSON has it. Torch-free: `megaaccum check` prints it."""

from __future__ import annotations

from typing import Any

from megaaccum.config.plan import Plan

PASSED = frozenset(
    {
        "aio", "comms_logger", "disable_python_gc", "dump_state", "log_level", "memory_breakdown", "steps_per_print",
        "timers", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    }
)  # fmt: skip
"""Given to DeepSpeed as they are."""

ZERO_PASSED = frozenset(
    {
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "enable_sanity_checks",
        "ignore_unused_parameters", "log_trace_cache_warnings", "overlap_comm", "parameter_alignment",
        "round_robin_gradients", "sub_group_size", "use_multi_rank_bucket_allreduce",
    }
)  # fmt: skip
"""Keys of zero_optimization given to DeepSpeed as they are."""

BF16_OPTIMIZER = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
"""Keys of its bf16 block for an optimizer whose masters and moments are BF16."""


def deepspeed_config(plan: Plan) -> dict[str, object]:
    """The configuration that megaaccum gives `deepspeed.initialize`, the user's remaining keys merged in.

    DeepSpeed sees one batch of `num_microbatches * micro_batch_size` sequences per data-parallel rank and one
    accumulation step: accumulation, the loss divisor and clipping have their one owner outside it. The whole
    batch is left for DeepSpeed to multiply out, over whichever group it is given as data-parallel.
    """
    user, sharding, batch = plan.config.deepspeed, plan.config.sharding, plan.batch
    user_zero: Any = user.get("zero_optimization", {})
    zero: dict[str, object] = {name: value for name, value in user_zero.items() if name in ZERO_PASSED}
    zero |= {"stage": sharding.zero_stage, "reduce_bucket_size": sharding.reduce_bucket_size}
    if sharding.zero_stage == 3:
        # By default DeepSpeed gathers every parameter of up to 100,000 elements alone, one collective for each, at
        # the end of its step. The backend gathers all of them in one, at the start of the next.
        zero["stage3_param_persistence_threshold"] = 0
        # Else it replaces torch.nn.functional.linear in the whole process, and for good, by a function that rounds
        # twice in 16 bits (sharding/released_linear).
        zero["memory_efficient_linear"] = False
    if sharding.offload_optimizer != "none":
        zero["offload_optimizer"] = {**user_zero.get("offload_optimizer", {}), "device": sharding.offload_optimizer}
    in_bf16 = sharding.optimizer_dtype == "bf16"
    passed: dict[str, object] = {name: value for name, value in user.items() if name in PASSED}
    return passed | {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size * batch.num_microbatches,
        "gradient_accumulation_steps": 1,
        # megaaccum clips by the norm over all stages; DeepSpeed would clip a second time.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": sharding.bf16, **BF16_OPTIMIZER} if in_bf16 else {"enabled": sharding.bf16},
        # The loss is scaled and gradients are unscaled outside DeepSpeed: a second scale of 1, that never moves.
        "fp16": {"enabled": sharding.fp16, "loss_scale": 1.0},
        "communication_data_type": sharding.grad_reduce_dtype,
        "data_types": {"grad_accum_dtype": sharding.grad_accum_dtype},
        # The optimizer is built by megaaccum, which DeepSpeed always calls untested.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
