"""One optimizer step: the accumulated batch, from the pulled micro-batches to the committed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.distributed import cpu, rng
from megaaccum.distributed.agreement import check_agreement
from megaaccum.distributed.breadcrumbs import Clock, Trace, traced
from megaaccum.errors import RankDisagreement, StepError
from megaaccum.metrics.memory import Activations, Memory
from megaaccum.metrics.traffic import Meter, Traffic
from megaaccum.model import router_state
from megaaccum.precision import fp8, loss_scaler, sanitize
from megaaccum.precision.findings import Findings, Probe
from megaaccum.schedule.entry import get_forward_backward_func
from megaaccum.sharding import note_held
from megaaccum.step import grad_norm, short_batch
from megaaccum.step.loss import StepLoss
from megaaccum.step.norm_guard import NormGuard

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.errors import MegaaccumError
    from megaaccum.sharding import ShardingBackend

Microbatch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [micro_batch_size, seq_length] int64, loss_mask of the same shape, on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did; the same on every rank, but for `seconds`, `traffic` and `memory`.

    loss: mean over the step (loss_norm). num_tokens: unmasked tokens over all ranks. grad_norm: L2 norm of the model's
    gradient before clipping, with FP16 after unscaling. loss_scale: what the loss was multiplied by in the backward (1
    without FP16). skipped: no rank changed its weights. sanitized: elements of the gradient set to 0, or micro-batches
    left out, over all ranks. note: what was wrong, empty where nothing was. stop: some rank was told to stop after this
    step. seconds: by phase. traffic: this rank's collectives, by collective, group and dtype. memory: the
    most bytes that this rank held, by kind.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    skipped: bool
    loss_scale: float = 1.0
    sanitized: int = 0
    note: str = ""
    stop: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A gradient, reduced and unscaled. mean (loss), norm, num_zeroed (elements that `nonfinite: zero` set to 0): over
    all ranks."""

    loss: StepLoss
    mean: float
    norm: float
    num_zeroed: int = 0
    num_dropped: int = 0

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)


