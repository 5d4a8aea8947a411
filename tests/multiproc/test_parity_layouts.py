"""The same parity with the matrices cut (tp), with tied embeddings on two stages, recompute and optimizer offload."""

import pytest

from tests.support.distance import check
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


def zero(stage: int) -> str:
    return f"--zero_stage {stage} "


def tensor_parallel(lane: str) -> list[Case]:
    """tp 2 on four ranks, with dp 2 and with pp 2."""
    return [
        Case(4, TP + SPLIT, lane=lane),
        Case(4, TP + SP + SPLIT, lane=lane),
        Case(4, TP + SP + SPLIT, GATED_WITH_BIAS, lane),
        Case(4, TP + SPLIT, GATED_WITH_BIAS + UNTIED, lane),
        Case(4, TP + PP + SPLIT, GATED_WITH_BIAS, lane),
        Case(4, TP + PP + SP + SPLIT, lane=lane),
        Case(4, TP + PP + SP + SPLIT + "--virtual_pipeline_model_parallel_size 2", GATED_WITH_BIAS + UNTIED, lane),
    ]


def test_tensor_parallel_float64():
    check(tensor_parallel("fp64"))


def test_tensor_parallel_engine():
    check(tensor_parallel("fp32"))


@pytest.mark.parametrize("stage", [1, 2])
def test_tensor_parallel_at_other_zero_stages(stage):
    check([Case(4, TP + SP + SPLIT + zero(stage), GATED_WITH_BIAS), Case(4, TP + PP + SP + SPLIT + zero(stage))])


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_tensor_parallel_alone(lane):
    check([Case(2, TP + SPLIT, LLAMA, lane), Case(2, TP + SP + SPLIT, LLAMA + UNTIED, lane)])


def test_untied_embeddings_over_stages():
    check([Case(4, PP + SPLIT, UNTIED, "fp64"), *(Case(4, PP + SPLIT + zero(stage), UNTIED) for stage in STAGES)])


def test_tied_embeddings_over_stages_with_bf16_parameters():
    check([Case(4, PP + SPLIT + zero(stage), LLAMA, "bf16") for stage in STAGES])


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_recompute(lane):
    full, selective = "--recompute_granularity full ", "--recompute_granularity selective "
    interleaved = "--virtual_pipeline_model_parallel_size 2 "
    check(
        [
            Case(4, PP + SPLIT + full, lane=lane),
            Case(4, PP + SPLIT + interleaved + full + "--recompute_method uniform --recompute_num_layers 1", lane=lane),
            Case(4, PP + SPLIT + selective, lane=lane),
            Case(4, TP + SP + SPLIT + full, GATED_WITH_BIAS, lane),
        ]
    )


def test_optimizer_on_the_cpu():
    check([Case(4, PP + SPLIT + zero(stage) + "--offload_optimizer cpu", LLAMA) for stage in STAGES])
