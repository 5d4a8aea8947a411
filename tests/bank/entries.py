"""Every entry of the bank. Imports the names that mistakes replace, so call `preload.libraries()` first."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megaaccum.config import Plan
from tests.bank import data, divisor, experts, muon, norm, optimizer, pipeline, reduction, side_losses
from tests.bank.mistake import BANK, Mistake

__all__ = ["BANK", "FILLED_BY", "Mistake", "made"]

FILLED_BY = (divisor, reduction, norm, experts, side_losses, pipeline, optimizer, muon, data)


def made(name: str, plan: Plan) -> AbstractContextManager[None]:
    """Make a mistake of the bank, in the layout of a plan, while it is entered."""
    return BANK[name].make(plan)
