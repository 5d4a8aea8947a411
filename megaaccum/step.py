"""One optimizer step: the accumulated batch, from the pulled micro-batches to the committed weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum import cpu, grad_norm, router_state
from megaaccum.agreement import agree
from megaaccum.loss import StepLoss

if TYPE_CHECKING:
    from megaaccum.boundary import Boundary
    from megaaccum.config import Plan
    from megaaccum.errors import MegaaccumError
    from megaaccum.groups import Groups

Microbatch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [micro_batch_size, seq_length] int64, loss_mask of the same shape, on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did; the same on every rank, but for `seconds`.

    loss: mean over the step (loss_norm). num_tokens: unmasked tokens over all ranks. grad_norm: L2 norm of the model's
    gradient before clipping. skipped: the gradient was not finite on some rank, and no rank changed its weights.
    stop: some rank was told to stop after this step.
    seconds: by phase.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    skipped: bool
    stop: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


class Stepper:
    """Runs steps of one model over one boundary. Every method is collective over the world."""

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], boundary: Boundary):
        self._plan = plan
        self._groups = groups
        self._chunks = chunks
        self._boundary = boundary
        self._p2p = P2PCommunicator(pp_group=groups.pp, config=chunks[0].config)
        self._schedule = get_forward_backward_func(
            pp_size=plan.layout.pp, vp_size=plan.layout.vpp if plan.layout.vpp > 1 else None
        )
        self._digest = plan.digest()

    def train(
        self,
        microbatches: Sequence[Microbatch],
        *,
        step: int,
        stop: bool = False,
        problem: MegaaccumError | None = None,
    ) -> StepResult:
        """Make the accumulated step on this rank's `num_microbatches` micro-batches: the step on the global batch.

        A rank that cannot take the step comes with its `problem`, which every rank then raises before it begins.
        """
        clock = _Clock()
        stop = agree(self._digest, step=step, num_microbatches=len(microbatches), stop=stop, problem=problem)
        loss = self._divisor(microbatches)
        clock.lap("agree")
        router_state.begin_step(self._chunks)
        self._boundary.begin_step()
        clock.lap("gather")
        reports = self._run_flushes(microbatches, loss)
        clock.lap("forward_backward")
        norm = grad_norm.global_norm(self._boundary, self._groups)
        skipped = not math.isfinite(norm)
        clock.lap("norm")
        self._update(norm, skipped)
        clock.lap("optimizer")
        return StepResult(
            loss=loss.mean(reports, self._groups),
            num_tokens=loss.num_tokens,
            grad_norm=norm,
            skipped=skipped,
            stop=stop,
            seconds=clock.seconds,
        )

    def gradient(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """Everything up to the reduced gradient, which the boundary's `shards` then show (tests, diagnosis)."""
        loss = self._divisor(microbatches)
        self._boundary.begin_step()
        self._run_flushes(microbatches, loss)
        return loss

    def evaluate(self, microbatches: Sequence[Microbatch], problem: MegaaccumError | None = None) -> tuple[float, int]:
        """Mean loss of one global batch and its unmasked tokens, without gradients or dropout; the same on every
        rank. A `problem` of any rank is raised on every rank."""
        agree(self._digest, num_microbatches=len(microbatches), problem=problem)
        loss = self._divisor(microbatches)
        self._boundary.gather()
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            reports = self._flush(microbatches, 0, loss, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        return loss.mean(reports, self._groups), loss.num_tokens

    def _divisor(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        masks = [microbatch["loss_mask"] for microbatch in microbatches]
        loss = StepLoss(
            masks,
            batch=self._plan.batch,
            groups=self._groups,
            reduction_divisor=self._boundary.reduction_divisor,
        )
        self._scale_side_losses(loss, rows=masks[0].numel())
        return loss

    def _scale_side_losses(self, loss: StepLoss, *, rows: int) -> None:
        """Give Megatron the scale of the losses that it differentiates on the side (MoE balancing, MTP)."""
        layout = self._plan.layout
        rows //= layout.cp * (layout.tp if self._plan.config.parallel.sequence_parallel else 1)
        configs: dict[int, Any] = {id(chunk.config): chunk.config for chunk in self._chunks}
        for config in configs.values():
            config.moe_grad_scale_func = lambda: loss.aux_scale(rows)
            config.mtp_grad_scale_func = lambda: loss.scale

    def _run_flushes(self, microbatches: Sequence[Microbatch], loss: StepLoss) -> list[torch.Tensor]:
        """One flush of all micro-batches (`merged`), or one per accumulation round; the last one reduces."""
        size, count = self._plan.batch.microbatches_per_flush, self._plan.batch.num_flushes
        reports: list[torch.Tensor] = []
        for flush in range(count):
            self._boundary.set_last_flush(flush == count - 1)
            reports += self._flush(microbatches[flush * size : (flush + 1) * size], flush * size, loss)
        return reports

    def _flush(self, microbatches, first: int, loss: StepLoss, *, forward_only: bool = False) -> list[torch.Tensor]:
        """Run Megatron's schedule over `microbatches`, whose first has index `first` in the step. Returns what the
        last stage reports, one scalar per micro-batch; elsewhere an empty list."""
        indexed = list(enumerate(microbatches, start=first))
        return self._schedule(
            forward_step_func=_ForwardStep(loss, self._groups),
            data_iterator=[iter(indexed) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(indexed),
            seq_length=self._plan.batch.seq_length,
            micro_batch_size=self._plan.batch.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self._groups.collection,
        )

    def _update(self, norm: float, skipped: bool) -> None:
        if skipped:
            self._boundary.discard()
            return
        grad_norm.clip(self._boundary, norm, self._plan.config.optimizer.clip_grad)
        self._boundary.step()
        router_state.update_bias(self._chunks, self._groups)


class _ForwardStep:
    """The `forward_step_func` of Megatron's schedules: the next micro-batch through one chunk."""

    def __init__(self, loss: StepLoss, groups: Groups):
        self._loss = loss
        self._cp = groups.collection.cp

    def __call__(self, data_iterator: Iterator[tuple[int, Microbatch]], chunk: torch.nn.Module):
        index, microbatch = next(data_iterator)
        batch = self._own_part(
            {k: v.to(cpu.device(), non_blocking=True) for k, v in microbatch.items() if v is not None}
        )
        output = chunk(
            batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )  # fmt: skip
        loss_func = self._loss.of_microbatch(index)
        return output, lambda losses: loss_func(batch["loss_mask"], losses)

    def _own_part(self, batch: Microbatch) -> Microbatch:
        """This context-parallel rank's part of the sequences."""
        if self._cp.size() == 1:
            return batch
        from megatron.core.utils import get_batch_on_this_cp_rank

        return get_batch_on_this_cp_rank(batch, cp_group=self._cp)


class _Clock:
    """Seconds between laps, by the host's clock: on a GPU what is still queued counts for a later lap."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
