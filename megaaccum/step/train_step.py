"""One optimizer step: the accumulated batch, from the pulled micro-batches to the committed weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.distributed import rng
from megaaccum.distributed.agreement import printed_once, raise_together
from megaaccum.distributed.breadcrumbs import Trace, traced
from megaaccum.errors import ConfigError, MegaaccumError, StepError
from megaaccum.metrics.observer import Observer
from megaaccum.model import router_state
from megaaccum.model.packed_rows import sent_shape
from megaaccum.precision import fp8
from megaaccum.precision.nonfinite import Probe
from megaaccum.schedule.entry import ForwardBackward, get_forward_backward_func
from megaaccum.step import grad_norm, short_batch
from megaaccum.step.again import Again
from megaaccum.step.agreement import StepAgreement, with_lengths
from megaaccum.step.forward_step import ForwardStep
from megaaccum.step.loss import (
    Divisor,
    ForwardStepFunc,
    ReportReducer,
    Tally,
    places_of,
    post_total_weight,
    sums_over_ranks,
)
from megaaccum.step.microbatches import Microbatches, read_batch
from megaaccum.step.open_step import Before, OpenStep
from megaaccum.step.recovery import Attempt, Recovery, Verdict
from megaaccum.step.result import StepResult
from megaaccum.step.side_losses import SideLosses
from megaaccum.step.speculation import Speculation
from megaaccum.step.totals import StepTotals, Totals

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.precision.loss_scaler import LossScaler
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
        self._plan, self._groups, self._chunks, self._backend = plan, groups, chunks, backend
        self.batch = plan.batch
        """That of the step; the engine sets it by the samples consumed."""
        self._forward_step_func = forward_step_func
        self._fp8 = low_precision or fp8.build(plan, chunks)
        self.observer = Observer(groups, chunks, backend)
        self._p2p = traced(P2PCommunicator(pp_group=groups.pp, config=chunks[0].config), self.trace)
        self._schedule = get_forward_backward_func(plan)
        if isinstance(self._schedule, ForwardBackward):
            self._schedule.prepare(plan.ramp.flush_sizes(), groups.pp, len(chunks))
        self._agreement = StepAgreement(plan, groups)
        self._recovery = Recovery(plan, backend, self._fp8)
        self._speculation = Speculation(self)
        self.num_updates = 0
        """Those before this step; the engine sets it."""
        self._seeds = rng.SampleSeeds(plan, groups, chunks)
        self._side_losses = SideLosses(chunks)
        self._reports = ReportReducer(reports)
        self._totals = StepTotals(groups, self._reports, self._recovery.zero)
        self._probe: Probe | None = None
        self._last_weight = 0.0
        self._open: OpenStep | None = None
        self.before_update: Callable[[], None] | None = None
        """Called when the backend's `shards` are as the optimizer is about to read them, if set."""

    @property
    def trace(self) -> Trace:
        """This rank's notes on what it is doing."""
        return self.observer.trace

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of an FP16 run."""
        return self._recovery.scaler

    @property
    def loss_scale(self) -> float:
        """Scale of the loss in the next backward; 1 without FP16."""
        return self._recovery.loss_scale

    @property
    def in_loss(self) -> float:
        """The factor on losses of the open step, beside the loss scale."""
        assert self._open is not None
        return self._open.divisor.in_loss

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, guard and counters, as plain numbers; the same on every rank."""
        return self._recovery.state_dict()

    def drop_begun(self) -> None:
        """End the step that began before its call, if one has (`speculative_step`). Collective over the world."""
        self._speculation.drop()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A part that `state` lacks starts afresh (the precision was another)."""
        self._recovery.load_state_dict(state)

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
                stop, short = self._agreement.on_step(step, microbatches, self.batch, stop=stop, **self._since(problem))
            if has_begun:
                self._speculation.go_on()
                result = self._end(step, stop, problem=problem, upcoming=upcoming)
            elif short and self._plan.config.step.short_batch == "drop":
                result = StepResult(loss=math.nan, weight=0.0, grad_norm=0.0, skipped=True, note=short, stop=stop)
            else:
                self._run(self._whole(microbatches), step=step, last=True)
                assert self._open is not None
                self._open.short = short
                result = self._end(step, stop, upcoming=upcoming)
        return replace(result, **self.observer.take()._asdict())

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
        return replace(result, **self.observer.take()._asdict())

    def _end(self, step: int, stop: bool, *, upcoming: Sequence[Any] | None = None, **more: Any) -> StepResult:
        opened, self._open = self._open, None
        assert opened is not None
        if self._backend.sums is not None and (problem := self._backend.sums.missing(opened.num_microbatches)):
            self._drop(opened)
            raise printed_once(StepError(f"step {step}: {problem}"))
        if upcoming is not None and self._speculation.may_end(opened):
            verdict, stop = self._speculation.end(opened, upcoming, stop=stop, **more)
        else:
            verdict = self._settle(opened, self._reduce_and_measure(opened))
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

    # --- forward and backward ---

    def _run(self, batch: Microbatches, *, step: int, last: bool, total: float | None = None) -> None:
        """The flushes of one call; the step's first call begins it."""
        opened = self._open or self._begin(step, self._divisor([batch], total, alone=last))
        opened.calls.append(batch)
        self.observer.phase("forward_backward")
        try:
            self._flushes(batch, opened, reduce=last or not self._backend.can_defer)
        except BaseException:
            self._open = None
            raise

    def _begin(self, step: int, divisor: Callable[[], Divisor]) -> OpenStep:
        self.observer.phase("gather")
        self._open = OpenStep(step, Before.of(self._fp8))
        self._begin_attempt(self._open, divisor)
        return self._open

    # --- a flush that another loop runs, between these two ---

    def begin_flush(self, step: int, expected: float | None = None) -> float:
        """The gradients that come now add to those of step `step`; its first flush begins it. expected: the weight of a
        micro-batch, default its tokens. Returns what losses are to be multiplied by, beside the loss scale. Raises
        ConfigError with `reproducible: layout`, which has to know which micro-batch runs."""
        if self._backend.sums is not None:
            raise printed_once(ConfigError("reproducible layout needs a step of megaaccum's own: set it to none"))
        opened = self._open or self._begin(step, lambda: self._divisor_at_commit(expected))
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

    def _divisor(self, calls: Sequence[Microbatches], total: float | None, *, alone: bool) -> Callable[[], Divisor]:
        """That of a step: its weights are on their way, and are waited for when it is asked for. total: N where the
        caller knows it. alone: there is this one call, so its weights are all."""
        weights = [each.weights for each in calls]
        if total is None and not (alone and all(each is not None for each in weights)):
            return lambda: self._divisor_at_commit(calls[0].expected)
        known = [weight for each in weights for weight in each or ()]
        count = sum(len(each) - len(each.dummies) for each in calls)
        summed = (
            post_total_weight(known, count, self._groups, places_of(self._plan, self._groups, len(known)))
            if total is None
            else lambda: (total, self.batch.num_microbatches * self._groups.dp.size())
        )

        def divisor() -> Divisor:
            weight, self._num_microbatches = summed()
            return Divisor.known(weight, reduction_divisor=self._backend.reduction_divisor)

        return divisor

    def _divisor_at_commit(self, expected: float | None) -> Divisor:
        """Of a step whose weight is not known before it ends: about that of the last one, else by what is `expected` of
        a micro-batch."""
        nominal, batch, self._num_microbatches = None, self.batch, 0
        if self.scaler is not None:
            expected = expected or float(batch.micro_batch_size * batch.seq_length)
            nominal = (self._last_weight or expected / batch.micro_batch_size) * batch.global_batch_size
        return Divisor.at_commit(reduction_divisor=self._backend.reduction_divisor, nominal=nominal)

    def _begin_attempt(self, opened: OpenStep, divisor: Callable[[], Divisor]) -> None:
        self._backend.begin_step()
        opened.divisor = divisor()
        opened.tally, opened.reduced = Tally(places_of(self._plan, self._groups, self.batch.num_microbatches)), False
        if self._backend.sums is not None:
            self._backend.sums.count = self.batch.num_microbatches
        self._backend.loss_scale = self._recovery.loss_scale
        self._side_losses.begin_attempt(opened.divisor, self._backend.loss_scale, self._num_microbatches)
        self._fp8.begin_attempt()
        self.observer.note_held()
        router_state.begin_step(self._chunks)
        if self._recovery.zero is not None:
            self._recovery.zero.clear()

    def _flushes(self, batch: Microbatches, opened: OpenStep, *, reduce: bool) -> None:
        """One flush of all micro-batches (`merged`), or one per accumulation round; the last one reduces."""
        if opened.reduced:
            self._backend.resume_accumulation()
        size = self.batch.microbatches_per_flush if batch.can_run_again else len(batch)
        starts = range(0, len(batch), size)
        with self.observer.flushing(), self._seeds.flush(opened.step):
            for start in starts:
                self._backend.set_last_flush(reduce and start == starts[-1])
                if opened.begun:
                    opened.begun = False
                    self._schedule.finish()  # type: ignore[attr-defined]  # a ForwardBackward
                else:
                    self._flush(batch.part(start, min(start + size, len(batch))), opened.divisor, opened.tally)
        opened.num_microbatches += len(batch)
        opened.reduced = reduce

    def _flush(
        self, batch: Microbatches, divisor: Divisor, tally: Tally, *, forward_only: bool = False, **more: Any
    ) -> None:
        """Run the schedule over `batch`. What loss functions give goes into `tally`, on the ranks of the last stage.
        more: arguments of a ForwardBackward."""
        forward_step = ForwardStep(
            batch, divisor, tally, chunks=self._chunks, trace=self.trace, seeds=self._seeds, sums=self._backend.sums,
            side_losses=self._side_losses, low_precision=self._fp8, probe=self._probe, look=self.observer.note_held,
            timed=nullcontext if forward_only else self.observer.forward,
        )  # fmt: skip
        self._side_losses.begin_flush(batch)
        # Looking at single micro-batches takes each forward and backward for itself.
        interleaves = self._plan.config.parallel.overlap_moe_expert_parallel_comm and not forward_step.looks_closely
        for chunk in self._chunks:
            chunk.config.overlap_moe_expert_parallel_comm = interleaves  # type: ignore[union-attr]
        if batch.lengths is not None and isinstance(self._schedule, ForwardBackward):
            more["seq_lengths"] = batch.lengths  # Megatron's own schedules send the shapes ahead
        self._schedule(
            forward_step_func=forward_step,
            data_iterator=batch.iterators(len(self._chunks)),
            model=self._chunks,
            num_microbatches=len(batch),
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self._groups.collection,
            **(sent_shape(self._chunks, self.batch) | more),
        )
        self._fp8.end_flush()

    def forward(self, batch: Microbatches) -> Tally:
        """The loss functions' values of `batch`, without gradients or dropout; on other ranks than those of the last
        stage an empty tally."""
        self.drop_begun()
        self._backend.gather()
        before = self._fp8.snapshot()  # largest values are noted in every forward, and these are not the training's
        self._fp8.begin_attempt()
        for chunk in self._chunks:
            chunk.eval()
        tally = Tally(places_of(self._plan, self._groups, len(batch)))
        with torch.no_grad(), self._seeds.flush(0):
            self._flush(batch, Divisor.known(1.0, reduction_divisor=1), tally, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        self._fp8.restore(before)
        return tally

    def evaluate(self, microbatches: Sequence[Any], problem: MegaaccumError | None = None) -> tuple[float, float]:
        """(mean loss, weight) of one global batch, without gradients or dropout; the same on every rank. A `problem` of
        any rank is raised on every rank."""
        self._agreement.on_call("evaluate", num_microbatches=len(microbatches), **self._since(problem))
        tally = self.forward(self.batch_of(microbatches))
        total, weight = sums_over_ranks(self._totals.counted(tally.sums()))
        return total / (weight or 1.0), weight

    # --- the micro-batches ---

    def batch_of(
        self,
        data: Any,
        forward_step_func: ForwardStepFunc | None = None,
        *,
        count: int | None = None,
        weights: Sequence[float] | None = None,
        expected: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Microbatches:
        """`data` as the step takes it (`read_batch`). Raises ConfigError for what is missing."""
        function = forward_step_func or self._forward_step_func
        if function is None:
            raise ConfigError("no forward_step_func: give one to initialize, or with the call")
        return read_batch(
            function, data, self.batch, varies=self._plan.config.batch.variable_seq_lengths,
            first=0 if self._open is None else self._open.num_microbatches, count=count, weights=weights,
            expected=expected, lengths=lengths,
        )  # fmt: skip

    def _whole(self, microbatches: Sequence[Any]) -> Microbatches:
        """A whole step's, with the lengths that only some stages know. Raises on every rank where none does."""
        filled, unknown = with_lengths(self._filled(microbatches), self._plan, self._groups.pp)
        if filled.lengths is not None or unknown is not None:
            raise_together(unknown)
        return filled

    def _filled(self, microbatches: Sequence[Any]) -> Microbatches:
        """With dummies up to the planned number, where a short batch is padded."""
        filled, dummies = short_batch.filled(microbatches, self._plan, self.batch)
        batch = self.batch_of(filled)
        return batch.without({index: filled[index] for index in dummies})

    def _since(self, problem: MegaaccumError | None) -> dict[str, Any]:
        """Since the last optim_step: the number of calls, and what was wrong with this rank's values in one of them."""
        if self._open is None:
            return {"calls": 0, "problem": problem}
        return {"calls": len(self._open.calls), "problem": problem or self._open.tally.problem}

    # --- the gradient ---

    def _reduce_and_measure(self, opened: OpenStep) -> Attempt:
        """The step's gradient, reduced over all ranks; its norm, loss, weight and reports, all in one all-reduce."""
        self.observer.phase("reduce")
        self._backend.finish_reduction()
        return self._measure(opened)

    def _measure(self, opened: OpenStep) -> Attempt:
        self.observer.phase("norm")
        norm, sums = grad_norm.global_norm(
            self._backend, self._groups, along=self._totals.own(opened.tally), overflow=self._fp8.overflow()
        )
        self.observer.phase("verdict")
        totals, is_unusual = self._totals.read(sums)
        if is_unusual:
            try:
                totals = self._totals.in_full(opened.tally, totals)
            except MegaaccumError:
                self._drop(opened)
                raise
        return self._attempt(opened, norm, totals)

    def _attempt(self, opened: OpenStep, norm: float, totals: Totals) -> Attempt:
        weight = totals.weight if opened.divisor.total is None else opened.divisor.total
        factor = opened.divisor.at_end(weight) / self._backend.loss_scale
        return Attempt(
            loss=totals.loss / (weight or 1.0),
            weight=weight,
            norm=norm * factor,
            factor=factor,
            num_zeroed=totals.num_zeroed,
            reports=totals.reports,
        )

    def gradient(
        self, microbatches: Sequence[Any], *, step: int = 1, place: Callable[[int], int] | None = None
    ) -> Attempt:
        """Everything up to the reduced gradient, which the backend's `shards` then show. place: the number in the
        global batch of each of these micro-batches, where it is not the planned one."""
        with self._seeds.placed(place):
            self._run(self._whole(microbatches), step=step, last=True)
        opened, self._open = self._open, None
        assert opened is not None
        return self._reduce_and_measure(opened)

    def abandon(self) -> None:
        """Drop the gradients of the step that was begun, and go back to the random states of before."""
        opened, self._open = self._open, None
        if opened is not None:
            self._drop(opened)

    def _drop(self, opened: OpenStep) -> None:
        self._backend.discard()
        opened.before.restore(self._fp8)

    def _settle(self, opened: OpenStep, attempt: Attempt, *, updated: bool = False) -> Verdict:
        """Judge, then change the weights, where they have not been `updated`, or leave everything as it was; after the
        verdict nothing fails on one rank alone."""
        verdict = self._recovery.judge(opened.step, attempt, Again(self, opened))
        attempt = verdict.attempt
        self.observer.phase("optimizer")
        if verdict.skip:
            self._drop(opened)
        elif not updated:
            self._update_weights(attempt.norm, attempt.factor)
        self._recovery.conclude(verdict)
        self._last_weight = attempt.weight / self.batch.global_batch_size
        return verdict

    def _update_weights(self, norm: float, factor: float) -> None:
        """Take the optimizer's step on the reduced gradient times `factor`; norm: of that product."""
        grad_norm.scale_and_clip(self._backend, norm, self._plan.config.optimizer.clip_grad, factor=factor)
        if self.before_update is not None:
            self.before_update()
        self._backend.step()
        router_state.update_bias(self._chunks, self._groups)
