"""Runs that are saved in one layout and go on in another, and what their next step comes to.

Every function here runs inside ranks and returns plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch

from tests.support.parity import VOCAB, Case, Cut, Gradient, Reference, Rig, named, sample

SAMPLES = 1000
Change = Callable[[list[torch.nn.Module]], None]
"""What is done to a rank's chunks right after they are built."""


@dataclass(frozen=True)
class Next:
    """A step. gradient: that the optimizer received. weights: masters after it, and buffers, by name. outcome: what
    else it reports."""

    gradient: Gradient
    weights: dict[str, torch.Tensor]
    outcome: dict[str, float]


class Samples:
    """The made-up data set of `parity.sample`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


def unchanged(chunks: list[torch.nn.Module]) -> None:
    """The model as it is."""


@dataclass
class Run(Rig):
    """One rank of a run over an Engine; its samples follow from the engine's count."""

    engine: Any = None

    @classmethod
    def of(cls, case: Case, change: Change = unchanged) -> Self:
        """Collective. change: what is done to the chunks when they are built."""
        from megaaccum import initialize
        from megaaccum.distributed import groups
        from megaaccum.model import gpt
        from megaaccum.model.gpt_forward import REPORTS, GptForwardStep

        plan = case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        change(chunks)
        forward_step = GptForwardStep(built, plan.batch.loss_norm)
        engine = initialize(plan, chunks, groups=built, forward_step_func=forward_step, reports=REPORTS)
        return cls(case, plan, built, chunks, engine.backend, engine.train_steps, engine)

    def step(self, *, update: bool = True) -> Next:
        """The next step. update: whether the weights follow; if not, only its gradient counts."""
        from megaaccum.data.loader import MicrobatchLoader

        batch, optimizer_step = self.plan.batch, self.backend.step
        loader = MicrobatchLoader(
            Samples(),
            micro_batch_size=batch.micro_batch_size,
            dp_rank=self.groups.dp.rank(),
            dp_size=self.groups.dp.size(),
            global_batch_size=batch.global_batch_size,
            consumed_samples=self.engine.consumed_samples,
            num_workers=0,
        )
        seen: dict[str, torch.Tensor] = {}

        def looked_at() -> None:
            seen.update(self.assemble())
            if update:
                optimizer_step()

        with patch.object(self.backend, "step", looked_at):
            result = self.engine.train_step(loader.next_step())
        gradient = Gradient(seen, result.grad_norm, result.loss, result.num_tokens, self.groups.tp.rank())
        outcome = {"step": result.step, "lr": result.lr, "loss_scale": result.loss_scale, "skipped": result.skipped}
        return Next(gradient, self.weights() if update else {}, outcome)

    def weights(self) -> dict[str, torch.Tensor]:
        """Masters and buffers, by name."""
        states = [(each.name, each.param, each.start, each.tensors["param"]) for each in self.backend.state()]
        return self.whole(states) | {name: buffer.detach().clone() for name, buffer in self.engine.buffers.items()}


def saved(folder: str, case: Case, steps: int = 2, *, change: Change = unchanged) -> Next:
    """The uninterrupted next step of a run of `case` that was saved after `steps` steps."""
    run = Run.of(case, change)
    for _ in range(steps):
        run.step()
    run.engine.save(folder)
    return run.step()


def loaded(run: Run, folder: str, mistake: AbstractContextManager[None] | None = None) -> Run:
    """`run` as it goes on from the checkpoint, read by a loader that makes a mistake, if any is given."""
    with mistake or nullcontext():
        assert run.engine.load(folder)
    return run


def reference(folder: str, model: str, lane: str) -> Reference:
    """The next step of one process that holds the whole model of the checkpoint in the precision of `lane`."""
    dtype = {"fp64": "fp64", "fp32": "fp32", "bf16": "bf16"}[lane]
    run = loaded(Run.of(Case(1, "--global_batch_size 8 --pp_microbatches 8", model, dtype)), folder)
    (chunk,) = run.chunks
    cuts = {
        name: Cut(getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1) == 2)
        for name, param in named(chunk)
    }
    return Reference(run.step(update=False).gradient, cuts)
