"""Numbers that a verification compares: those of one process, and those that each rank of a layout came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megaaccum.lab.verification.borders import Crossing

GRADIENT, MODEL = "gradient", "model"
KINDS = (GRADIENT, "param", "exp_avg", "exp_avg_sq", MODEL)
"""Kinds of tensors: the gradient as the optimizer reads it (reduced, divided, unscaled, clipped); after the step the
master weights and Adam's moments; and the weights that the next forward reads."""


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
class Step:
    """One step on one rank. tensors: by kind. buffers: routers' biases by name."""

    loss: float
    weight: float
    norm: float
    lr: float
    loss_scale: float
    skipped: bool
    tensors: dict[str, list[Piece]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Observed:
    """Steps of a layout on one rank. before: its initial weights. place: its rank in each group. random: a digest of
    the state that dropout draws from after the steps; empty for a model of a user's own, who seeds it. crossings: what
    crossed borders of stages in the first step, where asked for."""

    rank: int
    place: dict[str, int]
    before: list[Piece]
    steps: list[Step] = field(default_factory=list)
    random: str = ""
    crossings: list[Crossing] = field(default_factory=list)


@dataclass(slots=True)
class ReferenceStep:
    """One step of one process. tensors: by kind and name, of whole parameters, float64. amplification: by name, how
    much larger the sum of the norms of the micro-batches' gradients is than the norm of their sum. rounding: the
    largest relative distance of that sum from the gradient of the whole batch, up to this step, where whole batches
    went through at once."""

    loss: float
    weight: float
    norm: float
    lr: float
    loss_scale: float
    skipped: bool
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    amplification: dict[str, float] = field(default_factory=dict)
    rounding: float = 0.0


@dataclass(slots=True)
class Reference:
    """Steps of one process, without pipeline, sharding or accumulation.

    before: its initial weights by name, in the order of the model. whole: all samples of a step went through the model
    in one forward, and not micro-batch by micro-batch. parts: of the first step, where asked for, each micro-batch's
    share of the gradient, before clipping, with `weights` of their losses, and of its `layers` outputs and gradients
    (borders.of_layers). clip: what the first step's gradient was
    multiplied by in clipping. problem: why nothing can be verified; empty where it can. notes: what a reader of the
    verdict should know."""

    before: dict[str, torch.Tensor]
    steps: list[ReferenceStep] = field(default_factory=list)
    whole: bool = False
    parts: list[dict[str, torch.Tensor]] = field(default_factory=list)
    layers: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    clip: float = 1.0
    weights: list[float] = field(default_factory=list)
    problem: str = ""
    notes: list[str] = field(default_factory=list)
