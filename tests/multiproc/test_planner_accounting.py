"""The planner's memory model against tensors counted in real steps of the project's own loop, on every rank.

Held: parameters and gradients to the byte. On a CPU the layers are Megatron's local ones, whose activations have an
upper bound of at most LOOSE times what autograd keeps at its peak. The loss counts with what it keeps (an FP32 number
per logit), as transient tensors are in no graph.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaaccum.config import Plan
from megaaccum.lab.planner.layouts import from_rows, row_of
from megaaccum.lab.planner.memory import MemoryModel
from megaaccum.lab.planner.stages import chunks_of_rank, stages_of
from megaaccum.lab.planner.weights import rank_parameters
from megaaccum.lab.planner.workload import kernels_of
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.model.layers import choose
from tests.support.accounting import Counted, count
from tests.support.parity import VOCAB, Case

LOOSE = 1.5
LLAMA = (
    "--swiglu --normalization RMSNorm --position_embedding_type rope --add_bias_linear false --num_query_groups 2"
    " --untie_embeddings_and_output_weights"
)
FUSED = "--attention_backend fused"
FULL, SELECTIVE = "--recompute_granularity full", "--recompute_granularity selective"
BLOCK = f"{FULL} --recompute_method block --recompute_num_layers"
PP2, TP2 = "--pipeline_model_parallel_size 2", "--tensor_model_parallel_size 2"
VPP2, SP = "--virtual_pipeline_model_parallel_size 2", "--sequence_parallel"
ONE = [Case(1, f"--num_chunks 2 {keys}") for keys in (
    "", LLAMA, FULL, SELECTIVE, f"{LLAMA} {FULL}", "--micro_batch_size 2 --zero_stage 1", "--zero_stage 2 --ga 2",
    "--attention_dropout 0.1 --hidden_dropout 0.1", f"--position_embedding_type rope {SELECTIVE}",
    "--normalization RMSNorm --position_embedding_type none", FUSED, f"{FUSED} {LLAMA}",
    f"{FUSED} --position_embedding_type rope --micro_batch_size 2", f"{LLAMA} {BLOCK} 1", f"{BLOCK} 3",
    f"{LLAMA} {FULL} --recompute_num_layers 2", f"{FULL} --recompute_num_layers 4",
)] + [Case(1, "--num_chunks 2", lane="bf16")]  # fmt: skip
TWO = [Case(2, keys) for keys in (
    f"{PP2} --num_chunks 4", f"{PP2} --num_chunks 6 {LLAMA}", f"{PP2} --num_chunks 4 {FULL}",
    f"{PP2} --num_chunks 4 {SELECTIVE} --micro_batch_size 2", f"{PP2} {VPP2} --num_chunks 4",
    f"{PP2} {VPP2} --num_chunks 6 {FULL}", f"{PP2} --virtual_pipeline_model_parallel_size 4 --num_chunks 4 {LLAMA}",
    f"{TP2} --num_chunks 2", f"{TP2} {SP} --num_chunks 2", f"{TP2} {SP} --num_chunks 2 {LLAMA} {FULL}",
    f"{TP2} {SP} --num_chunks 2 {SELECTIVE}", "--num_chunks 2 --zero_stage 3", "--num_chunks 2 --zero_stage 1",
    f"{PP2} {VPP2} --num_chunks 8 --microbatch_group_size_per_vp_stage 6 {LLAMA}", f"{PP2} --num_chunks 4 {BLOCK} 1",
    f"{PP2} {VPP2} --num_chunks 4 --microbatch_group_size_per_vp_stage 4 {BLOCK} 1",
    f"{PP2} --num_chunks 2 --ga 2 --flush merged", f"{TP2} {SP} --num_chunks 2 {FUSED} {LLAMA} --num_query_groups 1",
)]  # fmt: skip
PP4 = "--pipeline_model_parallel_size 4 --num_chunks 8"
FOUR = [Case(4, keys) for keys in (
    PP4, f"{PP4} {FULL} {LLAMA}", f"{PP4} {VPP2}", f"{PP2} {TP2} {SP} --num_chunks 4",
    f"{PP2} {TP2} {SP} {VPP2} --num_chunks 4 {LLAMA}",
    f"{PP2} {TP2} {SP} --num_chunks 4 {FUSED} {LLAMA}", f"{PP2} --num_chunks 4 --zero_stage 2",
    f"{PP2} {VPP2} --num_chunks 4 {SELECTIVE}",
)]  # fmt: skip


def test_there_are_thirty_layouts() -> None:
    assert len({str(case) for case in ONE + TWO + FOUR}) >= 30


@pytest.mark.parametrize("cases", [ONE, TWO, FOUR], ids=["1 rank", "2 ranks", "4 ranks"])
def test_predicted_memory_is_what_a_real_step_keeps(cases: list[Case]) -> None:
    for rank, counted in enumerate(run_ranks(count, cases[0].world_size, cases, timeout=240)):
        for case, real in zip(cases, counted, strict=True):
            compare(case.plan(), real, f"rank {rank} of {case}")


def compare(plan: Plan, real: Counted, name: str) -> None:
    at, stages = from_rows([row_of(plan.layout, plan.batch, plan.config)]), stages_of(plan.config)
    chunks = chunks_of_rank(stages, real.pp_rank, pp=plan.layout.pp, schedule=plan.layout.schedule)
    params = rank_parameters(plan.config.model, chunks, VOCAB, plan.layout).total
    element = 2 if plan.config.sharding.bf16 else 4
    assert real.parameters == params * element, name
    assert real.gradients == params * 4, name
    made_of = choose(plan.config, has_te=False, on_gpu=False)
    kernels = kernels_of(plan.config, made_of)
    model = MemoryModel(
        model=plan.config.model,
        vocab_size=VOCAB,
        kernels=replace(kernels, logit_bytes=4.0),
        fixed_stages=tuple(stages),
        group_size=plan.config.parallel.microbatch_group_size_per_vp_stage,
    )
    kinds = model.on_rank(at, real.pp_rank)
    kept = float(kinds["activations"][0] + kinds["loss"][0] + kinds["workspace"][0])
    assert 1 <= kept / real.activations <= LOOSE, f"{name}: {kept:.0f} predicted, {real.activations} kept"
