"""Megatron's hooks on parameters and gradients, called at the right actions of a schedule.

Under an I/W split, I computes the gradients of norms, biases and embeddings, and W those of matrices. Outside
`no_sync_func` every gradient that arrives is final: in a chunk's last I (or B) for the former, and in its last W (or B)
for the latter, which may lie far apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaaccum.schedule.actions import Action, Schedule
from megaaccum.upstream import pytorch


class Hooks:
    """The hooks of one flush on one rank: Megatron's, of `config`, and those of a sharding backend."""

    def __init__(self, schedule: Schedule, rank: int, config: Any, chunks: Sequence[torch.nn.Module], backend: Any):
        self._chunks, self._backend = chunks, backend
        self._no_sync = config.no_sync_func or contextlib.nullcontext
        self._inside: contextlib.AbstractContextManager[Any] | None = None
        self._param_sync = _per_chunk(config.param_sync_func, len(chunks))
        self._grad_sync = _per_chunk(config.grad_sync_func, len(chunks))
        self.add_weight_grad = pytorch.add_by_autograd if backend is None else backend.add_weight_grad
        actions = [*schedule.actions(rank)]
        self._last_input_grad = {chunk: microbatch for kind, chunk, microbatch in actions if kind in "IB"}
        self._last_weight_grad = {chunk: microbatch for kind, chunk, microbatch in actions if kind in "WB"}

    def before_first_forward(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self._chunks[chunk].parameters())

    def before_input_grad(self, action: Action) -> None:
        self._expect(final=self._last_input_grad[action.chunk] == action.microbatch)

    def after_input_grad(self, action: Action) -> None:
        if self._backend is not None:
            self._backend.after_input_grad(action.chunk)
        self.enter()

    def before_weight_grad(self, action: Action) -> None:
        last = self._last_weight_grad[action.chunk] == action.microbatch
        self._expect(final=last)
        if self._backend is not None:
            self._backend.sums.begin_weight_grad(action.microbatch)
            if last:
                self._backend.memory.measure(self._backend.tensors)  # the most sums that wait, of gradients W brings
            self._backend.before_weight_grad(action.chunk, last)

    def after_weight_grad(self, action: Action) -> None:
        """After a chunk's last weight gradient its gradients are whole: hand them over, if the backend asks for it."""
        if self._backend is not None:
            self._backend.after_weight_grad(action.chunk)
        if self._grad_sync is not None and self._last_weight_grad[action.chunk] == action.microbatch:
            self.leave()
            self._grad_sync[action.chunk](self._chunks[action.chunk].parameters())
        self.enter()

    def _expect(self, *, final: bool) -> None:
        # With a grad_sync_func the backend takes gradients when they are all there, not one by one.
        if final and self._grad_sync is None:
            self.leave()
        else:
            self.enter()

    def enter(self) -> None:
        """Gradients stay on the rank: before the first action, and again after what was final."""
        if self._inside is None:
            self._inside = self._no_sync()
            self._inside.__enter__()

    def leave(self) -> None:
        """Gradients that come are final; also after the last action, or when the flush has failed."""
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.__exit__(None, None, None)


def _per_chunk(hook: Any, chunks: int) -> Sequence[Callable[..., Any]] | None:
    """Megatron takes one function, or one per chunk."""
    return hook if hook is None or isinstance(hook, list | tuple) else [hook] * chunks
