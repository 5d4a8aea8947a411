"""A step that is open, and attempts at its gradient: their flushes, their measure, and the update by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.distributed import rng
from megaaccum.distributed.breadcrumbs import traced
from megaaccum.errors import MegaaccumError
from megaaccum.executor.entry import ForwardBackward, get_forward_backward_func
from megaaccum.model import router_state
from megaaccum.model.packed_rows import sent_shape
from megaaccum.observe.observer import Observer
from megaaccum.step import grad_norm
from megaaccum.step.forward_step import ForwardStep
from megaaccum.step.loss import Divisor, Tally, places_of, post_sums, post_total_weight
from megaaccum.step.microbatches import Microbatches
from megaaccum.step.recovery import Attempt, Recovery
from megaaccum.step.seeds import SampleSeeds
from megaaccum.step.side_losses import SideLosses
from megaaccum.step.totals import StepTotals, Totals

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.model.fp8 import Fp8
    from megaaccum.sharding import ShardingBackend
    from megaaccum.step.nonfinite import Probe


@dataclass
class OpenStep:
    """A step between its first flush and its end: its divisor, what its loss functions gave, its calls so far."""

    step: int
    restore: Callable[[], None]
    """Puts random states and FP8 scales back as they were before it."""
    divisor: Divisor = field(init=False)
    tally: Tally = field(default_factory=Tally)
    calls: list[Microbatches] = field(default_factory=list)
    num_microbatches: int = 0
    reduced: bool = False
    begun: bool = False
    """Its first forwards have run, before the verdict on the step before."""
    short: str = ""
    """What was unusual about it before its verdict, for the note."""


class Attempts:
    """Makes attempts at the gradient of one step at a time over one sharding backend; collective over the world.

    An attempt is `begin`, `add` for each call, and `reduce_and_measure`; `update` or `drop` ends it. The divisor of a
    step comes from here too. schedule: what runs a flush.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: list[torch.nn.Module],
        backend: ShardingBackend,
        recovery: Recovery,
        totals: StepTotals,
        fp8: Fp8,
    ):
        self._plan, self.groups, self.chunks, self.backend = plan, groups, chunks, backend
        self._recovery, self._totals, self.fp8 = recovery, totals, fp8
        self.batch, self.num_updates = plan.batch, 0
        """That of the step, and the updates before it; the engine sets both."""
        self.observer = Observer(groups, chunks, backend)
        self._p2p = traced(P2PCommunicator(pp_group=groups.pp, config=chunks[0].config), self.observer.trace)
        self.schedule: Any = get_forward_backward_func(plan)
        if isinstance(self.schedule, ForwardBackward):
            self.schedule.prepare(plan.ramp.flush_sizes(), groups.pp, len(chunks))
        self.seeds = SampleSeeds(plan, groups, chunks)
        self._side_losses = SideLosses(chunks)
        self.probe: Probe | None = None
        """Looks at every micro-batch that is added, if set."""
        self.last_weight = 0.0
        """N of the last step by its sequences, 0 before one has ended."""
        self.before_update: Callable[[], None] | None = None
        """Called when the backend's `shards` are as the optimizer is about to read them, if set."""

    # --- the divisor ---

    def divisor(self, calls: Sequence[Microbatches], total: float | None, *, alone: bool) -> Callable[[], Divisor]:
        """That of a step: its weights are on their way, and are waited for when it is asked for. total: N where the
        caller knows it. alone: there is this one call, so its weights are all."""
        if total is not None:
            everyone = self.batch.num_microbatches * self.groups.dp.size()
            return lambda: Divisor.known(total, everyone, reduction_divisor=self.backend.reduction_divisor)
        weights = [each.weights for each in calls]
        if not alone or any(each is None for each in weights):
            return lambda: self.divisor_at_commit(calls[0].expected)
        known = [weight for each in weights for weight in each or ()]
        count = sum(len(each) - len(each.dummies) for each in calls)
        summed = post_total_weight(known, count, self.groups, places_of(self._plan, self.groups, len(known)))
        return lambda: Divisor.known(*summed(), reduction_divisor=self.backend.reduction_divisor)

    def divisor_at_commit(self, expected: float | None) -> Divisor:
        """Of a step whose weight is not known before it ends: about that of the last one, else by what is `expected` of
        a micro-batch."""
        nominal, batch = None, self.batch
        if self._recovery.scaler is not None:
            expected = expected or float(batch.micro_batch_size * batch.seq_length)
            nominal = (self.last_weight or expected / batch.micro_batch_size) * batch.global_batch_size
        return Divisor.at_commit(reduction_divisor=self.backend.reduction_divisor, nominal=nominal)

    # --- an attempt ---

    def open(self, step: int) -> OpenStep:
        """Step `step`, and the state that an attempt moves on, as it is now: a skipped step, and another attempt, go
        back to it."""
        states, scales = rng.snapshot(), self.fp8.snapshot()

        def restore() -> None:
            rng.restore(states)
            self.fp8.restore(scales)

        return OpenStep(step, restore)

    def begin(self, opened: OpenStep, divisor: Callable[[], Divisor]) -> None:
        """Begin an attempt at the gradient of `opened`: whole parameters, no gradient, nothing counted."""
        self.backend.begin_step()
        opened.divisor = divisor()
        opened.tally, opened.reduced = Tally(places_of(self._plan, self.groups, self.batch.num_microbatches)), False
        if self.backend.sums is not None:
            self.backend.sums.count = self.batch.num_microbatches
        self.backend.loss_scale = self._recovery.loss_scale
        self._side_losses.begin_attempt(opened.divisor, self.backend.loss_scale)
        self.fp8.begin_attempt()
        router_state.begin_step(self.chunks)
        if self._recovery.zero is not None:
            self._recovery.zero.clear()

    def add(self, batch: Microbatches, opened: OpenStep, *, reduce: bool) -> None:
        """Add the gradients of `batch`, in one flush of all micro-batches (`merged`), or one per accumulation round;
        the last one reduces."""
        if opened.reduced:
            self.backend.resume_accumulation()
        size = self.batch.microbatches_per_flush if batch.can_run_again else len(batch)
        starts = range(0, len(batch), size)
        with self.observer.flushing(), self.seeds.flush(opened.step):
            for start in starts:
                self.backend.set_last_flush(reduce and start == starts[-1])
                if opened.begun:
                    opened.begun = False
                    self.schedule.finish()
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
            batch, divisor, tally, chunks=self.chunks, trace=self.observer.trace, seeds=self.seeds,
            sums=self.backend.sums, side_losses=self._side_losses, low_precision=self.fp8, probe=self.probe,
            look=self.observer.measure_memory, timed=nullcontext() if forward_only else self.observer.forward,
        )  # fmt: skip
        self._side_losses.begin_flush(batch)
        # Looking at single micro-batches takes each forward and backward for itself.
        interleaves = self._plan.config.parallel.overlap_moe_expert_parallel_comm and not forward_step.looks_closely
        for chunk in self.chunks:
            chunk.config.overlap_moe_expert_parallel_comm = interleaves  # type: ignore[union-attr]
        if batch.lengths is not None and isinstance(self.schedule, ForwardBackward):
            more["seq_lengths"] = batch.lengths  # Megatron's own schedules send the shapes ahead
        self.schedule(
            forward_step_func=forward_step,
            data_iterator=batch.iterators(len(self.chunks)),
            model=self.chunks,
            num_microbatches=len(batch),
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.groups.collection,
            **(sent_shape(self.chunks, self.batch) | more),
        )
        self.fp8.end_flush()

    def drop(self, opened: OpenStep) -> None:
        """Drop the gradient, and go back to the random states of before."""
        self.backend.discard()
        opened.restore()

    # --- its measure, and the update by it ---

    def reduce_and_measure(self, opened: OpenStep) -> Attempt:
        """The step's gradient, reduced over all ranks; its norm, loss, weight and reports, all in one all-reduce."""
        self.observer.phase("reduce")
        self.backend.finish_reduction()
        return self.measure(opened)

    def measure(self, opened: OpenStep) -> Attempt:
        """The norm of the reduced gradient, and the sums of what its loss functions gave. Where these have a problem on
        some rank, drops the gradient and raises it on every rank."""
        self.observer.phase("norm")
        weight = opened.divisor.total
        own, unusual = self._totals.own(opened.tally, weight), self._totals.unusual(opened.tally)
        norm, sums, is_unusual = grad_norm.global_norm(
            self.backend, self.groups, along=own, flag=unusual, overflow=self.fp8.overflow()
        )
        self.observer.phase("verdict")
        totals = self._totals.read(sums, weight)
        if is_unusual:
            try:
                totals = self._totals.in_full(opened.tally, totals)
            except MegaaccumError:
                self.drop(opened)
                raise
        return self._attempt(opened, norm, totals)

    def post(
        self, opened: OpenStep, square: torch.Tensor, facts: Sequence[torch.Tensor]
    ) -> Callable[[], tuple[Attempt, bool, list[float]]]:
        """`measure`, begun, over host memory. square: of the norm, this rank's part. What it returns waits for the
        attempt, whether ranks have more to say of it (it is then to be measured again), and the sums of `facts`."""
        weight = opened.divisor.total
        parts = [square, *facts, self._totals.unusual(opened.tally), *self._totals.own(opened.tally, weight)]
        wait = post_sums(parts, self.groups.host, device=torch.device("cpu"))

        def measured() -> tuple[Attempt, bool, list[float]]:
            total, *sums = wait()
            said, (unusual, *sums) = sums[: len(facts)], sums[len(facts) :]
            return self._attempt(opened, total**0.5, self._totals.read(sums, weight)), unusual != 0, said

        return measured

    def _attempt(self, opened: OpenStep, norm: float, totals: Totals) -> Attempt:
        weight = totals.weight
        factor = opened.divisor.at_end(weight) / self.backend.loss_scale
        return Attempt(
            loss=totals.loss / (weight or 1.0),
            weight=weight,
            norm=norm * factor,
            factor=factor,
            num_zeroed=totals.num_zeroed,
            reports=totals.reports,
        )

    def update(self, norm: float, factor: float) -> None:
        """Take the optimizer's step on the reduced gradient times `factor`; norm: of that product."""
        grad_norm.scale_and_clip(self.backend, norm, self._plan.config.optimizer.clip_grad, factor=factor)
        if self.before_update is not None:
            self.before_update()
        self.backend.step()
        router_state.update_bias(self.chunks, self.groups)

    # --- a step that begins before the verdict on the one before it ---

    def begin_early(self, step: int, batch: Microbatches, divisor: Divisor, *, is_ready: bool) -> OpenStep:
        """Begin step `step`, and run its forwards up to the first backward where ranks are ready for them. `begin` and
        `add` go on with it."""
        opened = self.open(step)
        opened.begun, opened.divisor = True, divisor
        self._side_losses.begin_attempt(divisor, self._recovery.loss_scale)
        with self.observer.flushing(), self.seeds.flush(step):
            if is_ready:
                self.observer.phase("gather")
                self.backend.gather()
            self.observer.phase("forward_backward")
            self._flush(batch, divisor, opened.tally, begin_only=True)
            if is_ready:
                self.schedule.warm_up()
        return opened

    def drop_early(self, opened: OpenStep) -> None:
        """End that step without a gradient. Collective over the pipeline."""
        self.schedule.drain()
        opened.restore()

    # --- forwards alone ---

    def forward(self, batch: Microbatches) -> Tally:
        """The loss functions' values of `batch`, without gradients or dropout; on other ranks than those of the last
        stage an empty tally."""
        self.backend.gather()
        before = self.fp8.snapshot()  # largest values are noted in every forward, and these are not the training's
        self.fp8.begin_attempt()
        for chunk in self.chunks:
            chunk.eval()
        tally = Tally(places_of(self._plan, self.groups, len(batch)))
        with torch.no_grad(), self.seeds.flush(0):
            self._flush(batch, Divisor.known(1.0, reduction_divisor=1), tally, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        self.fp8.restore(before)
        return tally
