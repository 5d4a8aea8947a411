"""Every rule broken on purpose: the text names the numbers, the key and what to write instead."""

from __future__ import annotations

import pytest

from megaaccum.config import resolve
from megaaccum.config.rules import RULES, Subject, broken_rules
from megaaccum.errors import ConfigError
from tests.support.configs import make, plan

EXPERTS = dict(num_experts=8, add_bias_linear=False)
COLD = EXPERTS | dict(cold_expert_offload=True)
SPREAD = EXPERTS | dict(expert_model_parallel_size=2)
OVERLAP = SPREAD | dict(overlap_moe_expert_parallel_comm=True, bf16=True)
BF16 = dict(bf16=True, optimizer_dtype="bf16")
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
LATENT = dict(multi_latent_attention=True, position_embedding_type="rope", kv_lora_rank=16)
SAME = dict(reproducible="layout")
PP2 = dict(pipeline_model_parallel_size=2)
FP8 = dict(fp8_format="hybrid", bf16=True)
EARLY = PP2 | dict(speculative_step=True, schedule="zbv", num_layers=4)
PACKED = dict(reset_attention_mask=True, transformer_impl="transformer_engine")
GLOBAL = dict(num_experts=4, add_bias_linear=False, moe_router_load_balancing_type="global_aux_loss")

