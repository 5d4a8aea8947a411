"""Experts spread over data-parallel ranks: the gradient, the norm and the checkpoint of one process' model."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megaaccum.checkpoint.folders import Progress
from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_nonfinite import attempts
from tests.support.distance import cells, problems
from tests.support.faults import Fault
from tests.support.parity import Case, Gradient, Rig, gradient

MODEL = (
    "--num_layers 2 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 --moe_router_dtype fp64 "
)
EP = "--expert_model_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 --sequence_parallel --expert_tensor_parallel_size 1 --pp_microbatches 8 "
SPLIT = "--grad_accum_steps 2 --pp_microbatches 2 "


@cells(Case(2, EP + SPLIT, MODEL), Case(2, EP + SPLIT + "--flush per_round", MODEL, "bf16"))
def test_two_ranks_with_half_of_the_experts_each(case, parity):
    parity(case)


@cells(Case(2, TP, MODEL), Case(2, EP + TP, MODEL), Case(2, EP + SPLIT + "--offload_optimizer cpu", MODEL))
def test_experts_that_are_whole_where_dense_matrices_are_cut(case, parity):
    parity(case)


@cells(
    Case(4, EP + SPLIT, MODEL),
    Case(4, "--expert_model_parallel_size 4 " + SPLIT, MODEL),
    Case(
        4, EP + "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4", MODEL + "--num_layers 4 "
    ),
    Case(4, EP + TP, MODEL),
)
def test_four_ranks(case, parity):
    """Each expert on two ranks; on one of four; on one rank of each of two stages; on two that are one tp group."""
    parity(case)


@pytest.mark.parametrize("backend", ["", "--backend fsdp2 ", "--backend fsdp2 --sync streaming "])
def test_a_bad_microbatch_does_not_take_the_healthy_one_of_another_rank_with_it(backend):
    """Its tokens are in the gradients of experts on the other rank, too."""
    case = Case(2, EP + backend + "--pp_microbatches 4 --nonfinite drop_microbatch", MODEL)
    ranks = [done for (done,) in run_ranks(attempts, 2, [case], [Fault(1, 1)])]
    assert [result.sanitized for _, result in ranks] == [1, 1]
    assert all("micro-batch 1 of data-parallel rank 1: first in" in result.note for _, result in ranks)
    rest = tuple(index for index in range(8) if index != 3)  # micro-batch m of rank r is sequence 2 * m + r
    assert problems(case, [gradient for gradient, _ in ranks], rest) == []


# --- mistakes --------------------------------------------------------------------------------------------------------


def divided_by_their_own_ranks(case: Case) -> Gradient:
    """Experts averaged over the ranks that share them, and not over all whose tokens they saw."""
    from megaaccum.upstream import zero

    set_expert_ranks = zero.set_expert_ranks

    def as_dense(params, *groups):
        set_expert_ranks(params, *groups)
        for param in params:
            param.ds_zero_placement_family = "replicated"

    with patch.object(zero, "set_expert_ranks", as_dense):
        return gradient(case)


def counted_on_the_first_rank_of_tp(case: Case) -> Gradient:
    """The norm leaves out the experts of other tp ranks, as if they were copies."""
    from megaaccum.model import names

    dense = names.is_same_over_tp
    with patch.object(names, "is_same_over_tp", lambda param: dense(param) or names.is_expert(param)):
        return gradient(case)


def named_by_place(case: Case) -> Gradient:
    """The first expert of every rank is the first expert."""
    from megaaccum.model import names

    name = names.global_name

    def by_place(chunk, local_name):
        first = name(chunk, local_name)
        return re.sub(r"local_experts\.(\d)", lambda match: f"local_experts.{int(match[1]) % 2}", first)

    with patch.object(names, "global_name", by_place):
        return gradient(case)


def complaints(mistake, layout: str) -> list[str]:
    case = Case(2, layout, MODEL)
    return problems(case, run_ranks(mistake, 2, case))


def test_mistakes_with_experts_are_seen():
    assert any("error" in text for text in complaints(divided_by_their_own_ranks, EP + SPLIT))
    assert any("norm" in text for text in complaints(counted_on_the_first_rank_of_tp, EP + TP))
    assert any("is on no rank" in text for text in complaints(named_by_place, EP + SPLIT))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save(folder: str, case: Case) -> float:
    """Two steps and a checkpoint. Returns the loss of a third step."""
    from megaaccum.checkpoint import save_load

    rig = Rig.of(case)
    for step in range(2):
        rig.train(step=step, first=8 * step)
    progress = Progress(step=2, consumed_samples=16, lr_schedule={}, data={}, shape={})
    save_load.save(folder, rig.backend, rig.groups, progress, keep_last=1)
    return rig.train(step=2, first=16).loss


def go_on(folder: str, case: Case) -> float:
    from megaaccum.checkpoint import save_load

    rig = Rig.of(case)
    save_load.load(Path(folder) / "step_0000002", rig.backend, rig.groups, shape={})
    return rig.train(step=2, first=16).loss


def test_a_checkpoint_moves_between_numbers_of_expert_parallel_ranks(tmp_path):
    """To the bit on the same layout; else to what other orders of summation make of FP32."""
    spread, alone = Case(2, EP + SPLIT, MODEL), Case(2, SPLIT, MODEL)
    losses = run_ranks(save, 2, str(tmp_path), spread)
    assert run_ranks(go_on, 2, str(tmp_path), spread) == losses
    for loss in run_ranks(go_on, 2, str(tmp_path), alone):
        assert abs(loss - losses[0]) < 1e-6 * losses[0]


def names_on_the_second_rank() -> list[str]:
    """Name of the second of two local experts in the fifth layer, on the rank that holds experts 2 and 3."""
    from megaaccum.model import names

    chunk = SimpleNamespace(get_submodule=lambda name: SimpleNamespace(local_expert_indices=[2, 3], layer_number=5))
    layer = "decoder.layers.0.mlp.experts."
    return [
        names.global_name(chunk, layer + "linear_fc1.weight1"),
        names.global_name(chunk, layer + "local_experts.1.x"),
    ]


def test_grouped_experts_are_named_over_all_ranks_as_single_ones_are():
    """Transformer Engine's grouped layers need a GPU; the names of their parameters do not."""
    layer = "decoder.layers.4.mlp.experts."
    assert run_ranks(names_on_the_second_rank, 1) == [
        [layer + "local_experts.3.linear_fc1.weight", layer + "local_experts.3.x"]
    ]
