"""Experts with ranks of their own on every backend and sync mode: spread (ep), whole beside dense matrices that are cut
(etp 1), and both (etp = tp). The gradient of every parameter is that of one process."""

from __future__ import annotations

import pytest

from tests.support.distance import cells
from tests.support.expert_table import EP2 as EP
from tests.support.expert_table import MODEL as EXPERTS
from tests.support.expert_table import MODES, TP, WHOLE, Cell, measured, table
from tests.support.parity import REPLICAS, Case

MODEL = EXPERTS + "--moe_z_loss_coeff 0.01 "
TWO = "--num_layers 2 "
"""No rank has several chunks."""


def cell(mode: str, ranks: int, layout: str, model: str = "", *, exact: bool = True) -> Case:
    """exact: in float64 if the backend can."""
    flags = (MODES | REPLICAS)[mode]
    lane = "fp64" if exact and ("fsdp2" in flags or "ddp" in flags) else "fp32"
    precision = "--params_dtype fp64 " if lane == "fp64" else ""
    return Case(ranks, f"--pp_microbatches 4 {flags}{precision}{layout}", MODEL + model, lane)


@cells(*(cell(mode, 2, EP, TWO) for mode in MODES), *(cell(mode, 2, WHOLE, TWO) for mode in MODES))
def test_two_ranks(case, parity):
    """Half of the experts on each; all of them on both, beside cut dense matrices."""
    parity(case)


@cells(*(cell(mode, 4, EP + TP, TWO) for mode in MODES), *(cell(mode, 4, EP, TWO) for mode in REPLICAS))
def test_spread_and_cut(case, parity):
    """Each half of half of the experts; experts over a mesh of their own with replicas."""
    parity(case)


DETERMINISTIC = EP + "--deterministic "


@cells(*(cell(mode, 4, DETERMINISTIC, TWO) for mode in MODES))
def test_sums_in_rank_order(case, parity):
    parity(case)


FP16 = [mode for mode in MODES if mode != "Megatron"]
"""Megatron's optimizer has a loss scale of its own."""


@cells(
    *(
        Case(2, f"--pp_microbatches 4 {MODES[mode]}{EP}", MODEL + TWO + "--moe_router_topk 4 ", "bf16")
        for mode in MODES
    ),
    *(
        Case(2, f"--pp_microbatches 4 {MODES[mode]}{WHOLE}", MODEL + TWO + "--moe_router_topk 4 ", "fp16")
        for mode in FP16
    ),
)
def test_sixteen_bits(case, parity):
    """All experts see every token, or rounding would change which do."""
    parity(case)


FOUR = [each for each in table() if each.case.world_size == 4]
PART = [*FOUR[5::11], FOUR[-1]]


@pytest.fixture(scope="module")
def of_part() -> dict[Cell, list[str]]:
    return measured(PART)


@pytest.mark.parametrize("one", PART, ids=str)
def test_a_part_of_the_table(one, of_part):
    """`python -m benchmarks experts` runs all of it."""
    assert not of_part[one], "\n".join(of_part[one])
