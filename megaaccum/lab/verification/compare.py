"""Comparison of the accumulated step with the reference: the error of every number, and its bound.

A bound is no tolerance chosen for the case. In float64 it is 1e-12 of a gradient or, if the model casts to FP32, FACTOR
times the distance of one process' full batch from the sum of its parts. In other precisions it comes from a measurement
and a sum: one process in that precision, on the same batch, is `e` away from float64; adding m summands whose norms are
together A times the norm of their sum rounds by at most (m - 1) * u * A, with u the unit roundoff of the addition. The
bound is FACTOR * e + (m + 8) * u * A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megaaccum.lab.verification.case import Lane
from megaaccum.lab.verification.records import GRADIENT, KINDS, MODEL, Observed, Piece, Reference, ReferenceStep, Step

EXACT = 1e-12
"""Float64: largest relative distance of a gradient."""
FACTOR = 4.0
"""How much farther from float64 a layout may be than one process of the same precision."""
UNIT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-24, "fp16": 2.0**-24}
"""Unit roundoff in which gradients are added."""
MODEL_UNIT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-11}
"""Unit roundoff of the model's own weights and activations."""


ALONE = {"fp64": 0.0, "fp32": 2.0**-10, "bf16": 2.0**-9 * 32, "fp16": 2.0**-11 * 32}
"""Largest relative distance of one process in a precision from float64, over the whole first gradient: 32 roundings of
an activation, or one of a TF32 product."""


Part = list[tuple[int, Piece]]
"""(rank, piece) of what ranks hold of one tp rank's part of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    kind: loss, weight, norm, lr, loss_scale, skipped, router, ranks, or a kind of tensor. name: of a parameter. step:
    from 1. error: relative distance. bound: the error that rounding explains. got, true: values of a scalar. rank: the
    farthest one. note: an explanation of rows without a number."""

    kind: str
    name: str = ""
    step: int
    error: float
    bound: float
    got: float | None = None
    true: float | None = None
    rank: int | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        what = f"{self.kind} of {self.name}" if self.name else self.kind
        values = "" if self.got is None else f" {self.got!r}, one process {self.true!r};"
        tail = f" ({self.note})" if self.note else ""
        return f"step {self.step}: {what}:{values} off by {self.error:.2e}, rounding explains {self.bound:.1e}{tail}"


@dataclass(slots=True)
class Comparison:
    """All rows of one lane. largest: max |w_acc - w_ref| over all weights, after the last step."""

    lane: Lane
    rows: list[Row] = field(default_factory=list)
    largest: float = 0.0
    num_weights: int = 0

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    @property
    def ok(self) -> bool:
        return not self.failed

    def worst(self, kind: str) -> Row | None:
        """The row of a kind that is farthest from its bound."""
        return max((row for row in self.rows if row.kind == kind), key=_order, default=None)


def _order(row: Row) -> float:
    ratio = row.error / max(row.bound, 1e-300)
    return ratio if ratio == ratio else math.inf


def compare(lane: Lane, ranks: list[Observed], exact: Reference, near: Reference, *, summands: int) -> Comparison:
    """Compare `ranks` with `exact`, one process in float64, and `near`, one in the precision of the lane. summands:
    micro-batches of a step over all ranks."""
    compared = Comparison(lane, num_weights=sum(each.numel() for each in exact.before.values()))
    compared.rows += [*_initial_weights(ranks, near), *_random_states(ranks)]
    for number, (true, like) in enumerate(zip(exact.steps, near.steps, strict=True)):
        steps = [(rank.rank, rank.steps[number]) for rank in ranks]
        measure = _Measure(lane, number + 1, summands, true, like)
        compared.rows += [*measure.scalars(steps), *measure.buffers(steps)]
        for kind in KINDS:
            compared.rows += measure.tensors(kind, steps, exact.before, near.before)
    if exact.steps:
        compared.largest = _largest(ranks, _from(near.before, exact.before, exact.steps[-1].tensors["param"]))
    return compared


def alone(lane: Lane, exact: Reference, near: Reference) -> Iterator[Row]:
    """How far one process in the precision of the lane is from float64. Other layers and kernels compute it on a GPU,
    and bounds that follow from its distance would let through what they have wrong."""
    trues, likes = (each.steps[0].tensors.get(GRADIENT, {}) for each in (exact, near))
    if trues and likes:
        off = math.sqrt(sum(float((likes[name] - true).square().sum()) for name, true in trues.items()))
        size = math.sqrt(sum(float(true.square().sum()) for true in trues.values()))
        yield Row(kind="one process", step=1, error=off / max(size, 1e-300), bound=ALONE[lane])


