"""Looks up private names of libraries, for the `check()` of each module here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable


def absent(owner: object, names: Iterable[str], *, called: str | None = None) -> list[str]:
    """A sentence for each of `names` that `owner` (a class, a module, an object) lacks. called: the owner's name."""
    called = called or getattr(owner, "__name__", type(owner).__name__)
    return [f"{called}.{name} is missing" for name in names if not hasattr(owner, name)]


def unwritten(owner: type, names: Iterable[str], *, form: str = "{}") -> list[str]:
    """A sentence for each of `names` that the source of a class lacks, in which an attribute is only set when an object
    is made. form: the text around a name, `self.{}`."""
    source = inspect.getsource(owner)
    return [f"{owner.__name__}.{name} is missing" for name in names if form.format(name) not in source]
