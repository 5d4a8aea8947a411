"""Megatron's hooks on parameters and gradients, called at the right actions of a schedule.

Under an I/W split a parameter's gradient of one micro-batch comes with the input gradient (norms, biases, embeddings)
or later with the weight gradient (matrices). Outside `no_sync_func` every gradient that arrives is final: that is so in
a chunk's last I (or B) for the former, and in its last W (or B) for the latter, which may lie far apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaaccum.schedule.actions import Action, Schedule
from megaaccum.upstream import pytorch


class Hooks:
    """The hooks of one flush on one rank; `config` is Megatron's."""

    def __init__(self, schedule: Schedule, rank: int, config: Any, chunks: Sequence[torch.nn.Module]):
        self._chunks = chunks
        self._no_sync = config.no_sync_func or contextlib.nullcontext
        self._inside: contextlib.AbstractContextManager | None = None
        self._param_sync = _per_chunk(config.param_sync_func, len(chunks))
        self._grad_sync = _per_chunk(config.grad_sync_func, len(chunks))
        self._split = getattr(config, "follows_split", None)  # ours, so a plain Megatron configuration has none
        self._sums = getattr(config, "microbatch_sums", None)
        self._note_held = getattr(config, "note_held", None)
        self.add_weight_grad = pytorch.add_by_autograd if self._split is None else self._split.add_weight_grad
        self._last_input_grad: dict[int, int] = {}
        self._last_weight_grad: dict[int, int] = {}
        for kind, chunk, microbatch in schedule.actions(rank):
            if kind in "IB":
                self._last_input_grad[chunk] = microbatch
            if kind in "WB":
                self._last_weight_grad[chunk] = microbatch

    def begin(self) -> None:
        """Before the first action: gradients stay on the rank."""
        self._enter()

    def before_first_forward(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self._chunks[chunk].parameters())

    def before_input_grad(self, action: Action) -> None:
        self._expect(final=self._last_input_grad[action.chunk] == action.microbatch)

    def after_input_grad(self, action: Action) -> None:
        if self._split is not None:
            self._split.after_input_grad(action.chunk)
        self._enter()

    def before_weight_grad(self, action: Action) -> None:
        last = self._last_weight_grad[action.chunk] == action.microbatch
        if self._sums is not None:
            self._sums.begin_weight_grad(action.microbatch)
        if last and self._note_held is not None:
            self._note_held()  # the most sums that wait, of gradients which come in W
        self._expect(final=last)
        if self._split is not None:
            self._split.before_weight_grad(action.chunk, last)

    def after_weight_grad(self, action: Action) -> None:
        """After a chunk's last weight gradient its gradients are whole: hand them over, if the backend asks for it."""
        if self._split is not None:
            self._split.after_weight_grad(action.chunk)
        if self._grad_sync is not None and self._last_weight_grad[action.chunk] == action.microbatch:
            self._leave()
            self._grad_sync[action.chunk](self._chunks[action.chunk].parameters())
        self._enter()

    def end(self) -> None:
        """After the last action, or when the flush has failed."""
        self._leave()

    def _expect(self, *, final: bool) -> None:
        # With a grad_sync_func the backend takes gradients when they are all there, not one by one.
        if final and self._grad_sync is None:
            self._leave()
        else:
            self._enter()

    def _enter(self) -> None:
        if self._inside is None:
            self._inside = self._no_sync()
            self._inside.__enter__()

    def _leave(self) -> None:
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.__exit__(None, None, None)


def _per_chunk(hook: Any, chunks: int) -> Sequence[Callable] | None:
    """Megatron takes one function, or one per chunk."""
    if hook is None or isinstance(hook, list | tuple):
        return hook
    return [hook] * chunks
