"""All rules together: each is broken in one of the files beside this one, and what keeps them is accepted."""

from __future__ import annotations

import pytest

from megaaccum.config import resolve
from megaaccum.config.rules import RULES, broken_rules
from megaaccum.errors import ConfigError
from tests.support.configs import make, plan
from tests.unit.config.rules import model, parallel, sharding, step
from tests.unit.config.rules.cases import (
    BF16,
    COLD,
    COLUMNS,
    EARLY,
    EXPERTS,
    FP8,
    LATENT,
    PACKED,
    PP2,
    SAME,
    SPREAD,
    TP2,
    derived,
)

BROKEN = [*model.BROKEN, *parallel.BROKEN, *sharding.BROKEN, *step.BROKEN]


@pytest.mark.parametrize(("rule_name", "world_size", "keys", "words"), BROKEN)
def test_a_broken_rule_says_what_to_write(
    rule_name: str, world_size: int, keys: dict[str, object], words: list[str]
) -> None:
    """One text of the rule has the words, and `resolve` raises all of them."""
    (rule,) = (rule for rule in RULES if rule.__name__ == rule_name)
    texts = list(rule(derived(make(**keys), world_size)))
    assert any(all(word in text for word in words) for text in texts), texts
    with pytest.raises(ConfigError) as caught:
        resolve(make(**keys), world_size=world_size)
    assert set(texts) <= set(caught.value.problems)


def test_every_rule_is_broken() -> None:
    assert {rule.__name__ for rule in RULES} == {name for name, *_ in BROKEN}


LEGAL: list[tuple[int, dict[str, object]]] = [
    (1, dict()),
    (2, dict()),
    (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    (8, dict(tensor_model_parallel_size=2) | PP2),
    (2, dict(context_parallel_size=2)),
    (2, PP2 | dict(virtual_pipeline_model_parallel_size=2)),
    (4, dict(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, batch_p2p_comm=True)),
    (2, PP2 | dict(num_layers_per_virtual_pipeline_stage=2)),
    (2, PP2 | dict(schedule="zbv")),
    (2, PP2 | dict(schedule="dualpipev", virtual_pipeline_model_parallel_size=2)),
    (2, PP2 | dict(schedule="zb-h1")),
    (2, EARLY),
    (4, EARLY | EXPERTS | dict(backend="fsdp2", bf16=True)),
    (2, PP2 | dict(schedule="gpipe", transformer_impl="local")),
    (4, dict(pipeline_model_parallel_size=4, schedule="zbv", decoder_last_pipeline_num_layers=2)),
    (2, PP2 | dict(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=5)),
    (4, dict(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=2)),
    (2, PP2 | dict(pipeline_model_parallel_layout="Et*2|(tt|)*2,ttL")),
    (1, EXPERTS),
    (4, EXPERTS | PP2 | dict(expert_model_parallel_size=2, moe_layer_freq=[0, *[1] * 7])),
    (1, EXPERTS | dict(moe_token_dispatcher_type="allgather", variable_seq_lengths=True)),
    (1, EXPERTS | dict(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)),
    (1, EXPERTS | dict(moe_router_load_balancing_type="global_aux_loss")),
    (1, EXPERTS | dict(moe_router_topk=1, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0)),
    (1, EXPERTS | dict(moe_router_topk=1, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)),
    (2, SPREAD | dict(moe_token_dispatcher_type="allgather")),
    (2, SPREAD | dict(variable_seq_lengths=True)),
    (1, EXPERTS | dict(moe_expert_capacity_factor=8.0)),
    (1, dict(backend="fsdp2", sync="streaming")),
    (2, SPREAD | SAME),
    (2, SAME | BF16),
    (1, LATENT | dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])),
    (
        1,
        dict(recompute_granularity="selective", recompute_modules=["layernorm"], transformer_impl="transformer_engine"),
    ),
    (1, dict(sft=True, tokenizer_model="m", train_data_path=["a.jsonl"])),
    (1, COLUMNS | dict(recompute_granularity="selective", recompute_modules=["mlp"])),
    (2, TP2 | PACKED | dict(micro_batch_size=2)),
    (1, dict(sync="streaming", max_live_parameters=1000, lr_scaling="sqrt", lr_reference_batch_size=8)),
    (1, dict(apply_rope_fusion=True, position_embedding_type="rope", data_path=["a"], split="9,1,0")),
    (1, EXPERTS | dict(nonfinite="drop_microbatch", short_batch="pad")),
    (1, SAME | EXPERTS | dict(transformer_impl="transformer_engine", moe_token_dispatcher_type="allgather")),
    (1, SAME | EXPERTS | dict(sync="streaming", optimizer="muon", add_bias_linear=True)),
    (2, SAME | dict(bf16=True, grad_reduce_dtype="bf16", offload_optimizer="cpu")),
    (2, SAME | dict(mtp_num_layers=1, position_embedding_type="rope", untie_embeddings_and_output_weights=True)),
    (2, SAME | dict(backend="fsdp2")),
    (2, SAME | dict(sync="streaming", rampup_batch_size=[8, 8, 64])),
    (2, PP2 | dict(schedule="zbv", schedule_trace="trace")),
    (2, PP2 | dict(noise_scale_window=10, untie_embeddings_and_output_weights=True)),
    (1, dict(noise_scale_window=10, mtp_num_layers=1, position_embedding_type="rope")),
    (1, dict(verify_at_start=True, rng="megatron", attention_dropout=0.0, hidden_dropout=0.0)),
    (1, dict(verify_at_start=True, attention_dropout=0.1)),
    (1, dict(fp16=True, nonfinite="zero", fim_data=True, data_path=["a"])),
    (1, dict(static_graph=True)),
    (
        1,
        EXPERTS | dict(static_graph=True, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
    ),
    (1, dict(lr_warmup_init=1e-5, megatron=dict(experimental_attention_variant="gated_delta_net"))),
    (1, dict(lr_mult=["embedding.*=0"])),
    (1, EXPERTS | dict(moe_router_num_groups=4, moe_router_group_topk=2)),
    (2, SPREAD | COLD | dict(cold_expert_tokens=100, cold_expert_steps=5)),
    (1, LATENT),
    (1, dict(megatron=dict(window_size=[8, 0], window_attn_skip_freq=[1, 0] * 4, no_rope_freq=4))),
    (1, dict(megatron=dict(window_size=(0, 0), window_attn_skip_freq=3, no_rope_freq=[1, 0] * 4))),
    (1, dict(bf16=True, grad_accum_dtype="bf16")),
    (1, dict(params_dtype="bf16")),
    (1, dict(fp16=True)),
    (1, dict(params_dtype="fp16", loss_scale=1024.0)),
    (1, dict(fp16=True, initial_loss_scale=4.0, min_loss_scale=4.0, hysteresis=1, loss_scale_window=1)),
    (1, dict(backend="ddp", params_dtype="fp64")),
    (1, dict(recompute_granularity="full")),
    (1, dict(recompute_granularity="selective", recompute_modules=["mlp", "core_attn"])),
    (1, dict(lr_decay_style="WSD", lr_wsd_decay_iters=10, lr_warmup_fraction=0.1)),
    (1, dict(weight_decay_incr_style="linear", start_weight_decay=0.1, end_weight_decay=0.2)),
    (1, dict(data_path=["0.3", "a", "0.7", "b"])),
    (1, dict(data_path=["a", "b"])),
    (1, dict(train_data_path=["a"], valid_data_path=["b"])),
    (1, dict(expert_model_parallel_size=1)),
    (1, dict(num_attention_heads=6, hidden_size=100, kv_channels=16)),
    (1, FP8),
    (8, FP8 | PP2 | TP2 | dict(fp8_amax_history_len=16, fp8_amax_compute_algo="max", zero_stage=1)),
    (2, FP8 | PP2 | dict(schedule="dualpipev", fp8_recipe="tensorwise")),
    (2, PP2 | dict(schedule="zb-h1", transformer_impl="transformer_engine")),
    (1, FP8 | dict(backend="megatron", fp8_recipe="blockwise", first_last_layers_bf16=True)),
]


