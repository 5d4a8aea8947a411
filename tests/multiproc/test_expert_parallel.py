"""Experts spread over data-parallel ranks: the gradient, the norm and the checkpoint of one process' model."""

from __future__ import annotations

from tests.multiproc.distance import check
from tests.multiproc.parity import Case

MODEL = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --disable_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 --moe_router_dtype fp64 "
)
EP = "--expert_model_parallel_size 2 "
SPLIT = "--grad_accum_steps 2 --num_chunks 2 "


def test_two_ranks_with_half_of_the_experts_each():
    check([Case(2, EP + SPLIT, MODEL), Case(2, EP + SPLIT + "--flush per_round", MODEL, "bf16")])


def test_four_ranks():
    """Each expert on two ranks; on one of four; on one rank of each of two stages."""
    check(
        [
            Case(4, EP + SPLIT, MODEL),
            Case(4, "--expert_model_parallel_size 4 " + SPLIT, MODEL),
            Case(4, EP + "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --num_chunks 4", MODEL),
        ]
    )
