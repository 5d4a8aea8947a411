"""Runs a schedule over Megatron chunks: one flush, on one rank, in Megatron's calling convention.

A full backward is done as I, then W: the input gradient leaves before the weight gradients are computed. In Megatron's
terms this is a `forward_backward_func`; `megaaccum.get_forward_backward_func` gives it out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.errors import ConfigError, FlushError
from megaaccum.executor.hooks import Hooks
from megaaccum.executor.p2p import Mail
from megaaccum.executor.passes import (
    Backward,
    Call,
    Forward,
    Forwarded,
    FusedPass,
    ModulePasses,
    PlanPasses,
    Saved,
    announce,
)
from megaaccum.executor.wgrad import WeightGrads, put_aside
from megaaccum.platform import cpu
from megaaccum.schedule.actions import Action, Item, Pair, Schedule, passes_of
from megaaccum.upstream import pytorch


@dataclass(slots=True, kw_only=True)
class FlushRecord:
    """A rank's record of a flush. spans: (start, end) of each action in seconds of time.perf_counter, in the order of
    `schedule.actions(rank)`, without what it waited for its input; on a GPU that is when it was launched. The peaks are
    counted as `validate` counts."""

    schedule: Schedule
    rank: int
    spans: list[tuple[float, float]] = field(default_factory=list)
    peak_in_flight: int = 0
    peak_deferred: int = 0


class Flush:
    """One flush of a schedule on one rank, run from its first action to its last."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        call: Call,
        mail: Mail,
        fused: FusedPass | None = None,
        splitting: Sequence[torch.nn.Module] = (),
        shapes: Sequence[tuple[int, ...]] = (),
    ):
        """fused: runs a fused pair, default: forward, then backward. splitting: layers that split their own
        backward. shapes: of the activations of each micro-batch that are sent to another rank."""
        self.schedule, self.rank, self.call, self.mail = schedule, rank, call, mail
        self._fused, self._config, self._splitting, self._shapes = fused, call.config, splitting, shapes
        self._hooks = Hooks(schedule, rank, call.config, call.chunks, call.backend)
        self._passes = choose_passes(call, at_once=fused is not None)
        self._stages, self._last = schedule.stages[rank], schedule.num_stages - 1
        self._saved: dict[tuple[int, int], Saved] = {}
        self._owed: dict[tuple[int, int], WeightGrads] = {}
        self._passed_on: dict[tuple[str, int, int], torch.Tensor] = {}  # between two chunks of this rank
        self._started: set[int] = set()
        self._nothing: torch.Tensor | None = None
        self.num_tokens = torch.zeros([], dtype=torch.int, device=cpu.device())
        self.record = FlushRecord(schedule=schedule, rank=rank)
        self._left: Iterator[Item] = iter(schedule.items[rank])
        if call.forward_only:
            self._left = (action for action in schedule.actions(rank) if action.kind == "F")

    def run(self, items: int | None = None) -> None:
        """Run the rank's remaining actions in order, or the next `items` of them (a pair counts once). Raises
        FlushError, from the cause, naming rank, action and micro-batch."""
        has_backwards = items is None and not self.call.forward_only
        if has_backwards:
            self._hooks.enter()
        try:
            for item in itertools.islice(self._left, items):
                self._now = item
                if not isinstance(item, Pair):
                    self._do(item)
                elif isinstance(self._passes, PlanPasses):
                    self._do_interleaved(item, self._passes)
                elif self._fused is not None:
                    self._fused(partial(self._do, item.forward), partial(self._do, item.backward))
                else:
                    self._do(item.forward)
                    self._do(item.backward)
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if has_backwards:
                self._hooks.leave()
        if items is None:
            self._end()

    def drain(self) -> None:
        """Exchange the messages that are left, without content, and compute nothing: the flush counts for nothing.
        Every rank of the pipeline does so, each from where it is. Raises FlushError."""
        try:
            for item in self._left:
                self._now = item
                self._pass_nothing(item)
        except Exception as error:
            raise self._failure(error) from error
        self._saved.clear()
        self._end()

    def _end(self) -> None:
        self.mail.finish()
        assert not (self._saved or self._owed or self._passed_on), "a valid schedule leaves nothing open"

    def _do(self, action: Action) -> None:
        """One action: a forward, an input gradient, a weight gradient, or the latter two (B)."""
        self._now = action
        self._begun = time.perf_counter()
        if action.kind == "F":
            at = self._ready_forward(action)
            self._forward_done(at, self._passes.forward(at))
        if action.kind in "IB":
            back = self._ready_backward(action)
            with self._weight_grads_aside(action):
                self._passes.backward(back)
            self._backward_done(action)
        if action.kind in "WB":
            self.weight_grad(action)
        self.record.spans.append((self._begun, time.perf_counter()))

    def _do_interleaved(self, pair: Pair, passes: PlanPasses) -> None:
        """A fused pair as one pass. Its weight gradients come after it, when both of its results have left."""
        self._begun = time.perf_counter()
        at, back = self._ready_forward(pair.forward), self._ready_backward(pair.backward)
        with self._weight_grads_aside(pair.backward):
            forwarded = passes.pair(at, back)
        self._forward_done(at, forwarded)
        self._backward_done(pair.backward)
        if pair.backward.kind == "B":
            self.weight_grad(pair.backward)
        self.record.spans += [(self._begun, time.perf_counter())] * 2

    # --- the three passes ---

    def _weight_grads_aside(self, action: Action) -> AbstractContextManager[None]:
        owed = self._owed[action.chunk, action.microbatch]
        return put_aside(owed, self._splitting, at_once=not self.call.defer_weight_grads)

    def _ready_forward(self, action: Action) -> Forward:
        """A forward and its input, which is waited for."""
        _, chunk, microbatch = action
        stage, first = self._stages[chunk], chunk not in self._started
        if first:
            self._hooks.before_first_forward(chunk)
            self._started.add(chunk)
        announce(self.call, chunk, microbatch, first=first)  # before waiting, when there may be time
        received = None if stage == 0 else self._arrived("F", stage - 1, microbatch)
        if received is not None and not self.call.forward_only:
            received.requires_grad_()
        return Forward(
            chunk=chunk, microbatch=microbatch, received=received, last_stage=stage == self._last,
            send=lambda output: self.pass_on("F", stage, microbatch, output, to=stage + 1),
        )  # fmt: skip

    def _forward_done(self, at: Forward, forwarded: Forwarded) -> None:
        saved, num_tokens = forwarded
        if at.last_stage:
            assert num_tokens is not None
            self.num_tokens += num_tokens  # a scalar, of either device
        if self.call.forward_only:
            return
        self._saved[at.chunk, at.microbatch] = saved
        self.record.peak_in_flight = max(self.record.peak_in_flight, len(self._saved))
        if not at.last_stage and self._config.deallocate_pipeline_outputs:
            self._let_go(saved.output)

    def _let_go(self, output: torch.Tensor) -> None:
        """Let go of an output that was sent: only its place in the graph is needed, its sender holds the content.
        Megatron-core's deallocate_output_tensor does so with a new tensor each time, and raises for a view."""
        if output._base is None:  # else others hold the content too
            self._nothing = output.new_empty(1) if self._nothing is None else self._nothing
            output.data = self._nothing

    def _ready_backward(self, action: Action) -> Backward:
        """A backward and the gradient that it starts from, which is waited for."""
        _, chunk, microbatch = action
        stage = self._stages[chunk]
        grad = None if stage == self._last else self._arrived("B", stage + 1, microbatch)
        self._owed[chunk, microbatch] = WeightGrads()
        self._hooks.before_input_grad(action)
        return Backward(
            saved=self._saved[chunk, microbatch], grad=grad,
            send=lambda grad_input: self.pass_on("B", stage, microbatch, grad_input, to=stage - 1),
        )  # fmt: skip

    def _backward_done(self, action: Action) -> None:
        # Only now: until here its activations are alive.
        del self._saved[action.chunk, action.microbatch]
        if action.kind == "I":
            self.record.peak_deferred = max(self.record.peak_deferred, len(self._owed))
        self._hooks.after_input_grad(action)

    def weight_grad(self, action: Action) -> None:
        """Compute and add up the weight gradients that the micro-batch's input gradient put off."""
        self._hooks.before_weight_grad(action)
        self._owed.pop((action.chunk, action.microbatch)).compute(self._hooks.add_weight_grad)
        self._hooks.after_weight_grad(action)

    def _pass_nothing(self, item: Item) -> None:
        """Take an action's input and send a tensor of its output's shape."""
        for kind, chunk, microbatch in passes_of([item]):
            if kind == "W":
                continue
            message, step = ("F", 1) if kind == "F" else ("B", -1)
            stage = self._stages[chunk]
            if 0 <= stage - step <= self._last:
                self._arrived(message, stage - step, microbatch)
            if 0 <= stage + step <= self._last:
                nothing = self.mail.new_buffer((stage, microbatch)).zero_()
                self.pass_on(message, stage, microbatch, nothing, to=stage + step)

    # --- between stages ---

    def _arrived(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        owner = self.schedule.rank_of_stage[stage]
        if owner == self.rank:
            return self._passed_on.pop((kind, stage, microbatch))
        self._awaited = (kind, stage, microbatch)
        tensor = self.mail.receive(owner, kind, (stage, microbatch))
        self._awaited, self._begun = None, time.perf_counter()
        return tensor

    def pass_on(self, kind: str, stage: int, microbatch: int, tensor: torch.Tensor, *, to: int) -> None:
        """Give the activation (kind F) or gradient (B) that `stage` made to stage `to`, on this rank or another. Raises
        ConfigError for an activation that its receiver would take for another."""
        owner = self.schedule.rank_of_stage[to]
        if owner == self.rank:
            self._passed_on[kind, stage, microbatch] = tensor
            return
        if kind == "F" and (problem := unfit(tensor, self._shapes[microbatch], self._config.pipeline_dtype)):
            raise ConfigError(f"stage {stage} {problem}")
        self.mail.send(tensor.contiguous(), owner, kind)

    # --- failures ---

    _now: Item
    _awaited: tuple[str, int, int] | None = None

    def _failure(self, error: Exception) -> FlushError:
        """The error of this rank, which tells the others' what happened first. Ends the thread of its sends."""
        self.mail.finish(wait=False)
        key = "megaaccum/flush/" + ",".join(map(str, self.mail.members))
        where = f"pipeline rank {self.rank} (global rank {dist.get_rank()})"
        at = f"{self._now.describe()} of schedule {self.schedule.name}"
        if self._awaited is None:
            text = f"{where} failed in {at}: {type(error).__name__}: {error}"
            pytorch.note_failure(key, text)
            return FlushError(text)
        kind, stage, microbatch = self._awaited
        what = "activation" if kind == "F" else "gradient"
        owner = self.schedule.rank_of_stage[stage]
        first = pytorch.noted_failure(key)
        because = f"; before that, {first}" if first else f": {type(error).__name__}: {error}"
        return FlushError(
            f"{where}, in {at}, waited for the {what} of stage {stage}, micro-batch {microbatch}, from pipeline rank"
            f" {owner}, and it did not come{because}"
        )


def unfit(output: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Why a stage's output cannot be sent, or None if it can: a receive takes whatever bytes come."""
    is_dense = isinstance(output, torch.Tensor) and output.layout is torch.strided
    if is_dense and output.dtype is dtype and output.shape == shape:
        return None
    kind = f"a {type(output).__name__} ({getattr(output, 'layout', 'no tensor')})"
    found = f"{list(output.shape)} of {output.dtype}" if is_dense else kind
    return (
        f"returns {found}, but stages send [sequence, micro-batch, hidden] ="
        f" {list(shape)} of {dtype}: return that, or give the chunks' config another pipeline_dtype"
    )


def choose_passes(call: Call, *, at_once: bool) -> ModulePasses | PlanPasses:
    """Schedule plans where Megatron's configuration asks for them; an evaluation has nothing to interleave."""
    overlaps = getattr(call.config, "overlap_moe_expert_parallel_comm", False)
    return PlanPasses(call) if overlaps and not call.forward_only else ModulePasses(call, at_once=at_once)
