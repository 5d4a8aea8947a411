"""The same parity with the matrices cut (tp), with tied embeddings on two stages, recompute and optimizer offload."""

from tests.support.distance import cells
from tests.support.parity import Case

TP = "--tensor_model_parallel_size 2 "
PP = "--pipeline_model_parallel_size 2 "
SP = "--sequence_parallel "
SPLIT = "--grad_accum_steps 2 --pp_microbatches 4 "
LLAMA = (
    "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "
    "--no_add_bias_linear "
)
GATED_WITH_BIAS = "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "
UNTIED = "--untie_embeddings_and_output_weights "
STAGES = (1, 2, 3)
LANES = ("fp64", "fp32")


def cell(world_size: int, layout: str, model: str = "", lane: str = "fp32") -> Case:
    """A case of four layers; of eight where a rank has several chunks, each of two layers."""
    several = "virtual" in layout or "zbv" in layout
    return Case(world_size, layout, model if several else "--num_layers 4 " + model, lane)


def zero(stage: int) -> str:
    return f"--zero_stage {stage} "


def tensor_parallel(lane: str) -> list[Case]:
    """tp 2 on four ranks, with dp 2 and with pp 2."""
    return [
        cell(4, TP + SPLIT, lane=lane),
        cell(4, TP + SP + SPLIT, lane=lane),
        cell(4, TP + SP + SPLIT, GATED_WITH_BIAS, lane),
        cell(4, TP + SPLIT, GATED_WITH_BIAS + UNTIED, lane),
        cell(4, TP + PP + SPLIT, GATED_WITH_BIAS, lane),
        cell(4, TP + PP + SP + SPLIT, lane=lane),
        cell(4, TP + PP + SP + SPLIT + "--virtual_pipeline_model_parallel_size 2", GATED_WITH_BIAS + UNTIED, lane),
    ]


@cells(*tensor_parallel("fp64"), *tensor_parallel("fp32"))
def test_tensor_parallel(case, parity):
    parity(case)


@cells(
    *(cell(4, TP + SP + SPLIT + zero(stage), GATED_WITH_BIAS) for stage in (1, 2)),
    *(cell(4, TP + PP + SP + SPLIT + zero(stage)) for stage in (1, 2)),
)
def test_tensor_parallel_at_other_zero_stages(case, parity):
    parity(case)


@cells(
    *(cell(2, TP + SPLIT, LLAMA, lane) for lane in LANES),
    *(cell(2, TP + SP + SPLIT, LLAMA + UNTIED, lane) for lane in LANES),
)
def test_tensor_parallel_alone(case, parity):
    parity(case)


@cells(cell(4, PP + SPLIT, UNTIED, "fp64"), *(cell(4, PP + SPLIT + zero(stage), UNTIED) for stage in STAGES))
def test_untied_embeddings_over_stages(case, parity):
    parity(case)


@cells(*(cell(4, PP + SPLIT + zero(stage), LLAMA, "bf16") for stage in STAGES))
def test_tied_embeddings_over_stages_with_bf16_parameters(case, parity):
    parity(case)


FULL = "--recompute_granularity full "
INTERLEAVED = "--virtual_pipeline_model_parallel_size 2 "


def recomputed(lane: str) -> list[Case]:
    return [
        cell(4, PP + SPLIT + FULL, lane=lane),
        cell(4, PP + SPLIT + INTERLEAVED + FULL + "--recompute_method uniform --recompute_num_layers 1", lane=lane),
        cell(4, PP + SPLIT + "--recompute_granularity selective ", lane=lane),
        cell(4, TP + SP + SPLIT + FULL, GATED_WITH_BIAS, lane),
    ]


@cells(*recomputed("fp64"), *recomputed("fp32"))
def test_recompute(case, parity):
    parity(case)


@cells(*(cell(4, PP + SPLIT + zero(stage) + "--offload_optimizer cpu", LLAMA) for stage in STAGES))
def test_optimizer_on_the_cpu(case, parity):
    parity(case)


GPT_OSS = (
    UNTIED + "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.05 "
    "--softmax-type learnable --window-size 4,0 --window-attn-skip-freq 2 --position_embedding_type yarn "
    "--normalization RMSNorm --num_query_groups 2 --num_experts 4 --moe_router_topk 2 --moe_ffn_hidden_size 32 "
    "--moe_router_dtype fp64 "
)
"""Sinks and windows of attention, YaRN, a clamped gate with an offset, biases of experts and routers."""


@cells(
    cell(4, PP + SPLIT + "--schedule zbv --expert_model_parallel_size 2 ", GPT_OSS, "fp64"),
    cell(4, TP + SP + SPLIT + "--expert_tensor_parallel_size 1 --expert_model_parallel_size 2 ", GPT_OSS, "fp64"),
    cell(4, TP + SP + PP + SPLIT + "--expert_tensor_parallel_size 1 --sync streaming ", GPT_OSS),
    cell(4, SPLIT + "--backend fsdp2 --recompute_granularity full ", GPT_OSS),
)
def test_the_parts_of_gpt_oss(case, parity):
    parity(case)
