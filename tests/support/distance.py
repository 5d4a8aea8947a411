"""The distance of a layout's gradient from the float64 reference, and whether that is parity.

The float64 lane and the cut of a parameter over tp are those of `megaaccum verify`. Its bound in other precisions has a
term for what rounding explains; the engine lane here compares all parameters together with one process, and each one
with its own norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from megaaccum.lab.verification.compare import EXACT, cut, relative_error
from megaaccum.lab.verification.records import Piece
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import Case, Gradient, Reference, gradients, references

if TYPE_CHECKING:
    import pytest

FACTOR = 2.0
"""Engine lane: how much farther from float64 a gradient may be than that of one process in the same precision."""
OWN_FACTOR, CANCELS = 4.0, 1e-3
OWN = {"fp32": 2e-6, "bf16": 2.0**-7, "fp16": 2.0**-9}
"""Engine lane, each parameter: the same factor, the share of the whole norm below which a gradient has cancelled, and
the relative error that is rounding in any case."""
SCALAR = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Largest relative error of loss and norm; in 16 bit the distance of 1 to the next number."""


def cells(*cases: Case) -> pytest.MarkDecorator:
    """A test of each case; it takes `case`, and `parity` of tests/multiproc/conftest.py."""
    import pytest  # which a machine with a GPU need not have (tests/gpu)

    return pytest.mark.parametrize("case", cases, ids=str)


def check(cases: list[Case]) -> None:
    """Run `cases` (all of one world size) on ranks and raise AssertionError with every problem of every case."""
    found = [f"{case}: {problem}" for case, problems in measured(cases).items() for problem in problems]
    assert not found, "\n" + "\n".join(found)


def measured(cases: list[Case]) -> dict[Case, list[str]]:
    """The problems of each case, after one start of ranks; all cases have one world size."""
    (world_size,) = {case.world_size for case in cases}
    by_rank = run_ranks(gradients, world_size, cases, timeout=60 + 10 * len(cases))
    _compute(dict.fromkeys(key for case in cases for key in _keys_of(case)))
    return {case: problems(case, list(ranks)) for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)}


def problems(case: Case, ranks: list[Gradient], batch: tuple[int, ...] | None = None) -> list[str]:
    """Why `ranks`, what each rank got, is not parity; empty if it is. batch: the sequences that count, if not all."""
    return problems_with(case, ranks, *both_references(case, batch))


def problems_with(case: Case, ranks: list[Gradient], exact: Reference, near: Reference) -> list[str]:
    """Why `ranks` is not parity with given references: one process in float64, and in the precision of the lane."""
    found = _scalar_problems(case, ranks, exact.gradient)
    missing = exact.gradient.parts.keys() - {name for rank in ranks for name in rank.parts}
    found += [f"{name} is on no rank" for name in sorted(missing)]
    if case.lane == "fp64":
        return found + _parameter_problems(ranks, exact)
    error, limit = total_error(ranks, exact), FACTOR * total_error([near.gradient], exact)
    if not error <= limit:
        found.append(f"error {error:.2e} > {limit:.2e}; {_worst(ranks, exact)}")
    return found + _far_parameters(case, ranks, exact, near)


def _far_parameters(case: Case, ranks: list[Gradient], exact: Reference, near: Reference) -> list[str]:
    """Parameters that are off by more than rounding, each against its own norm: a few times as far as in one process,
    or, of those whose gradients cancel to little, by rounding of what cancels."""
    found = []
    for rank, got in enumerate(ranks):
        for name, part in got.parts.items():
            true, like = (own_part(name, part, got, each) for each in (exact, near))
            size = max(float(true.norm()), CANCELS * exact.gradient.norm)
            error, limit = float((part - true).norm()) / size, OWN_FACTOR * float((like - true).norm()) / size
            if not error <= limit + OWN[case.lane]:
                found.append(f"rank {rank}: {name} is off by {error:.2e} > {limit + OWN[case.lane]:.1e} of its norm")
    return found


