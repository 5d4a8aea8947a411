"""The outcome of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megaaccum.observe.expert_loads import ExpertLoads
    from megaaccum.observe.memory import Memory
    from megaaccum.observe.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The outcome of one step; the same on every rank, but for `seconds`, `forward_seconds`, `traffic`, `memory` and
    `per_microbatch`.

    step: its number, from 1. loss: sum of all losses over `weight`. weight: N, the weights of all micro-batches over
    all ranks (unmasked tokens, say). grad_norm: L2 norm of the model's gradient before clipping, after unscaling. lr:
    that it used, or would have. loss_scale: what the loss was multiplied by in the backward, or would have been (1
    without FP16). skipped: no rank changed its weights. advanced: its samples count as consumed. bad: it counts towards
    max_bad_steps. sanitized: elements of the gradient set to 0, or micro-batches left out, over all ranks. note: what
    was wrong, empty where nothing was. stop: some rank asked to stop after this step. reports: what loss functions
    reported, reduced over micro-batches and ranks. per_microbatch: on ranks of the last stage, reports of their own.
    expert_loads: how evenly tokens went to experts, if there are any. seconds: by phase, and `between` it and the step
    before. forward_seconds: in this rank's forwards. traffic: this rank's collectives, by collective, group and dtype.
    memory: the most bytes that this rank held, by kind.
    """

    step: int = 0
    loss: float
    weight: float
    grad_norm: float
    skipped: bool
    lr: float = 0.0
    advanced: bool = True
    bad: bool = False
    loss_scale: float = 1.0
    sanitized: int = 0
    note: str = ""
    stop: bool = False
    reports: dict[str, float] = field(default_factory=dict)
    per_microbatch: dict[str, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    expert_loads: ExpertLoads | None = field(default=None, repr=False)
    seconds: dict[str, float] = field(default_factory=dict, repr=False)
    forward_seconds: float = field(default=0.0, repr=False)
    traffic: Traffic = field(default_factory=dict, repr=False)
    memory: Memory = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """Unmasked tokens over all ranks: the report of that name, or the weight, where it counts tokens."""
        return round(self.reports.get("num_tokens", self.weight))
