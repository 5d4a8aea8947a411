"""Bodies that tests of batch warm-up run on ranks: steps of growing batches, and the same steps one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch

from tests.support import parity
from tests.support.engines import engine_of
from tests.support.parity import Case, Rig, merged, named, stack

STEPS = 5


@dataclass(frozen=True)
class Step:
    """A step on one rank: its first sample and size, this rank's parameters around it, the gradient, and the parameters
    after the same step of an engine that has only this batch."""

    first: int
    size: int
    before: dict[str, torch.Tensor]
    gradient: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    alone: dict[str, torch.Tensor]


def walk_all(cases: Sequence[Case]) -> list[list[Step]]:
    return [walk(case) for case in cases]


def walk(case: Case) -> list[Step]:
    """Steps of a ramped run, each taken again, from the same state, by an engine whose batch is always that one."""
    ramped, steps = engine_of(case), []
    sizes = {ramped.plan.ramp.size_at(ramped.plan.ramp.samples_after(step)) for step in range(STEPS)}
    every = {size: engine_of(_without_ramp(case, size)) for size in sorted(sizes)}
    for _ in range(STEPS):
        size, first, rate = ramped.batch.global_batch_size, ramped.consumed_samples, ramped.lr_schedule.lr
        fixed = every[size]
        _copy_state(ramped, fixed)
        before = parameters(ramped)
        gradient = _take(ramped, case, first)
        for group in fixed.param_groups:
            group["lr"] = rate
        _take(fixed, case, first)
        steps.append(Step(first, size, before, gradient, parameters(ramped), parameters(fixed)))
    return steps


def _take(engine, case: Case, first: int) -> dict[str, torch.Tensor]:
    """One step on the samples from `first` on. Returns its gradient."""
    rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    seen: dict[str, torch.Tensor] = {}
    step = engine.backend.step

    def watched() -> None:
        seen.update(rig.assemble())
        step()

    batch, rank = engine.batch, engine.groups.dp.rank()
    dp, rows = batch.data_parallel_size, batch.micro_batch_size
    starts = [first + (m * dp + rank) * rows for m in range(batch.num_microbatches)]
    with patch.object(engine.backend, "step", watched):
        assert not engine.train_step([stack(range(start, start + rows)) for start in starts]).skipped
    return seen


def _without_ramp(case: Case, size: int) -> Case:
    """The case with a batch of `size` sequences in every step."""
    gone = (
        "batch_warmup_steps",
        "rampup_batch_size",
        "step_batch_size_schedule",
        "grad_accum_steps",
        "num_chunks",
        "global_batch_size",
    )
    kept = [flag for flag in case.layout.split("--") if flag.strip() and flag.split()[0] not in gone]
    chunks = case.plan().batch.pp_microbatches if "per_round" in case.layout else None
    sizes = f"--global_batch_size {size}" + (f" --num_chunks {chunks}" if chunks else "")
    return Case(case.world_size, " ".join(merged(*(f"--{flag}" for flag in kept), sizes)), case.model, case.lane)


def _copy_state(source, target) -> None:
    for mine, theirs in zip(source.backend.state(), target.backend.state(), strict=True):
        assert (mine.name, mine.start) == (theirs.name, theirs.start)
        for kind, tensor in theirs.tensors.items():
            tensor.copy_(mine.tensors[kind])
    target.backend.adopt_state(source.step)


def parameters(engine) -> dict[str, torch.Tensor]:
    """A copy of this rank's parameters by their names in the whole model."""
    from megaaccum.model import names

    return {name: param.detach().clone() for name, param in names.named_parameters(engine.chunks)}


def whole_model(steps: Iterable[Step], what: str) -> dict[str, torch.Tensor]:
    """One field of a step, of the parameters of all ranks."""
    return {name: tensor for step in steps for name, tensor in getattr(step, what).items()}


def one_process(wanted: Sequence[tuple[str, dict[str, torch.Tensor], int, int]]) -> list[dict[str, torch.Tensor]]:
    """The float64 gradients of one process with these weights, each on `size` samples from `first` on."""
    return [_gradient(*each) for each in wanted]


def _gradient(model: str, weights: dict[str, torch.Tensor], first: int, size: int) -> dict[str, torch.Tensor]:
    chunk, plan = parity.one_process(model, "fp64")
    with torch.no_grad():
        for name, param in named(chunk):
            param.copy_(weights[name])
    return parity.gradient_of(chunk, plan, range(first, first + size)).gradient.parts
