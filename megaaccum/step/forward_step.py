"""The `forward_step_func` that the schedules are given: the user's own, observed, its loss multiplied by 1 / N."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megaaccum.errors import FlushError, StepError
from megaaccum.executor.executor import unfit
from megaaccum.model.torch_chunk import tensors_in
from megaaccum.platform import cpu
from megaaccum.platform.replacing import replaced
from megaaccum.step.loss import Divisor, LossFunc, Tally, read_triple
from megaaccum.step.microbatches import Microbatches
from megaaccum.upstream import pytorch


class ForwardStep:
    """Takes the micro-batches of one flush through this rank's chunks.

    observers: objects with any of the methods `begin_forward(chunk, microbatch)`, `end_forward(chunk, microbatch,
    output)` and `begin_backward(chunk, microbatch)`, which are called in the list's order. chunk: number of this
    rank's chunk. microbatch: index in the step. sent: (sequence of this rank, micro-batch, hidden) of each
    micro-batch's messages between stages; none without a pipeline. last: the chunk that sends none, if it is here.
    gathered: a backend's `gathered_parameters`.

    The micro-batch that runs is counted per chunk, since every schedule runs a chunk's forwards in order. A recomputed
    forward does not pass here: it belongs to the backward that was announced last (`begin_backward`; step/seeds.py
    and the backends ask `pytorch.in_backward`).
    """

    def __init__(
        self,
        batch: Microbatches,
        divisor: Divisor,
        tally: Tally,
        chunks: Sequence[torch.nn.Module],
        observers: Sequence[object],
        sent: Sequence[tuple[int, int, int]] = (),
        last: int | None = None,
        gathered: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]] = tuple,
    ):
        self._batch, self._divisor, self._tally, self._gathered = batch, divisor, tally, gathered
        self._begin_forward, self._end_forward, self._begin_backward = (
            [getattr(each, event) for each in observers if hasattr(each, event)]
            for event in ("begin_forward", "end_forward", "begin_backward")
        )
        self._number = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._has_loss = [bool(getattr(chunk, "post_process", False)) for chunk in chunks]
        self._next = [0] * len(chunks)
        self._sent, self._last = sent, last
        self._in_backward: tuple[int, int] | None = None
        self._no_tokens = torch.zeros((), dtype=torch.int, device=cpu.device())

    def __call__(
        self, data_iterator: Iterator[Any], chunk: torch.nn.Module, *, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """(output of `chunk` for the next micro-batch, its loss function); with `return_schedule_plan`, Megatron's plan
        of that computation instead of the output."""
        number = self._number[id(chunk)]
        index, self._next[number] = self._next[number], self._next[number] + 1
        at = number, self._batch.first + index
        for begin in self._begin_forward:
            begin(*at)
        user: Any = self._batch.forward_step_func
        try:
            with replaced(torch.autograd, backward=partial(self._hear_backward, torch.autograd.backward, chunk)):
                given = user(data_iterator, chunk, **({"return_schedule_plan": True} if return_schedule_plan else {}))
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise TypeError(f"forward_step_func has to return (output, loss_func), not {type(given).__name__}")
        except Exception as error:
            if isinstance(error, StopIteration):
                ended = f"the data of chunk {number}, or an iterator of your code, ended before micro-batch {index + 1}"
                error = FlushError(f"{ended} of the {len(self._batch)} of this flush: give as many, one for each call")
            if not self._tally.keeps_errors:
                raise error
            self._tally.problem = self._tally.problem or error
            given = self._no_tokens, lambda zero: (zero, 0.0, {})
        output, loss_func = given
        if self._sent and number != self._last and not return_schedule_plan:
            output = pytorch.without_base(self._as_sent(output, number, index, chunk.config))
        for end in self._end_forward:
            end(*at, output)
        if return_schedule_plan:
            output.begins = partial(self._begins, at)
        if isinstance(output, torch.Tensor) and output.requires_grad and not self._has_loss[number]:
            output.register_hook(lambda _grad: self._begins(at))
        return output, self.scaled_loss(index, at, loss_func)

    def _hear_backward(self, run: Any, chunk: Any, roots: Any, *args: Any, inputs: Any = None, **keys: Any) -> None:
        """`torch.autograd.backward` inside a forward. A gradient that it gave one of the chunk's parameters would be
        taken for the loss' own, or for its last: it is left out, and all ranks raise after the flush."""
        leaves = set(pytorch.leaves_in_graph([*tensors_in(roots)]) if inputs is None else tensors_in(inputs))
        others = leaves - {*chunk.parameters(), *(whole for _, whole in self._gathered())}
        if len(others) < len(leaves):
            inputs = [*others]
            self._tally.problem = self._tally.problem or StepError(
                "a backward inside the forward adds to gradients of the model: use torch.autograd.grad, or its inputs="
            )
        if inputs is None or others:
            run(roots, *args, inputs=inputs, **keys)

    def _as_sent(self, output: Any, number: int, index: int, config: Any) -> Any:
        """The contiguous `output` of a chunk. A receive takes whatever bytes come: of an output that is not what it
        expects it is given zeros, so that the flush continues, and all ranks raise after it."""
        shape, dtype = self._sent[index], config.pipeline_dtype
        if (problem := unfit(output, shape, dtype)) is None:
            return output.contiguous()
        self._tally.problem = self._tally.problem or StepError(f"chunk {number} {problem}")
        zero = _nothing(output)[0]
        return zero.new_zeros(shape, dtype=dtype) + zero.to(dtype)

    def _begins(self, at: tuple[int, int]) -> None:
        """Announce the backward of a micro-batch through a chunk: it begins at the loss on the last stage, and
        otherwise where the gradient of the output arrives."""
        if self._in_backward != at:
            self._in_backward = at
            for begin in self._begin_backward:
                begin(*at)

    def scaled_loss(self, index: int, at: tuple[int, int], loss_func: LossFunc) -> Callable[..., Any]:
        """`loss_func` as Megatron calls it on the last stage: the sum times 1 / N to differentiate, no tokens to divide
        by, and nothing to report, since the tally has it."""

        def scaled(output: torch.Tensor, non_loss_data: bool = False) -> tuple[torch.Tensor, ...]:
            try:
                total, weight, reports = read_triple(loss_func(output))
            except Exception as error:  # other stages wait for this one: the flush continues, and all raise after it
                if not (self._tally.keeps_errors or isinstance(error, StepError)):
                    raise
                self._tally.problem = self._tally.problem or error
                total, weight, reports = _nothing(output)
            if not total.requires_grad and (zero := _nothing(output)[0]).requires_grad:
                total = total + zero  # the stage before waits for a gradient
                weight = torch.where(weight > 0, torch.nan, weight)  # counted as a fault, without a wait
            loss = total.detach()
            if index in self._batch.dummies:
                total, loss, weight, reports = total * 0.0, loss * 0.0, weight * 0.0, {}
            self._tally.losses.append(loss)
            self._tally.weights.append(weight)
            self._tally.reports.append(reports)
            if total.requires_grad:
                total.register_hook(lambda _grad: self._begins(at))
            return total * self._divisor.in_loss, self._no_tokens, self._no_tokens

        return scaled


def _nothing(output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The triple of a micro-batch that adds nothing, differentiable if `output` is. It multiplies no element by 0: one
    may be infinite."""
    zeros = (each.to_dense()[None][:0].float().sum() for each in tensors_in(output) if each.requires_grad)
    zero = sum(zeros, torch.zeros((), device=cpu.device()))
    return zero, torch.zeros((), dtype=torch.float64, device=zero.device), {}
