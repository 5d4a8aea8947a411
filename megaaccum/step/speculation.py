"""The optimizer's update before its verdict, so that no rank waits for the others at the end of a step.

A rank that has reduced its gradients updates its weights and begins the next step's forwards; norm and verdict of all
ranks come in meanwhile. They are read before its first backward, until which gradients, moments and scale are those of
the step that ends. If that is to update, unclipped, the next one goes on. If not (a value that is not finite, a norm
that has to be clipped or alarms the guard), every rank ends the begun flush, takes its update back to the bit, and does
what it would have done with the barrier. After that, steps wait for their verdict until one updates unclipped.

Qi et al. (arXiv 2401.10241, section 4) pass the norm from stage to stage instead, and undo AdamW by its formula, which
rounds; here weights and moments are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from megaaccum.step import grad_norm
from megaaccum.step.loss import Divisor, post_sums, sums_over_ranks
from megaaccum.step.microbatches import Microbatches, shapes_of
from megaaccum.step.open_step import Before, OpenStep

if TYPE_CHECKING:
    from megaaccum.errors import MegaaccumError
    from megaaccum.schedule.entry import ForwardBackward
    from megaaccum.sharding import ShardingBackend
    from megaaccum.step.recovery import Attempt, Verdict
    from megaaccum.step.train_step import TrainStep


class Undo:
    """A copy of what an update changes on this rank: master weights, moments, and the gradient that it reads."""

    def __init__(self, backend: ShardingBackend, num_updates: int):
        self._backend, self._num_updates = backend, num_updates
        self._state = [tensor.clone() for tensor in _state(backend)]
        self._give_gradients = backend.keep_gradients()

    def restore(self) -> None:
        """Go back; collective over the data-parallel ranks."""
        for tensor, kept in zip(_state(self._backend), self._state, strict=True):
            tensor.copy_(kept)
        self._backend.adopt_state(self._num_updates)
        self._give_gradients()


def _state(backend: ShardingBackend) -> list[torch.Tensor]:
    return [tensor for piece in backend.state() for tensor in piece.tensors.values()]


@dataclass(frozen=True)
class Begun:
    """A step that began before the verdict on the one before it. microbatches: the list that it was given."""

    opened: OpenStep
    batch: Microbatches
    microbatches: Sequence[Any]


class Speculation:
    """Ends steps of `of` before their verdict, and begins those that come after them, where `speculative_step` is."""

    def __init__(self, of: TrainStep):
        self._of, self._is_on = of, of._plan.config.step.speculative_step
        self._begun: Begun | None = None
        self._last_confirmed = False
        """Whether the last verdict was to update without clipping, as the next one then is likely to be."""

    # --- the step that has begun ---

    def has_begun(self, microbatches: Sequence[Any]) -> bool:
        """Whether the step on this list has begun. Another one that has is dropped, collectively over the pipeline."""
        if self._begun is not None and self._begun.microbatches is not microbatches:
            self.drop()
        return self._begun is not None

    def go_on(self) -> None:
        """The flush of the step that has begun, from its first backward on."""
        of, begun = self._of, self._take()
        of._open, tally = begun.opened, begun.opened.tally
        of._begin_attempt(begun.opened, lambda: begun.opened.divisor)
        begun.opened.tally = tally
        of._run(begun.batch, step=begun.opened.step, last=True)

    def _take(self) -> Begun:
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun

    def drop(self) -> None:
        """End the step that has begun, if any, without a gradient. Collective over the pipeline."""
        if self._begun is not None:
            self._drop(self._take())

    @property
    def _schedule(self) -> ForwardBackward:
        return cast("ForwardBackward", self._of._schedule)  # a rule says so

    def _drop(self, begun: Begun) -> None:
        self._schedule.drain()
        begun.opened.before.restore(self._of._fp8)

    # --- the step that ends ---

    def note(self, verdict: Verdict) -> None:
        """Take note of a step that waited for its verdict."""
        self._last_confirmed = self._is_on and not verdict.skip and self._is_confirmed(verdict.attempt)

    def may_end(self, opened: OpenStep) -> bool:
        """Whether the step can end before its verdict; the same on every rank."""
        return self._last_confirmed and opened.divisor.total is not None and not opened.short

    def end(
        self, opened: OpenStep, upcoming: Sequence[Any], *, stop: bool, problem: MegaaccumError | None = None
    ) -> tuple[Verdict, bool]:
        """Update, begin the step on `upcoming`, then judge. stop, problem: of this rank, which then begins nothing.
        Returns the verdict, carried out, and whether some rank asked to stop. Collective over the world."""
        of, backend, groups = self._of, self._of._backend, self._of._groups
        of.observer.phase("reduce")
        backend.finish_reduction()
        of.observer.phase("norm")
        square = grad_norm.own_square(backend, groups)
        (of_stage,) = sums_over_ranks([square], groups.dp_cp)
        factor = 1.0 / backend.loss_scale  # N is in the loss
        updates = self._is_free(of_stage**0.5 * factor)
        batch, divisor, is_ready = self._read(opened, upcoming, wanted=not stop and problem is None)
        facts = [_scalar(stop), _scalar(not is_ready), _scalar(not updates)]
        wait = post_sums([square, *facts, *of._totals.own(opened.tally)], groups.host, device=torch.device("cpu"))
        of.observer.phase("optimizer")
        undo = Undo(backend, of.num_updates)
        if updates:
            of._update_weights(0.0, factor)
        of.observer.end_early()
        begun = Begun(self._begin(opened.step + 1, batch, divisor, is_ready), batch, upcoming)
        of.observer.phase("verdict")
        total, stops, not_ready, held_back, *sums = wait()
        totals, is_unusual = of._totals.read(sums)
        attempt = of._attempt(opened, total**0.5, totals)
        if not (held_back or is_unusual) and self._is_confirmed(attempt):
            if not_ready:
                self._drop(begun)
            else:
                self._begun = begun
            return of._settle(opened, attempt, updated=True), bool(stops)
        of.observer.take_back()
        self._drop(begun)
        undo.restore()  # where there was no update too: what the dropped forwards gathered must not outlive the next
        del undo
        self._last_confirmed = False
        opened.short = "the update before the verdict was taken back"
        return of._settle(opened, of._measure(opened)), bool(stops)

    def _is_confirmed(self, attempt: Attempt) -> bool:
        """Whether the verdict on `attempt` is to update without clipping."""
        return self._of._recovery.lets_pass(attempt) and self._is_free(attempt.norm)

    def _is_free(self, norm: float) -> bool:
        """Whether a gradient of that norm is not clipped."""
        return math.isfinite(norm) and grad_norm.clip_coefficient(norm, self._of._plan.config.optimizer.clip_grad) >= 1

    def _read(self, opened: OpenStep, upcoming: Sequence[Any], *, wanted: bool) -> tuple[Microbatches, Divisor, bool]:
        """The micro-batches of `upcoming`, their divisor, and whether the ranks of this stage can all run them. If not,
        the step with the barrier finds out why; those of `opened`, which no rank runs, are then in their place.
        Collective over the ranks of this stage."""
        of, current = self._of, opened.calls[-1]
        planned = (of.batch.micro_batch_size, of.batch.seq_length)
        batch = replace(current, weights=[math.nan] * len(current))
        if wanted and len(upcoming) == of.batch.num_microbatches and {*shapes_of(upcoming)} <= {planned}:
            read = of.batch_of(upcoming)
            batch = batch if read.weights is None else read
        divisor = of._divisor([batch], None, alone=True)()
        (unread,) = sums_over_ranks([_scalar(math.isnan(divisor.in_loss))], of._groups.tp)
        return batch, divisor, not unread

    def _begin(self, step: int, batch: Microbatches, divisor: Divisor, is_ready: bool) -> OpenStep:
        """Begin step `step`, and run its forwards up to the first backward where that is possible."""
        of = self._of
        opened = OpenStep(step, Before.of(of._fp8), begun=True)
        opened.divisor = divisor
        of._side_losses.begin_attempt(divisor, of.loss_scale, of._num_microbatches)
        with of.observer.flushing(), of._seeds.flush(step):
            if is_ready:
                of.observer.phase("gather")
                of._backend.gather()
            of.observer.phase("forward_backward")
            of._flush(batch, divisor, opened.tally, begin_only=True)
            if is_ready:
                self._schedule.warm_up()
        return opened


def _scalar(flag: bool) -> torch.Tensor:
    return torch.full((), float(flag), dtype=torch.float64)
