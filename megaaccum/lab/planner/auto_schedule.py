"""`schedule: auto`, and a micro-batch that is left open: of those that the rules allow and that fit into memory, the
one with the fastest predicted step. Numbers alone, the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megaaccum.config import resolve
from megaaccum.config.derive import derive
from megaaccum.config.plan import Plan
from megaaccum.config.resolve import PLANNER, with_schedules
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import expected, sync_mode
from megaaccum.lab.planner.candidates import LARGEST_MICRO_BATCH, divisors
from megaaccum.lab.planner.hardware import names
from megaaccum.lab.planner.layouts import SCHEDULES, Layouts
from megaaccum.lab.planner.pipeline import is_simulated, seconds_without_barrier
from megaaccum.lab.planner.stages import stages_of
from megaaccum.lab.planner.time import TimeModel, rank_pass
from megaaccum.pretrain.model.layers import Layers
from megaaccum.schedule.registry import build
from megaaccum.schedule.simulate import Costs, simulate
from megaaccum.units import amount

PRICED_ON = names()[0]
"""The GPU, by its name in the hardware table: micro-batches are compared, not promised."""

LayersOf = Callable[[Plan], Layers | None]
"""The layers of the machine that trains a plan; None is a GPU with Transformer Engine."""


def choose_schedule(plan: Plan, device_bytes: float | None = None, *, layers_of: LayersOf = lambda plan: None) -> Plan:
    """`plan` with a schedule, if it says `auto`, and with what choose_micro_batch chooses. A note gives the choice and
    the ones that came after it. device_bytes: as choose_micro_batch's.

    Raises:
        ConfigError: nothing fits; it lists which rank needs what.
        DataError: the vocabulary is not known.
    """
    if not is_open(plan):
        return choose_micro_batch(plan, device_bytes, layers=layers_of(plan))
    fitting: list[tuple[float, Plan]] = []
    needs: list[str] = []
    problems: list[str] = []
    for option in _options(plan):
        if is_simulated(option.layout.schedule) and any(each.layout.placement == "v" for _, each in fitting):
            continue  # they hold less than other Vs for more time
        layers = layers_of(option)
        try:
            settled = choose_micro_batch(option, device_bytes, layers=layers)
        except ConfigError as error:
            needs.append(_need(option, device_bytes, layers))
            problems = error.problems
        else:
            fitting.append((seconds(settled, layers), settled))
    if not fitting:
        raise ConfigError([f"schedule auto: no schedule fits. {'; '.join(needs)}.", *problems])
    ranking = sorted(fitting, key=lambda each: round(each[0], 9))  # the last digits decide nothing
    return sync_mode.with_note(ranking[0][1], _reason(ranking, needs, megatrons_choice(plan)))


def is_open(plan: Plan) -> bool:
    """Whether the plan says `schedule: auto`, which nothing has settled yet."""
    return plan.written is not None and plan.written.parallel.schedule == "auto"


def megatrons_choice(plan: Plan) -> str:
    """The schedule where the key is left out."""
    assert plan.written is not None
    config = copy.deepcopy(plan.written)
    config.parallel.schedule = None
    derive(config, [])
    assert config.parallel.schedule is not None
    return config.parallel.schedule


def _options(plan: Plan) -> Iterator[Plan]:
    """The plan with each schedule that the rules allow."""
    assert plan.written is not None
    for named in with_schedules(plan.written):
        with suppress(ConfigError):
            yield resolve(named, world_size=plan.layout.world_size)


# --- price and need --------------------------------------------------------------------------------------------------


def seconds(plan: Plan, layers: Layers | None) -> float:
    """Predicted seconds of a step (of one flush, where it has several) on the first GPU of the hardware table:
    schedules are compared, not promised. The flush is simulated with the costs of its own stages."""
    model, at = expected.time_model(plan, sync_mode.vocab_size_of(plan), layers, PRICED_ON)
    parts = model.step(at).by_part
    if plan.layout.pp == 1:
        return float(sum(part[0] for part in parts.values()))
    around = float(sum(parts[name][0] for name in ("gather", "reduce", "optimizer", "overhead")))
    group_size = plan.config.parallel.microbatch_group_size_per_vp_stage
    at_pp, name, m = plan.layout.pp, plan.layout.schedule, plan.batch.microbatches_per_flush
    size = {"chunks": plan.layout.vpp, "group_size": group_size} if name == "interleaved" else {}
    schedule = build(name, pp=at_pp, num_microbatches=m, **size)
    costs = _costs(plan, model, at)
    if plan.config.step.speculative_step:
        return around + seconds_without_barrier(schedule, costs)
    return around + simulate(schedule, costs).makespan


def _costs(plan: Plan, model: TimeModel, at: Layouts) -> Costs:
    """Seconds of each stage's passes, and of a message."""
    passes = model.passes(at)
    stages = [rank_pass(passes, [stage], 1) for stage in stages_of(plan.config)]
    names = ("forward", "input_grad", "weight_grad")
    seconds: dict[str, Any] = {name: [float(getattr(each, name)[0]) for each in stages] for name in names}
    return Costs(**seconds, p2p=float(model.hop_seconds(at)[0]))


