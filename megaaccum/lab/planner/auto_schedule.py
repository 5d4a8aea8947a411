"""`schedule: auto`: of the built-in schedules that the rules allow and that fit into memory, the one with the fastest
predicted step. Numbers alone, the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from megaaccum.config import resolve
from megaaccum.config.derive import derive
from megaaccum.config.plan import Plan
from megaaccum.config.resolve import with_schedules
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import expected, micro_batch, sync_mode
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.lab.planner.pipeline import is_simulated, seconds_without_barrier
from megaaccum.lab.planner.stages import stages_of
from megaaccum.lab.planner.time import TimeModel, rank_pass
from megaaccum.pretrain.model.layers import Layers
from megaaccum.schedule.registry import build
from megaaccum.schedule.simulate import Costs, simulate
from megaaccum.units import amount

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
        return micro_batch.choose_micro_batch(plan, device_bytes, layers=layers_of(plan))
    fitting: list[tuple[float, Plan]] = []
    needs: list[str] = []
    problems: list[str] = []
    for option in _options(plan):
        if is_simulated(option.layout.schedule) and any(each.layout.placement == "v" for _, each in fitting):
            continue  # they hold less than other Vs for more time
        layers = layers_of(option)
        try:
            settled = micro_batch.choose_micro_batch(option, device_bytes, layers=layers)
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
    model, at = expected.time_model(plan, sync_mode.vocab_size_of(plan), layers, micro_batch.PRICED_ON)
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
