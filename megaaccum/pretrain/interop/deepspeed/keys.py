"""The treatment of each key of a user's DeepSpeed JSON (deepspeed 0.19), other than those that are reconciled."""

from __future__ import annotations

from megaaccum.config.deepspeed_config import PASSED, ZERO_PASSED

DROPPED = {
    "activation_checkpointing": "recompute_granularity is what recomputes activations",
    "checkpoint": "megaaccum writes its own checkpoints",
    "dataloader_drop_last": "megaaccum has its own loader",
    "flops_profiler": "the log shows FLOP/s already",
    "nebula": "megaaccum writes its own checkpoints",
    "prescale_gradients": "the loss is divided once, by loss_norm, for the same gradient",
    "scheduler": "megaaccum builds Megatron's scheduler",
    "optimizer": "megaaccum builds the optimizer",
    "sparse_gradients": "gradients of embeddings cross ranks whole, for the same sums",
    "use_data_before_expert_parallelism": "Megatron lays out the ranks",
}
"""Not passed to DeepSpeed, with the reason. Some are reconciled first, or refused if switched on."""

REFUSED = {
    "amp": "write bf16: true instead",
    "autotuning": "the tuner would start runs of its own; leave it out",
    "comet": "write tensorboard_dir, wandb_project or csv_dir instead",
    "compile": "Megatron's modules are not compiled; leave it out",
    "compression_training": "weights would be rounded, pruned or left out as they train; leave it out",
    "curriculum_learning": "early steps would train on shorter sequences than seq_length; leave it out",
    "data_efficiency": "the data order is that of Megatron's datasets; leave it out",
    "disable_allgather": "ZeRO gathers parameters by all-gather; leave it out",
    "eigenvalue": "it times the rounding of weights, which compression_training asks for; leave it out",
    "elasticity": "give the batch as global_batch_size; leave it out",
    "expert_parallel": "write expert_model_parallel_size instead",
    "hybrid_engine": "it serves reinforcement learning; leave it out",
    "pipeline": "write pipeline_model_parallel_size and schedule instead",
    "progressive_layer_drop": "steps would skip layers at random; leave it out",
    "quantize_training": "weights would be rounded to a few bits as they train; leave it out",
    "sequence_parallel_size": "write context_parallel_size instead",
    "sparse_attention": "tokens would attend to fewer others; leave it out",
    "tensor_parallel": "write tensor_model_parallel_size instead",
    "torch_autocast": "write bf16: true instead",
    "weight_quantization": "weights would be rounded to a few bits; leave it out",
    "zenflow": "most gradients would be applied in a later step than their own; leave it out",
}
"""Keys that are refused if switched on, and what to write instead."""

RECONCILED = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "bf16", "bfloat16", "fp16", "zero_optimization", "communication_data_type", "data_types", "tensorboard",
        "wandb", "csv_monitor", "gradient_predivide_factor", "gradient_allreduce_op",
        "managed_gradient_accumulation",
    }
)  # fmt: skip
"""Reconciled with megaaccum's own keys."""

_BY_STAGE3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)  # fmt: skip

ZERO_DROPPED = {
    **dict.fromkeys(_BY_STAGE3, "parameters are gathered once per step"),
    **dict.fromkeys((f"stage3_{name}" for name in _BY_STAGE3), "parameters are gathered once per step"),
    **dict.fromkeys(
        ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
         "stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights", "pipeline_loading_checkpoint",
         "elastic_checkpoint"),
        "megaaccum writes its own checkpoints",
    ),
    **dict.fromkeys(
        ("legacy_stage1", "memory_efficient_linear", "override_module_apply", "leaf_module",
         "cpu_offload_use_pin_memory", "compute_grad_norm"),
        "it has no effect here",
    ),
}  # fmt: skip
"""Keys of zero_optimization that are not passed to DeepSpeed, with the reason."""

ZERO_REFUSED = {
    "cpu_offload": "write offload_optimizer: cpu instead",
    "cpu_offload_params": "parameters stay on the device through a step; leave it out",
    "cpu_offload_param": "parameters stay on the device through a step; leave it out",
    "mics_hierarchical_params_gather": "write backend: fsdp2 with data_parallel_replicas instead",
    "mics_shard_size": "write backend: fsdp2 with data_parallel_replicas instead",
    "offload_param": "parameters stay on the device through a step; leave it out",
    "save_muon_momentum_buffer_in_memory": "DeepSpeed's own Muon is not used; leave it out",
    "zenflow": "most gradients would be applied in a later step than their own; leave it out",
    "zero_quantized_gradients": "quantized gradients would not be exact; leave it out",
    "zero_quantized_nontrainable_weights": "frozen weights would be rounded; leave it out",
    "zero_quantized_weights": "quantized parameters would not be exact; leave it out",
    "zeropp_loco_param": "quantized gradients would not be exact; leave it out",
}
"""Keys of zero_optimization that are refused if switched on, and what to write instead."""

ZERO_RECONCILED = frozenset(
    {"stage", "reduce_bucket_size", "offload_optimizer", "reduce_scatter", "zero_hpz_partition_size"}
)
"""Keys of zero_optimization that are reconciled with megaaccum's own."""

TOP_LEVEL = PASSED | DROPPED.keys() | REFUSED.keys() | RECONCILED
ZERO = ZERO_PASSED | ZERO_DROPPED.keys() | ZERO_REFUSED.keys() | ZERO_RECONCILED


def is_on(value: object) -> bool:
    """Whether a block or flag asks for something; `false`, `{"enabled": false}` and `{"device": "none"}` do not."""
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) and value.get("device", "") not in ("none", None)
    return value not in (None, False, "auto", 0, 1.0) or value is True
