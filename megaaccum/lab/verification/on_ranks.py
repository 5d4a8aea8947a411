"""The functions that ranks run for a verification; the process that starts them needs neither DeepSpeed nor
Megatron."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.records import Observed, Truth


def truths(case: Case, lanes: Sequence[Lane], steps: int, keep_parts: bool = False) -> list[Truth]:
    """One process' steps in each precision; in a world of one rank."""
    from megaaccum.lab.verification.truth import truth_of

    return [truth_of(case, lane, steps, keep_parts=keep_parts and lane == "fp64") for lane in lanes]


def observed(case: Case, steps: int, at_borders: bool = False) -> Observed:
    """This rank's steps of a layout, with the case's mistake made."""
    from megaaccum.lab.verification import bank
    from megaaccum.lab.verification.observe import observe

    with bank.made(case.mistake, case.plan()) if case.mistake else contextlib.nullcontext():
        return observe(case, steps, at_borders=at_borders)
