"""Resolving a configuration for a number of ranks: derive open keys, check every rule, cut the batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megaaccum.config import lr_scaling, lr_spans
from megaaccum.config.batch import SIZES, BatchPlan, bubble_fraction, pipeline_fill_problem
from megaaccum.config.batch_keys import deepspeed_problems, resolve_batch
from megaaccum.config.batch_ramp import BatchRamp, build_ramp
from megaaccum.config.derive import derive
from megaaccum.config.keys import ALIASES, choices, value
from megaaccum.config.layout import RankLayout
from megaaccum.config.rules import Subject, broken_rules
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError, problems_of
from megaaccum.schedule.builders import interleaved_problems
from megaaccum.schedule.registry import build, entry, set_shared_table

MOST_PASSES = 1_000_000
"""Limit on the micro-batches of a flush times the pipeline ranks, for which a schedule's table is built."""
PLANNER = "the planner"
"""Origin of a key that the planner has chosen."""


class Resolved(NamedTuple):
    """A configuration with every key derived, its batch and its rank layout."""

    config: Config
    batch: BatchPlan
    ramp: BatchRamp
    layout: RankLayout
    notes: list[str]


def resolve_keys(config: Config, world_size: int, *, own_model: bool) -> Resolved:
    """A copy of `config` with every key derived. own_model: see plan.resolve. Raises ConfigError with one text per
    broken rule."""
    resolved = copy.deepcopy(config)
    notes = list(config.notes)
    if (path := resolved.parallel.schedule or "").endswith(".csv"):
        set_shared_table(path, None)  # left by an earlier run in this process
    derive(resolved, notes, own_model=own_model)
    problems = broken_rules(Subject.from_config(resolved, written=config, world_size=world_size, own_model=own_model))
    model = math.prod(value(resolved, ALIASES[axis]) for axis in ("tp", "cp", "pp"))
    dp = world_size // model if model > 0 and world_size % model == 0 else 0  # which a rule reports
    batch = _cut_batch(resolved, dp, notes, problems) if dp else None
    ramp = _ramp(resolved, batch, notes, problems) if batch is not None and not problems else None
    problems += lr_spans.too_long(resolved, ramp) if ramp is not None else ()
    if batch is None or ramp is None or problems:
        raise ConfigError(problems)
    lr_scaling.scale(resolved)
    return Resolved(resolved, batch, ramp, _layout(resolved, world_size, dp), notes)


def with_schedules(config: Config) -> Iterator[Config]:
    """`config` with each built-in schedule in place of `auto`; rules may refuse some. Interleaved has two chunks per
    rank if their number is open."""
    parallel = config.parallel
    vpp = parallel.virtual_pipeline_model_parallel_size
    is_open = not (vpp or parallel.num_layers_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_layout)
    # In the schema's order: Megatron's own first, those that trade time for memory last.
    built_in = tuple(name for name in choices("schedule") if name not in ("auto", "none"))
    for name in built_in if parallel.pipeline_model_parallel_size > 1 else ("none",):
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


def _cut_batch(config: Config, dp: int, notes: list[str], problems: list[str]) -> BatchPlan | None:
    """Resolve the batch, write it back into `config`, and check it against the schedule."""
    try:
        batch = resolve_batch(config, dp, notes)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None
    for name in SIZES:
        setattr(config.batch, name, getattr(batch, name))
    if pipeline_fill_problem(batch):
        pp, m = batch.pipeline_model_parallel_size, batch.microbatches_per_flush
        vpp = config.parallel.virtual_pipeline_model_parallel_size or 1
        idle = f"ranks idle {bubble_fraction(pp=pp, vpp=vpp, microbatches=m):.0%} of a flush (1F1B, equal stages)"
        notes.append(f"{m} micro-batches for {pp} pipeline ranks: {idle}.")
    if not problems or config.parallel.schedule == "interleaved":
        problems += _schedule_problems(config, batch)
    problems += deepspeed_problems(config, batch, notes)
    return batch


def flush_problems(config: Config, batch: BatchPlan) -> list[str]:
    """The rules on the micro-batches of a flush that `batch` breaks, one text each."""
    if (too_few := pipeline_fill_problem(batch)) and not config.batch.allow_underfilled_pipeline:
        return [too_few]
    return _schedule_problems(config, batch)


def _schedule_problems(config: Config, batch: BatchPlan) -> list[str]:
    """The reasons why the schedule does not exist for this flush or cannot end. Requires that the rules hold."""
    parallel, m = config.parallel, batch.microbatches_per_flush
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        return []
    if pp * m > MOST_PASSES:
        return [
            f"{m:,} micro-batches in a flush over {pp} pipeline ranks: a schedule has at most {MOST_PASSES:,} passes;"
            " set grad_accum_steps or pp_microbatches lower, or micro_batch_size higher."
        ]
    if parallel.schedule == "interleaved":
        group = parallel.microbatch_group_size_per_vp_stage
        assert group is not None, "derive fills the group size of an interleaved schedule"
        return [*interleaved_problems(m, pp, group)]
    return problems_of(build, parallel.schedule, pp=pp, num_microbatches=m)


def _layout(config: Config, world_size: int, dp: int) -> RankLayout:
    """The layout of a resolved configuration. dp: data-parallel ranks."""
    parallel = config.parallel
    assert parallel.schedule is not None, "derive names a schedule"
    placement = "loop" if parallel.schedule == "none" else entry(parallel.schedule).placement
    sizes = {axis: value(config, ALIASES[axis]) or 1 for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    return RankLayout(world_size=world_size, dp=dp, schedule=parallel.schedule, placement=placement, **sizes)
