"""Verification under a launcher, before any rank meets another (tests/multiproc/test_launchers.py has the rest)."""

from __future__ import annotations

import pytest

from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.lab.verification import launched
from megaaccum.lab.verification.shrink import as_case
from tests.support.configs import make


def test_another_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = make(pipeline_model_parallel_size=2)
    case = as_case(config, resolve(config, world_size=2), shrink=False).case
    assert launched.num_ranks() == 3
    assert not launched.is_first()
    with pytest.raises(ConfigError, match="started 3 ranks, but the layout that is verified has 2: start 2"):
        launched.together(case, lambda observe: pytest.fail("not reached"))


def test_without_a_launcher_this_rank_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (launched.num_ranks(), launched.is_first()) == (1, True)
