"""Factors and sums by which a wrong gradient is recognised: the right one times a number that the layout has, or a sum
over micro-batches in which one is missing, counted twice, or weighed otherwise."""

from __future__ import annotations

import math

import torch

from megaaccum.config.batch import BatchPlan
from megaaccum.config.layout import RankLayout
from megaaccum.lab.verification.compare import Part, by_name, cut, farthest
from megaaccum.lab.verification.records import GRADIENT, Observed, Reference

CLOSE = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 0.05, "fp16": 0.02}
"""Relative distance within which a number, or a sum of vectors, is taken for the one that is recognised."""


def sizes_of(at: RankLayout, batch: BatchPlan, loss_scale: float) -> dict[str, float]:
    """The numbers of a layout that gradients are wrongly multiplied or divided by, by name; those that are not 1."""
    ga, micro = batch.grad_accum_steps, batch.num_microbatches
    every = {
        "dp": at.dp, "tp": at.tp, "pp": at.pp, "cp": at.cp, "ep": at.ep, "ga": ga,
        "pp_microbatches": batch.pp_microbatches, "micro-batches": micro, "dp * micro-batches": at.dp * micro,
        "loss scale": loss_scale,
    }  # fmt: skip
    return {name: float(size) for name, size in every.items() if size != 1}


def gather(ranks: list[Observed], true: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first step's gradients by name, the tp ranks' parts in a row. If ranks differ, the value farthest from the
    reference counts. A parameter that lacks elements is left out."""
    found = {
        name: torch.cat([farthest(cut(true[name], part[0][1]), part)[0] for part in parts])
        for name, parts in _first_gradients(ranks).items()
    }
    whole = {name: each for name, each in found.items() if each.numel() == true[name].numel()}
    return {name: each for name, each in whole.items() if bool(each.isfinite().all())}


def laid_out(ranks: list[Observed], whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole parameters in the order of elements that `gather` has."""
    return {
        name: torch.cat([cut(whole[name], part[0][1]) for part in parts])
        for name, parts in _first_gradients(ranks).items()
        if name in whole
    }


def _first_gradients(ranks: list[Observed]) -> dict[str, list[Part]]:
    return by_name([(rank.rank, piece) for rank in ranks for piece in rank.steps[0].tensors.get(GRADIENT, [])])


def factor_of(got: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """(r, relative distance of `got` from r * true)."""
    square = float(true.square().sum())
    r = float((got * true).sum()) / square if square else 0.0
    size = float(got.norm())
    return r, float((got - r * true).norm()) / size if size else math.inf


def name_of_factor(r: float, sizes: dict[str, float], close: float) -> str:
    """Name a factor: `x 2 (dp)`, `x 0.25 (1 / ga)`; a bare number if no size fits; empty for 1."""
    if abs(r - 1) <= close:
        return ""
    if abs(r) <= close:
        return "is zero"
    up = [name for name, size in sizes.items() if abs(r / size - 1) <= close]
    down = [name for name, size in sizes.items() if abs(r * size - 1) <= close]
    if up:
        return f"x {r:.6g} ({' or '.join(up)})"
    if down:
        return f"x {r:.6g} (1 / {' or 1 / '.join(down)})"
    if abs(r - 2) <= close:
        return "x 2 (counted twice)"
    if abs(r + 1) <= close:
        return "x -1 (another sign)"
    return f"x {r:.6g}"


def shares_of(got: dict[str, torch.Tensor], parts: list[dict[str, torch.Tensor]]) -> tuple[list[float], float]:
    """(c, relative distance of `got` from the sum over micro-batches i of c[i] * their gradients), least squares over
    all names together."""
    columns = torch.stack([torch.cat([part[name] for name in got]) for part in parts], dim=1)
    values = torch.cat(list(got.values()))
    solution = torch.linalg.lstsq(columns, values[:, None], driver="gelsd").solution[:, 0]
    left = float((columns @ solution - values).norm()) / max(float(values.norm()), 1e-300)
    return solution.tolist(), left


def name_of_shares(c: list[float], reference: Reference, dp: int, close: float) -> str:
    """Describe the weights with which micro-batches enter; micro-batch i is number i // dp of data-parallel rank
    i % dp. Empty if all are 1."""
    count, close = len(c), max(close, 1e-9)
    zero, one, two = ([abs(each - value) <= 10 * close for each in c] for value in (0.0, 1.0, 2.0))
    if all(one):
        return ""
    rows = [c[number * dp : (number + 1) * dp] for number in range(count // dp)]
    if all(z or o for z, o in zip(zero, one, strict=True)) and any(zero):
        return _missing(zero, dp)
    if all(o or t for o, t in zip(one, two, strict=True)):
        return f"counted twice: {_listed([i for i, each in enumerate(two) if each], dp)}"
    total = sum(reference.weights)
    by_mean = [total / (weight * count) if weight else 0.0 for weight in reference.weights]
    if _alike(c, by_mean, close):
        return "each micro-batch weighs the same, however many tokens it has (a mean of means)"
    own = [sum(reference.weights[rank::dp]) for rank in range(dp)]
    per_rank = [total / (dp * own[i % dp]) if own[i % dp] else 0.0 for i in range(count)]
    if dp > 1 and _alike(c, per_rank, close):
        return "each data-parallel rank divides by its own weight, and the ranks are averaged"
    if dp > 1 and max(abs(each - rows[0][rank]) for row in rows for rank, each in enumerate(row)) <= 10 * close:
        return "each data-parallel rank has a factor of its own: " + ", ".join(f"{each:.4g}" for each in rows[0])
    steps = [rows[i][0] / rows[i + 1][0] for i in range(len(rows) - 1) if abs(rows[i + 1][0]) > close]
    if (
        len(steps) > 1
        and max(abs(each - steps[0]) for each in steps) <= 10 * close * abs(steps[0])
        and abs(steps[0] - 1) > close
    ):
        return f"each micro-batch enters with {steps[0]:.4g} times the weight of the one after it"
    return "micro-batches enter with the weights " + ", ".join(f"{each:.3g}" for each in c)


def _missing(zero: list[bool], dp: int) -> str:
    count = len(zero)
    numbers = range(count // dp)
    for rank in range(dp):
        if dp > 1 and zero == [i % dp == rank for i in range(count)]:
            return f"the gradient of data-parallel rank {rank} is missing"
    if zero == [i // dp != numbers[-1] for i in range(count)]:
        return "only the last micro-batch of each rank counts"
    if zero == [i // dp == numbers[-1] for i in range(count)]:
        return "the last micro-batch of each rank is missing"
    if zero == [i // dp == 0 for i in range(count)]:
        return "the first micro-batch of each rank is missing"
    gone = [number for number in numbers if all(zero[number * dp : (number + 1) * dp])]
    if len(gone) * dp == sum(zero) and len(gone) > 1:
        return f"missing: micro-batches {', '.join(map(str, gone))} of each rank"
    return f"missing: {_listed([i for i, each in enumerate(zero) if each], dp)}"


def _listed(indices: list[int], dp: int) -> str:
    return ", ".join(f"micro-batch {i // dp} of data-parallel rank {i % dp}" for i in indices)


def _alike(c: list[float], other: list[float], close: float) -> bool:
    return all(abs(one - two) <= 10 * close * max(abs(two), 1.0) for one, two in zip(c, other, strict=True))
