"""Settling a configuration for a number of ranks: derive what is open, hold every rule, cut the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megaaccum.config import lr_scaling
from megaaccum.config.batch import BatchPlan, pipeline_fill_problem
from megaaccum.config.batch_keys import deepspeed_problems, settle
from megaaccum.config.batch_ramp import BatchRamp, build_ramp
from megaaccum.config.derive import derive
from megaaccum.config.layout import Layout
from megaaccum.config.rules import Subject, broken_rules
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError, ScheduleError
from megaaccum.schedule.build import BUILT_IN, build, by_executor, entry, interleaved_problems, set_shared_table

PLANNER = "the planner"
"""Origin of a key that the planner has chosen."""


class Settled(NamedTuple):
    """Every key of a configuration derived, its batch and its ranks cut."""

    config: Config
    batch: BatchPlan
    ramp: BatchRamp
    layout: Layout
    notes: list[str]


def settle_keys(config: Config, world_size: int, *, own_model: bool) -> Settled:
    """A copy of `config` with every key derived. own_model: see plan.resolve. Raises ConfigError with one text per
    broken rule."""
    settled = copy.deepcopy(config)
    notes = list(config.notes)
    if (path := settled.parallel.schedule or "").endswith(".csv"):
        set_shared_table(path, None)  # what a run before this one in the same process has left
    derive(settled, notes, own_model=own_model)
    problems = broken_rules(Subject(config=settled, written=config, world_size=world_size, own_model=own_model))
    dp = _data_parallel_size(settled, world_size)
    batch = _cut_batch(settled, dp, notes, problems) if dp else None
    ramp = _ramp(settled, batch, notes, problems) if batch is not None and not problems else None
    if batch is None or ramp is None or problems:
        raise ConfigError(problems)
    lr_scaling.scale(settled)
    return Settled(settled, batch, ramp, _layout(settled, world_size, dp), notes)


def with_schedules(config: Config) -> Iterator[Config]:
    """`config`, which says `schedule: auto`, with each built-in schedule in its place, Megatron's own first; rules may
    refuse some. If the chunks per rank are open, interleaved has two of them."""
    parallel = config.parallel
    vpp = parallel.virtual_pipeline_model_parallel_size
    is_open = not (vpp or parallel.num_layers_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_layout)
    for name in sorted(BUILT_IN, key=by_executor) if parallel.pipeline_model_parallel_size > 1 else ("none",):
        chunks = 2 if name == "interleaved" and is_open else vpp
        if vpp == 1 and name != "none" and entry(name).chunks != 1:
            continue
        named = replace(parallel, schedule=name, virtual_pipeline_model_parallel_size=chunks)
        yield replace(config, parallel=named, origin=config.origin | {"schedule": PLANNER})


def _ramp(config: Config, batch: BatchPlan, notes: list[str], problems: list[str]) -> BatchRamp | None:
    try:
        return build_ramp(config.batch, batch, config.run.train_iters, partial(flush_problems, config), notes)
    except ConfigError as error:
        problems += error.problems
        return None


def _data_parallel_size(config: Config, world_size: int) -> int:
    """dp = world / (tp * cp * pp), or 0 where that is no whole number (a rule of its own says so)."""
    parallel = config.parallel
    model = parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // model if model > 0 and world_size % model == 0 else 0


def _cut_batch(config: Config, dp: int, notes: list[str], problems: list[str]) -> BatchPlan | None:
    """Solve the batch, write it back into `config`, and check what the schedule asks of it."""
    try:
        batch = settle(config, dp, notes)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None
    for name in ("micro_batch_size", "global_batch_size", "device_batch_size", "pp_microbatches", "grad_accum_steps"):
        setattr(config.batch, name, getattr(batch, name))
    if pipeline_fill_problem(batch):
        pp, m = batch.pipeline_model_parallel_size, batch.microbatches_per_flush
        idle = (pp - 1) / ((config.parallel.virtual_pipeline_model_parallel_size or 1) * m + pp - 1)
        notes.append(
            f"{m} micro-batches for {pp} pipeline ranks: they idle {idle:.0%} of a flush (1F1B, equal stages)."
        )
    if not problems or config.parallel.schedule == "interleaved":
        problems += _schedule_problems(config, batch)
    problems += deepspeed_problems(config, batch, notes)
    return batch


def flush_problems(config: Config, batch: BatchPlan) -> list[str]:
    """The rules on the micro-batches of a flush that `batch` breaks, one text each."""
    too_few = pipeline_fill_problem(batch)
    if too_few and not config.batch.allow_underfilled_pipeline:
        return [too_few]
    return _schedule_problems(config, batch)


def _schedule_problems(config: Config, batch: BatchPlan) -> list[str]:
    """Why the schedule does not exist for this flush, or cannot end. Looked at when the rules are kept."""
    parallel, m = config.parallel, batch.microbatches_per_flush
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        return []
    if parallel.schedule == "interleaved":
        group = parallel.microbatch_group_size_per_vp_stage
        assert group is not None, "derive fills the group size of an interleaved schedule"
        return [*interleaved_problems(m, pp, group)]
    try:
        build(parallel.schedule, pp=pp, num_microbatches=m)
    except ScheduleError as error:
        return error.problems
    return []


def _layout(config: Config, world_size: int, dp: int) -> Layout:
    """How the ranks of a settled configuration are cut. dp: data-parallel ranks."""
    parallel = config.parallel
    assert parallel.schedule is not None, "derive names a schedule"
    placement = "loop" if parallel.schedule == "none" else entry(parallel.schedule).placement
    assert parallel.expert_tensor_parallel_size is not None
    return Layout(
        world_size=world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size or 1,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        dp=dp,
        schedule=parallel.schedule,
        placement=placement,
    )
