"""A cell of the fuzz in one process: the reference's loop, micro-batch by micro-batch.

The loop is that of `megaaccum verify` (lab/verification/reference). Which micro-batches count, and whether a step is
taken at all, is decided here a second time, from the cell alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.fuzz_cell import (
    LOSS_SCALE,
    RESUME_AFTER,
    SHORT_STEP,
    STEPS,
    VOCAB,
    Cell,
    Step,
    Trained,
    add_gates,
    counts,
    freeze,
    has_bf16_sums,
    indices,
    is_bad,
    is_hollow,
    is_open,
    microbatch,
    ranks_of_a_model,
    reference_plan,
)
from megaaccum.lab.verification.records import Piece

if TYPE_CHECKING:
    from megaaccum.lab.verification.reference import Gradients

ROUNDING, FOLLOWING = 1e-5, 1e-3
"""A mean of gradients is zero but for rounding if it is smaller than this share of the largest of its parameter; and
than this after a step in which some were."""


def references(cells: list[Cell]) -> list[tuple[Trained, Trained]]:
    """(in float64, in the cell's precision) of each."""
    return [(_reference(cell, "fp64"), _reference(cell, cell.lane, near=True)) for cell in cells]


def _reference(cell: Cell, lane: str, *, near: bool = False) -> Trained:
    loop = _Loop(cell, lane, near=near)
    before = loop.parts()
    steps, evaluations = [], []
    for step in range(STEPS):
        steps.append(loop.take(step))
        if cell.evaluate:
            evaluations.append(loop.evaluate())
    return Trained(steps, evaluations, loop.parts(), before)


class _Loop:
    """The reference's loop on the micro-batches of a cell, with its policies for bad and short steps."""

    def __init__(self, cell: Cell, lane: str, *, near: bool):
        from megaaccum.distributed import groups
        from megaaccum.lab.verification.reference import PlainLoop, lr_schedule
        from megaaccum.lab.verification.subject import gpt_loss, optimizer_of
        from megaaccum.model import names
        from megaaccum.pretrain.model import gpt
        from megaaccum.step.seeds import SampleSeeds

        self.cell, self.plan = cell, reference_plan(cell, lane)
        groups.destroy()
        built = groups.build(self.plan.layout, timeout_minutes=1)
        (chunk,) = gpt.build_chunks(self.plan, built, vocab_size=VOCAB)
        if cell.gated:
            add_gates(chunk)
        freeze(cell, names.named_parameters([chunk]))
        self.scale = _LossScale(cell if lane == "fp16" else None)
        means = self.plan.batch.loss_norm != "token"
        self._head, self._chunk = self._head_apart(chunk), chunk
        self._is_bad = False
        self._seeds = SampleSeeds(self.plan, built, [chunk])
        chunk.register_forward_hook(self._spoil)
        self.loop = PlainLoop(
            chunk, lambda batch: gpt_loss(chunk, batch, means=means), means=means,
            optimizer=lambda named: optimizer_of(named, self.plan),
        )  # fmt: skip
        self._schedule = lr_schedule(self.loop.adam, self.plan)
        self._noise = torch.Generator().manual_seed(0) if near and cell.model.get("optimizer") == "soap" else None
        self._sums_in = torch.bfloat16 if lane == "bf16" and has_bf16_sums(cell) else None
        self._undecided = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in self.loop.masters.items()}

    def _head_apart(self, chunk: Any) -> torch.nn.Parameter | None:
        """The weight of a tied head, with a gradient of its own, if the layout has a copy of it: there, `nonfinite:
        zero` sees what the head adds to the gradient apart from what the embedding does."""
        layout = self.cell.layout
        copies = "pipeline_model_parallel_size" in layout or layout.get("reproducible") == "layout"
        if not copies or not chunk.share_embeddings_and_output_weights:
            return None
        head = torch.nn.Parameter(chunk.embedding.word_embeddings.weight.detach())
        head.requires_grad_(chunk.embedding.word_embeddings.weight.requires_grad)
        chunk.shared_embedding_or_output_weight = lambda: head
        return head

    def _spoil(self, _chunk: Any, _args: Any, output: torch.Tensor) -> None:
        if self._is_bad and output.requires_grad:
            output.register_hook(lambda grad: grad * float("nan"))

    def take(self, step: int) -> Step:
        scale = self.scale.now
        taken, overflows = self._take(step)
        self.scale.update(overflows)
        return replace(taken, loss_scale=scale)

    def _take(self, step: int) -> tuple[Step, bool]:
        """The step, and whether it overflows."""
        dp = self._dp(step)
        short = self.cell.short and step == SHORT_STEP
        short_rank = short and len(indices(self.cell, step, dp)[-1]) < self.cell.microbatches // dp
        if short_rank and self.cell.policies.get("short_batch") == "drop":
            return Step(float("nan"), 0.0, 0, True), False
        present = sorted(index for mine in indices(self.cell, step, dp) for index in mine)
        bad = any(is_bad(self.cell, step, index) for index in present)
        # An overflow that a smaller loss scale may cure is one, whatever is done about others.
        policy = "skip" if "loss_scale_window" in self.cell.policies else self.cell.policies.get("nonfinite")
        left = [index for index in present if not (policy == "drop_microbatch" and is_bad(self.cell, step, index))]
        batches = {
            index: microbatch(self.cell, step, index, hollow=is_hollow(self.cell, step, index, dp)) for index in left
        }
        tokens = round(sum(float(batch["loss_mask"].sum()) for batch in batches.values()))
        if tokens == 0 or (bad and policy == "skip"):
            return Step(0.0, 0.0, tokens, True), bad
        return self._update(step, batches, tokens), bad

    def _dp(self, step: int) -> int:
        """Data-parallel ranks of the layout that takes `step`."""
        cell = self.cell
        layout = cell.resume if cell.resume is not None and step > RESUME_AFTER else cell.layout
        return cell.world_size // ranks_of_a_model(layout)

    def _update(self, step: int, batches: dict[int, dict[str, torch.Tensor]], tokens: int) -> Step:
        """Balancing losses are a mean over micro-batches, by weight if the package is not given N in time."""
        from megaaccum.lab.verification.reference import add, clip_factor, norm_of

        by_weight = self.cell.calls > 1 and not self.cell.told and self.plan.batch.loss_norm == "token"
        grads: Gradients = {}
        by_sum: dict[tuple[Any, ...], Gradients] = {}
        loss = 0.0
        self.loop.forget_tokens()
        for index, batch in batches.items():
            share = float(batch["loss_mask"].sum()) / tokens if by_weight else None
            self._is_bad, self._chunk.is_open = is_bad(self.cell, step, index), is_open(batch)
            with self._seeds.flush(step + 1):
                self._seeds.begin_forward(0, index)
                value, part = self.loop.backward(batch, float(tokens), len(batches), scale=self.scale.now, share=share)
            loss += value
            for which, each in (("", part), ("head", self._part_of_head())):
                for name, grad in each.items():
                    own = by_sum.setdefault((which, *self._own_sum(step, index, name)), {})
                    add(own, {name: grad})
                    own[name] = own[name].to(self._sums_in or own[name].dtype).to(own[name].dtype)
        self._is_bad = False
        for part in by_sum.values():
            add(grads, {name: grad.nan_to_num(nan=0.0) for name, grad in part.items()})
        norm = norm_of(grads)
        if norm == 0:
            return Step(0.0, 0.0, tokens, True)
        factor = clip_factor(norm, self.plan.config.optimizer.clip_grad)
        grads = {name: grad * factor for name, grad in grads.items()}
        if self.plan.config.optimizer.optimizer == "lion" and self.cell.lane != "fp64":
            self._note_undecided(grads)
        if self._noise is not None:
            grads = {name: self._rounded(grad) for name, grad in grads.items()}
        self.loop.update(grads)
        self._schedule.step(increment=self.plan.batch.global_batch_size)
        return Step(loss, norm, tokens, False)

    def _rounded(self, grad: torch.Tensor) -> torch.Tensor:
        """A gradient that is another in the last bit of FP32, in which SOAP computes. A matrix has no gradient in some
        directions, of which the basis of eigenvectors is one of many: the last bit decides which."""
        return grad * (1 + 2.0**-24 * torch.randn(grad.shape, generator=self._noise, dtype=grad.dtype))

    def _note_undecided(self, grads: Gradients) -> None:
        """Note the elements whose sign rounding decides, and Lion with it, here or in a layout. Where there are some,
        the next gradient is another by as much as a step of them moves it."""
        keys = self.plan.config.optimizer
        near = FOLLOWING if any(bool(each.any()) for each in self._undecided.values()) else ROUNDING
        for name, grad in grads.items():
            had = self.loop.adam.state.get(self.loop.masters[name], {}).get("exp_avg", torch.zeros_like(grad))
            mean = had.lerp(grad, 1 - keys.lion_beta1).abs()
            self._undecided[name] |= (mean > 0) & (mean < near * mean.max())

    def _part_of_head(self) -> dict[str, torch.Tensor]:
        """The gradient that a micro-batch has brought to a head apart."""
        if self._head is None or self._head.grad is None:
            return {}
        name = "embedding.word_embeddings.weight"
        grad, self._head.grad = self._head.grad.to(self.loop.masters[name].dtype) / self.scale.now, None
        return {name: grad}

    def _own_sum(self, step: int, index: int, name: str) -> tuple[int, ...]:
        """Identifies the sum in which the gradient of micro-batch `index` crosses ranks: that of a rank's micro-batches
        (fsdp2: of a call's), with streaming that of one, and of an expert that of all ranks that send it tokens.
        Elements that are not finite in it are 0 (`nonfinite: zero`). Empty where no step has such elements."""
        cell = self.cell
        if cell.policies.get("nonfinite") != "zero":
            return ()
        dp = self._dp(step)
        position, rank = index // dp, index % dp
        if ".experts." in name:
            rank //= int(cell.layout.get("expert_model_parallel_size", 1))
        if cell.layout.get("sync") == "streaming":
            return rank, position
        per_rank = counts(cell)[step] // dp
        return (rank, position * cell.calls // per_rank) if cell.layout["backend"] == "fsdp2" else (rank,)

    def evaluate(self) -> float:
        batches = [microbatch(self.cell, STEPS, index, hollow=False) for index in range(self.cell.microbatches)]
        tokens = round(sum(float(batch["loss_mask"].sum()) for batch in batches))
        divisor = self.loop.divisor(max(tokens, 1), len(batches))
        self.loop.model.eval()
        with torch.no_grad():
            total = 0.0
            for batch in batches:
                self._chunk.is_open = is_open(batch)
                total += float(self.loop.loss(batch)[0]) / divisor
        self.loop.model.train()
        return total

    def parts(self) -> list[Piece]:
        """The masters; nan where Lion's sign was a matter of rounding."""
        return [
            Piece(name, master.detach().double().masked_fill(self._undecided[name], float("nan")), 0)
            for name, master in self.loop.masters.items()
        ]


class _LossScale:
    """The loss scale of a cell in FP16; None: 1. Doubles after a window of steps, halves at an overflow."""

    def __init__(self, cell: Cell | None):
        keys = {} if cell is None else cell.policies
        self.now = 1.0 if cell is None else LOSS_SCALE
        self._window, self._hysteresis = keys.get("loss_scale_window"), keys.get("hysteresis")
        self._good, self._left = 0, self._hysteresis

    def update(self, overflows: bool) -> None:
        if self._window is None:
            return
        self._good = 0 if overflows else self._good + 1
        self._left -= overflows
        if overflows and self._left <= 0:
            self.now /= 2
        if self._good == self._window:
            self.now, self._good, self._left = self.now * 2, 0, self._hysteresis
