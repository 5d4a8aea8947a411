"""A documented mistake: how it is made, its source, and the place that a verification has to find."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.sharding.ddp import DdpBackend
from megaaccum.step.forward_step import ForwardStep
from megaaccum.upstream import pytorch

Making = Callable[[Plan], Iterator[None]]
"""A generator that makes the mistake in the layout of a plan, yields once, and takes it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One entry of the bank.

    name: unique. text: what goes wrong. source: where it was reported, or the paper, manual or code of a library that
    has it or defines what is broken here. base: the healthy case in which it is made (cases.py). axes: those that it
    needs; the diagnosis has to name these and no others. parameter: an expression for the first wrong parameter; empty
    if none is wrong. make: makes it, on a rank.
    """

    name: str
    text: str
    source: str
    base: str
    axes: frozenset[str]
    parameter: str
    make: Callable[[Plan], AbstractContextManager[None]]

    def is_at(self, axes: list[str], parameter: str) -> bool:
        """Whether a diagnosis has found it."""
        return set(axes) == self.axes and re.fullmatch(self.parameter, parameter) is not None


BANK: dict[str, Mistake] = {}
"""By name; the modules of this package fill it."""

FIRST = r"embedding\.word_embeddings\.weight"
"""The first parameter of the model: all are wrong, or those from the first on."""
NORM = r"decoder\.layers\.0\.input_layernorm\.weight"
"""The first norm."""


def mistake(text: str, source: str, base: str, axes: str, parameter: str = FIRST) -> Callable[[Making], Making]:
    """Enter the decorated function into the bank under its own name. axes: separated by commas."""

    def enter(function: Making) -> Making:
        name = function.__name__.replace("_", " ")
        assert name not in BANK, f"{name} is in the bank twice"
        needed = frozenset(each.strip() for each in axes.split(",") if each.strip())
        BANK[name] = Mistake(
            name=name, text=text, source=source, base=base, axes=needed, parameter=parameter,
            make=contextmanager(function),
        )  # fmt: skip
        return function

    return enter


_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name`, which exists, is `value` inside."""
    assert hasattr(owner, name), f"{owner} has no {name}: the mistake replaces nothing"
    had = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


@contextmanager
def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """The method `name` is `around(original, self, *args)` inside."""
    original = getattr(owner, name)
    with replaced(owner, name, lambda self, *args, **keys: around(original, self, *args, **keys)):
        yield


def forwards(around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Every forward of a micro-batch is `around(run, chunk, index, count)` inside: `run()` is the forward, `index` the
    micro-batch's number in its flush of `count`."""

    def called(original: Any, self: ForwardStep, iterator: Any, chunk: Any, **keys: Any) -> Any:
        index = self._next[self._number[id(chunk)]]
        return around(lambda: original(self, iterator, chunk, **keys), chunk, index, len(self._batch))

    return wrapped(ForwardStep, "__call__", called)


@contextmanager
def added_by_microbatch() -> Iterator[dict[int, list[torch.Tensor]]]:
    """Gradients of the current step's micro-batches on this rank, under torch's DDP: a list per parameter, by its
    id."""
    added: dict[int, list[torch.Tensor]] = {}

    def note(param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        mine = added.setdefault(id(param), [])
        mine.append(param.grad - sum(mine))

    def watching(original: Any, self: DdpBackend, *args: Any, **keys: Any) -> None:
        original(self, *args, **keys)
        for param in (param for ddp in self._ddp for param in ddp.parameters()):
            pytorch.OnGradient(param, note)

    def begin(original: Any, self: DdpBackend) -> None:
        original(self)
        added.clear()

    with wrapped(DdpBackend, "__init__", watching), wrapped(DdpBackend, "begin_accumulation", begin):
        yield added
