"""Tests that need several ranks: `run_ranks(fn, n, *args)` runs `fn(*args)` on n ranks and returns their results."""

from megaaccum.lab.verification.testing.ranks import Outcome, RanksFailed, run_ranks, try_ranks

__all__ = ["Outcome", "RanksFailed", "run_ranks", "try_ranks"]
