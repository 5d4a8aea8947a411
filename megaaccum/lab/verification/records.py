"""Numbers that a verification compares: the reference's, and those of each rank of a layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GRADIENT, MODEL = "gradient", "model"
KINDS = (GRADIENT, "param", "exp_avg", "exp_avg_sq", "momentum_buffer", MODEL)
"""Kinds of tensors: the gradient as the optimizer reads it (reduced, divided, unscaled, clipped); master weights and
Adam's moments and Muon's momenta after the step; the weights that the next forward reads."""
SENT, RECEIVED = "sends", "receives"


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor at a border, as a rank has it.

    stage: that sends or receives it. way: SENT or RECEIVED. is_gradient: else an activation. after: the layer before
    the border, in the whole model. microbatch: its number in the global batch. values: float64, of an activation
    [sequence, batch, hidden] this rank's run of the sequence, number `part` of `parts`."""

    stage: int
    way: str
    is_gradient: bool
    after: str
    microbatch: int
    values: torch.Tensor
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one parameter's tensor on one rank.

    name: in the whole model. values: flat, float64. start: offset in the flattened part that its tp rank holds, in
    elements. axis: the one that tp cuts, -1 for none; gated: it holds [gate; up].
    """

    name: str
    values: torch.Tensor
    start: int
    tp_rank: int = 0
    tp_size: int = 1
    axis: int = -1
    gated: bool = False


@dataclass(slots=True)
class _Numbers:
    """The numbers of one step."""

    loss: float
    weight: float
    norm: float
    lr: float
    loss_scale: float
    skipped: bool


@dataclass(slots=True)
class Step(_Numbers):
    """One step on one rank. tensors: by kind. buffers: routers' biases by name."""

    tensors: dict[str, list[Piece]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Observed:
    """Steps of a layout on one rank.

    place: its rank in each group. before: its initial weights. random: a digest of the random states after the steps;
    empty for a user's model, which seeds itself. crossings: what crossed borders of stages in the first step, if
    requested."""

    rank: int
    place: dict[str, int]
    before: list[Piece]
    steps: list[Step] = field(default_factory=list)
    random: str = ""
    crossings: list[Crossing] = field(default_factory=list)


@dataclass(slots=True)
class ReferenceStep(_Numbers):
    """One step of one process.

    tensors: by kind and name, of whole parameters, float64. amplification: by name, the sum of the norms of the
    micro-batches' gradients relative to the norm of their sum. rounding: the largest relative distance of that sum from
    the gradient of the full batch, up to this step; 0 if batches go through micro-batch by micro-batch."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    amplification: dict[str, float] = field(default_factory=dict)
    rounding: float = 0.0


@dataclass(slots=True)
class Reference:
    """Steps of one process, without pipeline, sharding or accumulation.

    before: initial weights by name, in the order of the model. parts: each micro-batch's share of the first step's
    gradient before clipping, if requested, with the `weights` of their losses and the outputs and gradients of `layers`
    (borders.of_layers). clip: the factor by which the first step's gradient was clipped. problem: the reason why
    nothing can be verified; else empty. notes: remarks for the reader of the verdict."""

    before: dict[str, torch.Tensor]
    steps: list[ReferenceStep] = field(default_factory=list)
    parts: list[dict[str, torch.Tensor]] = field(default_factory=list)
    layers: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    clip: float = 1.0
    weights: list[float] = field(default_factory=list)
    problem: str = ""
    notes: list[str] = field(default_factory=list)
