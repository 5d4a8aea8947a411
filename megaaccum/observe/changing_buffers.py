"""Buffers that a forward changes: what comes of a step then depends on how its batch is cut."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from megaaccum.errors import listed
from megaaccum.model import names


class ChangingBuffers:
    """Warns once of the saved buffers that the first differentiated forward of a chunk changes, such as averages of
    activations and the vectors of `spectral_norm`. Megatron's expert biases change between steps alone.

    is_loud: whether this rank warns; copies on other ranks need not say so again.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], *, is_loud: bool):
        self._chunks = chunks
        self._waiting = set(range(len(chunks))) if is_loud else set[int]()
        self._before: dict[str, torch.Tensor] = {}

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        if chunk in self._waiting:
            self._before = {name: each.clone() for name, each in names.named_buffers([self._chunks[chunk]])}

    def end_forward(self, chunk: int, microbatch: int, output: object) -> None:
        if chunk not in self._waiting:
            return
        self._waiting.remove(chunk)
        before, self._before = self._before, {}
        after = names.named_buffers([self._chunks[chunk]])
        changed = [name for name, each in after if name in before and not torch.equal(each, before[name])]
        if changed:
            warnings.warn(
                f"the forward of a micro-batch changes {listed(changed)}: steps depend on how the batch is cut into"
                " micro-batches and over ranks, each of which has values of its own",
                stacklevel=2,
            )
