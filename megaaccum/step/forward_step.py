"""The `forward_step_func` that the schedules are given: the user's own, observed, its loss multiplied by 1 / N."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.errors import StepError
from megaaccum.model.fp8 import Fp8
from megaaccum.sharding.sum_tree import MicrobatchSums
from megaaccum.step.loss import Divisor, LossFunc, Tally, read_triple
from megaaccum.step.microbatches import Microbatches
from megaaccum.step.seeds import SampleSeeds
from megaaccum.step.side_losses import SideLosses

if TYPE_CHECKING:
    from megaaccum.step.nonfinite import Probe


class ForwardStep:
    """Takes the micro-batches of one flush through this rank's chunks.

    Which micro-batch runs is counted per chunk: every schedule runs a chunk's forwards in order, and a recomputed
    forward does not come through here. look: called when a chunk's last backward begins. timed: around each forward.
    """

    def __init__(
        self,
        batch: Microbatches,
        divisor: Divisor,
        tally: Tally,
        *,
        chunks: Sequence[torch.nn.Module],
        trace: Trace,
        seeds: SampleSeeds,
        sums: MicrobatchSums | None,
        side_losses: SideLosses,
        low_precision: Fp8,
        probe: Probe | None,
        look: Callable[[], None],
        timed: AbstractContextManager[None],
    ):
        self._batch, self._divisor, self._tally = batch, divisor, tally
        self._trace, self._side_losses, self._fp8, self._probe = trace, side_losses, low_precision, probe
        self._followers: list[SampleSeeds | MicrobatchSums] = [] if sums is None else [sums]
        if seeds.may_be_needed(batch.forward_step_func):
            self._followers.append(seeds)
        self._look, self._timed = look, timed
        if sums is not None:
            sums.begin_flush(batch.first)
        self._number = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._next = [0] * len(chunks)

    @property
    def looks_closely(self) -> bool:
        """Whether it follows single micro-batches through their backward (dummies, a probe)."""
        return bool(self._batch.dummies) or self._probe is not None

    def __call__(self, data_iterator: Iterator, chunk: torch.nn.Module, *, return_schedule_plan: bool = False):
        """(what `chunk` computes from the next micro-batch, its loss function); with `return_schedule_plan`, Megatron's
        plan of that computation in its place."""
        number = self._number[id(chunk)]
        index, self._next[number] = self._next[number], self._next[number] + 1
        action = f"chunk {number} micro-batch {self._batch.first + index}"
        self._trace.action = f"F {action}"
        for follower in self._followers:
            follower.begin_forward(self._batch.first + index)
        with self._timed, self._fp8.forward(number, self._batch.first + index):
            output, loss_func = self._forward(data_iterator, chunk, number, index, return_schedule_plan)
        if return_schedule_plan:
            self._trace.action = f"F {action}, interleaved with a backward"
        else:
            self._fp8.watch_backward(number, self._batch.first + index, output)
            self._follow(chunk, index, output, action)
        return output, self._divided(index, loss_func)

    def _forward(self, data_iterator: Iterator, chunk: torch.nn.Module, number: int, index: int, plan: bool):
        user: Any = self._batch.forward_step_func
        return user(data_iterator, chunk, return_schedule_plan=True) if plan else user(data_iterator, chunk)

    def _follow(self, chunk: Any, index: int, output: torch.Tensor, action: str) -> None:
        """Note when the backward of `output` begins."""
        if isinstance(output, torch.Tensor) and output.requires_grad:

            def begins(_grad: torch.Tensor) -> None:
                self._trace.action = f"B {action}"
                self._begin_backward(index)
                if index == len(self._batch) - 1:
                    self._look()  # a chunk's last backward: its gradients are all there

            output.register_hook(begins)
            self._side_losses.follow(self._batch, index, output)
        if self._probe is not None:
            self._probe.watch(chunk, self._batch.first + index, output)

    def _begin_backward(self, index: int) -> None:
        for follower in self._followers:
            follower.begin_backward(self._batch.first + index)

    def _divided(self, index: int, loss_func: LossFunc):
        """`loss_func` as Megatron calls it on the last stage: the sum times 1 / N to differentiate, no tokens to divide
        by, and nothing to report, which the tally has."""

        def divided(output: torch.Tensor, non_loss_data: bool = False):
            try:
                total, weight, reports = read_triple(loss_func(output))
            except StepError as error:  # other stages wait for this one: the flush goes on, and all raise after it
                self._tally.problem = self._tally.problem or error
                total, weight, reports = _nothing(output)
            loss = total.detach()
            if index in self._batch.dummies:
                total, loss, weight, reports = total * 0.0, loss * 0.0, weight * 0.0, {}
            self._tally.losses.append(loss)
            self._tally.weights.append(weight)
            self._tally.reports.append(reports)
            no_tokens = torch.zeros((), dtype=torch.int, device=total.device)
            if total.requires_grad:  # an output that is no tensor has no hook
                total.register_hook(lambda _grad: self._begin_backward(index))
            return total * self._divisor.in_loss, no_tokens, no_tokens

        return divided


def _nothing(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    zero = (output.float() * 0.0).sum()
    return zero, torch.zeros((), dtype=torch.float64, device=zero.device), {}