# Rule, ranks, keys that break it, words of its text.
BROKEN: list[tuple[str, int, dict[str, object], list[str]]] = [
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
    (
        "world_factors",
        6,
        dict(tensor_model_parallel_size=2) | PP2,
        ["world size 6", "tensor_model_parallel_size 2", "pipeline_model_parallel_size 2 = 4", "4 or 8"],
    ),
    ("tensor_parallel", 3, dict(tensor_model_parallel_size=3), ["num_attention_heads 8", "2 or 4", "6 or 9"]),
    ("tensor_parallel", 2, dict(tensor_model_parallel_size=2, ffn_hidden_size=63), ["ffn_hidden_size 63", "62 or 64"]),
    (
        "query_groups",
        3,
        dict(num_attention_heads=12, hidden_size=72, ffn_hidden_size=72, num_query_groups=4)
        | dict(tensor_model_parallel_size=3),
        ["num_query_groups 4", "tensor_model_parallel_size 3", "num_query_groups to 3 or 6", "2 or 4"],
    ),
    ("sequence_parallel", 1, dict(sequence_parallel=True), ["tensor_model_parallel_size", "silently", "to false"]),
    (
        "sequence_parallel",
        4,
        dict(sequence_parallel=True, tensor_model_parallel_size=4, seq_length=66),
        ["seq_length 66", "tensor_model_parallel_size 4", "64 or 68"],
    ),
    ("context_parallel", 2, dict(context_parallel_size=2, seq_length=66), ["seq_length 66", "= 4", "64 or 68"]),
    ("context_parallel", 2, dict(context_parallel_size=2, attention_backend="unfused"), ["fused attention", "to auto"]),
    ("context_parallel", 2, dict(context_parallel_size=2, reset_attention_mask=True), ["no mask", "to false"]),
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
    ("schedule", 1, dict(virtual_pipeline_model_parallel_size=2), ["pipeline_model_parallel_size above 1"]),
    ("schedule", 2, PP2 | dict(schedule="none"), ["schedule none", "not 2"]),
    ("schedule", 1, dict(schedule="1f1b"), ["schedule 1f1b", "leave schedule out"]),
    ("schedule", 2, PP2 | dict(schedule="interleaved"), ["virtual_pipeline_model_parallel_size"]),
    ("schedule", 2, PP2 | dict(schedule="1f1b", virtual_pipeline_model_parallel_size=2), ["is 2", "interleaved"]),
    ("group_size", 2, PP2 | dict(microbatch_group_size_per_vp_stage=2), ["interleaved", "leave it out"]),
    ("chunk_count", 2, PP2 | dict(num_layers_per_virtual_pipeline_stage=3), ["num_layers 8", "= 6", "6 or 12"]),
    (
        "chunk_count",
        2,
        PP2 | dict(num_layers_per_virtual_pipeline_stage=2, virtual_pipeline_model_parallel_size=4),
        ["makes 2 chunks", "is 4"],
    ),
    (
        "chunk_count",
        2,
        PP2 | dict(num_layers_per_virtual_pipeline_stage=2, decoder_first_pipeline_num_layers=4),
        ["decoder_first_pipeline_num_layers", "virtual_pipeline_model_parallel_size instead"],
    ),
    ("even_stages", 3, dict(pipeline_model_parallel_size=3), ["num_layers 8", "6 or 9", "to 2 or 4"]),
    ("even_stages", 2, PP2 | dict(virtual_pipeline_model_parallel_size=3), ["2 *", "3 = 6", "6 or 12"]),
    (
        "uneven_ends",
        4,
        dict(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=1),
        ["leaves 7 layers", "3 stages", "6 or 9"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=3),
        ["leaves 2 layers for 0 stages"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=3, virtual_pipeline_model_parallel_size=2),
        ["decoder_first_pipeline_num_layers 3", "2 or 4"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=4, pipeline_model_parallel_layout="Et*4|t*4L"),
        ["pipeline_model_parallel_layout"],
    ),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|x*4L"), ["'x'", "Et*3|(tt|)*29,m|L"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*3L"), ["7 layers t", "is 8"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*2|t*2L"), ["3 stages"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="t*4|t*4L"), ["E (the embedding)"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4"), ["L (head and loss)"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4mL"), ["1 layers m", "is 0"]),
    (
        "explicit_layout",
        2,
        PP2
        | dict(pipeline_model_parallel_layout="Et*4|t*3mtL", mtp_num_layers=1, position_embedding_type="rope"),
        ["every t must come before the first m"],
    ),
    (
        "explicit_layout",
        2,
        PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4L", virtual_pipeline_model_parallel_size=2),
        ["makes 1 chunks", "is 2"],
    ),
    (
        "block_recompute",
        2,
        PP2 | dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=5),
        ["recompute_num_layers 5", "4 layers", "at most 4"],
    ),
    (
        "traffic",
        4,
        dict(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
        | dict(overlap_p2p_comm=True, batch_p2p_comm=True),
        ["both true", "batch_p2p_comm to false"],
    ),
    ("traffic", 2, PP2 | dict(overlap_p2p_comm=True), ["interleaved schedule", "1f1b"]),
    (
        "interleaved_on_two_ranks",
        2,
        PP2 | dict(virtual_pipeline_model_parallel_size=2, batch_p2p_comm=True),
        ["wrong gradients", "overlap_p2p_comm is true and batch_p2p_comm is false"],
    ),
    (
        "interleaved_on_two_ranks",
        2,
        PP2 | dict(virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=False),
        ["wrong gradients"],
    ),
    ("one_precision", 1, dict(bf16=True, fp16=True), ["bf16 and fp16"]),
    ("one_precision", 1, dict(bf16=True, params_dtype="fp32"), ["bf16 is true and params_dtype is fp32"]),
    ("one_precision", 1, dict(bf16=False, params_dtype="bf16"), ["bf16 is false and params_dtype is bf16"]),
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
    ("double_precision", 1, dict(params_dtype="fp64"), ["fp64", "backend to ddp"]),
    ("schedule", 2, PP2 | dict(schedule="dualpipe"), ["'dualpipe'", "did you mean dualpipev"]),
    ("schedule", 2, PP2 | dict(schedule="none.csv"), ["none.csv", "cannot be read"]),
    ("schedule", 1, dict(schedule="zbv"), ["schedule zbv", "above 1"]),
    (
        "schedule",
        2,
        PP2 | dict(schedule="zb-h1", virtual_pipeline_model_parallel_size=2),
        ["schedule zb-h1 has 1 model chunk per rank", "is 2"],
    ),
    (
        "schedule",
        2,
        PP2 | dict(schedule="dualpipev", virtual_pipeline_model_parallel_size=4),
        ["schedule dualpipev has 2 model chunks per rank", "is 4"],
    ),
    (
        "v_shape",
        2,
        PP2
        | dict(
            schedule="zbv", mtp_num_layers=1, position_embedding_type="rope",
            pipeline_model_parallel_layout="Et*3|ttt|ttm|L",
        ),
        ["m before its last stage", "zbv", "...|mL"],
    ),
    (
        "own_executor",
        2,
        PP2 | dict(schedule="zb-h1", transformer_impl="transformer_engine", backend="ddp"),
        ["zb-h1", "transformer_impl transformer_engine", "backend to deepspeed"],
    ),
    ("expert_overlap", 1, OVERLAP | dict(expert_model_parallel_size=1), ["there is none", "num_experts 8"]),
    ("expert_overlap", 4, OVERLAP | PP2 | dict(schedule="1f1b"), ["schedule 1f1b pairs none", "dualpipev"]),
    ("expert_overlap", 2, OVERLAP | dict(bf16=False), ["16-bit", "bf16 to true"]),
    ("expert_overlap", 2, OVERLAP | dict(fp8_format="hybrid"), ["fp8_format out"]),
    ("expert_overlap", 2, OVERLAP | dict(sync="streaming"), ["sync streaming cannot gather"]),
    ("expert_overlap", 2, OVERLAP | dict(moe_token_dispatcher_type="allgather"), ["allgather", "alltoall"]),
    ("expert_overlap", 2, OVERLAP | dict(recompute_granularity="full"), ["selective without moe"]),
    (
        "expert_overlap",
        2,
        OVERLAP | dict(mtp_num_layers=1, position_embedding_type="rope", loss_norm="microbatch"),
        ["loss_norm to token"],
    ),
    ("traced", 2, PP2 | dict(schedule_trace="t.json"), ["schedule_trace t.json", "schedule 1f1b", "dualpipev"]),
    ("even_stages", 2, PP2 | dict(schedule="zbv", num_layers=10), ["num_layers 10", "= 4", "8 or 12"]),
    ("low_precision_optimizer", 1, dict(optimizer_dtype="bf16"), ["fp32 parameters", "bf16 to true"]),
    ("low_precision_optimizer", 1, BF16 | dict(backend="ddp"), ["not ddp"]),
    ("low_precision_optimizer", 1, BF16 | dict(zero_stage=2), ["zero_stage is 2", "to 3"]),
    ("low_precision_optimizer", 1, BF16 | dict(offload_optimizer="cpu"), ["offload_optimizer to none"]),
    ("low_precision_sums", 1, dict(grad_accum_dtype="bf16"), ["fp32 parameters", "grad_accum_dtype to fp32"]),
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
    ("ranges", 1, COLD | dict(cold_expert_steps=0), ["cold_expert_steps is 0", "at least 1"]),
    ("scaled_loss", 1, dict(fp16=True, backend="megatron"), ["megatron", "bf16"]),
    ("deepspeed_only", 1, dict(backend="ddp", zero_stage=3), ["zero_stage needs backend deepspeed", "ddp"]),
    ("deepspeed_only", 1, dict(backend="ddp", offload_optimizer="cpu"), ["offload_optimizer"]),
    ("deepspeed_only", 1, dict(backend="ddp", deepspeed={"steps_per_print": 1}), ["deepspeed block"]),
    ("rates", 1, dict(min_lr=0.01), ["min_lr 0.01", "lr 0.001", "at most 0.001"]),
    ("rates", 1, dict(lr_warmup_init=0.01), ["lr_warmup_init 0.01"]),
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
]  # fmt: skip


