"""Calls of Megatron's hooks and a backend's over a table whose weight gradients have an order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megaaccum.executor.hooks import Hooks
from megaaccum.schedule.actions import Action

TABLE = [
    *(Action("F", chunk, microbatch) for chunk in (0, 1) for microbatch in (0, 1)),
    Action("I", 1, 0), Action("I", 1, 1), Action("I", 0, 0), Action("F", 1, 2), Action("I", 0, 1), Action("B", 1, 2),
    Action("W", 1, 1), Action("W", 1, 0), Action("W", 0, 1), Action("F", 0, 2), Action("W", 0, 0), Action("B", 0, 2),
    Action("I", 1, 3), Action("I", 0, 3), Action("I", 0, 4), Action("W", 0, 4), Action("F", 1, 5), Action("W", 0, 3),
    Action("W", 1, 3),
]  # fmt: skip
"""Chunk 0 has its last I in micro-batch 4, and its last W in micro-batch 3."""


class Driven:
    """The hooks over TABLE, each called as the executor does. events: their calls; inside: for each action, whether
    gradients stayed on the rank meanwhile."""

    def __init__(self, *, with_grad_sync: bool):
        self.events: list[tuple] = []
        self.is_inside = False
        self.chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        owner = {id(param): at for at, chunk in enumerate(self.chunks) for param in chunk.parameters()}

        def called(name: str, at: int):
            return lambda params: self.events.append((name, at, {owner[id(param)] for param in params}, self.is_inside))

        config = SimpleNamespace(
            no_sync_func=self.no_sync,
            param_sync_func=[called("gather", at) for at in (0, 1)],
            grad_sync_func=[called("reduce", at) for at in (0, 1)] if with_grad_sync else None,
        )
        backend = SimpleNamespace(
            add_weight_grad="the backend's", memory=SimpleNamespace(measure=lambda of: None), tensors=None,
            sums=SimpleNamespace(begin_weight_grad=lambda microbatch: self.events.append(("of", microbatch))),
            after_input_grad=lambda chunk: self.events.append(("after I", chunk)),
            before_weight_grad=lambda chunk, last: self.events.append(("before W", chunk, last)),
            after_weight_grad=lambda chunk: self.events.append(("after W", chunk)),
        )  # fmt: skip
        self.hooks = Hooks(SimpleNamespace(actions=lambda rank: iter(TABLE)), 0, config, self.chunks, backend)
        self.inside: dict[tuple[str, int, int], bool] = {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert not self.is_inside, "entered twice"
        self.is_inside = True
        yield
        self.is_inside = False

    def run(self) -> None:
        hooks = self.hooks
        hooks.enter()
        for action in TABLE:
            if action.kind == "F":
                self.inside["F", action.chunk, action.microbatch] = self.is_inside
            if action.kind in "IB":
                hooks.before_input_grad(action)
                self.inside["I", action.chunk, action.microbatch] = self.is_inside
                hooks.after_input_grad(action)
            if action.kind in "WB":
                hooks.before_weight_grad(action)
                self.inside["W", action.chunk, action.microbatch] = self.is_inside
                hooks.after_weight_grad(action)
            self.inside["after " + action.kind, action.chunk, action.microbatch] = self.is_inside
        hooks.leave()
        assert not self.is_inside


FINAL = [("I", 1, 3), ("I", 0, 4), ("W", 0, 3), ("W", 1, 3)]


@pytest.mark.parametrize("with_grad_sync", [False, True])
def test_gradients_are_final_in_a_chunks_last_i_and_w_alone_whatever_order_these_have(with_grad_sync: bool):
    driven = Driven(with_grad_sync=with_grad_sync)
    driven.run()
    assert [at for at, inside in driven.inside.items() if not inside] == ([] if with_grad_sync else FINAL)


@pytest.mark.parametrize("with_grad_sync", [False, True])
def test_a_backend_is_told_of_each_part_of_a_backward_and_of_the_last(with_grad_sync: bool):
    driven = Driven(with_grad_sync=with_grad_sync)
    assert driven.hooks.add_weight_grad == "the backend's"
    driven.run()
    expected: list[tuple] = []
    for kind, chunk, microbatch in TABLE:
        expected += [("after I", chunk)] if kind in "IB" else []
        last = (chunk, microbatch) in {(1, 3), (0, 3)}
        expected += [("of", microbatch), ("before W", chunk, last), ("after W", chunk)] if kind in "WB" else []
        expected += [("reduce", chunk, {chunk}, False)] if kind == "W" and last and with_grad_sync else []
    assert driven.events == expected


def test_a_chunk_gathers_its_own_parameters():
    driven = Driven(with_grad_sync=False)
    for chunk in (1, 0):
        driven.hooks.before_first_forward(chunk)
    assert driven.events == [("gather", 1, {1}, False), ("gather", 0, {0}, False)]
