"""A number that is off by more than rounding fails, whatever it is; what several ranks hold counts by the farthest."""

from __future__ import annotations

import math

import pytest
import torch

from megaaccum.lab.verification.compare import alone, compare
from megaaccum.lab.verification.records import GRADIENT, MODEL, Observed, Piece, Reference, ReferenceStep, Step

NAMES = ("a.weight", "b.weight")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 6, dtype=torch.float64, generator=generator) for name in NAMES}


def reference() -> Reference:
    before, after = tensors(0), tensors(1)
    kinds = {GRADIENT: tensors(2), "param": after, "exp_avg": tensors(3), "exp_avg_sq": tensors(4), MODEL: after}
    step = ReferenceStep(2.0, 10.0, 1.5, 0.1, 1.0, False, tensors=kinds, amplification=dict.fromkeys(NAMES, 1.0))
    return Reference(before, [step])


def ranks(of: Reference, dp: int = 2) -> list[Observed]:
    """The observations of dp ranks that each hold the whole model."""
    true = of.steps[0]
    found = []
    for rank in range(dp):
        pieces = {
            kind: [Piece(name, value.reshape(-1).clone(), 0) for name, value in each.items()]
            for kind, each in true.tensors.items()
        }
        step = Step(true.loss, true.weight, true.norm, true.lr, true.loss_scale, False, tensors=pieces)
        before = [Piece(name, value.reshape(-1).clone(), 0) for name, value in of.before.items()]
        found.append(Observed(rank, {"pp": 0, "dp": rank, "tp": 0, "cp": 0}, before, [step], f"state {rank}"))
    return found


def failed(seen: list[Observed], of: Reference) -> set[tuple[str, str]]:
    return {(row.kind, row.name) for row in compare("fp64", seen, of, of, summands=8).failed}


def test_one_process_on_a_gpu_may_be_as_far_from_float64_as_rounding():
    exact, near = reference(), reference()
    generator = torch.Generator().manual_seed(9)
    for factor, passes in ((0.0, True), (1e-2, True), (0.2, False)):
        for name, true in exact.steps[0].tensors[GRADIENT].items():
            noise = torch.randn(true.shape, dtype=true.dtype, generator=generator)
            near.steps[0].tensors[GRADIENT][name] = true + factor * noise
        (row,) = alone("bf16", exact, near)
        assert row.ok == passes, row


def test_equal_numbers_pass():
    of = reference()
    compared = compare("fp64", ranks(of), of, of, summands=8)
    assert compared.ok
    assert compared.largest < 1e-15
    assert compared.num_weights == 48


@pytest.mark.parametrize("kind", [GRADIENT, "param", "exp_avg", "exp_avg_sq", MODEL])
def test_one_element_on_one_rank(kind):
    of, seen = reference(), ranks(reference())
    seen[1].steps[0].tensors[kind][1].values[3] += 1e-6
    assert failed(seen, of) == {(kind, NAMES[1])}


def test_rounding_passes():
    of, seen = reference(), ranks(reference())
    seen[0].steps[0].tensors[GRADIENT][0].values.mul_(1 + 1e-14)
    assert failed(seen, of) == set()


@pytest.mark.parametrize("name", ["loss", "weight", "norm", "lr", "loss_scale"])
def test_a_scalar(name):
    of, seen = reference(), ranks(reference())
    for rank in seen:
        setattr(rank.steps[0], name, getattr(rank.steps[0], name) * 1.01)
    assert failed(seen, of) == {(name, "")}


@pytest.mark.parametrize("name", ["loss", "weight", "norm", "lr", "loss_scale"])
@pytest.mark.parametrize(("lane", "rounded", "wrong"), [("fp64", 1e-13, 1e-8), ("bf16", 1e-2, 0.1)])
def test_a_loss_and_a_norm_alone_may_be_rounded(name, lane, rounded, wrong):
    of = reference()
    for error in (rounded, wrong):
        seen = ranks(of)
        for rank in seen:
            setattr(rank.steps[0], name, getattr(rank.steps[0], name) * (1 + error))
        found = {(row.kind, row.name) for row in compare(lane, seen, of, of, summands=8).failed}
        passes = error == rounded and (name in ("loss", "norm") or (name == "lr" and lane == "fp64"))
        assert found == (set() if passes else {(name, "")})


def test_one_bias_of_a_router():
    of = reference()
    of.steps[0].buffers["router.expert_bias"] = torch.tensor([1e-3, -1e-3, 2e-3, 0.0], dtype=torch.float64)
    seen = ranks(of)
    for rank in seen:
        rank.steps[0].buffers["router.expert_bias"] = of.steps[0].buffers["router.expert_bias"].clone()
    assert failed(seen, of) == set()
    for off in (torch.tensor([0.0, 0.0, 1e-4, 0.0]), torch.full((4,), 1e-3)):  # one of them, and all
        seen[1].steps[0].buffers["router.expert_bias"] = of.steps[0].buffers["router.expert_bias"] + off
        assert failed(seen, of) == {("router", "router.expert_bias")}


@pytest.mark.parametrize("kind", [GRADIENT, "exp_avg", "exp_avg_sq"])
def test_a_tensor_of_small_numbers_is_measured_by_its_own_size(kind):
    of = reference()
    for each in of.steps[0].tensors[kind].values():
        each *= 1e-6
    seen = ranks(of)
    seen[0].steps[0].tensors[kind][1].values.mul_(1 + (1e-11 if kind == GRADIENT else 1e-8))
    assert failed(seen, of) == {(kind, NAMES[1])}


