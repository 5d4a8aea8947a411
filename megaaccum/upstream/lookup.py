"""Looks up private names of libraries, for the `check()` of each module here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType


def absent(owner: object, names: Iterable[str], *, called: str | None = None) -> list[str]:
    """A sentence for each of `names` that `owner` (a class, a module, an object) lacks. called: the owner's name."""
    called = called or getattr(owner, "__name__", type(owner).__name__)
    return [f"{called}.{name} is missing" for name in names if not hasattr(owner, name)]


def unwritten(owner: type, names: Iterable[str]) -> list[str]:
    """A sentence for each of `names` that no method of a class has as an attribute, a variable or a text; an attribute
    is only set when an object is made. Reads compiled code: parsing sources of thousands of lines takes seconds."""
    codes = [inspect.unwrap(each).__code__ for each in vars(owner).values() if inspect.isfunction(each)]
    written = set(vars(owner))
    for code in codes:
        written |= {*code.co_names, *code.co_varnames, *(each for each in code.co_consts if isinstance(each, str))}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    mangled = {name: f"_{owner.__name__}{name}" if name.startswith("__") else name for name in names}
    return [f"{owner.__name__}.{name} is missing" for name in mangled if mangled[name] not in written]
