"""The optimizer's update before its verdict, so that no rank waits for the others at the end of a step.

A rank that has reduced its gradients updates its weights and begins the next step's forwards, while norm and verdict of
all ranks arrive. They are read before its first backward, until which gradients, moments and scale are those of the
step that ends. If that step is to update, unclipped, the next one continues. If not (a value that is not finite, a norm
that has to be clipped or alarms the guard), every rank ends the begun flush, takes its update back to the bit, and does
what it would have done with the barrier. After that, steps wait for their verdict until one updates unclipped.

Qi et al. (arXiv 2401.10241, section 4) pass the norm from stage to stage instead, and undo AdamW by its formula, which
rounds; here weights and moments are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megaaccum.distributed.sums import post_sums, sums_over_ranks
from megaaccum.errors import MegaaccumError
from megaaccum.sharding import ShardingBackend
from megaaccum.step import grad_norm, world_sums
from megaaccum.step.flush import flush_arguments
from megaaccum.step.loss import Divisor, flag
from megaaccum.step.microbatches import Microbatches, OpenStep, shapes_of
from megaaccum.step.recovery import Attempt
from megaaccum.step.result import StepResult
from megaaccum.step.train_step import TrainStep


class SpeculativeTrainStep(TrainStep):
    """Ends steps before their verdict and begins those that come after them (`speculative_step`). Arguments as for
    TrainStep."""

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self._begun: tuple[OpenStep, Microbatches, Sequence[Any]] | None = None
        """The step that began before the verdict on the one before it, and the list that it was given."""
        self._last_confirmed = False
        """Whether the last verdict was to update without clipping, as the next one then is likely to be."""

    def train(
        self,
        microbatches: Sequence[Any],
        *,
        step: int | None = None,
        stop: bool = False,
        problem: MegaaccumError | None = None,
        upcoming: Sequence[Any] | None = None,
    ) -> StepResult:
        """TrainStep.train. upcoming: the micro-batches of the next step, on every rank or on none, which may begin
        before the verdict on this one."""
        step = self.transaction.step + 1 if step is None else step
        if self.transaction.next_batch != self.batch:
            upcoming = None
        with self.observer.watching():
            if self._begun is not None and self._begun[2] is not microbatches:
                self.drop_begun()
            note = ""
            if self._begun is None or upcoming is None:  # else what is to be agreed on travels with the next verdict
                batch, stop, note = self.agree(microbatches, step, stop=stop, problem=problem)
            begun, self._begun = self._begun, None  # not before: if the agreement raises, it is still to be ended
            if begun is not None:
                opened, batch, _ = begun
                self.running = opened
                self.begin_attempt(opened, lambda: opened.divisor, tally=opened.tally)
                self.side_losses.begin_flush(batch)  # again, by the loss scale of now
            elif batch is not None:
                opened = self.open(step, world_sums.divisor_of(self, [batch], alone=True))
                opened.note = note
            if batch is None:
                result = self.skip_short_batch(step, stop=stop, note=note)
            else:
                opened.calls.append(batch)
                self.observer.phase("forward_backward")
                self.flush(opened, batch, reduce=True, begun=begun is not None)
                is_updated = False
                if upcoming is not None and self._last_confirmed and opened.divisor.total is not None and not note:
                    attempt, is_updated, stop = self.end_early(opened, upcoming, stop=stop, problem=problem)
                    verdict = self.judge(opened, attempt)
                else:
                    verdict = self.judge(opened, self.reduce_and_measure(opened))
                    self._last_confirmed = not verdict.skip and self._is_confirmed(verdict)
                if verdict.skip:
                    self.roll_back(opened)
                elif not is_updated:
                    self.update(verdict.norm, verdict.factor)
                result = self.commit(opened, verdict, stop=stop)
        return replace(result, **self.observer.pop()._asdict())

    def drop_begun(self) -> None:
        """End the step that has begun, if any, without a gradient. Collective over the pipeline."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._drop_early(begun[0])

    # --- the step that ends ---

    def end_early(
        self, opened: OpenStep, upcoming: Sequence[Any], *, stop: bool, problem: MegaaccumError | None
    ) -> tuple[Attempt, bool, bool]:
        """Update, and begin the step on `upcoming`.

        stop, problem: of this rank, which then begins nothing. Returns the attempt, which is still to be judged,
        whether the update by it stays, and whether some rank asked to stop. Collective over the world.
        """
        backend = self.backend
        self.observer.phase("reduce")
        backend.finish_reduction()
        self.observer.phase("norm")
        square = grad_norm.own_square(backend, self.groups)
        # The ranks that share collectives of an update, which all make or none.
        among = self.groups.dp_cp if self.groups.tp.size() == 1 else self.groups.collection.tp_dp_cp
        (of_stage,) = sums_over_ranks([square], among)
        factor = 1.0 / backend.loss_scale  # N is in the loss
        updates = self.is_unclipped(of_stage**0.5 * factor)
        batch, divisor, is_ready = self._read(opened, upcoming, wanted=not stop and problem is None)
        parts = [square, flag(stop), flag(not is_ready), flag(not updates)]
        parts += [torch.stack(world_sums.faults(self, opened.tally)).sum(), *world_sums.own_sums(self, opened)]
        wait = post_sums(parts, self.groups.host, on_host=True)
        self.observer.phase("optimizer")
        undo = _undo(backend, self.transaction.num_updates)
        if updates:
            self.update(0.0, factor)
        self.observer.end_early()
        begun = self._begin_early(opened.step + 1, batch, divisor, is_ready=is_ready)
        self.observer.phase("verdict")
        total, stops, not_ready, held_back, is_unusual, *sums = wait()
        attempt = world_sums.attempt_of(self, opened, total**0.5, sums)
        if not (held_back or is_unusual) and self._is_confirmed(attempt):
            if not_ready:
                self._drop_early(begun)
            else:
                self._begun = begun, batch, upcoming
            return attempt, True, bool(stops)
        self.observer.undo_end_early()
        self._drop_early(begun)
        undo()  # if there was no update too: what the dropped forwards gathered must not outlive the next
        del undo
        self.amid, self._last_confirmed = "", False
        opened.note = "the update before the verdict was taken back"
        return self.measure(opened), False, bool(stops)

    def _is_confirmed(self, attempt: Attempt) -> bool:
        """Whether the verdict on `attempt` is to update without clipping."""
        return self.recovery.lets_pass(attempt) and self.is_unclipped(attempt.norm)

    def is_unclipped(self, norm: float) -> bool:
        """Whether a gradient of that norm is not clipped."""
        return math.isfinite(norm) and grad_norm.clip_coefficient(norm, self.plan.config.optimizer.clip_grad) >= 1

    # --- the step that begins ---

    def _begin_early(self, step: int, batch: Microbatches, divisor: Divisor, *, is_ready: bool) -> OpenStep:
        """Begin step `step`, and run its forwards up to the first backward if ranks are ready for them."""
        opened = OpenStep(step, self.restorer())
        opened.divisor, opened.expert_counts = divisor, self._experts.begin()
        self.side_losses.begin_attempt(divisor, self.recovery.loss_scale)
        with self.observer.flushing(), self.seeds.flush(step):
            if is_ready:
                self.observer.phase("gather")
                self.backend.gather()
            self.observer.phase("forward_backward")
            self.schedule.begin(**flush_arguments(self, opened, batch))
            if is_ready:
                self.schedule.warm_up()
        return opened

    def _drop_early(self, opened: OpenStep) -> None:
        """End a step that has begun without a gradient. Collective over the pipeline."""
        self.schedule.drain()
        opened.restore()

    def _read(self, opened: OpenStep, upcoming: Sequence[Any], *, wanted: bool) -> tuple[Microbatches, Divisor, bool]:
        """The micro-batches of `upcoming`, their divisor, and whether the ranks of this stage can all run them. If not,
        the step with the barrier finds out why; those of `opened`, which no rank runs, are then in their place.
        Collective over the ranks of this stage."""
        plan, current = self.batch, opened.calls[-1]
        batch = replace(current, weights=[math.nan] * len(current), total_weight=None)
        planned = (plan.micro_batch_size, plan.seq_length)
        if wanted and len(upcoming) == plan.num_microbatches and {*shapes_of(upcoming)} <= {planned}:
            read = self.batch_of(upcoming)
            batch = batch if read.weights is None else read
        divisor = world_sums.divisor_of(self, [batch], alone=True)()
        (unread,) = sums_over_ranks([flag(math.isnan(divisor.in_loss))], self.groups.tp)
        return batch, divisor, not unread


def _undo(backend: ShardingBackend, num_updates: int) -> Callable[[], None]:
    """Copy the tensors that an update changes on this rank: master weights, moments, and the gradient that it reads.
    Returns a function that restores the copy; collective over the data-parallel ranks."""
    copies = [tensor.clone() for tensor in _state(backend)]
    give_gradients = backend.copy_gradients()

    def undo() -> None:
        for tensor, copy in zip(_state(backend), copies, strict=True):
            tensor.copy_(copy)
        backend.adopt_state(num_updates)
        give_gradients()

    return undo


def _state(backend: ShardingBackend) -> list[torch.Tensor]:
    return [tensor for piece in backend.state() for tensor in piece.tensors.values()]