@pytest.mark.parametrize("kind", ["param", MODEL])
def test_a_weight_is_measured_by_its_change(kind):
    of = reference()
    for each in ("param", MODEL):
        moved = {name: before + 1e-3 * tensors(1)[name] for name, before in of.before.items()}
        of.steps[0].tensors[each] = moved
    seen = ranks(of)
    seen[0].steps[0].tensors[kind][0].values[5] += 1e-9 if kind == "param" else 1e-7
    assert failed(seen, of) == {(kind, NAMES[0])}


def test_the_farthest_weight_and_the_worst_row_of_a_kind():
    of, seen = reference(), ranks(reference())
    seen[1].steps[0].tensors["param"][0].values[7] -= 0.5
    for at, error in enumerate((1e-9, 1e-6)):
        seen[0].steps[0].tensors[GRADIENT][at].values[0] += error
    compared = compare("fp64", seen, of, of, summands=8)
    assert compared.largest == pytest.approx(0.5, rel=1e-12)
    assert compared.worst(GRADIENT).name == NAMES[1]


def test_ranks_that_disagree():
    of, seen = reference(), ranks(reference())
    seen[1].steps[0].skipped = True
    assert failed(seen, of) == {("skipped", ""), ("ranks", "")}


def test_what_is_missing_or_not_a_number():
    of, seen = reference(), ranks(reference(), dp=1)
    del seen[0].steps[0].tensors[GRADIENT][0]
    assert failed(seen, of) == {(GRADIENT, NAMES[0])}
    seen = ranks(of)
    seen[0].steps[0].tensors["param"][0].values[0] = math.nan
    assert failed(seen, of) == {("param", NAMES[0])}


def test_other_initial_weights():
    of, seen = reference(), ranks(reference())
    seen[1].before[0].values[0] += 1e-9
    assert failed(seen, of) == {("initial weight", NAMES[0])}


def test_a_part_of_a_parameter_that_no_rank_has():
    of, seen = reference(), ranks(reference(), dp=1)
    piece = seen[0].steps[0].tensors[GRADIENT][0]
    seen[0].steps[0].tensors[GRADIENT][0] = Piece(piece.name, piece.values[:12], 0)
    assert failed(seen, of) == {(GRADIENT, NAMES[0])}


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_tp_ranks(gated):
    """Each holds its rows; of [gate; up] a part of both."""
    of, seen = reference(), ranks(reference())
    whole = of.steps[0].tensors[GRADIENT][NAMES[0]]
    for rank in range(2):
        rows = [rank, 2 + rank] if gated else [2 * rank, 2 * rank + 1]
        seen[rank].steps[0].tensors[GRADIENT][0] = Piece(
            NAMES[0], whole[rows].reshape(-1), 0, tp_rank=rank, tp_size=2, axis=0, gated=gated
        )
    assert failed(seen, of) == set()
    seen[1].steps[0].tensors[GRADIENT][0].values[0] *= 2
    assert failed(seen, of) == {(GRADIENT, NAMES[0])}


@pytest.mark.parametrize("kind", [GRADIENT, "param", "exp_avg", MODEL])
def test_the_part_of_a_tp_rank_that_no_rank_has(kind):
    of, seen = reference(), ranks(reference(), dp=1)
    rows = of.steps[0].tensors[kind][NAMES[0]][:2].reshape(-1)
    seen[0].steps[0].tensors[kind][0] = Piece(NAMES[0], rows, 0, tp_rank=0, tp_size=2, axis=0)
    assert failed(seen, of) == {(kind, NAMES[0])}


def test_ranks_without_any_gradient():
    of, seen = reference(), ranks(reference())
    for rank in seen:
        rank.steps[0].tensors[GRADIENT] = []
    assert failed(seen, of) == {(GRADIENT, name) for name in NAMES}


def test_a_gradient_that_cancels_is_allowed_the_rounding_of_its_parts_alone():
    """Parts of norm 5 that add up to 1e-9 round by some 1e-6 in FP32, not by a part of themselves."""
    of = reference()
    of.steps[0].tensors[GRADIENT][NAMES[0]] *= 1e-9 / float(of.steps[0].tensors[GRADIENT][NAMES[0]].norm())
    of.steps[0].amplification[NAMES[0]] = 5e9
    for error, wrong in ((1e-6, False), (1e-4, True)):
        seen = ranks(of)
        seen[0].steps[0].tensors[GRADIENT][0].values[0] += error
        found = {(row.kind, row.name) for row in compare("fp32", seen, of, of, summands=8).failed}
        assert found == ({(GRADIENT, NAMES[0])} if wrong else set())


def test_ranks_that_draw_the_same_dropout():
    of, seen = reference(), ranks(reference())
    seen[1].random = seen[0].random
    assert failed(seen, of) == {("random", "")}


def test_tp_ranks_with_states_of_their_own_hide_no_missing_one():
    of, seen = reference(), ranks(reference(), dp=4)
    for number, rank in enumerate(seen):
        rank.place |= {"dp": number // 2, "tp": number % 2}
    assert failed(seen, of) == set()
    seen[2].random = seen[0].random
    assert failed(seen, of) == {("random", "")}
