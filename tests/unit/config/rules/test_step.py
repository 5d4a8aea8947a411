"""Rules on the step, the optimizer and the data, each broken on purpose: the text names the key and what to write."""

from __future__ import annotations

import pytest

from tests.unit.config.rules.cases import COLD, EARLY, EXPERTS, FP8, GLOBAL, SAME, Case, check_broken

BROKEN: list[Case] = [
    (
        "start_can_be_verified",
        1,
        dict(verify_at_start=True, rng="megatron"),
        ["rng megatron with dropout", "set rng to sample", "verify_at_start to false"],
    ),
    (
        "start_can_be_verified",
        1,
        GLOBAL | dict(verify_at_start=True),
        ["global_aux_loss", "set it to aux_loss"],
    ),
    ("start_can_be_verified", 1, FP8 | dict(verify_at_start=True), ["fp8_format hybrid", "rounding"]),
    (
        "watchdog_is_first",
        1,
        dict(step_timeout_seconds=900.0),
        ["step_timeout_seconds 900", "* 60 = 600", "distributed_timeout_minutes to more than 15"],
    ),
    ("speculative_step", 1, dict(speculative_step=True), ["schedule none", "no pipeline", "schedule to zbv"]),
    ("speculative_step", 2, EARLY | dict(schedule="1f1b"), ["schedule 1f1b", "Megatron-core runs it"]),
    ("speculative_step", 2, EARLY | dict(sync="streaming"), ["sync streaming", "sync to resident"]),
    ("speculative_step", 2, EARLY | SAME, ["reproducible layout", "a collective that waits"]),
    ("speculative_step", 2, EARLY | dict(offload_optimizer="cpu"), ["offload_optimizer cpu", "to none"]),
    ("speculative_step", 2, EARLY | COLD, ["cold_expert_offload", "to false"]),
    ("speculative_step", 2, EARLY | FP8, ["fp8_format hybrid", "leave fp8_format out"]),
    ("speculative_step", 2, EARLY | dict(variable_seq_lengths=True), ["variable_seq_lengths", "exchange the lengths"]),
    ("speculative_step", 2, EARLY | dict(flush="per_round"), ["flush per_round", "flush to merged"]),
    (
        "speculative_step",
        2,
        EARLY | EXPERTS | dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
        ["moe_router_enable_expert_bias", "count the tokens"],
    ),
    (
        "speculative_step",
        2,
        EARLY | EXPERTS | dict(moe_router_load_balancing_type="global_aux_loss"),
        ["global_aux_loss", "it to aux_loss"],
    ),
    ("loss_scale_needs_fp16", 1, dict(bf16=True, loss_scale=128.0), ["loss_scale", "BF16 has FP32's range", "fp16 to"]),
    ("loss_scale_needs_fp16", 1, dict(hysteresis=1, loss_scale_window=10), ["hysteresis", "fp32", "Leave them out"]),
    ("one_loss_scale", 1, dict(fp16=True, loss_scale=8.0, hysteresis=1), ["loss_scale 8 is fixed", "hysteresis"]),
    ("one_loss_scale", 1, dict(fp16=True, initial_loss_scale=2.0, min_loss_scale=4.0), ["at least 4"]),
    ("overflow_is_seen", 1, dict(fp16=True, nonfinite="off"), ["nonfinite off with fp16", "nonfinite to zero or skip"]),
    ("guard_needs_itself", 1, dict(grad_norm_guard_window=10), ["grad_norm_guard_window", "grad_norm_guard to warn"]),
    (
        "exact_without_microbatches",
        1,
        EXPERTS
        | dict(moe_router_load_balancing_type="global_aux_loss")
        | dict(short_batch="pad", nonfinite="drop_microbatch"),
        ["nonfinite drop_microbatch and short_batch pad", "weight zero", "aux_loss"],
    ),
    (
        "exact_without_microbatches",
        1,
        EXPERTS
        | dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", nonfinite="drop_microbatch"),
        ["moe_router_enable_expert_bias true", "nonfinite to skip"],
    ),
    ("static_graph", 1, dict(static_graph=True, rampup_batch_size=[4, 4, 64]), ["static_graph", "rampup_batch_size"]),
    (
        "static_graph", 1,
        dict(static_graph=True, pp_microbatches=None, global_batch_size=None, step_batch_size_schedule="0:8 1K:16"),
        ["step_batch_size_schedule"],
    ),
    ("static_graph", 1, dict(static_graph=True, reset_attention_mask=True), ["reset_attention_mask", "to false"]),
    ("static_graph", 1, dict(static_graph=True, variable_seq_lengths=True), ["variable_seq_lengths", "pad"]),
    ("static_graph", 1, dict(static_graph=True, short_batch="pad"), ["short_batch pad", "set it to error"]),
    ("static_graph", 1, dict(static_graph=True, short_batch="drop"), ["short_batch drop"]),
    ("static_graph", 1, dict(static_graph=True, nonfinite="drop_microbatch"), ["nonfinite drop_microbatch"]),
    ("static_graph", 1, dict(static_graph=True, num_experts=4), ["num_experts 4", "moe_expert_capacity_factor"]),
    ("rates", 1, dict(min_lr=0.01), ["min_lr 0.01", "lr 0.001", "at most 0.001"]),
    ("rates", 1, dict(lr_warmup_init=0.01), ["lr_warmup_init 0.01"]),
    ("scaling", 1, dict(lr_scaling="sqrt"), ["lr_scaling sqrt", "lr_reference_batch_size"]),
    ("warm_up", 1, dict(lr_warmup_iters=10, lr_warmup_fraction=0.1), ["lr_warmup_iters 10", "fraction 0.1"]),
    ("warm_up", 1, dict(lr_warmup_iters=100), ["lr_warmup_iters 100", "lr_decay_iters 100", "at most 99", "101"]),
    ("stable_then_decay", 1, dict(lr_decay_style="WSD"), ["lr_wsd_decay_iters"]),
    ("stable_then_decay", 1, dict(lr_decay_style="WSD", lr_wsd_decay_iters=101), ["101", "at most 100"]),
    ("stable_then_decay", 1, dict(lr_wsd_decay_iters=10), ["lr_decay_style WSD, not linear"]),
    ("weight_decay", 1, dict(start_weight_decay=0.5), ["start_weight_decay 0.5", "weight_decay 0.01"]),
    ("weight_decay", 1, dict(weight_decay_incr_style="linear"), ["start_weight_decay and end_weight_decay"]),
    (
        "weight_decay",
        1,
        dict(weight_decay_incr_style="cosine", start_weight_decay=0.2, end_weight_decay=0.1),
        ["end_weight_decay 0.1", "start_weight_decay 0.2"],
    ),
    ("one_source", 1, dict(data_path=["a"], train_data_path=["b"]), ["data_path and train_data_path"]),
    ("one_source", 1, dict(split="1,1,1", train_data_path=["b"]), ["leave split out"]),
    ("one_source", 1, dict(valid_data_path=["b"]), ["train_data_path beside it"]),
    ("fill_in_the_middle", 1, dict(fim_data=True, mock_data=True), ["leave one of them out"]),
    ("fill_in_the_middle", 1, dict(fim_data=True, fim_split_sample="<f>"), ["set fim_fragment_rate"]),
    ("split_shares", 1, dict(split="a,b"), ["'a,b'", "969,30,1"]),
    ("split_shares", 1, dict(split="0,1,1"), ["'0,1,1'"]),
    ("split_shares", 1, dict(split="1,1,1,1"), ["'1,1,1,1'"]),
    ("blends", 1, dict(data_path=[]), ["data_path is empty"]),
    ("blends", 1, dict(data_path=["0.5", "a", "b"]), ["0.5 a b", "alternates"]),
    ("blends", 1, dict(data_path=["0", "a", "1", "b"]), ["more than 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "world_size", "keys", "words"), BROKEN)
def test_a_broken_rule_says_what_to_write(
    rule: str, world_size: int, keys: dict[str, object], words: list[str]
) -> None:
    check_broken(rule, world_size, keys, words)
