"""Attributes, variables of the environment and the collector of garbage that are others for a while."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context in which `owner`, a module, class or object, has these in place of its own attributes of their names."""
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


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with these variables in this process' environment, which is put back whole afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def without_collections() -> Iterator[None]:
    """Context without garbage collections, each of which would visit all of a growing million objects: a fifth of the
    time in which ranks import their libraries, a tenth of that of a short command."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