@dataclass(frozen=True, slots=True)
class _Before:
    """What an attempt moves on, as it was before. A step that is skipped, or attempted again, goes back to it."""

    rng: dict[str, torch.Tensor]
    fp8: fp8.Snapshot


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What becomes of an attempt. overflow: the loss scale has to go down. bad: counts towards max_bad_steps."""

    attempt: _Attempt
    skip: bool
    overflow: bool = False
    bad: bool = False
    note: str = ""


class TrainStep:
    """Runs steps of one model over one backend. Every method is collective over the world.

    scaler: the loss scale of an FP16 run, else None. trace: what this rank is doing. What a checkpoint has to hold of a
    train_step is `state_dict`.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: list[torch.nn.Module],
        backend: ShardingBackend,
        low_precision: fp8.Fp8 | None = None,
    ):
        """low_precision: what fp8.build made of these chunks, where a checkpoint has been read into it already."""
        self._plan = plan
        self._fp8 = low_precision or fp8.build(plan, chunks)
        self._groups = groups
        self._chunks = chunks
        self._backend = backend
        self.trace = Trace()
        self._p2p = traced(P2PCommunicator(pp_group=groups.pp, config=chunks[0].config), self.trace)
        self._schedule = get_forward_backward_func(plan)
        self._digest = plan.digest()
        self._keys = plan.config.step
        self.scaler = loss_scaler.build(plan)
        self._zero = sanitize.install(backend, self._keys)
        self._guard = NormGuard(self._keys)
        self._bad_steps = sanitize.BadSteps(self._keys)
        self._probe: Probe | None = None
        self._meter = Meter(groups)
        self._activations = Activations(chunks)

    def train(
        self,
        microbatches: Sequence[Microbatch],
        *,
        step: int,
        stop: bool = False,
        problem: MegaaccumError | None = None,
    ) -> StepResult:
        """Make the accumulated step on this rank's `num_microbatches` micro-batches: the step on the global batch.

        Where it is skipped, weights, optimizer and random states are as before. Raises StepError on every rank, before
        anything has changed, where the configuration says that what happened ends the run. A rank that cannot take the
        step comes with its `problem`, which every rank then raises before it begins.
        """
        with self._meter.counting() as traffic:
            result = self._step(microbatches, step=step, stop=stop, problem=problem)
        memory = self._backend.memory
        note_held(self._backend)
        memory.note("p2p", self._meter.most_receiving)
        return replace(result, traffic=traffic, memory=memory.take())

    def _step(
        self, microbatches: Sequence[Microbatch], *, step: int, stop: bool, problem: MegaaccumError | None
    ) -> StepResult:
        """Agree, attempt, judge, update."""
        clock = Clock(self.trace, "agree")
        stop, short = self._agree(step, microbatches, stop, problem)
        clock.lap("gather")
        if short and self._keys.short_batch == "drop":
            return StepResult(loss=math.nan, num_tokens=0, grad_norm=0.0, skipped=True, note=short, stop=stop)
        before = _Before(rng.snapshot(), self._fp8.snapshot())
        microbatches, dummies = short_batch.filled(microbatches, self._plan)
        attempt = self._attempt(microbatches, clock, dummies)
        verdict = self._judge(step, microbatches, attempt, before)
        self._bad_steps.count(verdict.bad, step=step, why=verdict.note)
        clock.lap("optimizer")
        self._update(verdict, before)
        clock.lap("report")
        attempt = verdict.attempt
        return StepResult(
            loss=attempt.mean,
            num_tokens=attempt.loss.num_tokens,
            grad_norm=attempt.norm,
            skipped=verdict.skip,
            loss_scale=self._backend.loss_scale,
            sanitized=attempt.num_zeroed + attempt.num_dropped,
            note=". ".join(filter(None, (short, verdict.note))),
            stop=stop,
            seconds=clock.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, guard and counters, as plain numbers; the same on every rank."""
        parts: dict[str, Any] = {"bad_steps": self._bad_steps.state_dict(), "guard": self._guard.state_dict()}
        return parts | ({} if self.scaler is None else {"loss_scale": self.scaler.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A part that `state` lacks starts afresh (the precision was another)."""
        for name, part in (("bad_steps", self._bad_steps), ("guard", self._guard), ("loss_scale", self.scaler)):
            if part is not None and name in state:
                part.load_state_dict(state[name])

    def gradient(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """Everything up to the reduced gradient, which the backend's `shards` then show (tests, diagnosis)."""
        return self._attempt(microbatches, Clock(self.trace, "gather")).loss

    def evaluate(self, microbatches: Sequence[Microbatch], problem: MegaaccumError | None = None) -> tuple[float, int]:
        """Mean loss of one global batch and its unmasked tokens, without gradients or dropout; the same on every
        rank. A `problem` of any rank is raised on every rank."""
        check_agreement(self._digest, num_microbatches=len(microbatches), problem=problem)
        loss = self._divisor(microbatches)
        self._backend.gather()
        before = self._fp8.snapshot()  # largest values are noted in every forward, and these are not the training's
        self._fp8.begin_attempt()
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            reports = self._flush(microbatches, 0, loss, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        self._fp8.restore(before)
        total = loss.share(reports, self._groups)
        torch.distributed.all_reduce(total)
        return loss.mean(float(total)), loss.num_tokens

    def _divisor(self, microbatches: Sequence[Microbatch], dummies: frozenset[int] = frozenset()) -> StepLoss:
        masks = [microbatch["loss_mask"] for microbatch in microbatches]
        loss = StepLoss(
            masks,
            batch=self._plan.batch,
            groups=self._groups,
            reduction_divisor=self._backend.reduction_divisor,
            dummies=dummies,
        )
        self._scale_side_losses(loss, rows=masks[0].numel())
        return loss

    def _scale_side_losses(self, loss: StepLoss, *, rows: int) -> None:
        """Give Megatron the scale of the losses that it differentiates on the side (MoE balancing, MTP)."""
        configs: dict[int, Any] = {id(chunk.config): chunk.config for chunk in self._chunks}
        for config in configs.values():
            config.moe_grad_scale_func = lambda: loss.aux_scale(rows) * self._backend.loss_scale
            config.mtp_grad_scale_func = lambda: loss.scale * self._backend.loss_scale

    def _run_flushes(
        self, microbatches: Sequence[Microbatch], loss: StepLoss, *, reduce: bool = True
    ) -> list[torch.Tensor]:
        """One flush of all micro-batches (`merged`), or one per accumulation round; the last one reduces."""
        size, count = self._plan.batch.microbatches_per_flush, self._plan.batch.num_flushes
        reports: list[torch.Tensor] = []
        for flush in range(count):
            self._backend.set_last_flush(reduce and flush == count - 1)
            reports += self._flush(microbatches[flush * size : (flush + 1) * size], flush * size, loss)
        return reports

    def _flush(self, microbatches, first: int, loss: StepLoss, *, forward_only: bool = False) -> list[torch.Tensor]:
        """Run the schedule over `microbatches`, whose first has index `first` in the step. Returns what the
        last stage reports, one scalar per micro-batch; elsewhere an empty list."""
        indexed = list(enumerate(microbatches, start=first))
        forward_step = _ForwardStep(
            loss, self._groups, self._chunks, self.trace, self._probe, partial(note_held, self._backend), self._fp8
        )
        # Who looks at single micro-batches needs each forward and backward for itself.
        interleaves = self._plan.config.parallel.overlap_moe_expert_parallel_comm and not forward_step.looks_closely
        for chunk in self._chunks:
            chunk.config.overlap_moe_expert_parallel_comm = interleaves  # type: ignore[union-attr]
        reports = self._schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(indexed) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(indexed),
            seq_length=self._plan.batch.seq_length,
            micro_batch_size=self._plan.batch.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self._groups.collection,
        )
        self._fp8.end_flush()
        return reports

    # --- the micro-batches ---

    def _agree(
        self, step: int, microbatches: Sequence[Microbatch], stop: bool, problem: MegaaccumError | None
    ) -> tuple[bool, str]:
        """Whether some rank wishes to stop, and which ranks have too few micro-batches, in words. Raises
        RankDisagreement where ranks would not do the same thing, what short_batch.too_few raises, and a `problem` of
        any rank."""
        batch = self._plan.batch
        planned = (batch.micro_batch_size, batch.seq_length)
        shapes = [tuple(each["tokens"].shape) for each in microbatches]
        rows, length = next((shape for shape in shapes if shape != planned), planned)
        agreed = check_agreement(
            self._digest,
            details=self._plan.facts,
            tell={"num_microbatches": len(microbatches), "dp_rank": self._groups.dp.rank()},
            stop=stop,
            problem=problem,
            step=step,
            seq_length=length,
            micro_batch_size=rows,
        )
        if (rows, length) != planned:
            raise RankDisagreement(
                f"every rank has micro-batches of {rows} x {length} tokens, and the plan says micro_batch_size"
                f" {planned[0]} x seq_length {planned[1]}: set these keys, or give such micro-batches."
            )
        counts, dp_ranks = agreed.told["num_microbatches"], agreed.told["dp_rank"]
        return agreed.stop, short_batch.too_few(counts, dp_ranks, plan=self._plan, step=step)

    # --- verdict ---

    def _attempt(
        self, microbatches: Sequence[Microbatch], clock: Clock, dummies: frozenset[int] = frozenset()
    ) -> _Attempt:
        """The gradient of `microbatches`, reduced, unscaled and measured."""
        loss = self._divisor(microbatches, dummies)
        self._backend.loss_scale = 1.0 if self.scaler is None else self.scaler.scale
        self._backend.begin_step()
        self._fp8.begin_attempt()
        note_held(self._backend)
        router_state.begin_step(self._chunks)
        clock.lap("forward_backward")
        if self._zero is not None:
            self._zero.clear()
        with self._activations.watching(self._backend.memory):
            reports = self._run_flushes(microbatches, loss)
        clock.lap("norm")
        grad_norm.unscale(self._backend, self._backend.loss_scale)
        along = [loss.share(reports, self._groups), *([] if self._zero is None else [self._zero.total()])]
        overflow = self._fp8.overflow()
        norm, (total, *zeroed) = grad_norm.global_norm(self._backend, self._groups, along=along, overflow=overflow)
        clock.lap("verdict")
        return _Attempt(loss, loss.mean(total), norm, int(sum(zeroed)))

    def _judge(self, step: int, microbatches, attempt: _Attempt, before: _Before) -> _Verdict:
        """Whether `attempt` becomes an update. All that is asked is the same on every rank, so the answer is too."""
        if self._keys.nonfinite == "off":
            return _Verdict(attempt, skip=False)
        if attempt.num_zeroed and attempt.is_finite:
            assert self._zero is not None
            where = sanitize.describe(self._zero)
            return _Verdict(attempt, skip=False, bad=True, note=f"set to 0 before the reduction: {where}")
        if attempt.is_finite:
            alarm = self._guard.judge(attempt.norm)
            return self._on_alarm(step, attempt, alarm) if alarm else _Verdict(attempt, skip=False)
        if self.scaler is not None and self.scaler.can_back_off:
            return _Verdict(attempt, skip=True, overflow=True)
        return self._on_nonfinite(step, microbatches, attempt, before)

    def _on_alarm(self, step: int, attempt: _Attempt, alarm: str) -> _Verdict:
        if self._guard.action == "stop":
            raise StepError(f"step {step}: {alarm}. Set grad_norm_guard to warn or skip to go on.")
        skip = self._guard.action == "skip"
        return _Verdict(attempt, skip=skip, bad=skip, note=alarm)

    def _on_nonfinite(self, step: int, microbatches, attempt: _Attempt, before: _Before) -> _Verdict:
        """Say where it came from; then end the run, step without those micro-batches, or skip."""
        in_fp8 = self._fp8.describe_overflow()
        findings = self._look(microbatches, attempt.loss.dummies, before)
        why = "; ".join(filter(None, (in_fp8, str(findings) if findings.found or not in_fp8 else "")))
        if self.scaler is not None and self.scaler.is_dynamic:
            raise StepError(
                f"step {step} overflows at loss scale {self.scaler.scale:g}, the floor (min_loss_scale): {findings}."
                " A smaller scale will not help: lower lr or clip_grad, or train with bf16."
            )
        if self._keys.nonfinite == "raise":
            raise StepError(f"step {step}: the gradient is not finite: {why}. (nonfinite: raise)")
        if self._keys.nonfinite == "drop_microbatch":
            attempt = self._attempt_without(microbatches, attempt.loss.dummies, findings, before)
        return _Verdict(attempt, skip=not attempt.is_finite, bad=True, note=f"not finite: {why}")

    def _look(self, microbatches: Sequence[Microbatch], dummies: frozenset[int], before: _Before) -> Findings:
        """Run the step's micro-batches again, unreduced, and look at each. Leaves no gradient behind."""
        self._backend.discard()
        self._backend.begin_step()
        self._fp8.begin_attempt()
        router_state.begin_step(self._chunks)
        self._go_back(before)
        loss = self._divisor(microbatches, dummies)
        with Probe(self._chunks, self._groups) as self._probe:
            self._run_flushes(microbatches, loss, reduce=False)
            findings = self._probe.gather()
        self._probe = None
        self._backend.begin_step()
        return findings

    def _attempt_without(self, microbatches, dummies: frozenset[int], findings: Findings, before: _Before) -> _Attempt:
        """The gradient of the step's other micro-batches, divided by their tokens: those that `findings` names are
        replaced by dummies, on every stage alike."""
        bad = findings.bad_microbatches()
        mine = frozenset(bad.get(self._groups.dp.rank(), []))
        self._go_back(before)
        rest = [short_batch.dummy_of(each) if index in mine else each for index, each in enumerate(microbatches)]
        return replace(
            self._attempt(rest, Clock(self.trace, "gather"), mine | dummies), num_dropped=sum(map(len, bad.values()))
        )

    def _update(self, verdict: _Verdict, before: _Before) -> None:
        """Change the weights, or leave everything as it was; nothing here fails on one rank alone."""
        if verdict.skip:
            self._backend.discard()
            self._go_back(before)
        else:
            grad_norm.clip(self._backend, verdict.attempt.norm, self._plan.config.optimizer.clip_grad)
            self._backend.step()
            router_state.update_bias(self._chunks, self._groups)
        if self.scaler is not None:
            self.scaler.update(verdict.overflow)

    def _go_back(self, before: _Before) -> None:
        rng.restore(before.rng)
        self._fp8.restore(before.fp8)


class _ForwardStep:
    """The `forward_step_func` of Megatron's schedules: the next micro-batch through one chunk."""

    def __init__(
        self,
        loss: StepLoss,
        groups: Groups,
        chunks: list,
        trace: Trace,
        probe: Probe | None,
        look: Callable[[], None],
        low_precision: fp8.Fp8,
    ):
        self._loss = loss
        self._look, self._fp8 = look, low_precision
        self._number = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._trace = trace
        self._cp = groups.collection.cp
        self._probe = probe
        self._last = loss.num_microbatches - 1

    @property
    def looks_closely(self) -> bool:
        """Whether it follows single micro-batches through their backward (dummies, a probe)."""
        return bool(self._loss.dummies) or self._probe is not None

    def __call__(
        self, data_iterator: Iterator[tuple[int, Microbatch]], chunk: Any, *, return_schedule_plan: bool = False
    ):
        """(what `chunk` computes from the next micro-batch, its loss function); with `return_schedule_plan`, Megatron's
        plan of that computation in its place."""
        index, microbatch = next(data_iterator)
        number = self._number[id(chunk)]
        action = f"chunk {number} micro-batch {index}"
        self._trace.action = f"F {action}"
        batch = self._own_part(
            {k: v.to(cpu.device(), non_blocking=True) for k, v in microbatch.items() if v is not None}
        )
        compute = chunk.build_schedule_plan if return_schedule_plan else chunk
        with self._fp8.forward(number, index):
            output = compute(
                batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"],
                loss_mask=batch["loss_mask"],
            )  # fmt: skip
        if return_schedule_plan:
            self._trace.action = f"F {action}, interleaved with a backward"
        else:
            self._fp8.follow(number, index, output)
            self._follow(chunk, index, output, action)
        loss_func = self._loss.of_microbatch(index)
        return output, lambda losses: loss_func(batch["loss_mask"], losses)

    def _follow(self, chunk: Any, index: int, output: torch.Tensor, action: str) -> None:
        """Note when the backward of `output` begins, for whoever wants to know."""
        if output.requires_grad:
            output.register_hook(lambda _grad: setattr(self._trace, "action", f"B {action}"))
        if output.requires_grad and index == self._last:
            output.register_hook(lambda _grad: self._look())  # a chunk's last backward: its gradients are all there
        if self._probe is not None:
            self._probe.watch(chunk, index, output)
        if self._loss.dummies and output.requires_grad and chunk.config.num_moe_experts:
            _weigh_side_losses(output, chunk.config, 0.0 if index in self._loss.dummies else 1.0)

    def _own_part(self, batch: Microbatch) -> Microbatch:
        """This context-parallel rank's part of the sequences."""
        if self._cp.size() == 1:
            return batch
        from megatron.core.utils import get_batch_on_this_cp_rank

        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=self._cp)


def _weigh_side_losses(output: torch.Tensor, config, weight: float) -> None:
    """Multiply the auxiliary losses of the micro-batch behind `output` by `weight`. Megatron has one scale for all of
    them, read in the backward, and a backward begins where the gradient of `output` arrives."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = torch.tensor(weight * config.moe_grad_scale_func(), device=output.device)
    output.register_hook(lambda _grad: MoEAuxLossAutoScaler.set_loss_scale(scale))