def _from(
    near: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights `after`, moved to the start `near` from the start `exact`: 16-bit weights are rounded before the first
    step."""
    return {name: near[name] + (each - exact[name]) for name, each in after.items()}


class _Measure:
    """Compares one step."""

    def __init__(self, lane: Lane, number: int, summands: int, true: ReferenceStep, like: ReferenceStep):
        self.lane, self.number, self.summands, self.true, self.like = lane, number, summands, true, like

    # --- numbers ---

    def scalars(self, steps: list[tuple[int, Step]]) -> Iterator[Row]:
        for name in ("skipped", "weight", "loss_scale", "lr", "loss", "norm"):
            if self.true.skipped and name in ("loss", "norm"):
                continue
            true, like = (
                float(getattr(self.like if name == "loss_scale" else self.true, name)),
                getattr(self.like, name),
            )
            values = {rank: float(getattr(step, name)) for rank, step in steps}
            rank, got = max(values.items(), key=lambda each: _distance(each[1], true))
            slack = 0.0
            if name in ("loss", "norm"):
                own = max(EXACT, FACTOR * self.like.rounding) if self.lane == "fp64" else 16 * MODEL_UNIT[self.lane]
                slack = own + FACTOR * _relative(float(like), true)
            yield Row(
                kind=name, step=self.number, error=_distance(got, true) if name == "skipped" else _relative(got, true),
                bound=1e-9 if name == "lr" else slack, got=got, true=true, rank=rank,
            )  # fmt: skip
            if len(set(values.values())) > 1 and name not in ("loss",):
                yield Row(
                    kind="ranks", step=self.number, error=math.inf, bound=0.0, rank=rank,
                    note=f"ranks disagree about {name}: {sorted(set(values.values()))}",
                )  # fmt: skip

    def buffers(self, steps: list[tuple[int, Step]]) -> Iterator[Row]:
        """Routers' biases: they move by whole steps of a fixed rate."""
        for rank, step in steps:
            for name, got in step.buffers.items():
                true = self.true.buffers.get(name)
                if true is not None and got.shape == true.shape:
                    error = (
                        float((got - true).norm() / true.norm().clamp_min(1e-30)) if bool((got != true).any()) else 0.0
                    )
                    yield Row(kind="router", name=name, step=self.number, error=error, bound=1e-6, rank=rank)

    # --- tensors ---

    def tensors(
        self, kind: str, steps: list[tuple[int, Step]], before: dict[str, torch.Tensor], near: dict[str, torch.Tensor]
    ) -> Iterator[Row]:
        trues, likes = self.true.tensors.get(kind, {}), self.like.tensors.get(kind, {})
        moves = kind in ("param", MODEL)
        if moves:
            trues = _from(near, before, trues)
        if self.true.skipped and kind == GRADIENT:
            return
        pieces = by_name([(rank, piece) for rank, step in steps for piece in step.tensors.get(kind, [])])
        if not trues or (not pieces and kind not in (GRADIENT, "param")):
            return
        sizes = {n: each - near[n] for n, each in trues.items()} if moves else trues
        total = (sum(float(each.square().sum()) for each in sizes.values()) / len(sizes)) ** 0.5  # root mean square
        for name, true in trues.items():
            parts = pieces.get(name, [])
            if not parts or len(parts) < parts[0][0][1].tp_size:
                if parts or kind != MODEL:
                    note = "a part is on no rank" if parts else "is on no rank"
                    yield Row(kind=kind, name=name, step=self.number, error=math.inf, bound=0.0, note=note)
                continue
            errors = [_distance_of(true, part) for part in parts]
            distance, rank = max(errors, key=lambda each: each[0] if each[0] == each[0] else math.inf)
            size = float((true - near[name]).norm()) if moves else float(true.norm())
            # A tiny change or gradient is measured relative to the others.
            size = max(size, 1e-3 * total, 1e-300)
            off = float((likes[name] - true).norm())
            error = distance / size
            bound = self._bound(kind, name, off / size, float(true.norm()) / size)
            yield Row(kind=kind, name=name, step=self.number, error=error, bound=bound, rank=rank)

    def _bound(self, kind: str, name: str, off: float, ratio: float) -> float:
        """The largest error that rounding explains. off: relative distance of one process in the same precision. ratio:
        size of the tensor relative to what is measured (a weight's change is small relative to the weight)."""
        amplification = self.like.amplification.get(name, 1.0)
        if kind == GRADIENT:
            amplification *= ratio + off  # of the gradient, which is measured by more than its own size if it is tiny
        summed = (self.summands + 8) * UNIT[self.lane] * amplification
        if self.lane == "fp64":
            exact = max(EXACT, summed, FACTOR * self.like.rounding)
            if kind == GRADIENT:
                return exact
            # Adam divides by a root of squares: elements near zero lose digits.
            return 1e3 * exact + 16 * UNIT["fp64"] * ratio
        unit = MODEL_UNIT[self.lane] if kind == MODEL else UNIT[self.lane]
        typical = MODEL_UNIT[self.lane]
        return FACTOR * off + summed + 4 * unit * ratio + 16 * typical * (2.0 if kind == "exp_avg_sq" else 1.0)


def by_name(pieces: list[tuple[int, Piece]]) -> dict[str, list[Part]]:
    """The parts of each parameter, in the order of the tp ranks."""
    found: dict[str, dict[int, Part]] = {}
    for rank, piece in pieces:
        found.setdefault(piece.name, {}).setdefault(piece.tp_rank, []).append((rank, piece))
    return {name: [parts[tp] for tp in sorted(parts)] for name, parts in found.items()}


def farthest(true: torch.Tensor, part: Part) -> tuple[torch.Tensor, int | None]:
    """(values of one tp rank's part, whose right ones are `true`; the rank that is farthest away). Of an element that
    several ranks hold, the farthest value counts; one that no rank holds is nan."""
    values, most = torch.full_like(true, math.nan), torch.full_like(true, -1.0)
    worst: tuple[float, int | None] = (-1.0, None)
    for rank, piece in part:
        at = slice(piece.start, piece.start + piece.values.numel())
        off = (piece.values - true[at]).abs().nan_to_num(nan=math.inf)
        values[at] = torch.where(off > most[at], piece.values, values[at])
        most[at] = torch.maximum(off, most[at])
        worst = max(worst, (float(off.max()) if off.numel() else 0.0, rank), key=lambda each: each[0])
    return values, worst[1]


def _distance_of(true: torch.Tensor, part: Part) -> tuple[float, int | None]:
    """(distance of one tp rank's part of a whole parameter, the rank that is farthest away). It is nan if an element is
    nan, or on no rank."""
    mine = cut(true, part[0][1])
    values, rank = farthest(mine, part)
    return float((values - mine).norm()) * part[0][1].tp_size ** 0.5, rank


def cut(true: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The tp rank's part of a whole parameter, flat."""
    if piece.tp_size == 1:
        return true.reshape(-1)
    if piece.gated and piece.axis == 0:
        return torch.cat([half.chunk(piece.tp_size)[piece.tp_rank] for half in true.chunk(2)]).reshape(-1)
    return true.chunk(piece.tp_size, dim=piece.axis)[piece.tp_rank].reshape(-1)


def relative_error(got: torch.Tensor, true: torch.Tensor) -> float:
    """|got - true| / |true|, L2."""
    return float((got - true).norm() / true.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _initial_weights(ranks: list[Observed], near: Reference) -> Iterator[Row]:
    """Every rank starts with the weights of one process in the same precision, to the bit."""
    pieces = by_name([(rank.rank, piece) for rank in ranks for piece in rank.before])
    for name, true in near.before.items():
        for part in pieces.get(name, []):
            distance, rank = _distance_of(true, part)
            error = distance / max(float(true.norm()), 1e-300)
            yield Row(kind="initial weight", name=name, step=1, error=error, bound=0.0, rank=rank)


def _random_states(ranks: list[Observed]) -> Iterator[Row]:
    """Ranks with different samples or layers draw different dropout; error: the number of missing states."""
    states = {tuple(rank.place[name] for name in ("pp", "dp", "cp", "tp")): rank.random for rank in ranks}
    seeds = {key[:3] for key in states}
    if "" in states.values():
        return
    missing = len(seeds) - len({state for key, state in states.items() if key[3] == 0})
    yield Row(
        kind="random", step=len(ranks[0].steps), error=float(missing), bound=0.0,
        note=f"{len(seeds)} ranks with samples or layers of their own have {len(seeds) - missing} random states",
    )  # fmt: skip


def _largest(ranks: list[Observed], true: dict[str, torch.Tensor]) -> float:
    """max |w_acc - w_ref| over all elements that some rank holds."""
    largest = 0.0
    for rank in ranks:
        for piece in rank.steps[-1].tensors.get("param", []):
            mine = cut(true[piece.name], piece)
            off = (piece.values - mine[piece.start : piece.start + piece.values.numel()]).abs()
            largest = max(largest, float(off.max()) if off.numel() else 0.0)
    return largest


def _distance(got: float, true: float) -> float:
    return abs(got - true) if got == got else math.inf


def _relative(got: float, true: float) -> float:
    return 0.0 if got == true else _distance(got, true) / max(abs(true), 1e-300)
