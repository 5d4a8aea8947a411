"""One optimizer step: the accumulated batch, from the pulled micro-batches to the committed weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.distributed import cpu, rng
from megaaccum.distributed.agreement import Agreed, check_agreement, printed_once, raise_on_all_ranks
from megaaccum.distributed.breadcrumbs import Trace, traced
from megaaccum.errors import ConfigError, MegaaccumError, RankDisagreement, StepError
from megaaccum.metrics.observer import Observer
from megaaccum.model import router_state
from megaaccum.precision import fp8
from megaaccum.precision.nonfinite import Findings, Probe
from megaaccum.schedule.entry import ForwardBackward, get_forward_backward_func
from megaaccum.step import grad_norm, short_batch
from megaaccum.step.forward_step import ForwardStep
from megaaccum.step.loss import Divisor, ForwardStepFunc, ReportReducer, Tally, total_weight
from megaaccum.step.microbatches import Microbatches, are_iterators, shapes_of
from megaaccum.step.recovery import Attempt, Recovery, Verdict
from megaaccum.step.side_losses import SideLosses

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.metrics.memory import Memory
    from megaaccum.metrics.traffic import Traffic
    from megaaccum.precision.loss_scaler import LossScaler
    from megaaccum.sharding import ShardingBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did; the same on every rank, but for `seconds`, `traffic`, `memory` and `per_microbatch`.

    step: its number, from 1. loss: sum of all losses over `weight`. weight: N, the weights of all micro-batches over
    all ranks (unmasked tokens, say). grad_norm: L2 norm of the model's gradient before clipping, after unscaling. lr:
    that it used, or would have. loss_scale: what the loss was multiplied by in the backward (1 without FP16). skipped:
    no rank changed its weights. advanced: its samples count as consumed. bad: it counts towards max_bad_steps.
    sanitized: elements of the gradient set to 0, or micro-batches left out, over all ranks. note: what was wrong, empty
    where nothing was. stop: some rank asked to stop after this step. reports: what loss functions reported, reduced
    over micro-batches and ranks. per_microbatch: on ranks of the last stage, reports of their own micro-batches.
    seconds: by phase. traffic: this rank's collectives, by collective, group and dtype. memory: the most bytes that
    this rank held, by kind.
    """

    step: int = 0
    loss: float
    weight: float
    grad_norm: float
    skipped: bool
    lr: float = 0.0
    advanced: bool = True
    bad: bool = False
    loss_scale: float = 1.0
    sanitized: int = 0
    note: str = ""
    stop: bool = False
    reports: dict[str, float] = field(default_factory=dict)
    per_microbatch: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Unmasked tokens over all ranks: the report of that name, or the weight, where it counts tokens."""
        return round(self.reports.get("num_tokens", self.weight))


@dataclass(frozen=True, slots=True)
class _Before:
    """What an attempt moves on, as it was before. A step that is skipped, or attempted again, goes back to it."""

    rng: dict[str, torch.Tensor]
    fp8: fp8.Snapshot


@dataclass
class _Open:
    """A step between its first flush and its end: its divisor, what its loss functions gave, its calls so far."""

    divisor: Divisor
    before: _Before
    tally: Tally = field(default_factory=Tally)
    calls: list[Microbatches] = field(default_factory=list)
    num_microbatches: int = 0
    reduced: bool = False
    short: str = ""


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
        self._forward_step_func = forward_step_func
        self._fp8 = low_precision or fp8.build(plan, chunks)
        self._observer = Observer(groups, chunks, backend)
        self._p2p = traced(P2PCommunicator(pp_group=groups.pp, config=chunks[0].config), self.trace)
        self._schedule = get_forward_backward_func(plan)
        self._digest = plan.digest()
        self._recovery = Recovery(plan, backend, self._fp8)
        self._side_losses = SideLosses(chunks)
        self._reports = ReportReducer(reports)
        self._probe: Probe | None = None
        self._last_weight = 0.0
        self._open: _Open | None = None
        self.before_update: Callable[[], None] | None = None
        """Called when the backend's `shards` are as the optimizer is about to read them, if set."""

    @property
    def trace(self) -> Trace:
        """What this rank is doing."""
        return self._observer.trace

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of an FP16 run."""
        return self._recovery.scaler

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, guard and counters, as plain numbers; the same on every rank."""
        return self._recovery.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A part that `state` lacks starts afresh (the precision was another)."""
        self._recovery.load_state_dict(state)

    # --- a step ---

    def train(
        self, microbatches: Sequence[Any], *, step: int, stop: bool = False, problem: MegaaccumError | None = None
    ) -> StepResult:
        """Make the accumulated step on this rank's `num_microbatches` micro-batches: the step on the global batch.

        Where it is skipped, weights, optimizer and random states are as before. Raises StepError on every rank, before
        anything has changed, where the configuration says that what happened ends the run. A rank that cannot take the
        step comes with its `problem`, which every rank then raises before it begins.
        """
        with self._observer.watching():
            stop, short = self._agree(step, microbatches, stop, problem)
            if short and self._plan.config.step.short_batch == "drop":
                result = StepResult(loss=math.nan, weight=0.0, grad_norm=0.0, skipped=True, note=short, stop=stop)
            else:
                filled, unknown = self._with_lengths(self._filled(microbatches))
                if filled.lengths is not None or unknown is not None:
                    raise_on_all_ranks(_raise, unknown)
                self._run(filled, last=True)
                assert self._open is not None
                self._open.short = short
                result = self._end(step, stop)
        return self._observed(result)

    def forward_backward(self, batch: Microbatches, *, last: bool, total: float | None = None) -> None:
        """Add the gradients of `batch` to the step's. total: N of the whole step, over all ranks and calls, where it is
        known. last: whether the reduction may run inside the last backward, if no further call is expected."""
        with self._observer.watching():
            batch, problem = self._with_lengths(batch)
            bits = -1 if total is None else struct.unpack("<q", struct.pack("<d", total))[0]
            self._agree_on("forward_backward", problem=problem, num_microbatches=len(batch), total_weight=bits)
            self._run(batch, last=last, total=total)

    def optim_step(self, *, step: int, stop: bool = False, problem: MegaaccumError | None = None) -> StepResult:
        """End the step that `forward_backward` began: reduce what is left, divide, judge, update."""
        with self._observer.watching():
            agreed = self._agree_on("optim_step", stop=stop, problem=problem, step=step)
            if self._open is None:
                raise printed_once(StepError(f"step {step} has no gradient: call forward_backward before optim_step"))
            result = self._end(step, agreed.stop)
        return self._observed(result)

    def _end(self, step: int, stop: bool) -> StepResult:
        opened, self._open = self._open, None
        assert opened is not None
        attempt = self._reduce_and_measure(opened)
        verdict = self._recovery.judge(step, attempt, _Again(self, opened))
        self._observer.phase("optimizer")
        self._update(verdict, opened)
        self._observer.phase("report")
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

    def _observed(self, result: StepResult) -> StepResult:
        seconds, traffic, memory = self._observer.take()
        return replace(result, seconds=seconds, traffic=traffic, memory=memory)

    # --- forward and backward ---

    def _run(self, batch: Microbatches, *, last: bool, total: float | None = None) -> None:
        """The flushes of one call; the step's first call begins it."""
        if self._open is None:
            self._observer.phase("gather")
            before = _Before(rng.snapshot(), self._fp8.snapshot())
            self._open = _Open(self._divisor([batch], total, alone=last), before)
            self._begin_attempt(self._open)
        elif self._open.reduced:
            self._backend.resume_accumulation()
            self._open.reduced = False
        self._open.calls.append(batch)
        self._observer.phase("forward_backward")
        try:
            self._flushes(batch, self._open, reduce=last or not self._backend.can_defer)
        except BaseException:
            self._open = None
            raise

    def _divisor(self, calls: Sequence[Microbatches], total: float | None, *, alone: bool) -> Divisor:
        """Of a step. total: N where the caller knows it. alone: there is this one call, so its weights are all."""
        factor = self._backend.reduction_divisor
        weights = [each.weights for each in calls]
        self._num_microbatches = 0
        if total is None and alone and all(each is not None for each in weights):
            known = [weight for each in weights for weight in each or ()]
            count = sum(len(each) - len(each.dummies) for each in calls)
            total, self._num_microbatches = total_weight(known, count, self._groups.dp)
        elif total is not None:
            self._num_microbatches = self._plan.batch.num_microbatches * self._groups.dp.size()
        if total is not None:
            return Divisor.known(total, reduction_divisor=factor)
        nominal = self._nominal_weight(calls[0]) if self.scaler is not None else None
        return Divisor.at_commit(reduction_divisor=factor, nominal=nominal)

    def _nominal_weight(self, first: Microbatches) -> float:
        """About the weight of a step, before it is known: that of the last one, else by what is expected."""
        batch = self._plan.batch
        expected = first.expected or float(batch.micro_batch_size * batch.seq_length)
        return self._last_weight or expected * batch.num_microbatches * self._groups.dp.size()

    def _begin_attempt(self, opened: _Open) -> None:
        opened.tally = Tally()
        self._backend.loss_scale = self._recovery.loss_scale
        self._side_losses.begin_attempt(opened.divisor, self._backend.loss_scale, self._num_microbatches)
        self._backend.begin_step()
        self._fp8.begin_attempt()
        self._observer.note_held()
        router_state.begin_step(self._chunks)
        if self._recovery.zero is not None:
            self._recovery.zero.clear()

    def _flushes(self, batch: Microbatches, opened: _Open, *, reduce: bool) -> None:
        """One flush of all micro-batches (`merged`), or one per accumulation round; the last one reduces."""
        size = self._plan.batch.microbatches_per_flush if batch.can_run_again else len(batch)
        starts = range(0, len(batch), size)
        with self._observer.flushing():
            for start in starts:
                self._backend.set_last_flush(reduce and start == starts[-1])
                self._flush(batch.part(start, min(start + size, len(batch))), opened.divisor, opened.tally)
        opened.num_microbatches += len(batch)
        opened.reduced = reduce

    def _flush(self, batch: Microbatches, divisor: Divisor, tally: Tally, *, forward_only: bool = False) -> None:
        """Run the schedule over `batch`. What loss functions give goes into `tally`, on the ranks of the last stage."""
        forward_step = ForwardStep(
            batch,
            divisor,
            tally,
            chunks=self._chunks,
            trace=self.trace,
            side_losses=self._side_losses,
            low_precision=self._fp8,
            probe=self._probe,
            look=self._observer.note_held,
        )
        self._side_losses.begin_flush(batch)
        # Looking at single micro-batches takes each forward and backward for itself.
        interleaves = self._plan.config.parallel.overlap_moe_expert_parallel_comm and not forward_step.looks_closely
        for chunk in self._chunks:
            chunk.config.overlap_moe_expert_parallel_comm = interleaves  # type: ignore[union-attr]
        lengths: dict[str, Any] = {}
        if batch.lengths is not None and isinstance(self._schedule, ForwardBackward):
            lengths = {"seq_lengths": batch.lengths}  # Megatron's own schedules send the shapes ahead
        self._schedule(
            forward_step_func=forward_step,
            data_iterator=batch.iterators(len(self._chunks)),
            model=self._chunks,
            num_microbatches=len(batch),
            seq_length=self._plan.batch.seq_length,
            micro_batch_size=self._plan.batch.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self._groups.collection,
            **lengths,
        )
        self._fp8.end_flush()

    def forward(self, batch: Microbatches) -> Tally:
        """The loss functions' values of `batch`, without gradients or dropout; on other ranks than those of the last
        stage an empty tally."""
        self._backend.gather()
        before = self._fp8.snapshot()  # largest values are noted in every forward, and these are not the training's
        self._fp8.begin_attempt()
        for chunk in self._chunks:
            chunk.eval()
        tally = Tally()
        with torch.no_grad():
            self._flush(batch, Divisor.known(1.0, reduction_divisor=1), tally, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        self._fp8.restore(before)
        return tally

    def evaluate(self, microbatches: Sequence[Any], problem: MegaaccumError | None = None) -> tuple[float, float]:
        """(mean loss, weight) of one global batch, without gradients or dropout; the same on every rank. A `problem` of
        any rank is raised on every rank."""
        self._agree_on("evaluate", problem=problem, num_microbatches=len(microbatches))
        tally = self.forward(self.batch_of(microbatches))
        total, weight, *_ = self._summed(tally.sums())
        return total / (weight or 1.0), weight

    def _summed(self, mine: list[torch.Tensor]) -> list[float]:
        """Sums over the world of what this rank has."""
        if not mine:
            return []
        sums = torch.stack(self._counted(mine))
        torch.distributed.all_reduce(sums)
        return sums.tolist()

    def _counted(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank adds to sums over the world: ranks of one tp group have the same, and the first counts."""
        return sums if self._groups.tp.rank() == 0 else [torch.zeros_like(each) for each in sums]

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
        """`data` as the step takes it. What is known of its micro-batches in advance is asked of the forward step
        function where it has `weights` and `token_weights`. Raises ConfigError for what is missing."""
        function = forward_step_func or self._forward_step_func
        if function is None:
            raise ConfigError("no forward_step_func: give one to initialize, or with the call")
        if count is None and not (isinstance(data, Sequence) and not are_iterators(data)):
            raise ConfigError("data comes from an iterator: give num_microbatches with it")
        plan, first = self._plan.batch, 0 if self._open is None else self._open.num_microbatches
        listed = isinstance(data, Sequence) and count is None
        count = len(data) if listed else count
        assert count is not None
        shapes = shapes_of(data) if listed else []
        if self._plan.config.batch.variable_seq_lengths and lengths is None:
            lengths = [length for _, length in shapes] or None
        if lengths is not None:
            shapes = [(plan.micro_batch_size, length) for length in lengths]
        tokens = [rows * length for rows, length in shapes] or [plan.micro_batch_size * plan.seq_length] * count
        if weights is None and listed and hasattr(function, "weights"):
            weights = function.weights(data)
        return Microbatches(
            forward_step_func=function,
            data=data,
            count=count,
            first=first,
            tokens=tokens,
            weights=weights,
            token_weights=function.token_weights(data) if listed and hasattr(function, "token_weights") else None,
            expected=expected,
            lengths=lengths,
        )

    def _filled(self, microbatches: Sequence[Any]) -> Microbatches:
        """With dummies up to the planned number, where a short batch is padded."""
        filled, dummies = short_batch.filled(microbatches, self._plan)
        batch = self.batch_of(filled)
        return batch.without({index: filled[index] for index in dummies})

    def _agree(
        self, step: int, microbatches: Sequence[Any], stop: bool, problem: MegaaccumError | None
    ) -> tuple[bool, str]:
        """Whether some rank wishes to stop, and which ranks have too few micro-batches, in words. Raises
        RankDisagreement where ranks would not do the same thing, what short_batch.too_few raises, and a `problem` of
        any rank."""
        batch = self._plan.batch
        planned = (batch.micro_batch_size, batch.seq_length)
        shapes = [] if self._plan.config.batch.variable_seq_lengths else shapes_of(microbatches)
        rows, length = next((shape for shape in shapes if shape != planned), planned)
        agreed = self._agree_on(
            "train_step",
            stop=stop,
            problem=problem,
            given=len(microbatches),
            step=step,
            seq_length=length,
            micro_batch_size=rows,
        )
        if (rows, length) != planned:
            raise RankDisagreement(
                f"every rank has micro-batches of {rows} x {length} tokens, and the plan says micro_batch_size"
                f" {planned[0]} x seq_length {planned[1]}: set these keys, or give such micro-batches."
            )
        if not agreed.told:  # every rank has as many as are planned
            return agreed.stop, ""
        counts, dp_ranks = agreed.told["given"], agreed.told["dp_rank"]
        return agreed.stop, short_batch.too_few(counts, dp_ranks, plan=self._plan, step=step)

    def _with_lengths(self, batch: Microbatches) -> tuple[Microbatches, MegaaccumError | None]:
        """`batch` with the lengths that some stage of this pipeline knows, or why there are none. Collective over the
        pipeline, where lengths vary."""
        if not self._plan.config.batch.variable_seq_lengths:
            return batch, None
        known = [0] * len(batch) if batch.lengths is None else list(batch.lengths)
        limits = torch.tensor([known, [-length if length else -self._LONGEST for length in known]], device=cpu.device())
        torch.distributed.all_reduce(limits, op=torch.distributed.ReduceOp.MAX, group=self._groups.pp)
        most, least = limits[0].tolist(), (-limits[1]).tolist()
        longest = self._plan.batch.seq_length
        if 0 in most:
            return batch, ConfigError("variable_seq_lengths: no stage of the pipeline knows the lengths: give lengths=")
        if most != least:
            return batch, RankDisagreement(f"stages of a pipeline have other lengths: {least} and {most}")
        if max(most) > longest:
            return batch, ConfigError(f"a micro-batch has {max(most)} tokens, and seq_length is {longest}: raise it")
        tokens = [self._plan.batch.micro_batch_size * length for length in most]
        return replace(batch, lengths=most, tokens=tokens), None

    _LONGEST = 2**40

    def _agree_on(
        self, call: str, *, stop: bool = False, problem: MegaaccumError | None = None, given: int = 0, **facts: int
    ) -> Agreed:
        """All ranks make the same `call`, with the same `facts`. It compares as many numbers in each of them, so that
        ranks that make different calls disagree and do not hang. given: micro-batches that each rank has, not compared.
        """
        plain = {"step": 0, "num_microbatches": 0, "seq_length": 0, "micro_batch_size": 0, "total_weight": 0}
        calls = 0 if self._open is None else len(self._open.calls)
        return check_agreement(
            self._digest,
            details=self._plan.facts,
            tell={"given": given, "dp_rank": self._groups.dp.rank()},
            usual={"given": self._plan.batch.num_microbatches if call == "train_step" else 0},
            stop=stop,
            problem=problem or self._problem(),
            **{f"call ({', '.join(f'{n} {name}' for n, name in enumerate(_CALLS))})": _CALLS.index(call)},
            **{"calls since the last optim_step": calls},
            **(plain | facts),
        )

    def _problem(self) -> StepError | None:
        """What was wrong with a loss function's values on this rank, in a call before."""
        return None if self._open is None else self._open.tally.problem

    # --- the gradient ---

    def _reduce_and_measure(self, opened: _Open) -> Attempt:
        """The step's gradient, reduced over all ranks; its norm, loss, weight and reports, all in one all-reduce."""
        self._observer.phase("reduce")
        self._backend.finish_reduction()
        self._observer.phase("norm")
        tally, zero = opened.tally, self._recovery.zero
        along = self._counted([*tally.sums(), self._reports.news(tally), *self._reports.sums(tally)])
        along += [] if zero is None else [zero.total()]
        norm, totals = grad_norm.global_norm(self._backend, self._groups, along=along, overflow=self._fp8.overflow())
        self._observer.phase("verdict")
        total, weight, bad, problem, news, *reported = totals
        zeroed = 0 if zero is None else int(reported.pop())
        if bad or problem:
            self._drop(opened)
            raise_on_all_ranks(_raise, tally.problem)
            text = f"{bad:.0f} micro-batches have a weight that is negative or not a number: fix the loss function"
            raise printed_once(StepError(text))
        weight = weight if opened.divisor.total is None else opened.divisor.total
        factor = opened.divisor.at_end(weight) / self._backend.loss_scale
        return Attempt(
            loss=total / (weight or 1.0),
            weight=weight,
            norm=norm * factor,
            factor=factor,
            num_zeroed=zeroed,
            reports=self._reports.reduced(self._sums_of_news(tally) if news else reported),
        )

    def _sums_of_news(self, tally: Tally) -> list[float]:
        """Sums of all reports, where some have names that other ranks have not heard of yet: in the first step."""
        self._reports.learn(tally)
        return self._summed(self._reports.sums(tally))

    def gradient(self, microbatches: Sequence[Any]) -> Attempt:
        """Everything up to the reduced gradient, which the backend's `shards` then show (tests, diagnosis)."""
        self._run(self._filled(microbatches), last=True)
        opened, self._open = self._open, None
        assert opened is not None
        return self._reduce_and_measure(opened)

    def abandon(self) -> None:
        """Drop the gradients of the step that was begun, and go back to the random states of before."""
        opened, self._open = self._open, None
        if opened is not None:
            self._drop(opened)

    def _drop(self, opened: _Open) -> None:
        self._backend.discard()
        self._go_back(opened.before)

    def _update(self, verdict: Verdict, opened: _Open) -> None:
        """Change the weights, or leave everything as it was; nothing here fails on one rank alone."""
        attempt = verdict.attempt
        if verdict.skip:
            self._drop(opened)
        else:
            grad_norm.scale_and_clip(
                self._backend, attempt.norm, self._plan.config.optimizer.clip_grad, factor=attempt.factor
            )
            if self.before_update is not None:
                self.before_update()
            self._backend.step()
            router_state.update_bias(self._chunks, self._groups)
        self._recovery.conclude(verdict)
        self._last_weight = attempt.weight

    def _go_back(self, before: _Before) -> None:
        rng.restore(before.rng)
        self._fp8.restore(before.fp8)


_CALLS = ("train_step", "forward_backward", "optim_step", "evaluate")


def _raise(problem: MegaaccumError | None) -> None:
    if problem is not None:
        raise problem


class _Again:
    """The micro-batches of an open step once more (recovery.Again)."""

    def __init__(self, of: TrainStep, opened: _Open):
        self._of, self._opened = of, opened

    def look(self) -> Findings | None:
        of, opened = self._of, self._opened
        if not all(batch.can_run_again for batch in opened.calls):
            return None
        of._backend.discard()
        of._go_back(opened.before)
        tally = opened.tally
        of._begin_attempt(opened)
        with Probe(of._chunks, of._groups) as of._probe:
            for batch in opened.calls:
                of._flushes(batch, opened, reduce=False)
            findings = of._probe.gather()
        of._probe = None
        of._backend.begin_step()
        opened.tally = tally
        return findings

    def without(self, findings: Findings) -> Attempt:
        of, opened = self._of, self._opened
        bad = findings.bad_microbatches()
        mine = set(bad.get(of._groups.dp.rank(), []))
        of._go_back(opened.before)
        every = {batch.first + i: each for batch in opened.calls for i, each in enumerate(batch.data)}
        healthy = [each for index, each in every.items() if index not in mine]
        replaced = {index: short_batch.stand_in(every[index], healthy) for index in mine}
        calls = [batch.without(replaced) for batch in opened.calls]
        known = opened.divisor.total is not None
        opened.divisor = of._divisor(calls, None, alone=known)
        of._begin_attempt(opened)
        for number, batch in enumerate(calls):
            of._flushes(batch, opened, reduce=number == len(calls) - 1 or not of._backend.can_defer)
        attempt = of._reduce_and_measure(opened)
        return replace(attempt, num_dropped=sum(map(len, bad.values())))