def both_references(case: Case, batch: int | tuple[int, ...] | None = None) -> tuple[Reference, Reference]:
    """One process in float64, and in the precision of the case's lane, on the same global batch."""
    exact, near = _keys_of(case, batch)
    return one_process_reference(*exact), one_process_reference(*near)


Key = tuple[str, int | tuple[int, ...], str]
"""Model flags, global batch and precision of a reference."""
_references: dict[Key, Reference] = {}


def _keys_of(case: Case, batch: int | tuple[int, ...] | None = None) -> tuple[Key, Key]:
    batch = batch or case.plan().batch.global_batch_size
    return (case.model, batch, "fp64"), (case.model, batch, case.lane)


def _compute(keys: Iterable[Key]) -> None:
    """Compute the references that are not there yet, in one start of a rank."""
    wanted = [key for key in keys if key not in _references]
    if wanted:
        _references.update(zip(wanted, run_ranks(references, 1, wanted, timeout=60 + 10 * len(wanted))[0], strict=True))


def one_process_reference(model: str, global_batch: int | tuple[int, ...], dtype: str) -> Reference:
    key = (model, global_batch, dtype)
    _compute([key])
    return _references[key]


def _scalar_problems(case: Case, ranks: list[Gradient], exact: Gradient) -> list[str]:
    found = []
    for rank, got in enumerate(ranks):
        if got.num_tokens != exact.num_tokens:
            found.append(f"rank {rank}: {got.num_tokens} tokens, not {exact.num_tokens}")
        for name in ("loss", "norm"):
            mine, true = getattr(got, name), getattr(exact, name)
            if not abs(mine - true) <= SCALAR[case.lane] * abs(true):
                found.append(f"rank {rank}: {name} {mine!r}, not {true!r}")
    return found


def _parameter_problems(ranks: list[Gradient], exact: Reference) -> list[str]:
    found = []
    for rank, got in enumerate(ranks):
        for name, part in got.parts.items():
            error = relative_error(part, own_part(name, part, got, exact))
            if not error <= EXACT:
                found.append(f"rank {rank}: {name} is off by {error:.2e}")
    return found


def own_part(name: str, part: torch.Tensor, rank: Gradient, exact: Reference) -> torch.Tensor:
    """The same cut of the reference's parameter `name` as `part`."""
    full, shape = exact.gradient.parts[name], part.shape
    if full.shape == shape:
        return full
    axis, gated = exact.cuts[name].axis, exact.cuts[name].gated
    size = full.shape[axis] // shape[axis]
    # An expert that fewer ranks cut than a dense matrix: those of a tensor-parallel group take turns.
    return cut(full, Piece(name, part, 0, rank.tp_rank % size, size, axis, gated)).view(shape)


def total_error(ranks: list[Gradient], exact: Reference) -> float:
    """Relative L2 error over all parameters together; of several ranks that hold the same part, the worst counts."""
    squares: dict[tuple[str, int], float] = {}
    for got in ranks:
        for name, part in got.parts.items():
            true = own_part(name, part, got, exact)
            key = (name, got.tp_rank if true.shape != exact.gradient.parts[name].shape else 0)
            square = float((part - true).square().sum())
            # Not max(): it would lose a nan.
            squares[key] = square if not square <= squares.get(key, 0.0) else squares.get(key, 0.0)
    return sum(squares.values()) ** 0.5 / exact.gradient.norm


def _worst(ranks: list[Gradient], exact: Reference) -> str:
    errors = [
        (relative_error(part, own_part(name, part, got, exact)), rank, name)
        for rank, got in enumerate(ranks)
        for name, part in got.parts.items()
    ]
    error, rank, name = max(errors, key=lambda each: each[0] if each[0] == each[0] else float("inf"))
    return f"worst {name} on rank {rank}: {error:.2e}"
