"""Keys that must be there, and the range of each number on its own."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.keys import all_keys
from megaaccum.config.load import UNREADABLE
from megaaccum.config.rules.subject import Rule, Subject

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "train_iters", "lr")

AT_LEAST_ONE = (
    "ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings", "rotary_base", "vocab_size",
    "make_vocab_size_divisible_by", "recompute_num_layers", "num_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "microbatch_group_size_per_vp_stage", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "reduce_bucket_size", "lr_decay_iters", "lr_wsd_decay_iters",
    "loss_scale_window", "hysteresis", "grad_norm_guard_window", "data_parallel_replicas",
    "max_steps", "exit_interval", "save_retain_interval",
    "log_interval", "num_threads", "nproc_per_node", "fp8_amax_history_len",
    "cold_expert_tokens", "cold_expert_steps",
)  # fmt: skip

AT_LEAST_ZERO = (
    "eval_iters",
    "lr_warmup_iters", "lr_warmup_init", "min_lr", "weight_decay", "start_weight_decay", "end_weight_decay",
    "clip_grad", "eval_interval", "save_interval", "keep_last", "num_workers", "step_timeout_seconds", "seed",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor", "max_bad_steps_in_a_row", "max_bad_steps",
    "max_live_parameters", "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
)  # fmt: skip

MORE_THAN_ZERO = (
    "norm_epsilon", "init_method_std", "adam_eps", "distributed_timeout_minutes", "rotary_percent",
    "moe_router_topk_scaling_factor", "loss_scale", "initial_loss_scale", "min_loss_scale",
    "grad_norm_guard_deviations", "memory_gib", "exit_duration_in_mins",
)  # fmt: skip

BELOW_ONE = ("attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2", "lr_warmup_fraction")


def required(subject: Subject) -> Iterator[str]:
    """Keys without which there is no model and no training."""
    for name in REQUIRED:
        value = _value(subject, name)
        if subject.written.origin.get(name) == UNREADABLE or (isinstance(value, int | float) and value > 0):
            continue
        if name in subject.given(name):
            yield f"{name} is {value}: it must be {'more than 0' if name == 'lr' else 'at least 1'}."
        else:
            yield f"{name} is required; add it to the file, or give --{name} on the command line."


def ranges(subject: Subject) -> Iterator[str]:
    """Numbers that make no sense whatever the others are."""
    for names, holds, expected in (
        (AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (AT_LEAST_ZERO, lambda v: v >= 0, "at least 0"),
        (MORE_THAN_ZERO, lambda v: v > 0, "more than 0"),
        (BELOW_ONE, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ):
        for name in names:
            # What was derived from a missing key would only repeat that it is missing.
            value = _value(subject, name) if subject.given(name) else None
            if value is not None and not holds(value):
                yield f"{name} is {value}: it must be {expected}."
    if subject.model.rotary_percent > 1:
        yield f"rotary_percent is {subject.model.rotary_percent}: it is a share, at most 1.0."


def world_size(subject: Subject) -> Iterator[str]:
    """A run has ranks."""
    if subject.world_size < 1:
        yield f"the run has {subject.world_size} ranks: it needs at least 1."


def _value(subject: Subject, name: str) -> object:
    return getattr(getattr(subject.config, all_keys()[name].section), name)


RULES: tuple[Rule, ...] = (required, ranges, world_size)
