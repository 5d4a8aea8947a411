"""A step that has begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaaccum.distributed import rng
from megaaccum.step.loss import Divisor, Tally
from megaaccum.step.microbatches import Microbatches

if TYPE_CHECKING:
    import torch

    from megaaccum.precision.fp8 import Fp8, Snapshot


@dataclass(frozen=True, slots=True)
class Before:
    """State that an attempt moves on, as it was before. A step that is skipped, or attempted again, goes back to it."""

    rng: dict[str, torch.Tensor]
    fp8: Snapshot

    @classmethod
    def of(cls, low_precision: Fp8) -> Before:
        return cls(rng.snapshot(), low_precision.snapshot())

    def restore(self, low_precision: Fp8) -> None:
        """Go back to it."""
        rng.restore(self.rng)
        low_precision.restore(self.fp8)


@dataclass
class OpenStep:
    """A step between its first flush and its end: its divisor, what its loss functions gave, its calls so far."""

    step: int
    before: Before
    divisor: Divisor = field(init=False)
    tally: Tally = field(default_factory=Tally)
    calls: list[Microbatches] = field(default_factory=list)
    num_microbatches: int = 0
    reduced: bool = False
    begun: bool = False
    """Its first forwards have run, before the verdict on the step before."""
    short: str = ""
    """What was unusual about it before its verdict, for the note."""
