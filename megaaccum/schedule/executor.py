"""Runs a schedule over Megatron chunks: one flush, on one rank, in Megatron's calling convention.

A full backward is done as I, then W: the input gradient leaves before the weight gradients are computed. In Megatron's
terms this is a `forward_backward_func`; `megaaccum.get_forward_backward_func` gives it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    check_first_val_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
)

from megaaccum import cpu, private
from megaaccum.errors import FlushError
from megaaccum.schedule.actions import Action, Item, Pair, Schedule
from megaaccum.schedule.hooks import Hooks
from megaaccum.schedule.p2p import Mail
from megaaccum.schedule.wgrad import WeightGrads, put_aside

FusedPass = Callable[[Callable[[], None], Callable[[], None]], None]
"""What runs a fused pair: called with two functions that run the forward and the backward, each of which sends its
result when it is done. It has to call both once; it may do so on streams or threads of its own."""


def forward_then_backward(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """The default for fused pairs: one after the other, so that the forward's output leaves as early as it can."""
    forward()
    backward()


@dataclass(slots=True, kw_only=True)
class FlushRecord:
    """What one rank did in a flush. spans: (start, end) of each action in seconds of time.perf_counter, in the order of
    `schedule.actions(rank)`, without what it waited for its input; on a GPU that is when it was launched. The peaks are
    counted as `validate` counts."""

    schedule: Schedule
    rank: int
    spans: list[tuple[float, float]] = field(default_factory=list)
    peak_in_flight: int = 0
    peak_deferred: int = 0


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of a forward_backward_func that concern single micro-batches; names are Megatron's."""

    forward_step_func: Callable
    data_iterator: Sequence[Iterator | None]
    model: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class Flush:
    """One flush of a schedule on one rank. `run` may be called once."""

    def __init__(self, schedule: Schedule, rank: int, call: Call, mail: Mail, hooks: Hooks, fused: FusedPass):
        self.schedule, self.rank, self.call, self.mail = schedule, rank, call, mail
        self._hooks, self._fused, self._config = hooks, fused, call.config
        self._stages, self._last = schedule.stages[rank], schedule.num_stages - 1
        self._saved: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._owed: dict[tuple[int, int], WeightGrads] = {}
        self._passed_on: dict[tuple[str, int, int], torch.Tensor] = {}  # between two chunks of this rank
        self._started: set[int] = set()
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=cpu.device())
        self.record = FlushRecord(schedule=schedule, rank=rank)

    def run(self) -> None:
        """Do the rank's actions in order. Raises FlushError, from the cause, naming rank, action and micro-batch."""
        for item in self._items():
            self._now = item
            try:
                self._do(item)
            except Exception as error:
                raise self._failure(error) from error
        self.mail.finish()
        assert not (self._saved or self._owed or self._passed_on), "a valid schedule leaves nothing behind"

    def _items(self) -> Iterator[Item]:
        if not self.call.forward_only:
            yield from self.schedule.items[self.rank]
        else:
            yield from (action for action in self.schedule.actions(self.rank) if action.kind == "F")

    def _do(self, item: Item) -> None:
        if isinstance(item, Pair):
            self._fused(lambda: self._single(item.forward), lambda: self._single(item.backward))
        else:
            self._single(item)

    def _single(self, action: Action) -> None:
        self._now = action
        self._begun = time.perf_counter()
        if action.kind == "F":
            self._forward(action)
        if action.kind in "IB":
            self._input_grad(action)
        if action.kind in "WB":
            self._weight_grad(action)
        self.record.spans.append((self._begun, time.perf_counter()))

    # --- the three passes ---

    def _forward(self, action: Action) -> None:
        _, chunk, microbatch = action
        stage, call = self._stages[chunk], self.call
        if chunk not in self._started:
            self._hooks.before_first_forward(chunk)
        received = None if stage == 0 else self._arrived("F", stage - 1, microbatch)
        if received is not None and not call.forward_only:
            received.requires_grad_()
        output, num_tokens = forward_step(
            call.forward_step_func, call.data_iterator[chunk], call.model[chunk], call.num_microbatches, received,
            self.reports, self._config, call.cp_group_size, call.collect_non_loss_data, None,
            check_first_val_step(call.first_val_step, call.forward_only, chunk not in self._started),
            current_microbatch=microbatch, vp_stage=getattr(call.model[chunk], "vp_stage", None),
            is_last_stage=stage == self._last,
        )  # fmt: skip
        self._started.add(chunk)
        if stage == self._last:
            self.num_tokens += num_tokens.to(self.num_tokens.device)
        else:
            self._pass_on("F", stage, microbatch, output.detach(), to=stage + 1)
        if not call.forward_only:
            self._saved[chunk, microbatch] = (received, output)
            self.record.peak_in_flight = max(self.record.peak_in_flight, len(self._saved))
            if stage < self._last:
                # What was sent is held by whoever sends it; here only its place in the graph is needed.
                deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _input_grad(self, action: Action) -> None:
        _, chunk, microbatch = action
        stage = self._stages[chunk]
        grad = None if stage == self._last else self._arrived("B", stage + 1, microbatch)
        received, output = self._saved[chunk, microbatch]
        owed = self._owed[chunk, microbatch] = WeightGrads()
        self._hooks.before_input_grad(action)
        with put_aside(owed):
            self._differentiate(output, grad)
        # Only now: until here its activations are alive.
        del self._saved[chunk, microbatch]
        if action.kind == "I":
            self.record.peak_deferred = max(self.record.peak_deferred, len(self._owed))
        if received is not None:
            # A chunk that does not depend on its input (frozen, or a model's fault) sends zeros: others wait for it.
            grad_input = torch.zeros_like(received) if received.grad is None else received.grad
            self._pass_on("B", stage, microbatch, grad_input, to=stage - 1)
        self._hooks.after_input_grad(action)

    def _differentiate(self, output: torch.Tensor, grad: torch.Tensor | None) -> None:
        if grad is None and self._config.grad_scale_func is not None:
            output = self._config.grad_scale_func(output)
        if not output.requires_grad:
            return
        if output.numel() == 1 and self._config.deallocate_pipeline_outputs:
            custom_backward(output, grad)
        else:
            torch.autograd.backward(output, grad_tensors=grad)

    def _weight_grad(self, action: Action) -> None:
        self._hooks.before_weight_grad(action)
        self._owed.pop((action.chunk, action.microbatch)).compute(self._hooks.add_weight_grad)
        self._hooks.after_weight_grad(action)

    # --- between stages ---

    def _arrived(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        owner = self.schedule.rank_of_stage[stage]
        if owner == self.rank:
            return self._passed_on.pop((kind, stage, microbatch))
        self._awaited = (kind, stage, microbatch)
        tensor = self.mail.receive(owner, kind, (stage, microbatch))
        self._awaited, self._begun = None, time.perf_counter()
        return tensor

    def _pass_on(self, kind: str, stage: int, microbatch: int, tensor: torch.Tensor, *, to: int) -> None:
        owner = self.schedule.rank_of_stage[to]
        if owner == self.rank:
            self._passed_on[kind, stage, microbatch] = tensor
        else:
            self.mail.send(tensor.contiguous(), owner, kind)

    # --- failures ---

    _now: Item
    _awaited: tuple[str, int, int] | None = None

    def _failure(self, error: Exception) -> FlushError:
        """The error of this rank, which tells the others' what happened first."""
        key = "megaaccum/flush/" + ",".join(map(str, self.mail.members))
        where = f"pipeline rank {self.rank} (global rank {dist.get_rank()})"
        at = f"{self._now.describe()} of schedule {self.schedule.name}"
        if self._awaited is None:
            text = f"{where} failed in {at}: {type(error).__name__}: {error}"
            private.note_failure(key, text)
            return FlushError(text)
        kind, stage, microbatch = self._awaited
        what = "activation" if kind == "F" else "gradient"
        owner = self.schedule.rank_of_stage[stage]
        first = private.noted_failure(key)
        because = f"; before that, {first}" if first else f": {type(error).__name__}: {error}"
        return FlushError(
            f"{where}, in {at}, waited for the {what} of stage {stage}, micro-batch {microbatch}, from pipeline rank"
            f" {owner}, and it did not come{because}"
        )
