"""A documented mistake: how it is made, where it was made first, and where a verification has to find it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from megaaccum.config import Plan

Making = Callable[[Plan], Iterator[None]]
"""A generator that makes the mistake in the layout of a plan, yields once, and takes it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One entry of the bank.

    name: unique. text: what goes wrong. source: an address where it was reported, or the paper that defines what is
    broken here. base: the healthy case in which it is made (cases.py). axes: those that it needs; the diagnosis has to
    name these and no others. parameter: an expression for the first wrong parameter; empty where none is wrong. make:
    makes it, on a rank.
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
    """`owner.name` is `value` inside."""
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
