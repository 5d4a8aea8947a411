"""`verify_at_start`: whether the first step's gradient depends on how its samples are split, on the run's own ranks.

The step's gradient is made twice and updates nothing: as the plan splits the batch, and from the same samples in
another split: dealt to the data-parallel ranks in runs if the plan deals in turns, in reverse order, in more or fewer
flushes, or in micro-batches of half the size. Both are projected, parameter by parameter, on random vectors of signs
that each rank draws for its shards, so ranks exchange a few numbers per parameter. With k projections of a difference
d,

    mean of (d . r)^2 over the k vectors r  =  |d|^2 (1 +- sqrt(2 / k))

An error that both splits share is not detected: a factor that no split changes, a missing sum over tp, a wrong loss,
norm, clipping or optimizer. `megaaccum verify` detects those, on a small model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.config.resolve import flush_problems
from megaaccum.config.rules.step import is_random, verifies_start
from megaaccum.distributed.agreement import gathered, raise_together
from megaaccum.engine import Engine
from megaaccum.errors import StepError
from megaaccum.lab.verification.compare import MODEL_UNIT, UNIT
from megaaccum.lab.verification.relations import CLOSE, factor_of, name_of_factor, sizes_of
from megaaccum.model.names import named_parameters
from megaaccum.platform import cpu
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.data.shared import SharedLoader
from megaaccum.pretrain.training.evaluation import loader_of
from megaaccum.step.recovery import Attempt

NUM_PROJECTIONS = 8
_BLOCK = 1 << 19
"""Elements of a shard that are projected at once, at a hundred bytes each."""


def is_due(engine: Engine) -> bool:
    """Whether this start has to be verified: the run asks for it, has a step left, and has not been verified in this
    layout."""
    asks = verifies_start(engine.plan.config, on_gpu=cpu.has_accelerator())
    return asks and engine.step < engine.plan.config.run.train_iters and engine.verified != layout_of(engine.plan)


def layout_of(plan: Plan) -> str:
    """Identifies the layout; a change requires re-verification."""
    sharding = plan.config.sharding
    return f"{plan.layout} {plan.batch} {sharding.backend} {sharding.zero_stage} {sharding.sync}"


def verify_start(engine: Engine, data: Datasets, loader: SharedLoader) -> str:
    """Verify the next step of a run, whose micro-batches `loader` has. Returns a line for the log. Collective over the
    world. Raises StepError on every rank if the gradient depends on the split."""
    begun, plan = time.monotonic(), engine.plan
    planned, other = engine.batch, other_split(plan, engine.batch)
    mine = _read(loader, planned)
    if (first := _gradient(engine, mine, planned)) is None:
        return "verify_at_start: not verified, the gradient of this step is not finite"
    theirs, sample_index = _otherwise(engine, data, planned, other)
    if (second := _gradient(engine, theirs, other, sample_index)) is None:
        problem = _failed("its gradient is finite as planned but not in the other", planned, other)
        raise StepError(problem).printed_once()
    error, problem = compare(plan, first, second, planned, other)
    if problem:
        raise StepError(problem).printed_once()
    engine.verified = layout_of(plan)
    return (
        f"verify_at_start: {len(first.names)} parameters, at most {error:.1e} apart in two splits of"
        f" {planned.global_batch_size} sequences ({_cut(planned)}; {_cut(other)}), {time.monotonic() - begun:.1f} s"
    )


def _otherwise(
    engine: Engine, data: Datasets, planned: BatchPlan, other: BatchPlan
) -> tuple[list[Any], Callable[[int], int]]:
    """(this rank's micro-batches of the same samples in another split, the number of each in the global batch)."""
    in_runs, after = not engine.plan.in_runs, engine.consumed_samples
    with closing(loader_of(engine, data.train, data, consumed_samples=after, batch=other, in_runs=in_runs)) as loader:
        found = _read(loader, other)[::-1]
    last, rank = len(found) - 1, engine.groups.dp.rank()
    return found, lambda index: planned.sample_index(last - index, rank, in_runs=in_runs)


def _read(loader: SharedLoader, batch: BatchPlan) -> list[Any]:
    """Read this rank's micro-batches of the next step. Raises on every rank if one cannot read."""
    found, problem = loader.try_next_step(batch.num_microbatches)
    raise_together(problem)
    return found


# --- another split ----------------------------------------------------------------------------------------------------


def other_split(plan: Plan, batch: BatchPlan) -> BatchPlan:
    """Another split of the samples that the schedule can run; `batch` itself if there is none."""
    return next((cut for cut in _cuts(plan, batch) if not flush_problems(plan.config, cut)), batch)


def _cuts(plan: Plan, batch: BatchPlan) -> Iterator[BatchPlan]:
    """Yield splits into micro-batches of half the size if the loss allows, then into other flushes. Balancing losses
    of experts, the weight of prediction layers, means over micro-batches and masks of dropout depend on the
    micro-batch."""
    model, count = plan.config.model, batch.num_microbatches
    if plan.config.batch.static_graph:
        return
    by_microbatch = model.num_experts or model.mtp_num_layers or batch.loss_norm != "token" or is_random(plan.config)
    if not by_microbatch and batch.micro_batch_size % 2 == 0:
        size, chunks = batch.micro_batch_size // 2, 2 * batch.pp_microbatches
        yield replace(batch, micro_batch_size=size, pp_microbatches=chunks)
    if batch.num_flushes > 1 and plan.layout.schedule != "gpipe":  # which holds the activations of a whole flush
        yield replace(batch, flush="merged")
    for rounds in (each for each in range(2, count + 1) if count % each == 0 and batch.num_flushes == 1):
        yield replace(batch, flush="per_round", grad_accum_steps=rounds, pp_microbatches=count // rounds)


def _cut(batch: BatchPlan) -> str:
    count, flushes = batch.num_microbatches, batch.num_flushes
    return f"{count} micro-batches of {batch.micro_batch_size} per rank in {flushes} flush{'es' * (flushes > 1)}"


# --- projections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sketch:
    """A gradient in a few numbers, the same on every rank.

    names: of the parameters, in the order of the model. table: [parameters, NUM_PROJECTIONS + 1], float64: the
    projections and the square of the norm. weight, loss: the step's. loss_scale: at which the gradient was made."""

    names: list[str]
    table: torch.Tensor
    weight: float
    loss: float
    loss_scale: float


def _gradient(engine: Engine, microbatches: list[Any], batch: BatchPlan, sample_index: Any = None) -> Sketch | None:
    """Make the step's gradient; None if it is not finite, in FP16 at any loss scale."""
    scaler = engine.train_steps.recovery.scaler
    before = None if scaler is None else scaler.state_dict()
    try:
        while True:
            with engine.trial(microbatches, batch=batch, sample_index=sample_index) as attempt:
                if attempt.is_finite and not attempt.num_zeroed:  # nonfinite zero makes a gradient finite
                    return _sketch(engine, attempt)
            if scaler is None or not scaler.can_back_off:
                return None
            scaler.update(overflow=True)
    finally:
        if scaler is not None and before is not None:
            scaler.load_state_dict(before)


def _sketch(engine: Engine, attempt: Attempt) -> Sketch:
    names = _names(engine)
    rows = {name: row for row, name in enumerate(names)}
    table = torch.zeros(len(names), NUM_PROJECTIONS + 1, dtype=torch.float64, device=cpu.device())
    for shard in engine.backend.shards():
        for row in _projections(shard.name, shard.grad):
            table[rows[shard.name]] += row.to(table.device)
    dist.all_reduce(table)
    table[:, :-1] *= attempt.factor
    table[:, -1] *= attempt.factor**2
    return Sketch(names, table.cpu(), attempt.weight, attempt.loss, engine.backend.loss_scale)


def _projections(name: str, grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield [NUM_PROJECTIONS + 1] numbers of each block of a shard; the signs depend on the name and the rank only."""
    seed = hashlib.sha256(f"{name} {dist.get_rank()}".encode()).digest()[:7]
    generator = torch.Generator(grad.device).manual_seed(int.from_bytes(seed, "little"))
    for block in grad.detach().reshape(-1).split(_BLOCK):
        values, shape = block.double(), (NUM_PROJECTIONS, block.numel())
        signs = torch.randint(0, 2, shape, generator=generator, device=grad.device, dtype=torch.int8)
        yield torch.cat([(2 * signs.double() - 1) @ values, values.square().sum().reshape(1)])


def _names(engine: Engine) -> list[str]:
    """Names of all trained parameters, in the order of the model. Collective over the world."""
    mine = [
        (stage, number, name)
        for stage, chunk in zip(engine.plan.layout.stages(dist.get_rank()), engine.chunks, strict=True)
        for number, (name, param) in enumerate(named_parameters([chunk]))
        if param.requires_grad
    ]
    places = sorted({place for each in gathered(mine) for place in each})
    return list(dict.fromkeys(name for _, _, name in places))


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(plan: Plan, first: Sketch, second: Sketch, planned: BatchPlan, other: BatchPlan) -> tuple[float, str]:
    """(the largest relative distance of a parameter's gradient, how the splits disagree or an empty text) of `first`,
    of the planned split, and `second`, of another. Two gradients of a parameter are equal within CLOSE of their norm
    plus four roundings of a parameter of usual size."""
    lane = plan.config.sharding.params_dtype or "fp32"
    summed = MODEL_UNIT if plan.config.sharding.backend == "ddp" else UNIT
    close = CLOSE[lane] + planned.num_microbatches * planned.data_parallel_size * summed[lane]
    sizes = torch.maximum(first.table[:, -1], second.table[:, -1]).sqrt()
    usual = float(sizes.square().mean().sqrt())
    distances = (first.table - second.table)[:, :-1].square().mean(dim=1).sqrt()
    relative = distances / sizes.clamp_min(1e-300)
    wrong = torch.logical_not(distances <= close * sizes + 4 * MODEL_UNIT[lane] * usual).nonzero().flatten().tolist()
    differing = _scalars(first, second, close)
    if wrong:
        one, two = first.table[wrong[0], :-1], second.table[wrong[0], :-1]
        r, left = factor_of(one, two)
        how = (
            _factor(plan, r, first, planned, other, close)
            if left <= close
            else f"{relative[wrong[0]]:.1%} away from it"
        )
        differing.append(
            f"{len(wrong)} of {len(first.names)} parameters have another gradient; the first in the order of the model"
            f" is {first.names[wrong[0]]}, {how}"
        )
    return float(relative.max()), _failed("; ".join(differing), planned, other) if differing else ""


def _failed(how: str, planned: BatchPlan, other: BatchPlan) -> str:
    return (
        "verify_at_start: the step depends on how its samples are split, so it is not that of the full global batch:"
        f" {how}. As planned: {_cut(planned)}. Compared with: {_cut(other)}, dealt to other ranks, in reverse order."
        " Nothing was saved. `megaaccum verify` locates the error; verify_at_start false starts the run without"
        " this check."
    )


def _scalars(first: Sketch, second: Sketch, close: float) -> list[str]:
    """Describe the weight N and the loss if they differ."""
    return [
        f"the {name} is {one:.9g} as planned and {other:.9g} in the other split"
        for name, one, other, allowed in (
            ("weight N", first.weight, second.weight, 1e-9),
            ("loss", first.loss, second.loss, close),
        )
        if not abs(one - other) <= allowed * max(abs(one), abs(other))
    ]


def _factor(plan: Plan, r: float, first: Sketch, planned: BatchPlan, other: BatchPlan, close: float) -> str:
    """Describe a gradient that is r times that of the other split."""
    ratio = other.microbatches_per_flush / planned.microbatches_per_flush
    if ratio != 1 and min(abs(r / ratio - 1), abs(r * ratio - 1)) <= close:
        return f"x {r:.6g} of that of the other split, whose flushes have {ratio:g} times the micro-batches"
    sizes = sizes_of(plan.layout, planned, first.loss_scale)
    return f"{name_of_factor(r, sizes, close)} of that of the other split"
