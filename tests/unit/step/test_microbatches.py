"""The micro-batches of one call: how many of a list are taken, and what has to be said of each."""

from __future__ import annotations

import pytest
import torch

from megaaccum.config import Plan
from megaaccum.errors import ConfigError
from megaaccum.step.microbatches import read_batch

PLAN = Plan.of(batch=dict(micro_batch_size=1, seq_length=4, grad_accum_steps=4), world_size=1).batch


def data(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"tokens": torch.zeros(1, length + 1)} for length in range(count)]


def test_fewer_than_a_list_has_are_its_first() -> None:
    found = read_batch(print, data(4), PLAN, first=0, count=2)  # type: ignore[arg-type]
    assert (len(found), len(found.data), found.tokens) == (2, 2, [1, 2])  # type: ignore[arg-type]


def test_a_stage_that_reads_nothing_gives_an_empty_list() -> None:
    found = read_batch(print, [], PLAN, first=0, count=2)  # type: ignore[arg-type]
    assert (len(found), found.tokens) == (2, [4, 4])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(count=5), "num_microbatches is 5, but the list has 4"),
        (dict(lengths=[1, 2]), "lengths has 2 numbers for 4 micro-batches"),
        (dict(count=2, weights=[1.0, 1.0, 1.0]), "weights has 3 numbers for 2 micro-batches"),
    ],
)
def test_numbers_of_another_count_are_refused(keys: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_batch(print, data(4), PLAN, first=0, **keys)  # type: ignore[arg-type]


class Routed:
    """A forward step function that knows how many tokens of each micro-batch are no padding."""

    def __init__(self, *counts: int):
        self.routed_tokens = lambda microbatches: counts

    def __call__(self, *args: object) -> None: ...


def test_tokens_are_those_that_routers_count() -> None:
    found = read_batch(Routed(3, 2, 1, 4), data(4), PLAN, first=0)  # type: ignore[arg-type]
    assert found.tokens == [3, 2, 1, 4]
    with pytest.raises(ConfigError, match="routed_tokens has 1 numbers for 4 micro-batches"):
        read_batch(Routed(3), data(4), PLAN, first=0)  # type: ignore[arg-type]
