"""Rules on precision and on where tensors are, each broken on purpose: the text names the key and what to write."""

from __future__ import annotations

import pytest

from tests.unit.config.rules.cases import BF16, COLD, EXPERTS, FP8, PP2, SAME, SPREAD, TP2, Case, check_broken

BROKEN: list[Case] = [
    ("one_precision", 1, dict(bf16=True, fp16=True), ["bf16 and fp16"]),
    ("one_precision", 1, dict(bf16=True, params_dtype="fp32"), ["bf16 is true and params_dtype is fp32"]),
    ("one_precision", 1, dict(bf16=False, params_dtype="bf16"), ["bf16 is false and params_dtype is bf16"]),
    ("double_precision", 1, dict(params_dtype="fp64"), ["fp64", "backend to ddp"]),
    ("low_precision_optimizer", 1, dict(optimizer_dtype="bf16"), ["fp32 parameters", "bf16 to true"]),
    ("low_precision_optimizer", 1, BF16 | dict(backend="ddp"), ["not ddp"]),
    ("low_precision_optimizer", 1, BF16 | dict(zero_stage=2), ["zero_stage is 2", "to 3"]),
    ("low_precision_optimizer", 1, BF16 | dict(offload_optimizer="cpu"), ["offload_optimizer to none"]),
    ("low_precision_sums", 1, dict(grad_accum_dtype="bf16"), ["fp32 parameters", "grad_accum_dtype to fp32"]),
    ("deepspeed_only", 1, dict(backend="ddp", zero_stage=3), ["zero_stage needs backend deepspeed", "ddp"]),
    ("deepspeed_only", 1, dict(backend="ddp", offload_optimizer="cpu"), ["offload_optimizer"]),
    ("deepspeed_only", 1, dict(backend="ddp", deepspeed={"steps_per_print": 1}), ["deepspeed block"]),
    ("fp8_keys", 1, dict(fp8_recipe="tensorwise", fp8_margin=1), ["fp8_recipe, fp8_margin without FP8", "hybrid"]),
    ("fp8_keys", 1, FP8 | dict(fp8_recipe="blockwise", fp8_margin=1), ["fp8_margin", "blockwise", "to delayed"]),
    ("fp8_layers", 1, FP8 | dict(transformer_impl="local"), ["hybrid", "local", "transformer_impl to auto"]),
    ("fp8_precision", 1, dict(fp8_format="e4m3"), ["e4m3", "params_dtype is fp32", "bf16 to true"]),
    ("fp8_precision", 1, FP8 | dict(grad_accum_dtype="bf16"), ["grad_accum_dtype bf16", "to fp32"]),
    ("fp8_precision", 1, FP8 | dict(backend="ddp"), ["backend ddp has not been checked", "deepspeed"]),
    ("fp8_precision", 1, FP8 | dict(backend="fsdp2"), ["backend fsdp2", "every forward", "deepspeed"]),
    ("fp8_weights", 1, FP8 | dict(sync="streaming"), ["FP8 copies", "sync to resident"]),
    ("bf16_ends", 1, FP8 | dict(num_layers_at_end_in_bf16=2), ["num_layers_at_end_in_bf16", "set it to true"]),
    ("bf16_ends", 1, FP8 | dict(first_last_layers_bf16=True), ["fp8_recipe delayed", "tensorwise"]),
    (
        "bf16_ends",
        2,
        FP8 | PP2 | dict(fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=5),
        ["num_layers_at_start_in_bf16 5", "8 / pp 2", "at most 4"],
    ),
    (
        "fp8_recompute",
        1,
        FP8 | dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
        ["layernorm", "delayed", "tensorwise"],
    ),
    ("fp8_shapes", 1, FP8 | dict(hidden_size=72), ["hidden_size 72 = 72", "multiples of 16", "64 or 80"]),
    ("fp8_shapes", 1, FP8 | dict(fp8_recipe="mxfp8", seq_length=80), ["seq_length 80", "multiples of 32", "64 or 96"]),
    ("fp8_shapes", 2, FP8 | TP2 | dict(ffn_hidden_size=144), ["144 / 2 ranks = 72", "128 or 160"]),
    ("fp8_shapes", 1, FP8 | dict(num_attention_heads=2, kv_channels=12), ["kv_channels 12 * 2 = 24", "8 or 16"]),
    ("streaming", 1, dict(sync="streaming", zero_stage=2), ["zero_stage 2", "resident"]),
    ("streaming", 1, dict(sync="streaming", backend="megatron"), ["megatron", "fsdp2"]),
    ("live_parameters", 1, dict(max_live_parameters=5), ["max_live_parameters 5", "resident", "streaming"]),
    ("deterministic", 1, dict(deterministic=True, zero_stage=1), ["zero_stage 1", "zero_stage to 3"]),
    ("reproducible", 2, SAME | TP2, ["tensor_model_parallel_size 2", "inside matrix products"]),
    ("reproducible", 2, SAME | dict(context_parallel_size=2), ["context_parallel_size 2", "inside attention"]),
    ("reproducible", 2, SAME | SPREAD, ["expert_model_parallel_size 2", "several ranks"]),
    ("reproducible", 2, SAME | EXPERTS | dict(backend="ddp"), ["num_experts", "only deepspeed"]),
    ("reproducible", 1, SAME | dict(fp16=True), ["fp16", "overflows"]),
    ("reproducible", 1, SAME | dict(mtp_num_layers=1), ["mtp_num_layers 1", "tied"]),
    (
        "reproducible",
        1,
        SAME | dict(grad_reduce_dtype="bf16", backend="fsdp2"),
        ["grad_reduce_dtype bf16", "rounds", "zero_stage 3"],
    ),
    ("reproducible", 1, SAME | dict(grad_reduce_dtype="bf16", zero_stage=1), ["reduce_dtype bf16", "zero_stage 3"]),
    ("reproducible", 1, SAME | dict(batch_warmup_steps=4), ["batch_warmup_steps", "resident"]),
    ("reproducible", 1, SAME | dict(offload_optimizer="cpu", zero_stage=2), ["zero_stage 2", "offload_optimizer"]),
    ("runs_of_microbatches", 3, SAME, ["power of two", "there are 3", "2 or 4 ranks", "streaming"]),
    ("runs_of_microbatches", 1, SAME | dict(backend="fsdp2", sync="streaming"), ["one data-parallel rank", "resident"]),
    ("replicas", 4, dict(data_parallel_replicas=2), ["data_parallel_replicas 2", "fsdp2", "deepspeed"]),
    ("replicas", 4, dict(data_parallel_replicas=3, backend="fsdp2"), ["replicas 3", "4 ranks", "2 or 4"]),
    (
        "experts_boundary",
        4,
        EXPERTS | dict(expert_model_parallel_size=2, backend="fsdp2"),
        ["expert_model_parallel_size 2", "fsdp2", "deepspeed"],
    ),
    ("experts_boundary", 4, SPREAD | dict(zero_stage=2), ["zero_stage is 2", "to 3"]),
    ("experts_boundary", 4, SPREAD | dict(sync="streaming"), ["sync streaming", "resident"]),
    ("experts_boundary", 4, SPREAD | dict(deterministic=True), ["deterministic to false"]),
    ("experts_boundary", 4, SPREAD | TP2, ["expert_tensor_parallel_size 2", "to 1"]),
    (
        "experts_boundary",
        2,
        EXPERTS | TP2 | dict(expert_tensor_parallel_size=1, backend="ddp"),
        ["expert_tensor_parallel_size 1", "backend is ddp", "to tensor_model_parallel_size"],
    ),
    ("cold_experts", 1, dict(cold_expert_offload=True), ["num_experts is not given", "cold_expert_offload to false"]),
    ("cold_experts", 1, dict(cold_expert_tokens=5), ["cold_expert_tokens 5", "cold_expert_offload to true"]),
    ("cold_experts", 1, EXPERTS | dict(cold_expert_steps=5), ["cold_expert_steps 5", "leave cold_expert_steps out"]),
    ("cold_experts", 1, COLD | dict(backend="fsdp2"), ["backend is fsdp2", "deepspeed"]),
    ("cold_experts", 1, COLD | dict(zero_stage=2), ["zero_stage is 2", "to 3"]),
    ("cold_experts", 1, COLD | dict(sync="streaming"), ["sync streaming", "resident"]),
    ("scaled_loss", 1, dict(fp16=True, backend="megatron"), ["megatron", "bf16"]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "world_size", "keys", "words"), BROKEN)
def test_a_broken_rule_says_what_to_write(
    rule: str, world_size: int, keys: dict[str, object], words: list[str]
) -> None:
    check_broken(rule, world_size, keys, words)
