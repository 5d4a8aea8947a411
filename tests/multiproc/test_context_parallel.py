"""Sequences cut over ranks (cp), and torch's fused attention: the gradient of one process with plain attention."""

import pytest

from tests.support.distance import check
from tests.support.parity import Case

CP = "--context_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
PP = "--pipeline_model_parallel_size 2 "
SPLIT = "--grad_accum_steps 2 --pp_microbatches 4 "
FUSED = "--attention_backend fused "
LLAMA = (
    "--num_layers 4 --swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope"
    " --num_query_groups 2 --group_query_attention --disable_bias_linear "
)
SHORT = "--num_layers 4 "


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_sequences_cut_over_ranks(lane):
    check(
        [
            Case(4, CP + SPLIT, SHORT, lane),
            Case(4, CP + SPLIT, LLAMA + "--micro_batch_size 2 --loss_norm microbatch", lane),
            Case(4, CP + PP + SPLIT, LLAMA, lane),
            Case(4, CP + TP + SPLIT, LLAMA, lane),
            Case(4, CP + PP + SPLIT + "--schedule zbv", SHORT, lane),
            Case(4, CP + SPLIT + "--recompute_granularity full", SHORT, lane),
        ]
    )


def test_sequences_cut_over_ranks_on_every_backend():
    check(
        [
            Case(4, CP + SPLIT + "--zero_stage 1", SHORT),
            Case(4, CP + PP + SPLIT + "--sync streaming", SHORT),
            Case(4, CP + PP + SPLIT + "--backend fsdp2", SHORT),
            Case(4, CP + PP + SPLIT + "--backend megatron", SHORT),
        ]
    )


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_fused_attention(lane):
    check(
        [
            Case(2, PP + SPLIT + FUSED, SHORT, lane),
            Case(2, PP + SPLIT + FUSED + "--schedule zb-h1", LLAMA, lane),
            Case(2, TP + SPLIT + FUSED, LLAMA, lane),
        ]
    )


def test_side_losses_of_cut_sequences():
    experts = "--num_experts 4 --moe_router_load_balancing_type none --disable_bias_linear "
    balanced = "--num_experts 4 --moe_aux_loss_coeff 0.05 --moe_z_loss_coeff 0.01 --disable_bias_linear "
    check([Case(4, CP + PP + SPLIT, SHORT + model) for model in (experts, balanced)])
