"""Attributes of libraries that are others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context in which `owner`, a module or a class, has these in place of its own attributes of their names."""
    assert all(hasattr(owner, name) for name in attributes), f"{owner} lacks one of {', '.join(attributes)}"
    before = {name: vars(owner).get(name, _INHERITED) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
