"""The bytes that a plan predicts for a rank, with which real steps are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """The prediction for a rank of pipeline rank `pp_rank`. gathered, reduced: bytes of parameters and gradients that
    it receives from other data-parallel ranks in a step. per_element: bytes of both per parameter of its stage, to
    account for padding. memory: bytes that it holds, by kind. least_share: the share of `reduced` that the
    data-parallel rank with the least receives."""

    pp_rank: int
    gathered: float
    reduced: float
    per_element: float
    memory: dict[str, float]
    least_share: float = 1.0
