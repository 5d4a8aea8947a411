"""Statements of docs/concepts/found.md about the libraries, with the numbers of the installed versions. If one of these
fails after an upgrade, the library may have changed, and the page has to be updated."""

from __future__ import annotations

from typing import Any

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.snippets import ROOT, blocks_of

BIAS, Z_LOSS, LATENT, ZERO_3, ROUND_ROBIN, TWICE = (
    block.source for block in blocks_of(ROOT / "docs/concepts/found.md")
)


def names_of(source: str, wanted: tuple[str, ...]) -> list[Any]:
    """The values of `wanted` after a block of the page, in a process of its own."""
    names: dict[str, Any] = {}
    exec(source, names)
    return [names[name] for name in wanted]


def found(source: str, *wanted: str, ranks: int = 1) -> list[Any]:
    """On rank 0."""
    return run_ranks(names_of, ranks, source, wanted, init=False)[0]


def test_a_bias_after_a_frozen_matrix():
    trained, frozen = found(BIAS, "trained", "frozen")
    assert trained.tolist() == [2.0] * 4
    assert frozen is None


def test_the_z_loss_of_a_repeated_prediction_layer():
    balanced, z = found(Z_LOSS, "balanced", "z")
    assert balanced == pytest.approx(0.5, abs=1e-5)
    assert z == pytest.approx(1.0, abs=1e-5)


def test_two_forwards_before_two_backwards():
    in_turn, forwards_first, second_stage = found(ZERO_3, "in_turn", "forwards_first", "second_stage")
    assert in_turn == second_stage == [-0.5, -0.5]
    assert forwards_first == [0.0, -0.5]


def test_the_norm_of_the_queries_latent():
    assert found(LATENT, "factor", ranks=2) == [pytest.approx(2.0, abs=1e-6)]


def test_masters_in_another_order():
    in_order, reordered = found(ROUND_ROBIN, "in_order", "reordered", ranks=2)
    assert in_order == [0.0, 1.0, 2.0, 3.0]
    assert reordered == [0.0, 2.0, 1.0, 3.0]


def test_a_layer_that_runs_twice_in_reentrant_checkpoints():
    assert found(TWICE, "whole", "half") == [2.0, 1.0]


@pytest.mark.parametrize(
    "source",
    [BIAS, Z_LOSS, LATENT, ZERO_3, ROUND_ROBIN, TWICE],
    ids=["bias", "z loss", "latent", "ZeRO-3", "round robin", "twice"],
)
def test_each_is_short(source):
    assert len(source.splitlines()) <= 40
