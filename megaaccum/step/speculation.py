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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.step import grad_norm
from megaaccum.step.loss import Divisor, sums_over_ranks
from megaaccum.step.microbatches import Microbatches, shapes_of

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.errors import MegaaccumError
    from megaaccum.sharding import ShardingBackend
    from megaaccum.step.attempts import Attempts, OpenStep
    from megaaccum.step.recovery import Attempt, Recovery, Verdict


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
    """Ends steps before their verdict, and begins those that come after them, where `speculative_step` is. read: the
    micro-batches of a list."""

    def __init__(self, plan: Plan, attempts: Attempts, recovery: Recovery, read: Callable[[Any], Microbatches]):
        self._is_on, self._clip_grad = plan.config.step.speculative_step, plan.config.optimizer.clip_grad
        self._attempts, self._recovery, self._read = attempts, recovery, read
        self._begun: Begun | None = None
        self._last_confirmed = False
        """Whether the last verdict was to update without clipping, as the next one then is likely to be."""

    # --- the step that has begun ---

    def has_begun(self, microbatches: Sequence[Any]) -> bool:
        """Whether the step on this list has begun. Another one that has is dropped, collectively over the pipeline."""
        if self._begun is not None and self._begun.microbatches is not microbatches:
            self.drop()
        return self._begun is not None

    def go_on(self) -> tuple[OpenStep, Microbatches]:
        """The step that has begun, and its micro-batches: its flush goes on when they are added."""
        begun = self._take()
        tally = begun.opened.tally
        self._attempts.begin(begun.opened, lambda: begun.opened.divisor)
        begun.opened.tally = tally
        return begun.opened, begun.batch

    def _take(self) -> Begun:
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun

    def drop(self) -> None:
        """End the step that has begun, if any, without a gradient. Collective over the pipeline."""
        if self._begun is not None:
            self._attempts.drop_early(self._take().opened)

    # --- the step that ends ---

    def note(self, verdict: Verdict) -> None:
        """Take note of a step that waited for its verdict."""
        self._last_confirmed = self._is_on and not verdict.skip and self._is_confirmed(verdict.attempt)

    def may_end(self, opened: OpenStep) -> bool:
        """Whether the step can end before its verdict; the same on every rank."""
        return self._last_confirmed and opened.divisor.total is not None and not opened.short

    def end(
        self, opened: OpenStep, upcoming: Sequence[Any], *, stop: bool, problem: MegaaccumError | None = None
    ) -> tuple[Attempt, bool, bool]:
        """Update, and begin the step on `upcoming`. stop, problem: of this rank, which then begins nothing. Returns the
        attempt, which is still to be judged, whether the update by it stays, and whether some rank asked to stop.
        Collective over the world."""
        attempts, backend = self._attempts, self._attempts.backend
        attempts.observer.phase("reduce")
        backend.finish_reduction()
        attempts.observer.phase("norm")
        square = grad_norm.own_square(backend, attempts.groups)
        (of_stage,) = sums_over_ranks([square], attempts.groups.dp_cp)
        factor = 1.0 / backend.loss_scale  # N is in the loss
        updates = self._is_free(of_stage**0.5 * factor)
        batch, divisor, is_ready = self._next(opened, upcoming, wanted=not stop and problem is None)
        wait = attempts.post(opened, square, [_scalar(stop), _scalar(not is_ready), _scalar(not updates)])
        attempts.observer.phase("optimizer")
        undo = Undo(backend, attempts.num_updates)
        if updates:
            attempts.update(0.0, factor)
        attempts.observer.end_early()
        begun = Begun(attempts.begin_early(opened.step + 1, batch, divisor, is_ready=is_ready), batch, upcoming)
        attempts.observer.phase("verdict")
        attempt, is_unusual, (stops, not_ready, held_back) = wait()
        if not (held_back or is_unusual) and self._is_confirmed(attempt):
            if not_ready:
                attempts.drop_early(begun.opened)
            else:
                self._begun = begun
            return attempt, True, bool(stops)
        attempts.observer.undo_end_early()
        attempts.drop_early(begun.opened)
        undo.restore()  # where there was no update too: what the dropped forwards gathered must not outlive the next
        del undo
        self._last_confirmed = False
        opened.short = "the update before the verdict was taken back"
        return attempts.measure(opened), False, bool(stops)

    def _is_confirmed(self, attempt: Attempt) -> bool:
        """Whether the verdict on `attempt` is to update without clipping."""
        return self._recovery.lets_pass(attempt) and self._is_free(attempt.norm)

    def _is_free(self, norm: float) -> bool:
        """Whether a gradient of that norm is not clipped."""
        return math.isfinite(norm) and grad_norm.clip_coefficient(norm, self._clip_grad) >= 1

    def _next(self, opened: OpenStep, upcoming: Sequence[Any], *, wanted: bool) -> tuple[Microbatches, Divisor, bool]:
        """The micro-batches of `upcoming`, their divisor, and whether the ranks of this stage can all run them. If not,
        the step with the barrier finds out why; those of `opened`, which no rank runs, are then in their place.
        Collective over the ranks of this stage."""
        plan, current = self._attempts.batch, opened.calls[-1]
        batch = replace(current, weights=[math.nan] * len(current))
        planned = (plan.micro_batch_size, plan.seq_length)
        if wanted and len(upcoming) == plan.num_microbatches and {*shapes_of(upcoming)} <= {planned}:
            read = self._read(upcoming)
            batch = batch if read.weights is None else read
        divisor = self._attempts.divisor([batch], None, alone=True)()
        (unread,) = sums_over_ranks([_scalar(math.isnan(divisor.in_loss))], self._attempts.groups.tp)
        return batch, divisor, not unread


def _scalar(flag: bool) -> torch.Tensor:
    return torch.full((), float(flag), dtype=torch.float64)
