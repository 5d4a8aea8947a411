"""The squares of micro-batches' gradients on every backend, against one process that makes each gradient alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.observe.noise_scale import Estimate, NoiseScale, estimate
from tests.multiproc.test_engine_inputs import batches, chunk_of, engine
from tests.multiproc.test_engine_states import BATCH
from tests.support.parity import SYNC_MODES, Case, Rig, gradient_of, one_process, sample

UNTIED = "--num_layers 4 --untie_embeddings_and_output_weights true"
EXPERTS = UNTIED + " --num_experts 4 --moe_router_topk 2 --moe_aux_loss_coeff 0 --no_add_bias_linear"
WINDOW = "--noise_scale_window 4 "
PIPELINE = WINDOW + "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 "
CASES = {
    "float64": Case(4, PIPELINE, UNTIED, lane="fp64"),
    "float64, chunks": Case(4, PIPELINE + "--virtual_pipeline_model_parallel_size 2", UNTIED, lane="fp64"),
    "float64, no pipeline": Case(4, WINDOW + "--grad_accum_steps 4", UNTIED, lane="fp64"),
    "ZeRO-1": Case(4, PIPELINE + "--zero_stage 1", UNTIED),
    "ZeRO-2": Case(4, PIPELINE + "--zero_stage 2", UNTIED),
    **{name: Case(4, PIPELINE + mode, UNTIED) for name, mode in SYNC_MODES.items()},
    "recompute": Case(
        4, PIPELINE + "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1", UNTIED
    ),
    "two flushes": Case(4, PIPELINE + "--flush per_round", UNTIED),
}
"""Sixteen sequences of unequal weight, one of them masked whole; a micro-batch is one sequence."""


def estimates(cases: list[Case]) -> list[Estimate]:
    """(S, in sequences, |G|^2) by a first step of each case."""
    found = []
    for case in cases:
        rig = Rig.of(case)
        rig.watched(step=1)
        assert rig.train_step.noise_scale is not None
        found.append(rig.train_step.noise_scale.steps[-1])
    return found


def expected(model: str) -> Estimate:
    """(S, in sequences, |G|^2) of one process in float64 that makes each micro-batch's gradient alone."""
    chunk, plan = one_process(model, "fp64")
    weights = [float(sample(index)["loss_mask"].sum()) for index in range(16)]
    total = sum(weights)
    squares = 0.0
    for index, weight in enumerate(weights):
        if weight:  # what the reference divides by
            squares += (gradient_of(chunk, plan, [index]).gradient.norm * weight / total) ** 2
    norm = gradient_of(chunk, plan, range(16)).gradient.norm
    noise, signal = estimate(norm**2, squares, sum(weight**2 for weight in weights) / total**2)
    return 16 * noise, signal


@pytest.fixture(scope="module")
def truth() -> Estimate:
    (found,) = run_ranks(expected, 1, UNTIED, timeout=60)
    assert all(found)
    return found


def distance(found: Estimate, truth: Estimate) -> float:
    return max(abs(mine / its - 1) for mine, its in zip(found, truth, strict=True))


def test_every_backend_has_the_estimates_of_one_process(truth: Estimate) -> None:
    by_rank = run_ranks(estimates, 4, list(CASES.values()), timeout=200)
    for (name, case), ranks in zip(CASES.items(), zip(*by_rank, strict=True), strict=True):
        for found in ranks:
            assert distance(found, truth) < (1e-11 if case.lane == "fp64" else 1e-5), (name, distance(found, truth))


def test_experts_that_every_rank_has_are_counted() -> None:
    """Also those that a micro-batch sends no token. Megatron's router rounds to FP32, and the step's |G|^2 is a small
    difference."""
    (truth,) = run_ranks(expected, 1, EXPERTS, timeout=60)
    for (found,) in run_ranks(estimates, 4, [Case(4, PIPELINE, EXPERTS, lane="fp64")], timeout=60):
        assert distance(found, truth) < 1e-6


def with_mistake(case: Case) -> Estimate:
    """The mistake: a hook that sees what was added up so far in place of one micro-batch's gradient."""
    so_far: dict[tuple[int, ...], torch.Tensor] = {}

    def adds_up(self: NoiseScale, grad: torch.Tensor) -> None:
        key = tuple(grad.shape)
        so_far[key] = so_far.get(key, torch.zeros_like(grad)) + grad
        self.square += so_far[key].double().square().sum()

    with patch.object(NoiseScale, "add", adds_up):
        return estimates([case])[0]


def test_sums_in_place_of_single_gradients_are_seen(truth: Estimate) -> None:
    for found in run_ranks(with_mistake, 4, CASES["float64"], timeout=60):
        assert distance(found, truth) > 0.1


def continued(folder: str) -> list[list[dict[str, float]]]:
    """The reports of two steps: after two others, after a load of what these left, and by a new engine's load."""

    def made():
        keys = dict(batch=BATCH, sharding=dict(backend="ddp"), step=dict(noise_scale_window=4))
        return engine(lambda rank: chunk_of(0, 1), keys=keys)

    def two_steps(engine) -> list[dict[str, float]]:
        return [engine.train_step([each + step for each in data]).reports for step in (2, 3)]

    torch.manual_seed(torch.distributed.get_rank())
    data, first = batches(), made()
    for step in (0, 1):
        first.train_step([each + step for each in data])
    first.save(folder)
    found = [two_steps(first)]
    for each in (first, made()):
        each.load(folder)
        found.append(two_steps(each))
    return found


def test_a_resumed_run_averages_over_the_steps_before_its_checkpoint(tmp_path) -> None:
    for whole, same, fresh in run_ranks(continued, 2, str(tmp_path), timeout=60):
        assert len(whole[0]) == 2 and whole == same == fresh
