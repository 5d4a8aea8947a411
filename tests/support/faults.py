"""Faults that tests put into a step on purpose, and what is compared after it. Runs inside ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class Fault:
    """A value put into the gradient of what one rank's chunk computes from one micro-batch, at most `times` times: a
    step that is run again sees it again. Micro-batches without unmasked tokens are spared."""

    rank: int
    microbatch: int
    value: float = float("inf")
    chunk: int = 0
    times: int = 10**9
    forward: bool = False
    """Put it into what the chunk computes instead."""
    within: str = ""
    """Put it into what the first module of the chunk with this name at its end computes (or its gradient)."""


@contextmanager
def injected(faults: list[Fault], chunks) -> Iterator[None]:
    """While inside, the faults of this rank are in every step."""
    from megaaccum.step.forward_step import ForwardStep

    mine = {(f.chunk, f.microbatch): f for f in faults if f.rank == torch.distributed.get_rank()}
    left = {at: fault.times for at, fault in mine.items()}
    forward = ForwardStep.__call__

    def call(self, data_iterator, chunk, **keys):
        number = self._number[id(chunk)]
        microbatch, at = next(data_iterator), (number, self._batch.first + self._next[number])
        spoils = left.get(at, 0) > 0 and torch.is_grad_enabled() and bool(microbatch["loss_mask"].any())
        if not spoils:
            return forward(self, iter([microbatch]), chunk, **keys)
        left[at] -= 1
        where = _module(chunk, mine[at].within)
        handle = where.register_forward_hook(lambda _module, _args, output: _spoil(output, mine[at]))
        try:
            return forward(self, iter([microbatch]), chunk)
        finally:
            handle.remove()

    with patch.object(ForwardStep, "__call__", call):
        yield


def _module(chunk: torch.nn.Module, within: str) -> torch.nn.Module:
    """The chunk, or its first module whose name ends so."""
    return next(module for name, module in chunk.named_modules() if name.endswith(within)) if within else chunk


def _spoil(output, fault: Fault):
    """`output` [..., last axis], or the first of several, with the fault's value at index 0 of its last axis, or of its
    gradient's."""
    if isinstance(output, tuple):
        return (_spoil(output[0], fault), *output[1:])
    at = torch.zeros(1, dtype=torch.long, device=output.device)
    if fault.forward:
        return output.index_fill(-1, at, fault.value)
    output.register_hook(lambda grad: grad.index_fill(-1, at, fault.value))
    return output


def state_of(bound) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts of master weights and moments: {name/kind/start: tensor}."""
    return {
        f"{piece.name}/{kind}/{piece.start}": tensor.clone()
        for piece in bound.state()
        for kind, tensor in piece.tensors.items()
    }


def weights(bound, chunks) -> dict[str, torch.Tensor]:
    """Copies of the weights that the next forward reads, by name."""
    from megaaccum.model import names

    bound.gather()
    return {name: param.detach().clone() for name, param in names.named_parameters(chunks)}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two states are not equal to the bit."""
    only_one = sorted(one.keys() ^ other.keys())
    return only_one + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
