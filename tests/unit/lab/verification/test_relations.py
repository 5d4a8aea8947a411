"""A wrong gradient is named by what it is of the right one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megaaccum.lab.verification.records import Reference
from megaaccum.lab.verification.relations import factor_of, name_of_factor, name_of_shares, shares_of, sizes_of

LAYOUT = SimpleNamespace(dp=2, tp=1, pp=3, cp=1, ep=1)
BATCH = SimpleNamespace(grad_accum_steps=5, pp_microbatches=7, num_microbatches=35)
SIZES = sizes_of(LAYOUT, BATCH, 1024.0)
WEIGHTS = [3.0, 5.0, 2.0, 6.0, 4.0, 4.0]
DP = 2


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (1.0, ""),
        (0.0, "is zero"),
        (2.0, "x 2 (dp)"),
        (0.2, "x 0.2 (1 / ga)"),
        (35.0, "x 35 (micro-batches)"),
        (1 / 1024, "x 0.000976562 (1 / loss scale)"),
        (-1.0, "x -1 (another sign)"),
        (1.37, "x 1.37"),
    ],
)
def test_factors(factor, name):
    true = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r, left = factor_of(factor * true, true)
    assert left < 1e-12 or factor == 0
    assert name_of_factor(r, SIZES, 1e-6) == name


def shares(c: list[float]) -> str:
    generator = torch.Generator().manual_seed(1)
    parts = [{"w": torch.randn(40, dtype=torch.float64, generator=generator)} for _ in c]
    got = {"w": sum(each * part["w"] for each, part in zip(c, parts, strict=True))}
    found, left = shares_of(got, parts)
    assert left < 1e-9
    return name_of_shares(found, Reference({}, weights=WEIGHTS), DP, 1e-6)


N = sum(WEIGHTS)
OWN = [sum(WEIGHTS[0::2]), sum(WEIGHTS[1::2])]


@pytest.mark.parametrize(
    ("c", "words"),
    [
        ([1, 1, 1, 1, 1, 1], ""),
        ([1, 1, 0, 1, 1, 1], "missing: micro-batch 1 of data-parallel rank 0"),
        ([1, 1, 1, 2, 1, 1], "counted twice: micro-batch 1 of data-parallel rank 1"),
        ([0, 0, 0, 0, 1, 1], "only the last micro-batch of each rank counts"),
        ([1, 1, 1, 1, 0, 0], "the last micro-batch of each rank is missing"),
        ([1, 0, 1, 0, 1, 0], "the gradient of data-parallel rank 1 is missing"),
        ([N / (6 * w) for w in WEIGHTS], "a mean of means"),
        ([N / (2 * OWN[i % 2]) for i in range(6)], "each data-parallel rank divides by its own weight"),
        ([0.25, 0.25, 0.5, 0.5, 1, 1], "each micro-batch enters with 0.5 times the weight of the one after it"),
        ([3, 0.5, 3, 0.5, 3, 0.5], "each data-parallel rank has a factor of its own: 3, 0.5"),
    ],
)
def test_shares_of_microbatches(c, words):
    found = shares([float(each) for each in c])
    assert words in found
    assert bool(words) == bool(found)


def test_what_is_no_sum_of_the_parts():
    generator = torch.Generator().manual_seed(1)
    parts = [{"w": torch.randn(40, dtype=torch.float64, generator=generator)} for _ in range(6)]
    assert shares_of({"w": torch.randn(40, dtype=torch.float64, generator=generator)}, parts)[1] > 0.1