@pytest.mark.parametrize(("world_size", "keys"), LEGAL)
def test_a_configuration_that_keeps_the_rules_is_accepted(world_size: int, keys: dict[str, object]) -> None:
    plan(world_size, **keys)


def test_all_broken_rules_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(make(hysteresis=1, swiglu=True, squared_relu=True, min_lr=1.0, device_batch_size=3), world_size=1)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for words in ("hysteresis", "squared_relu", "min_lr", "device_batch_size 3"):
        assert words in text


def test_a_missing_size_is_told_once_and_breaks_nothing_else() -> None:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "train_iters", "lr"):
        config = make(**{name: None})
        assert len(broken_rules(derived(config))) == 1


def test_interleaved_needs_whole_groups_in_a_flush() -> None:
    with pytest.raises(ConfigError, match="18 micro-batches in a flush leave a last group of 18 % "):
        plan(4, pp_microbatches=18, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)


@pytest.mark.parametrize(
    "keys",
    [
        dict(tensor_model_parallel_size=0, reproducible="layout"),
        dict(tensor_model_parallel_size=0, optimizer="muon"),
        dict(tensor_model_parallel_size=0, optimizer="soap"),
        dict(micro_batch_size=0, total_batch_size=64, global_batch_size=None),
        dict(pipeline_model_parallel_size=0, num_layers_per_virtual_pipeline_stage=1),
        dict(pipeline_model_parallel_size=0, pipeline_model_parallel_layout="Et*8L"),
        dict(pp_microbatches=0, total_batch_size=64, global_batch_size=None),
    ],
)
def test_a_size_of_zero_is_a_text_and_no_division(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is 0: it must be at least 1"):
        resolve(make(**keys), world_size=2)
