"""FP8 under Transformer Engine (TE): when weights are quantized, when histories move, and how a step is rolled back.

TE owns every scale: it computes, applies and updates them. megaaccum only decides when, and copies them (back when a
step is skipped, and to and from checkpoints). The rules under every schedule:

- A weight is quantized at a chunk's first micro-batch of a step, and the copy serves the step's other micro-batches:
  the weight does not change in between, and under delayed scaling another scale would make another weight. The next
  attempt quantizes again, whether weights were updated, loaded, gathered again or left as they were by a skipped step.
- Delayed scaling takes a scale from the history of a tensor's largest values. A chunk's forward histories get one row
  per micro-batch when its forward has ended, its backward histories one when its backward has; other chunks' get none.
  So the scales of a chunk depend on the order of its own micro-batches alone, and if that is the order of the
  batch (1F1B, interleaved, ZB-H1, ZB-V, DualPipeV) they are those of accumulation without a pipeline.
- The largest values are those of all ranks that hold the same stage: tp x cp x dp (Megatron's amax reduction group).
- A layer that is computed again uses the scales of its own micro-batch's first forward.

Megatron's chunks have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import gathered
from megaaccum.errors import listed
from megaaccum.model.names import over_stages
from megaaccum.upstream import te

PREFIX = "fp8/"
"""Prefix of the names of FP8 state, in checkpoints too."""

Snapshot = torch.Tensor
"""Copies of all scales and histories in one flat tensor, on the device."""


def build(plan: Plan, chunks: Sequence[Any]) -> Fp8:
    """The FP8 state of a run's chunks (Megatron GPT models on TE's layers); without fp8_format it does nothing."""
    return Fp8(chunks if plan.config.quantization.fp8_format is not None else [])


class Fp8:
    """FP8 state of this rank's chunks, and the moments at which it changes. Without chunks nothing happens.

    tensors: {fp8/MODULE/scale_fwd, fp8/MODULE/amax_history_fwd, ..._bwd: tensor} of delayed scaling, by the module's
    name in the whole model; the same on all ranks of a stage. Empty for other recipes, which keep nothing.
    """

    def __init__(self, chunks: Sequence[Any]):
        self._histories = [te.Histories() for _ in chunks]
        self._to_quantize: set[int] = set()
        self._backward_of: int | None = None
        self._recompute: dict[tuple[int, int], list[te.Scales]] = {}
        self._queues: list[list[te.Scales]] = [[] for _ in chunks]
        self.tensors: dict[str, torch.Tensor] = {}
        if not chunks:
            return
        self._update = te.stop_updates()
        for number, chunk in enumerate(chunks):
            self._quantize_when_due(number, chunk)
            te.make_states(chunk)
            self.tensors |= {PREFIX + over_stages(chunk, name): tensor for name, tensor in te.states(chunk)}

    # --- weights ---

    def begin_attempt(self) -> None:
        """Let each chunk's next first micro-batch quantize its weights, once, and forget the state of a flush that
        failed. Call it before the first flush of an attempt at a step, or of an evaluation while no step is open."""
        self._to_quantize = set(range(len(self._histories)))
        self._backward_of = None
        self._recompute.clear()

    def _quantize_when_due(self, number: int, chunk: Any) -> None:
        """Quantize once per attempt: Megatron's schedules tell a chunk at the first micro-batch of every flush, and a
        step may have several flushes."""
        quantize = chunk.set_is_first_microbatch

        def when_due() -> None:
            if number in self._to_quantize:
                self._to_quantize.remove(number)
                quantize()

        chunk.set_is_first_microbatch = when_due

    # --- histories ---

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        """Put the chunk's own histories in place; collective over the amax group."""
        if self._histories:
            self.end_backward()
            self._histories[chunk].use()
            te.begin_recompute(self._queues[chunk])

    def end_forward(self, chunk: int, microbatch: int, output: object) -> None:
        """Keep what a recomputation of this forward will read, and take its largest values into the histories."""
        if self._histories:
            self._queues[chunk] = te.recompute_queues()
            if torch.is_grad_enabled():
                self._recompute[chunk, microbatch] = self._queues[chunk]
                self._update(True)

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Put back what the forward of this micro-batch read. A chunk's backward has ended when the next pass begins,
        which is soon enough: nothing reads its scales before the chunk's own next backward."""
        if self._histories:
            self.end_backward()
            self._backward_of = chunk
            te.use_recompute(self._recompute.pop((chunk, microbatch)))

    def end_backward(self) -> None:
        """End the backward that began last, if it has not ended: when the next pass begins, or a flush is over."""
        if self._backward_of is not None:
            self._histories[self._backward_of].use()
            self._backward_of = None
            self._update(False)

    # --- a step that counts, or not ---

    def overflow(self) -> torch.Tensor | None:
        """0, or inf if a largest value of this step was not finite (float64 scalar on the device); None without
        histories. A cast to FP8 saturates: an infinite value leaves no other trace than in the history."""
        if not self.tensors:
            return None
        finite = torch.cat([tensor.flatten() for tensor in self._amaxes().values()]).isfinite().all()
        return torch.where(finite, 0.0, torch.inf).double()

    def describe_overflow(self) -> str:
        """Names of the tensors whose largest value was not finite on any rank, the same text on each; '' if none.
        Collective over the world."""
        if not self._histories:
            return ""
        mine = [name[len(PREFIX) :] for name, tensor in self._amaxes().items() if not tensor.isfinite().all()]
        names = sorted({name for each in gathered(mine) for name in each})
        return f"FP8 met an infinite value in {listed(names)}" if names else ""

    def _amaxes(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if "/amax_history_" in name}

    def snapshot(self) -> Snapshot:
        """Copy scales and histories, without synchronisation with the host."""
        return torch.cat([tensor.flatten() for tensor in self.tensors.values()] or [torch.empty(0)])

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Restore scales and histories."""
        tensors = list(self.tensors.values())
        for tensor, copy in zip(tensors, snapshot.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(copy.view_as(tensor))
