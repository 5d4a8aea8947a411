"""The bytes that a plan expects of a rank, to which real steps are held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """A rank of pipeline rank `pp_rank`: bytes that it receives from other data-parallel ranks in a step, of parameters
    and of gradients, and bytes that it holds, by kind. per_element: bytes of both per parameter of its stage, for what
    padding adds. least_share: of `reduced`, what the data-parallel rank that receives the least does."""

    pp_rank: int
    gathered: float
    reduced: float
    per_element: float
    memory: dict[str, float]
    least_share: float = 1.0
