"""The bank of documented mistakes: each can be made on a rank, and has to be seen and found."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megaaccum.config import Plan
from megaaccum.lab.verification.bank import data, divisor, norm, optimizer, pipeline, reduction, side_losses
from megaaccum.lab.verification.bank.mistake import BANK, Mistake

__all__ = ["BANK", "FILLED_BY", "Mistake", "made"]

FILLED_BY = (divisor, reduction, norm, side_losses, pipeline, optimizer, data)


def made(name: str, plan: Plan) -> AbstractContextManager[None]:
    """Makes a mistake of the bank, in the layout of a plan, while it is entered."""
    return BANK[name].make(plan)
