"""One optimizer step: the accumulated batch, from this rank's micro-batches to the committed weights.

`TrainStep.train` is the whole of it and reads downwards. `forward_backward` and `optim_step` are its first and second
half, for loops that pass the micro-batches of a step in several calls; `begin_flush` and `end_flush` are for loops
that run the schedule themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.distributed import rng
from megaaccum.distributed.agreement import any_rank, raise_on_all_ranks
from megaaccum.distributed.breadcrumbs import traced
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError, MegaaccumError, StepError, raise_problems
from megaaccum.executor.entry import ForwardBackward, get_forward_backward_func
from megaaccum.model import fp8, names, router_state
from megaaccum.observe.changing_buffers import ChangingBuffers
from megaaccum.observe.expert_loads import ExpertCounter
from megaaccum.observe.noise_scale import NoiseScale
from megaaccum.observe.nonfinite import Probe
from megaaccum.observe.observer import Observer
from megaaccum.platform.replacing import replaced
from megaaccum.schedule.builders import interleaved_problems
from megaaccum.sharding import ShardingBackend
from megaaccum.step import call_agreement, grad_norm, retry, short_batch, world_sums
from megaaccum.step.flush import flush_arguments
from megaaccum.step.loss import Divisor, ForwardStepFunc, ReportReducer, Tally, spread_over_batch
from megaaccum.step.microbatches import Microbatches, OpenStep, read_batch, shapes_of
from megaaccum.step.recovery import Attempt, Recovery
from megaaccum.step.result import StepResult
from megaaccum.step.seeds import SampleSeeds
from megaaccum.step.side_losses import SideLosses
from megaaccum.step.transaction import Transaction
from megaaccum.upstream import pytorch

PARTIAL_UPDATE = "a change of the weights failed midway, so they are of no step: start from a checkpoint"


class TrainStep:
    """Takes steps of one model over one sharding backend. Every method is collective over the world.

    Args:
        forward_step_func: of micro-batches that a call brings without one.
        reports: reduces the reports of loss functions; default: a ReportReducer without a rule of its own.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: list[torch.nn.Module],
        backend: ShardingBackend,
        forward_step_func: ForwardStepFunc | None = None,
        *,
        reports: ReportReducer | None = None,
    ):
        self.plan, self.groups, self.chunks, self.backend = plan, groups, chunks, backend
        self.forward_step_func = forward_step_func
        self.transaction = Transaction(plan, None)
        """Moves with each step: counters alone, until it is given a learning-rate schedule."""
        self.fp8 = fp8.build(plan, chunks)
        self.observer = Observer(groups, chunks, backend)
        self.parameters = list(names.named_parameters(chunks))
        self.modules = [module for chunk in chunks for module in chunk.modules()]
        self.held = pytorch.held_by(self.modules)
        """The model that the optimizer was built for; a call compares the one it finds."""
        self.versions = self.weight_versions()
        self.changing_buffers = ChangingBuffers(chunks, is_loud=groups.dp_cp.rank() == groups.tp.rank() == 0)
        self.recovery = Recovery(plan, backend, self.fp8)
        self.opened: OpenStep | None = None
        self.running: OpenStep | None = None
        """The step that is neither committed nor dropped: `opened`, or one that runs or has failed."""
        self.amid = ""
        """The work that runs or that an error left unfinished: "flush", "weights" (a change of them), "update" (that of
        a step, and no rank waits for another any more), or nothing."""
        self.failure: StepError | None = None
        """Why this rank makes no call, which the next agreement tells the others."""
        self.before_update: Callable[[], None] | None = None
        """Called when the backend's `shards` are as the optimizer is about to read them, if set."""
        # The plan has been checked, and a short last batch may have fewer.
        self.schedule: Any = get_forward_backward_func(plan, allow_underfilled_pipeline=True)
        if isinstance(self.schedule, ForwardBackward):
            self.schedule.prepare(plan.ramp.flush_sizes(), groups.pp, len(chunks))
        self.p2p = traced(P2PCommunicator(pp_group=groups.pp, config=chunks[0].config), self.observer.trace)
        self.digest = plan.digest()
        self.reports = reports or ReportReducer()
        self.seeds = SampleSeeds(plan, groups, chunks)
        self.side_losses = SideLosses(chunks)
        self._experts = ExpertCounter(plan, chunks)
        self.probe: Probe | None = None
        """Looks at each micro-batch that runs, if set."""
        self._trial_batch: BatchPlan | None = None
        self.in_loss = 1.0
        """The factor on the losses of the step that runs, beside the loss scale."""
        window = plan.config.step.noise_scale_window
        self.noise_scale = NoiseScale(chunks, window) if window else None

    @property
    def batch(self) -> BatchPlan:
        """The batch of the next step."""
        return self._trial_batch or self.transaction.batch

    # --- the step ---

    def train(
        self,
        microbatches: Sequence[Any],
        *,
        step: int | None = None,
        stop: bool = False,
        problem: MegaaccumError | None = None,
        upcoming: Sequence[Any] | None = None,
    ) -> StepResult:
        """Make the accumulated step on this rank's `batch.num_microbatches` micro-batches: the step on the full global
        batch.

        If it is skipped, weights, optimizer and random states are as before. Raises StepError on every rank, before
        anything has changed, if the configuration says that what happened ends the run, or if another step is open.
        step: its number, default the next. stop, problem: this rank asks to stop after it, or cannot take it, which
        every rank then raises before it begins. upcoming: for SpeculativeTrainStep.
        """
        step = self.transaction.step + 1 if step is None else step
        with self.observer.watching():
            batch, stop, note = self.agree(microbatches, step, stop=stop, problem=problem)
            if batch is None:
                result = self.skip_short_batch(step, stop=stop, note=note)
            else:
                opened = self.open(step, world_sums.divisor_of(self, [batch], alone=True))
                opened.note = note
                opened.calls.append(batch)
                self.observer.phase("forward_backward")
                self.flush(opened, batch, reduce=True)
                attempt = self.reduce_and_measure(opened)
                verdict = self.judge(opened, attempt)
                if verdict.skip:
                    self.roll_back(opened)
                else:
                    self.update(verdict.norm, verdict.factor)
                result = self.commit(opened, verdict, stop=stop)
        return replace(result, **self.observer.pop()._asdict())

    def agree(
        self, microbatches: Sequence[Any], step: int, *, stop: bool, problem: MegaaccumError | None
    ) -> tuple[Microbatches | None, bool, str]:
        """(this rank's micro-batches, with dummies if a short batch is padded; whether some rank asks to stop; which
        ranks have too few). None instead of micro-batches if a short batch is dropped. Raises on every rank what
        keeps one of them from taking the step."""
        if self.opened is not None:
            problem = problem or StepError(
                f"step {self.opened.step} is open, with {self.opened.num_microbatches} micro-batches: end it with"
                " optim_step before the next"
            )
        if not isinstance(microbatches, Sequence):
            problem, microbatches = problem or call_agreement.no_list(microbatches), ()
        batch = None
        try:
            batch = self.batch_of(microbatches) if len(microbatches) == self.batch.num_microbatches else None
        except ConfigError as error:
            problem = problem or error
        weights = None if batch is None else batch.weights
        stop, short, total = call_agreement.on_step(
            self, microbatches, step=step, stop=stop, problem=problem, weights=weights
        )
        if short and self.plan.config.step.short_batch == "drop":
            return None, stop, short
        if short:
            short_batch.check_can_pad(microbatches, short)
        whole = self._whole(microbatches, batch)
        if any_rank(whole.weights is None) if short else total is not None and math.isnan(total):
            return replace(whole, weights=None), stop, short
        return replace(whole, total_weight=total), stop, short

    def _whole(self, microbatches: Sequence[Any], batch: Microbatches | None = None) -> Microbatches:
        """A whole step's: with dummies up to the planned number, and with the lengths that only some stages know.
        Raises on every rank if none does. batch: what has been read of them."""
        if batch is None:
            filled = short_batch.filled(microbatches, self.plan, self.batch)
            dummies = {index: filled[index] for index in range(len(microbatches), len(filled))}
            batch = self.batch_of(filled).without(dummies)
        return call_agreement.with_lengths(batch, self.plan, self.groups.pp)

    def open(self, step: int, divisor: Callable[[], Divisor]) -> OpenStep:
        """Note the state that a skipped step goes back to, gather the parameters and begin with no gradient. divisor:
        its weights are on their way and are waited for when it is called."""
        self.observer.phase("gather")
        opened = self.running = OpenStep(step, self.restorer())
        self.begin_attempt(opened, divisor)
        return opened

    def restorer(self) -> Callable[[], None]:
        """A function that puts random states and FP8 scales back as they are now."""
        states, scales = rng.snapshot(), self.fp8.snapshot()

        def restore() -> None:
            rng.restore(states)
            self.fp8.restore(scales)

        return restore

    def begin_attempt(self, opened: OpenStep, divisor: Callable[[], Divisor], *, tally: Tally | None = None) -> None:
        """Gather the parameters, and empty gradients and counts. tally: values that loss functions have returned."""
        self.backend.begin_step()
        opened.divisor = divisor()
        self.in_loss = opened.divisor.in_loss
        spread = spread_over_batch(self.plan, self.groups, self.batch.num_microbatches)
        if tally is None:
            opened.expert_counts = self._experts.begin()
        opened.tally = tally or Tally(spread)
        opened.reduced = False
        self.backend.sums.count = self.batch.num_microbatches
        self.backend.loss_scale = self.recovery.loss_scale
        self.side_losses.begin_attempt(opened.divisor, self.backend.loss_scale)
        self.fp8.begin_attempt()
        if self.noise_scale is not None:
            self.noise_scale.begin_attempt()
        router_state.begin_step(self.chunks)
        if self.recovery.zero is not None:
            self.recovery.zero.clear()

    def flush(
        self, opened: OpenStep, batch: Microbatches, *, reduce: bool, forward_only: bool = False, begun: bool = False
    ) -> None:
        """Run the schedule over `batch` and add up gradients: in one flush (`merged`), or one per accumulation round.

        reduce: the last flush reduces inside its last backward. begun: the schedule has begun the first flush already
        (SpeculativeTrainStep).
        """
        if opened.reduced:
            self.backend.resume_accumulation()
        size = len(batch) if forward_only or not batch.can_run_again else self.batch.microbatches_per_flush
        self.amid = "" if opened.tally.keeps_errors else "flush"
        with nullcontext() if forward_only else self.observer.flushing(), self.seeds.flush(opened.step):
            for start in range(0, len(batch), size):
                if not forward_only:
                    self.backend.set_last_flush(reduce and start + size >= len(batch))
                if begun and start == 0:
                    self.schedule.finish()
                else:
                    part = batch.part(start, min(start + size, len(batch)))
                    self.schedule(**flush_arguments(self, opened, part, forward_only=forward_only))
                self.fp8.end_backward()
        self.amid, opened.reduced = "", reduce

    def reduce_and_measure(self, opened: OpenStep) -> Attempt:
        """The step's gradient, reduced over all ranks; its norm, loss, weight and reports, all in one all-reduce."""
        if problem := self.backend.sums.missing(opened.num_microbatches):
            self.drop(opened)
            raise StepError(f"step {opened.step}: {problem}").printed_once()
        self.observer.phase("reduce")
        self.backend.finish_reduction()
        return self.measure(opened)

    def measure(self, opened: OpenStep) -> Attempt:
        """The norm of the reduced gradient, and the sums of the loss functions' values. If these have a problem on any
        rank, drops the gradient and raises the problem on every rank.

        Bad weights, problems, new names of reports and zeroed elements are one flag in that all-reduce: ranks ask each
        other for more only if some rank has any of them."""
        self.observer.phase("norm")
        norm, sums, is_unusual = grad_norm.global_norm(
            self.backend, self.groups, along=world_sums.own_sums(self, opened),
            flag=torch.stack(world_sums.faults(self, opened.tally)).sum(), overflow=self.fp8.overflow(),
        )  # fmt: skip
        self.observer.phase("verdict")
        attempt = world_sums.attempt_of(self, opened, norm, sums)
        if is_unusual:
            try:
                attempt = world_sums.with_faults(self, opened, attempt)
            except MegaaccumError:
                self.drop(opened)
                raise
        return attempt

    def judge(self, opened: OpenStep, attempt: Attempt) -> Attempt:
        """The verdict on the step, the same on every rank; nothing fails on one rank alone after it. Rolls back a step
        that ends the run."""
        look, without = partial(retry.find_nonfinite, self, opened), partial(retry.without_nonfinite, self, opened)
        try:
            return self.recovery.judge(opened.step, attempt, look=look, without=without)
        except StepError:
            self.drop(opened)
            raise

    def update(self, norm: float, factor: float) -> None:
        """Run the optimizer on the reduced gradient times `factor`. norm: that of the product."""
        self.observer.phase("optimizer")
        self.amid = "weights"
        grad_norm.scale_and_clip(self.backend, norm, self.plan.config.optimizer.clip_grad, factor=factor)
        if self.before_update is not None:
            self.before_update()
        if self.backend.matrices is not None:
            self.backend.matrices.orthogonalise()
        waits = self.plan.config.model.num_experts or self.plan.config.step.speculative_step  # after it
        self.amid = "weights" if waits else "update"
        self.backend.step()
        router_state.update_bias(self.chunks, self.groups)

    def roll_back(self, opened: OpenStep) -> None:
        """Drop the gradient, and go back to the random states and FP8 scales of before the step."""
        self.backend.discard()
        opened.restore()
        self.running = None

    def drop(self, opened: OpenStep) -> None:
        """Roll back a step that has no result; what was measured of it is not the next one's."""
        self.roll_back(opened)
        self.observer.pop()

    def commit(self, opened: OpenStep, verdict: Attempt, *, stop: bool) -> StepResult:
        """Move loss scale, learning rate, counters and consumed samples with the verdict. Returns the step's result,
        without what the observer has measured."""
        self.observer.phase("report")
        self.recovery.conclude(verdict)
        self.transaction.last_weight = verdict.weight / self.batch.global_batch_size
        result = StepResult(
            step=opened.step, loss=verdict.loss, weight=verdict.weight, grad_norm=verdict.norm, skipped=verdict.skip,
            bad=verdict.bad, loss_scale=self.backend.loss_scale, sanitized=verdict.num_zeroed + verdict.num_dropped,
            note=". ".join(filter(None, (opened.note, verdict.note, self.side_losses.note))), stop=stop,
            reports=verdict.reports | world_sums.noise_report(self, verdict),
            per_microbatch=self.reports.per_microbatch(opened.tally),
            expert_loads=self._experts.loads(opened.expert_counts),
        )  # fmt: skip
        result = self.transaction.commit(result, self.backend.param_groups)
        self.settle()
        return result

    def weight_versions(self) -> list[int]:
        """Numbers that change with a write in place to a parameter, or to what an update makes from a master."""
        return pytorch.versions([copy for _, copy, _ in self.backend.copied] + [param for _, param in self.parameters])

    def settle(self) -> None:
        """Note that weights, counters and random states are those of after `step` steps."""
        self.amid, self.running = "", None
        self.versions = self.weight_versions()

    def skip_short_batch(self, step: int, *, stop: bool, note: str) -> StepResult:
        """The result of a step that no rank takes, because some have too few micro-batches."""
        result = StepResult(
            step=step, loss=math.nan, weight=0.0, grad_norm=0.0, loss_scale=self.recovery.loss_scale, skipped=True,
            note=note, stop=stop,
        )  # fmt: skip
        return self.transaction.commit(result, self.backend.param_groups)

    # --- the step in several calls ---

    def forward_backward(
        self, batch: Microbatches, *, step: int | None = None, last: bool | None = None, total: float | None = None
    ) -> None:
        """Add the gradients of `batch` to those of the open step; the first call opens it.

        last: whether no further call is expected, so that the reduction may run inside the last backward; default: when
        the step has as many micro-batches as the plan says. total: N of the whole step, over all ranks and calls, if it
        is known.
        """
        with self.observer.watching():
            bits = -1 if total is None else int(torch.as_tensor(total, dtype=torch.float64).view(torch.int64))
            known = dict(num_microbatches=len(batch), total_weight=bits)
            expected = round(batch.expected or self.batch.micro_batch_size * self.batch.seq_length)
            lacks = (batch.weights is None) + (not batch.can_run_again) * call_agreement.MORE_THAN_RANKS
            agreed = self.agree_on_call("forward_backward", None, add=(expected, lacks), **known)
            self.drop_begun()
            batch = call_agreement.with_lengths(batch, self.plan, self.groups.pp)
            # What some rank does not know, or cannot run again or in several flushes, none does.
            iterators, unknown = divmod(agreed.sums[1], call_agreement.MORE_THAN_RANKS)
            data = iter(batch.data) if iterators and batch.can_run_again else batch.data
            batch = replace(batch, data=data, weights=None if unknown else batch.weights)
            count, planned = batch.first + len(batch), self.batch.num_microbatches
            last = count == planned if last is None else last
            # A power of two near the mean of what ranks expect, which may differ, has to be the same on all.
            alike = replace(batch, expected=agreed.sums[0] / torch.distributed.get_world_size())
            opened = self.opened or self.open(
                self.transaction.step + 1 if step is None else step,
                world_sums.divisor_of(self, [alike], total, alone=last),
            )
            if count > planned and (why := self.backend.sums.missing(count)):
                raise StepError(f"step {opened.step}: {why}").printed_once()
            self.opened = None  # a flush that fails leaves no open step
            if not opened.calls:
                opened.told = total
            elif opened.told is None:  # N of the calls before, if it was known, is not the step's
                opened.divisor = replace(opened.divisor, total=None)
            opened.calls.append(batch)
            self.observer.phase("forward_backward")
            self.flush(opened, batch, reduce=last or not self.backend.can_defer)
            self.opened = opened

    def optim_step(self, *, stop: bool = False, problem: MegaaccumError | None = None) -> StepResult:
        """End the open step: reduce the remaining gradients, divide, judge, update, commit."""
        with self.observer.watching():
            step = self.transaction.step + 1 if self.opened is None else self.opened.step
            try:
                agreed = self.agree_on_call("optim_step", problem, stop=stop, step=step)
            except StepError:  # of what loss functions have given, which no further call mends
                self.abandon()
                raise
            opened, self.opened = self.opened, None
            if opened is None:
                raise StepError(f"step {step} has no gradient: call forward_backward before optim_step").printed_once()
            verdict = self.judge(opened, self.reduce_and_measure(opened))
            if verdict.skip:
                self.roll_back(opened)
            else:
                self.update(verdict.norm, verdict.factor)
            result = self.commit(opened, verdict, stop=agreed.stop)
        return replace(result, **self.observer.pop()._asdict())

    def begin_flush(self, expected: float | None = None) -> float:
        """Begin a flush that another loop runs, whose gradients add to those of the open step; the first opens it.

        expected: the weight of a micro-batch, default its tokens. Returns what losses are to be multiplied by, beside
        the loss scale. Raises ConfigError with `reproducible: layout`, which has to know which micro-batch runs.
        """
        if self.backend.sums.in_one_order:
            raise ConfigError("reproducible layout needs a step of megaaccum's own: set it to none").printed_once()
        if self.opened is None:
            self.opened = self.open(self.transaction.step + 1, lambda: world_sums.divisor_at_commit(self, expected))
        if self.opened.reduced:
            self.backend.resume_accumulation()
            self.opened.reduced = False
        self.backend.set_last_flush(True)
        return self.opened.divisor.in_loss

    def end_flush(self, weight: torch.Tensor | float) -> None:
        """Note the flush's weight on this rank, a scalar; over all ranks (of tp the first) they add up to N."""
        assert self.opened is not None
        self.opened.tally.add(weight)
        self.opened.reduced = True

    @contextmanager
    def before_open(self) -> Iterator[None]:
        """Context in which random states and FP8 scales are those of before the step that is open or has failed, if
        there is one. Ends a step that has begun before its call. Raises StepError, if the update failed, on every rank.
        """
        raise_on_all_ranks(self.refuse_partial_update)
        self.drop_begun()
        go_back = self.restorer()
        if self.running is not None:
            self.running.restore()
        try:
            yield
        finally:
            go_back()

    def refuse_partial_update(self) -> None:
        """Raise StepError if weights, moments or counters may be those of no step."""
        if self.amid in ("weights", "update"):
            raise StepError(PARTIAL_UPDATE)

    def abandon(self) -> None:
        """Drop the gradients of the open step, if there is one, and go back to the random states of before it. Ends a
        step that has begun before its call. Collective over the world."""
        self.drop_begun()
        opened, self.opened = self.opened, None
        if opened is not None and opened.reduced:
            self.backend.finish_reduction()  # which the last backward has begun
        if opened is not None:
            self.drop(opened)

    def drop_begun(self) -> None:
        """End the step that began before its call, if one has (SpeculativeTrainStep). Collective over the world."""

    # --- a gradient without a step on it ---

    def gradient(
        self,
        microbatches: Sequence[Any],
        *,
        batch: BatchPlan | None = None,
        sample_index: Callable[[int], int] | None = None,
    ) -> tuple[OpenStep, Attempt]:
        """Make the next step's gradient, which the backend's `shards` then show, until the step is dropped. batch: how
        these micro-batches are cut, default as planned. sample_index: the number in the global batch of each, if it is
        not the planned one."""
        if self.opened is not None:
            raise StepError(f"step {self.opened.step} is open: end it with optim_step before a trial").printed_once()
        self.drop_begun()
        with replaced(self, _trial_batch=batch):
            self.agree_on_call("trial", None, num_microbatches=len(microbatches))
            found = self._whole(microbatches)
            found = replace(found, weights=None) if any_rank(found.weights is None) else found
            opened = self.open(self.transaction.step + 1, world_sums.divisor_of(self, [found], alone=True))
            opened.calls.append(found)
            self.observer.phase("forward_backward")
            with self.seeds.numbered(sample_index):
                self.flush(opened, found, reduce=True)
            return opened, self.reduce_and_measure(opened)

    # --- the micro-batches, and their agreement ---

    def batch_of(self, data: Any, forward_step_func: ForwardStepFunc | None = None, **known: Any) -> Microbatches:
        """`data` as the step takes it. known: count, weights, expected, lengths (`read_batch`). Raises ConfigError for
        what is missing, and for a number of micro-batches that Megatron's interleaved schedule would refuse."""
        if (function := forward_step_func or self.forward_step_func) is None:
            raise ConfigError("no forward_step_func: give one to initialize, or with the call")
        first = 0 if self.opened is None else self.opened.num_microbatches
        batch = read_batch(function, data, self.batch, first=first, **known)
        if self.plan.layout.schedule == "interleaved" and len(batch) != self.batch.num_microbatches:
            pp, parallel = self.plan.layout.pp, self.plan.config.parallel
            problems = interleaved_problems(len(batch), pp, parallel.microbatch_group_size_per_vp_stage or pp)
            raise_problems([f"a call with {len(batch)} micro-batches: {each}" for each in problems])
        if self.plan.config.batch.variable_seq_lengths and batch.lengths is None and batch.can_run_again:
            return replace(batch, lengths=[length for _, length in shapes_of(batch.data)] or None)  # type: ignore[arg-type]
        return batch

    def agreed_batch(self, call: str, problem: MegaaccumError | None, *data: Any, **known: Any) -> Microbatches:
        """`batch_of`, where all ranks make the same call on as many micro-batches; all raise what keeps one of them."""
        try:
            batch = self.batch_of(*data, **known)
        except ConfigError as error:
            self.agree_on_call(call, problem or error)
            raise
        self.agree_on_call(call, problem, num_microbatches=len(batch))
        return batch

    def agree_on_call(self, call: str, problem: MegaaccumError | None, **facts: Any) -> Any:
        """All ranks make the same call, after as many of forward_backward, or all raise. Raises a `problem` of any rank
        too, and what was wrong with the values of an earlier call on some rank."""
        calls, before = (0, None) if self.opened is None else (len(self.opened.calls), self.opened.tally.problem)
        return call_agreement.on_call(call, self, calls=calls, problem=problem or before, **facts)