def _need(plan: Plan, device_bytes: float | None, layers: Layers | None) -> str:
    """The need of the most loaded rank under a schedule that does not fit."""
    limit, peak = sync_mode.limit_of(plan, device_bytes), sync_mode.peak(plan, device_bytes, layers)
    assert limit is not None, "without a limit everything fits"
    return (
        f"{plan.layout.schedule} needs {amount(float(peak.total[0]))} on pipeline rank {peak.rank[0]}, of"
        f" {amount(limit.num_bytes)}"
    )


def _reason(ranking: list[tuple[float, Plan]], needs: list[str], megatrons: str) -> str:
    """The choice, and its alternatives. ranking: predicted seconds of a step or flush, and the plan."""
    (least, best), *others = ranking
    if best.layout.pp == 1:
        return "schedule auto: none, as there is no pipeline."
    sizes = f" with {best.layout.vpp} model chunks per rank" if best.layout.vpp > 1 else ""
    text = f"schedule auto: {best.layout.schedule}{sizes}, the fastest predicted"
    if best.layout.schedule == megatrons:
        text += ", and what Megatron takes without the key"
    after = [f"{each.layout.schedule} {its / least - 1:+.1%}" for its, each in others]
    return "; ".join([text + (f" (then {', '.join(after)})" if after else ""), *needs]) + "."


# --- the micro-batch --------------------------------------------------------------------------------------------------


def choose_micro_batch(plan: Plan, device_bytes: float | None = None, *, layers: Layers | None = None) -> Plan:
    """`plan` with a micro-batch, if none is given, and a sync mode (sync_mode.choose_sync_mode, whose arguments these
    are). A note gives the reason. Without a limit of memory, the micro-batch stays one sequence.

    Raises:
        ConfigError: not even a micro-batch of one sequence fits.
        DataError: there is a limit, and the vocabulary is not known.
    """
    first = sync_mode.choose_sync_mode(plan, device_bytes, layers=layers)
    limit, larger = sync_mode.limit_of(plan, device_bytes), list(_larger(plan))
    if not larger:
        return first
    if limit is None:
        why = "none is given, and no limit of memory is known; memory_gib sets one"
        return sync_mode.with_note(first, f"micro_batch_size {plan.batch.micro_batch_size}: {why}.")
    fitting, missed = [first], ""
    for option in larger:
        try:
            fitting.append(sync_mode.choose_sync_mode(option, device_bytes, layers=layers))
        except ConfigError:
            missed = f"; {option.batch.micro_batch_size} would not fit into {amount(limit.num_bytes)} ({limit.source})"
            break
    best = min(fitting, key=lambda option: expected.seconds(option, sync_mode.vocab_size_of(option), layers, PRICED_ON))
    sizes = ", ".join(str(option.batch.micro_batch_size) for option in fitting)
    size = best.batch.micro_batch_size
    return sync_mode.with_note(
        best,
        f"micro_batch_size {size}: the fastest predicted of those that fit, {sizes}{missed}. Seconds are those on"
        f" {PRICED_ON}, whichever GPU runs it: set micro_batch_size where `megaaccum plan --gpu NAME` says otherwise.",
    )


def _larger(plan: Plan) -> Iterator[Plan]:
    """Plans of larger micro-batches, where none is given, that keep the other keys, every rule, and the batch of every
    step. With `reproducible: layout` results depend on it, so there are none."""
    assert plan.written is not None
    is_given = plan.written.batch.micro_batch_size is not None
    if is_given or plan.config.sharding.reproducible == "layout" or plan.layout.schedule not in SCHEDULES:
        return
    for size in divisors(plan.batch.device_batch_size * plan.batch.grad_accum_steps):
        if not plan.batch.micro_batch_size < size <= LARGEST_MICRO_BATCH:
            continue
        batch = replace(plan.written.batch, micro_batch_size=size)
        origin = plan.written.origin | {"micro_batch_size": PLANNER}
        try:
            option = resolve(replace(plan.written, batch=batch, origin=origin), world_size=plan.layout.world_size)
        except ConfigError:
            continue
        if option.batch.micro_batch_size == size and option.ramp.intervals == plan.ramp.intervals:
            yield option
