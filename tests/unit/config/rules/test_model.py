"""Rules on ranges, the model and its experts, each broken on purpose: the text names the key and what to write."""

from __future__ import annotations

import pytest

from tests.unit.config.rules.cases import COLD, EXPERTS, LATENT, PACKED, PP2, Case, check_broken

BROKEN: list[Case] = [
    ("required", 1, dict(num_layers=None), ["num_layers is required", "--num_layers"]),
    ("required", 1, dict(lr=None), ["lr is required"]),
    ("required", 1, dict(lr=-1.0), ["lr is -1.0", "more than 0"]),
    ("required", 1, dict(train_iters=0), ["train_iters is 0", "at least 1"]),
    ("ranges", 1, dict(tensor_model_parallel_size=0), ["tensor_model_parallel_size is 0", "at least 1"]),
    ("ranges", 1, dict(clip_grad=-1.0), ["clip_grad is -1.0", "at least 0"]),
    ("ranges", 1, dict(adam_eps=0.0), ["adam_eps is 0.0", "more than 0"]),
    ("ranges", 1, dict(adam_beta2=1.0), ["adam_beta2 is 1.0", "below 1"]),
    ("ranges", 1, dict(hidden_dropout=1.5), ["hidden_dropout is 1.5", "below 1"]),
    ("ranges", 1, dict(rotary_percent=1.5), ["rotary_percent is 1.5", "more than 0 and at most 1."]),
    ("world_size", 0, dict(), ["0 ranks"]),
    ("ranges", 1, COLD | dict(cold_expert_steps=0), ["cold_expert_steps is 0", "at least 1"]),
    ("heads", 1, dict(hidden_size=100), ["hidden_size 100", "num_attention_heads 8", "96 or 104", "5 or 10"]),
    ("heads", 1, dict(num_query_groups=3), ["num_query_groups 3", "2 or 4"]),
    ("positions", 1, dict(max_position_embeddings=32), ["32", "seq_length 64", "rope"]),
    ("activation", 1, dict(swiglu=True, squared_relu=True), ["swiglu", "squared_relu"]),
    ("latent_attention", 1, LATENT | dict(num_query_groups=2), ["num_query_groups 2", "leave num_query_groups out"]),
    ("latent_attention", 1, LATENT | dict(qk_pos_emb_head_dim=5), ["qk_pos_emb_head_dim 5", "4 or 6"]),
    ("latent_keys", 1, dict(q_lora_rank=8), ["q_lora_rank", "multi_latent_attention"]),
    ("recompute", 1, dict(recompute_method="block"), ["recompute_method", "recompute_granularity"]),
    ("recompute", 1, dict(recompute_granularity="full", recompute_modules=["mlp"]), ["recompute_modules", "selective"]),
    ("recompute", 1, dict(recompute_granularity="selective", recompute_num_layers=1), ["recompute_num_layers", "full"]),
    ("recompute_modules", 1, dict(recompute_granularity="selective", recompute_modules=["mpl"]), ["'mpl'", "mlp"]),
    (
        "recompute_modules",
        1,
        dict(recompute_granularity="selective", recompute_modules=["layernorm"], transformer_impl="local"),
        ["layernorm", "transformer_impl to auto"],
    ),
    (
        "recompute_modules",
        1,
        EXPERTS | dict(recompute_granularity="selective", recompute_modules=["moe_act"]),
        ["moe_act", "moe_grouped_gemm"],
    ),
    (
        "recompute_modules",
        1,
        dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"]),
        ["mla_up_proj", "multi_latent_attention"],
    ),
    ("recompute_modules", 1, dict(recompute_granularity="selective", recompute_modules=["moe"]), ["num_experts"]),
    ("prediction", 1, dict(mtp_num_layers=1), ["mtp_num_layers", "rope"]),
    (
        "document_mask",
        1,
        PACKED | dict(mtp_num_layers=1),
        ["mtp_num_layers stops predicting", "leave mtp_num_layers out", "transformer_impl to local"],
    ),
    ("document_mask", 1, PACKED | dict(variable_seq_lengths=True), ["variable_seq_lengths sends lengths of rows"]),
    (
        "document_mask", 1, PACKED | dict(multi_latent_attention=True, v_head_dim=256),
        ["v_head_dim 256 is above", "leave v_head_dim out"],
    ),
    (
        "document_mask", 2,
        PACKED | dict(
            num_experts=4, add_bias_linear=False, moe_router_load_balancing_type="seq_aux_loss", micro_batch_size=2,
            tensor_model_parallel_size=2, sequence_parallel=True,
        ),
        ["seq_aux_loss balances each row", "a part of all 2", "leave moe_router_load_balancing_type out"],
    ),
    (
        "prediction",
        2,
        dict(mtp_num_layers=1, position_embedding_type="rope", context_parallel_size=2),
        ["mtp_num_layers 1", "depend on the cut", "context_parallel_size to 1"],
    ),
    (
        "prediction",
        1,
        dict(
            mtp_num_layers=1,
            position_embedding_type="rope",
            recompute_granularity="full",
            recompute_num_layers=2,
        ),
        ["recompute_num_layers 2", "one by one", "recompute_num_layers to 1"],
    ),
    ("kernels", 1, dict(gradient_accumulation_fusion=True), ["backend is deepspeed", "20 bytes per parameter"]),
    (
        "kernels",
        2,
        PP2 | dict(gradient_accumulation_fusion=True, backend="megatron", schedule="zb-h1"),
        ["schedule zb-h1", "leave it out"],
    ),
    (
        "kernels",
        1,
        dict(cross_entropy_loss_fusion=True),
        ["rounds the gradient of the logits to BF16", "params_dtype is fp32", "leave it out"],
    ),
    ("kernels", 1, dict(apply_rope_fusion=True), ["no rope", "leave it out"]),
    (
        "kernels",
        1,
        dict(apply_rope_fusion=True, position_embedding_type="rope", transformer_impl="local"),
        ["apply_rope_fusion needs Transformer Engine's layers", "leave it out"],
    ),
    (
        "kernels",
        1,
        EXPERTS | dict(moe_grouped_gemm=True, transformer_impl="local"),
        ["moe_grouped_gemm needs Transformer Engine's layers", "leave it out"],
    ),
    ("needs_experts", 1, dict(moe_router_topk=4), ["moe_router_topk", "num_experts"]),
    ("needs_experts", 2, dict(expert_model_parallel_size=2), ["expert_model_parallel_size", "num_experts"]),
    ("layer_pattern", 1, EXPERTS | dict(moe_layer_freq=[0, 1]), ["2 layers", "num_layers is 8"]),
    ("layer_pattern", 1, EXPERTS | dict(moe_layer_freq=[2] * 8), ["[2]", "1 (experts) or 0"]),
    ("layer_pattern", 1, EXPERTS | dict(moe_layer_freq=0), ["moe_layer_freq is 0"]),
    ("router", 1, EXPERTS | dict(moe_router_topk=9), ["moe_router_topk 9", "num_experts 8"]),
    ("router", 1, EXPERTS | dict(moe_router_load_balancing_type="auxloss"), ["'auxloss'", "seq_aux_loss"]),
    ("router", 1, EXPERTS | dict(moe_router_enable_expert_bias=True), ["sigmoid"]),
    ("router", 1, EXPERTS | dict(moe_router_topk=1), ["moe_router_topk 1", "moe_router_pre_softmax to true"]),
    (
        "balancing_coefficient",
        1,
        EXPERTS | dict(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="none"),
        ["moe_aux_loss_coeff 0.1", "aux_loss"],
    ),
    ("router_groups", 1, EXPERTS | dict(moe_router_num_groups=4), ["moe_router_group_topk", "both"]),
    (
        "router_groups",
        1,
        EXPERTS | dict(moe_router_num_groups=3, moe_router_group_topk=1),
        ["num_experts 8", "moe_router_num_groups 3", "2 or 4"],
    ),
    (
        "router_groups",
        1,
        EXPERTS | dict(moe_router_num_groups=2, moe_router_group_topk=4),
        ["moe_router_group_topk 4", "set it to 2"],
    ),
    (
        "router_groups",
        1,
        EXPERTS | dict(moe_router_topk=5, moe_router_num_groups=4, moe_router_group_topk=2),
        ["moe_router_topk 5", "4 or 6"],
    ),
    ("expert_parallel", 3, EXPERTS | dict(expert_model_parallel_size=3), ["num_experts 8", "2 or 4"]),
    (
        "expert_parallel",
        6,
        EXPERTS | PP2 | dict(expert_model_parallel_size=4),
        ["world size 6", "expert_model_parallel_size 4", "= 8", "to 8"],
    ),
    ("experts_with_tensor_parallel", 2, EXPERTS | dict(tensor_model_parallel_size=2), ["sequence_parallel"]),
    (
        "expert_widths",
        2,
        EXPERTS | dict(moe_ffn_hidden_size=63, tensor_model_parallel_size=2, sequence_parallel=True),
        ["moe_ffn_hidden_size 63", "62 or 64"],
    ),
    ("shared_experts", 1, dict(num_experts=8, moe_shared_expert_intermediate_size=64), ["add_bias_linear to false"]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "world_size", "keys", "words"), BROKEN)
def test_a_broken_rule_says_what_to_write(
    rule: str, world_size: int, keys: dict[str, object], words: list[str]
) -> None:
    check_broken(rule, world_size, keys, words)
