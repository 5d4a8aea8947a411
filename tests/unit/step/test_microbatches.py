"""The micro-batches of one call: how many of a list are taken, and what has to be said of each."""

from __future__ import annotations

from dataclasses import replace

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
    assert found.can_run_again and [list(each) for each in found.iterators(2)] == [[], []]  # type: ignore[arg-type]


def test_lengths_are_those_of_the_plan_unless_every_microbatch_tells_its_own() -> None:
    assert read_batch(print, [data(4)[3], ("x",)], PLAN, first=0).tokens == [4, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(count=5), "num_microbatches is 5, but the list has 4"),
        (dict(lengths=[1, 2]), "lengths has 2 numbers for 4 micro-batches"),
        (dict(weights=[1.0, 0.0, -1.0, 1.0]), "weights has one that is negative or not finite"),
        (dict(weights=[1.0, float("inf"), 1.0, 1.0]), "weights has one that is negative or not finite"),
        (dict(weights=[1.0, 1.0, 1.0, float("nan")]), "weights has one that is negative or not finite"),
        (dict(count=2, weights=[1.0, 1.0, 1.0]), "weights has 3 numbers for 2 micro-batches"),
    ],
)
def test_numbers_of_another_count_or_that_weigh_nothing_real_are_refused(keys: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_batch(print, data(4), PLAN, first=0, **keys)  # type: ignore[arg-type]


class Told:
    """A forward step function that says what its micro-batches weigh."""

    def __call__(self, *_: object) -> None:
        """Never called."""

    def weights(self, data: list[dict[str, torch.Tensor]]) -> list[float]:
        return [10.0 + len(each["tokens"][0]) for each in data]

    def token_weights(self, data: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.tensor([1 / len(each["tokens"][0]) for each in data])


def test_what_the_function_says_holds_where_the_call_says_nothing() -> None:
    found = read_batch(Told(), data(4), PLAN, first=0, count=2, lengths=[5, 6])  # type: ignore[arg-type]
    assert (found.weights, found.token_weights, found.tokens) == ([11.0, 12.0], [1.0, 0.5], [5, 6])
    assert [found.expected_weight(0), found.token_weight(1)] == [11.0, 0.5]
    found = read_batch(Told(), data(2), PLAN, first=0, weights=[3, 4], expected=7)  # type: ignore[arg-type]
    assert (found.weights, found.expected_weight(1)) == ([3.0, 4.0], 4.0)
    found = read_batch(Told(), iter(data(2)), PLAN, first=0, count=2, expected=7)  # type: ignore[arg-type]
    assert (found.weights, found.token_weights, found.tokens, found.expected_weight(1)) == (None, None, [4, 4], 7.0)


def test_a_part_of_a_call_has_the_numbers_of_its_own_microbatches() -> None:
    whole = read_batch(Told(), data(5), PLAN, first=3, lengths=[7, 6, 5, 4, 3])  # type: ignore[arg-type]
    whole = replace(whole, dummies=frozenset({1, 3}))
    assert whole.part(0, 5) is whole
    for start, stop, dummies in ((0, 1, set()), (1, 3, {0}), (2, 5, {1})):
        part = whole.part(start, stop)
        assert (part.first, part.count, part.dummies) == (3 + start, stop - start, dummies)
        for name in ("data", "tokens", "weights", "token_weights", "lengths"):
            assert getattr(part, name) == getattr(whole, name)[start:stop]
    plain = read_batch(print, data(2), PLAN, first=0).part(1, 2)  # type: ignore[arg-type]
    assert (plain.weights, plain.token_weights, plain.lengths) == (None, None, None)


def test_what_is_replaced_weighs_nothing_and_the_rest_is_as_it_was() -> None:
    """By the numbers of micro-batches in the step, of which this call has 3 to 6."""
    whole = read_batch(Told(), data(4), PLAN, first=3, lengths=[7, 6, 5, 4])  # type: ignore[arg-type]
    whole = replace(whole, dummies=frozenset({0}))
    assert whole.without({2: "before", 7: "after"}) is whole
    found = whole.without({1: "before", 4: "this", 6: "that", 8: "after"}, {6: 9})
    assert found.data == [whole.data[0], "this", whole.data[2], "that"]  # type: ignore[index]
    assert (found.lengths, found.weights, found.dummies) == ([7, 6, 5, 9], [11.0, 0.0, 13.0, 0.0], {0, 1, 3})
    assert (found.first, found.count) == (3, 4)
    plain = read_batch(print, data(2), PLAN, first=0).without({0: "this"})  # type: ignore[arg-type]
    assert (plain.data[0], plain.lengths, plain.weights, plain.dummies) == ("this", None, None, {0})  # type: ignore[index]


def test_every_chunk_reads_every_microbatch() -> None:
    listed = read_batch(print, [1, 2, 3], PLAN, first=0)  # type: ignore[arg-type]
    assert [list(each) for each in listed.iterators(2)] == [[1, 2, 3]] * 2  # type: ignore[arg-type]
    one = read_batch(print, iter([1, 2]), PLAN, first=0, count=2)  # type: ignore[arg-type]
    assert [list(each) for each in one.iterators(2)] == [[1, 2]] * 2  # type: ignore[arg-type]
    own = [iter([1]), None]
    assert read_batch(print, own, PLAN, first=0, count=1).iterators(2) == own  # type: ignore[arg-type]


def test_what_makes_the_scales_of_microbatches_differ() -> None:
    same = read_batch(print, [{"tokens": torch.zeros(1, 4)}] * 2, PLAN, first=0)  # type: ignore[arg-type]
    assert not same.differ and not replace(same, weights=[2.0, 2.0]).differ
    for change in (dict(weights=[2.0, 3.0]), dict(tokens=[4, 5]), dict(token_weights=[1, 2]), dict(dummies={1})):
        assert replace(same, **change).differ, change  # type: ignore[arg-type]


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