def _texts(rule_name: str, world_size: int, keys: dict[str, object]) -> list[str]:
    """What the one rule says about these keys, with everything derived as in `resolve`."""
    import copy

    from megaaccum.config.derive import derive

    (rule,) = (rule for rule in RULES if rule.__name__ == rule_name)
    written = make(**keys)
    config = copy.deepcopy(written)
    derive(config, [])
    return list(rule(Subject(config=config, written=written, world_size=world_size)))


@pytest.mark.parametrize(("rule", "world_size", "keys", "words"), BROKEN)
def test_a_broken_rule_says_what_to_write(rule: str, world_size: int, keys: dict, words: list[str]) -> None:
    texts = _texts(rule, world_size, keys)
    assert any(all(word in text for word in words) for text in texts), texts
    with pytest.raises(ConfigError) as caught:
        resolve(make(**keys), world_size=world_size)
    assert set(texts) <= set(caught.value.problems)


def test_every_rule_is_broken_above() -> None:
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
    (1, EXPERTS | dict(moe_router_num_groups=4, moe_router_group_topk=2)),
    (2, SPREAD | COLD | dict(cold_expert_tokens=100, cold_expert_steps=5)),
    (1, LATENT),
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
        assert len(broken_rules(_derived(config))) == 1


def _derived(written) -> Subject:
    import copy

    from megaaccum.config.derive import derive

    config = copy.deepcopy(written)
    derive(config, [])
    return Subject(config=config, written=written, world_size=1)


def test_interleaved_needs_whole_groups_in_a_flush() -> None:
    with pytest.raises(ConfigError, match="18 micro-batches in a flush leave a last group of 18 % "):
        plan(4, pp_microbatches=18, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
