"""A step that has begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaaccum.step.loss import Divisor, Tally
from megaaccum.step.microbatches import Microbatches

if TYPE_CHECKING:
    import torch

    from megaaccum.precision import fp8


@dataclass(frozen=True, slots=True)
class Before:
    """State that an attempt moves on, as it was before. A step that is skipped, or attempted again, goes back to it."""

    rng: dict[str, torch.Tensor]
    fp8: fp8.Snapshot


@dataclass
class OpenStep:
    """A step between its first flush and its end: its divisor, what its loss functions gave, its calls so far."""

    step: int
    divisor: Divisor
    before: Before
    tally: Tally = field(default_factory=Tally)
    calls: list[Microbatches] = field(default_factory=list)
    num_microbatches: int = 0
    reduced: bool = False
    short: str = ""
