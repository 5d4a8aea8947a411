"""Parameters that are whole at a time when units come and go: sharding/streaming.py and sharding/fsdp2.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from megaaccum.lab.planner.stages import Stage


@dataclass(frozen=True, slots=True)
class Units:
    """Elements of whole parameters, and of whole gradients, at the moment when they are most."""

    params: Any
    grads: Any
    kept: Any = 0
    """Elements of the parameters that stay."""


def units_of(chunks: Sequence[Stage], size: Callable[[Stage], Any], *, live: float = 0, joined: bool = False) -> Units:
    """The units of a rank with these chunks; `size` gives the elements of a piece of the model.

    A unit and the next one are gathered at a time, and one has gradients. The first units, up to `live` elements, stay.
    joined (FSDP2): all that is in no layer is one unit, gathered throughout; a layer is gathered in addition, and not
    the next one before it is needed.
    """
    if joined:
        return _joined(chunks, size)
    in_order = [list(pieces(chunk)) for chunk in chunks]
    sizes = {piece: size(piece) for each in in_order for piece in each}
    staying = _staying([[sizes[piece] for piece in each] for each in in_order], live)
    marked = [list(zip(each, stay, strict=True)) for each, stay in zip(in_order, staying, strict=True)]
    runs = {run for each in marked for run in (itertools.pairwise(each) if len(each) > 1 else [(each[0],)])}
    kept = sum(sizes[piece] * np.array(stays) for each in marked for piece, stays in each)
    coming = max_of(sum(sizes[piece] * ~np.array(stays) for piece, stays in run) for run in runs)
    return Units(kept + coming, max_of(sizes.values()), kept)


def _staying(sizes: list[list[Any]], live: float) -> Iterator[list[Any]]:
    """Yields, by chunk, whether each unit stays: the first ones do, up to `live` elements. False, or a value for each
    layout."""
    so_far: Any = 0
    for each in sizes:
        stays: list[Any] = []
        for one in each:
            so_far = so_far + one
            stays.append(live > 0 and tuple(np.ravel(so_far <= live)))
        yield stays


def _joined(chunks: Sequence[Stage], size: Callable[[Stage], Any]) -> Units:
    """The head's and the final norm's gradients come first and wait for the root's turn, which is last."""
    params, grads = [], []
    for chunk in chunks:
        layers = [size(piece) for piece in set(pieces(chunk)) if piece.layers]
        root = size(replace(chunk, dense=0, moe=0))
        largest = max_of(layers) if layers else 0 * root
        params.append(root + largest)
        grads.append(largest + size(Stage(0, 0, head=chunk.head, final_norm=chunk.final_norm)))
        grads.append(root)
    return Units(max_of(params), max_of(grads))


def pieces(chunk: Stage) -> Iterator[Stage]:
    """The units of a chunk in the order of its forward, its layers with experts after the others: which of them are
    neighbours hardly matters."""
    if chunk.embedding:
        yield Stage(0, 0, embedding=True)
    yield from [Stage(1, 0)] * chunk.dense
    yield from [Stage(0, 1)] * chunk.moe
    if chunk.final_norm:
        yield Stage(0, 0, final_norm=True)
    yield from [Stage(0, 0, prediction=1)] * chunk.prediction
    if chunk.head:
        yield Stage(0, 0, head=True)


def max_of(values: Iterable[Any]) -> Any:
    """The largest, entry by entry."""
    return reduce(np.maximum, values)
