"""Looks up private names of libraries, for the `check()` of each module here."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from types import CodeType
from typing import Any

from megaaccum.texts import packaged_yaml

_NAMES: dict[str, dict[str, Any]] = packaged_yaml(__package__, "names.yaml")
"""Private names by the module that uses them, or by the kind of file that holds them, and by their owner."""


def missing(module: str) -> list[str]:
    """A sentence for each name that `module`, a part of names.yaml, uses and its library lacks."""
    found = []
    for place, names in _NAMES[module].items():
        owner = pkgutil.resolve_name(place)
        found += absent(owner, names.get("has", "").split()) + unwritten(owner, names.get("writes", "").split())
    return found


def pickled(kind: str) -> frozenset[tuple[str, str]]:
    """(module, name) of the classes that a kind of file, a part of names.yaml, may hold."""
    return frozenset((module, name) for module, names in _NAMES[kind].items() for name in names.split())


def absent(owner: object, names: Iterable[str]) -> list[str]:
    """A sentence for each of `names` that `owner` (a class, a module, an object) lacks."""
    called = getattr(owner, "__name__", type(owner).__name__)
    return [f"{called}.{name} is missing" for name in names if not hasattr(owner, name)]


def unwritten(owner: type, names: Iterable[str]) -> list[str]:
    """A sentence for each of `names` that no method of a class has as an attribute, a variable or a text; an attribute
    is only set when an object is made. Reads compiled code: parsing sources of thousands of lines takes seconds."""
    mangled = {name: f"_{owner.__name__}{name}" if name.startswith("__") else name for name in names}
    if not mangled:
        return []
    codes = [inspect.unwrap(each).__code__ for each in vars(owner).values() if inspect.isfunction(each)]
    written = set(vars(owner))
    for code in codes:
        written |= {*code.co_names, *code.co_varnames, *(each for each in code.co_consts if isinstance(each, str))}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return [f"{owner.__name__}.{name} is missing" for name in mangled if mangled[name] not in written]
