"""One optimizer step: the accumulated batch, from the pulled micro-batches to the committed weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed.agreement import printed_once, raise_together
from megaaccum.errors import ConfigError, MegaaccumError, StepError
from megaaccum.model import fp8
from megaaccum.step import short_batch
from megaaccum.step.again import Again
from megaaccum.step.agreement import StepAgreement, with_lengths
from megaaccum.step.attempts import Attempts, OpenStep
from megaaccum.step.loss import Divisor, ForwardStepFunc, ReportReducer, Tally, sums_over_ranks
from megaaccum.step.microbatches import Microbatches, read_batch
from megaaccum.step.recovery import Attempt, Recovery, Verdict
from megaaccum.step.result import StepResult
from megaaccum.step.speculation import Speculation
from megaaccum.step.totals import StepTotals

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend


class TrainStep:
    """Takes steps of one model over one sharding backend. Every method is collective over the world.

    forward_step_func: of micro-batches that come without one. reports: how each report is reduced (ReportReducer).
    low_precision: what fp8.build made of these chunks, where a checkpoint has been read into it already.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: list[torch.nn.Module],
        backend: ShardingBackend,
        forward_step_func: ForwardStepFunc | None = None,
        *,
        reports: Mapping[str, str] | None = None,
        low_precision: fp8.Fp8 | None = None,
    ):
        self._plan, self._groups, self._backend = plan, groups, backend
        self._forward_step_func = forward_step_func
        low_precision = low_precision or fp8.build(plan, chunks)
        self._agreement = StepAgreement(plan, groups)
        self.recovery = Recovery(plan, backend, low_precision)
        self._reports = ReportReducer(reports)
        self._totals = StepTotals(groups, self._reports, self.recovery.zero)
        self.attempts = Attempts(plan, groups, chunks, backend, self.recovery, self._totals, low_precision)
        self.observer = self.attempts.observer
        self._speculation = Speculation(plan, self.attempts, self.recovery, self.batch_of)
        self._open: OpenStep | None = None

    @property
    def in_loss(self) -> float:
        """The factor on losses of the open step, beside the loss scale."""
        assert self._open is not None
        return self._open.divisor.in_loss

    def gather_ahead(self) -> None:
        """Begin the gather that the next step begins with, and which counts for it."""
        with self.observer.watching():
            self.observer.phase("gather")
            self._backend.gather_ahead()

    def drop_begun(self) -> None:
        """End the step that began before its call, if one has (`speculative_step`). Collective over the world."""
        self._speculation.drop()

    # --- a step ---

    def train(
        self,
        microbatches: Sequence[Any],
        *,
        step: int,
        stop: bool = False,
        problem: MegaaccumError | None = None,
        upcoming: Sequence[Any] | None = None,
    ) -> StepResult:
        """Make the accumulated step on this rank's `num_microbatches` micro-batches: the step on the global batch.

        Where it is skipped, weights, optimizer and random states are as before. Raises StepError on every rank, before
        anything has changed, where the configuration says that what happened ends the run. A rank that cannot take the
        step comes with its `problem`, which every rank then raises before it begins. upcoming: with `speculative_step`,
        the micro-batches of the next step, which may begin before the verdict on this one.
        """
        with self.observer.watching():
            has_begun, short = self._speculation.has_begun(microbatches), ""
            if not has_begun or upcoming is None:
                batch = self.attempts.batch
                stop, short = self._agreement.on_step(step, microbatches, batch, stop=stop, **self._since(problem))
            if has_begun:
                self._open, begun = self._speculation.go_on()
                self._run(begun, step=step, last=True)
                result = self._end(step, stop, problem=problem, upcoming=upcoming)
            elif short and self._plan.config.step.short_batch == "drop":
                result = StepResult(loss=math.nan, weight=0.0, grad_norm=0.0, skipped=True, note=short, stop=stop)
            else:
                self._run(self._whole(microbatches), step=step, last=True).short = short
                result = self._end(step, stop, upcoming=upcoming)
        return replace(result, **self.observer.pop()._asdict())

    def forward_backward(self, batch: Microbatches, *, step: int, last: bool, total: float | None = None) -> None:
        """Add the gradients of `batch` to those of step `step`. total: N of the whole step, over all ranks and calls,
        where it is known. last: whether the reduction may run inside the last backward, if no further call is
        expected."""
        self.drop_begun()
        with self.observer.watching():
            batch, problem = with_lengths(batch, self._plan, self._groups.pp)
            bits = -1 if total is None else struct.unpack("<q", struct.pack("<d", total))[0]
            self._agreement.on_call(
                "forward_backward", num_microbatches=len(batch), total_weight=bits, **self._since(problem)
            )
            self._run(batch, step=step, last=last, total=total)

    def optim_step(self, *, step: int, stop: bool = False, problem: MegaaccumError | None = None) -> StepResult:
        """End the step that `forward_backward` began: reduce what is left, divide, judge, update."""
        with self.observer.watching():
            agreed = self._agreement.on_call("optim_step", stop=stop, step=step, **self._since(problem))
            if self._open is None:
                raise printed_once(StepError(f"step {step} has no gradient: call forward_backward before optim_step"))
            result = self._end(step, agreed.stop)
        return replace(result, **self.observer.pop()._asdict())

    def _end(self, step: int, stop: bool, *, upcoming: Sequence[Any] | None = None, **more: Any) -> StepResult:
        opened = self._close()
        if self._backend.sums is not None and (problem := self._backend.sums.missing(opened.num_microbatches)):
            self.attempts.drop(opened)
            raise printed_once(StepError(f"step {step}: {problem}"))
        if upcoming is not None and self._speculation.may_end(opened):
            attempt, is_updated, stop = self._speculation.end(opened, upcoming, stop=stop, **more)
            verdict = self._settle(opened, attempt, is_updated=is_updated)
        else:
            verdict = self._settle(opened, self.attempts.reduce_and_measure(opened))
            self._speculation.note(verdict)
        self.observer.phase("report")
        attempt = verdict.attempt
        return StepResult(
            step=step,
            loss=attempt.loss,
            weight=attempt.weight,
            grad_norm=attempt.norm,
            skipped=verdict.skip,
            bad=verdict.bad,
            loss_scale=self._backend.loss_scale,
            sanitized=attempt.num_zeroed + attempt.num_dropped,
            note=". ".join(filter(None, (opened.short, verdict.note))),
            stop=stop,
            reports=attempt.reports,
            per_microbatch=self._reports.per_microbatch(opened.tally),
        )

    def _settle(self, opened: OpenStep, attempt: Attempt, *, is_updated: bool = False) -> Verdict:
        """Judge, then change the weights, where they are not updated yet, or leave everything as it was; after the
        verdict nothing fails on one rank alone."""
        verdict = self.recovery.judge(opened.step, attempt, Again(self.attempts, opened))
        attempt = verdict.attempt
        self.observer.phase("optimizer")
        if verdict.skip:
            self.attempts.drop(opened)
        elif not is_updated:
            self.attempts.update(attempt.norm, attempt.factor)
        self.recovery.conclude(verdict)
        self.attempts.last_weight = attempt.weight / self.attempts.batch.global_batch_size
        return verdict

    def _close(self) -> OpenStep:
        """The open step, which is none from here on."""
        opened, self._open = self._open, None
        assert opened is not None
        return opened

    # --- forward and backward ---

    def _run(self, batch: Microbatches, *, step: int, last: bool, total: float | None = None) -> OpenStep:
        """The flushes of one call; the step's first call begins it."""
        opened = self._open or self._begin(step, self.attempts.divisor([batch], total, alone=last))
        opened.calls.append(batch)
        self.observer.phase("forward_backward")
        try:
            self.attempts.add(batch, opened, reduce=last or not self._backend.can_defer)
        except BaseException:
            self._open = None
            raise
        return opened

    def _begin(self, step: int, divisor: Callable[[], Divisor]) -> OpenStep:
        self.observer.phase("gather")
        self._open = self.attempts.open(step)
        self.attempts.begin(self._open, divisor)
        return self._open

    # --- a flush that another loop runs, between these two ---

    def begin_flush(self, step: int, expected: float | None = None) -> float:
        """The gradients that come now add to those of step `step`; its first flush begins it. expected: the weight of a
        micro-batch, default its tokens. Returns what losses are to be multiplied by, beside the loss scale. Raises
        ConfigError with `reproducible: layout`, which has to know which micro-batch runs."""
        if self._backend.sums is not None:
            raise printed_once(ConfigError("reproducible layout needs a step of megaaccum's own: set it to none"))
        opened = self._open or self._begin(step, lambda: self.attempts.divisor_at_commit(expected))
        if opened.reduced:
            self._backend.resume_accumulation()
            opened.reduced = False
        self._backend.set_last_flush(True)
        return opened.divisor.in_loss

    def end_flush(self, weight: torch.Tensor | float) -> None:
        """Take note of the flush's weight on this rank, a scalar; over all ranks (of tp the first) they add up to N."""
        assert self._open is not None
        self._open.tally.add(weight)
        self._open.reduced = True

    # --- forwards alone ---

    def forward(self, batch: Microbatches) -> Tally:
        """`Attempts.forward`, after the end of a step that began before its call."""
        self.drop_begun()
        return self.attempts.forward(batch)

    def evaluate(self, microbatches: Sequence[Any], problem: MegaaccumError | None = None) -> tuple[float, float]:
        """(mean loss, weight) of one global batch, without gradients or dropout; the same on every rank. A `problem` of
        any rank is raised on every rank."""
        self._agreement.on_call("evaluate", num_microbatches=len(microbatches), **self._since(problem))
        tally = self.forward(self.batch_of(microbatches))
        total, weight = sums_over_ranks(self._totals.counted(tally.sums()))
        return total / (weight or 1.0), weight

    # --- the micro-batches ---

    def batch_of(self, data: Any, forward_step_func: ForwardStepFunc | None = None, **known: Any) -> Microbatches:
        """`data` as the step takes it. known: count, weights, expected, lengths (`read_batch`). Raises ConfigError for
        what is missing."""
        function = forward_step_func or self._forward_step_func
        if function is None:
            raise ConfigError("no forward_step_func: give one to initialize, or with the call")
        first = 0 if self._open is None else self._open.num_microbatches
        varies = self._plan.config.batch.variable_seq_lengths
        return read_batch(function, data, self.attempts.batch, varies=varies, first=first, **known)

    def _whole(self, microbatches: Sequence[Any]) -> Microbatches:
        """A whole step's: with dummies up to the planned number, where a short batch is padded, and with the lengths
        that only some stages know. Raises on every rank where none does."""
        filled, dummies = short_batch.filled(microbatches, self._plan, self.attempts.batch)
        batch = self.batch_of(filled).without({index: filled[index] for index in dummies})
        batch, unknown = with_lengths(batch, self._plan, self._groups.pp)
        if batch.lengths is not None or unknown is not None:
            raise_together(unknown)
        return batch

    def _since(self, problem: MegaaccumError | None) -> dict[str, Any]:
        """Since the last optim_step: the number of calls, and what was wrong with this rank's values in one of them."""
        if self._open is None:
            return {"calls": 0, "problem": problem}
        return {"calls": len(self._open.calls), "problem": problem or self._open.tally.problem}

    # --- the gradient, without a step on it ---

    def gradient(
        self, microbatches: Sequence[Any], *, step: int = 1, place: Callable[[int], int] | None = None
    ) -> Attempt:
        """Everything up to the reduced gradient, which the backend's `shards` then show. place: the number in the
        global batch of each of these micro-batches, where it is not the planned one."""
        with self.attempts.seeds.placed(place):
            self._run(self._whole(microbatches), step=step, last=True)
        return self.attempts.reduce_and_measure(self._close())

    def abandon(self) -> None:
        """Drop the gradients of the step that was begun, and go back to the random states of before."""
        if self._open is not None:
            self.attempts.drop(self._close())
