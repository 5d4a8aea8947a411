"""The layers of a planned pipeline cut into stages by their costs, in place of an even split.

The costs are the planner's own predictions, or a profile that was measured (`megaaccum calibrate --layers`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megaaccum.errors import ScheduleError
from megaaccum.lab.planner import layout_config
from megaaccum.lab.planner.layouts import SCHEDULES, Layouts
from megaaccum.lab.planner.pipeline import Pass
from megaaccum.lab.planner.search import Ranked
from megaaccum.lab.planner.stages import layout_text, make_stages, split_layers
from megaaccum.lab.planner.workload import Workload
from megaaccum.lab.search.cut import price, tune_cut
from megaaccum.lab.search.profile import DENSE, EMBEDDING, EXPERTS, HEAD, Cut, LayerCost, Profile, with_one_head
from megaaccum.lab.search.search import search_order
from megaaccum.pretrain.metrics.layer_shapes import expert_layers
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.pass_numbers import Problem
from megaaccum.schedule.registry import build
from megaaccum.schedule.simulate import simulate
from megaaccum.units import amount

LEAST_GAIN = 0.01
"""A cut replaces the even one if the flush is faster by this."""
SIMULATED = 4
"""Micro-batches per pipeline rank that are simulated at most: more of them repeat the steady state."""


ORDERS, MOST_PASSES = 100, 4096
"""Orders that are tried for a row of the table, and the forwards of a flush, over all stages, beyond which none is."""


def cut_of(ranked: Ranked, index: int, profile: Profile | None) -> tuple[str, str]:
    """The cut of the pipeline in row `index` in Megatron's notation, "" for the even split, and why. profile: measured
    costs, in place of the predicted ones. Raises ScheduleError where it is of another model."""
    work, at = ranked.workload, ranked.layouts.select(slice(index, index + 1))
    pp, vpp, name = int(at.pp[0]), int(at.vpp[0]), SCHEDULES[int(at.schedule[0])]
    cut, profile = _cut_and_profile(work, at, profile)
    m = min(int(at.num_microbatches[0]), SIMULATED * pp)
    schedule = build(name, pp=pp, num_microbatches=m, chunks=vpp)
    tuned = tune_cut(profile, schedule)
    gain = price(profile, cut, schedule).seconds / tuned.seconds - 1
    if gain < LEAST_GAIN:
        return "", f"split evenly: the best cut found is {gain:.1%} faster than the even one"
    counts = list(tuned.cut)
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    if over := _bytes_over(ranked, index, counts):
        return "", f"split evenly: the cut that is {gain:.1%} faster needs {amount(over)} more than a GPU has"
    layout = layout_text(counts, work.model.mtp_num_layers or 0)
    if problems := layout_config.problems(work, ranked.name_of(index) | {"stages": layout}):
        return "", f"split evenly: {layout} would be {gain:.1%} faster, but {'\n'.join(problems)}"
    return layout, f"cut into {layout}, {gain:.1%} faster than the even split (simulated)"


def searched_seconds(ranked: Ranked, index: int, profile: Profile | None) -> float | None:
    """Seconds of a step of row `index` in the fastest order found for its even stages, in the memory of the named
    schedule: the row's, less what `megaaccum schedule --search` gains with the same costs. None without a pipeline, or
    with more than MOST_PASSES."""
    work, at = ranked.workload, ranked.layouts.select(slice(index, index + 1))
    pp, vpp, name = int(at.pp[0]), int(at.vpp[0]), SCHEDULES[int(at.schedule[0])]
    m = min(int(at.num_microbatches[0]), SIMULATED * pp)
    if pp == 1 or pp * vpp * m > MOST_PASSES:
        return None
    cut, profile = _cut_and_profile(work, at, profile)
    named = build(name, pp=pp, num_microbatches=m, chunks=vpp)
    hop = float(np.ravel(work.time_model(work.memory_model()).hop_seconds(at))[0])
    costs, predicted = (each.costs(cut, p2p=hop) for each in (profile, predicted_profile(work, at)))
    memory = Memory.counted(pp * vpp, chunks=vpp)
    limit = max(memory.peaks(named))
    problem = Problem(costs, stages=named.stages, num_microbatches=m, memory=memory, limit=limit)
    found = search_order(problem, start=[named], iterations=ORDERS, seed=0, name=name)
    # A share of the row's own flush: costs may have been measured on another device, or of another micro-batch.
    share = max(0.0, 1 - simulate(found.schedule, costs).makespan / simulate(named, costs).makespan)
    return float(ranked.time.total[index]) - share * simulate(named, predicted).makespan


def _cut_and_profile(work: Workload, at: Layouts, profile: Profile | None) -> tuple[Cut, Profile]:
    """The even split of a pipeline's layers, with embedding and head as layers of its ends, and their costs: measured
    ones, or those that are predicted."""
    layers = split_layers(work.model.num_layers, int(at.pp[0] * at.vpp[0]))
    assert layers is not None, "candidates.py plans only layers that have a split"
    predicted = predicted_profile(work, at)
    cut = layers[0] + 1, *layers[1:-1], layers[-1] + 1
    return cut, predicted if profile is None else _of_this_model(with_one_head(profile), predicted.pattern)


def _of_this_model(profile: Profile, pattern: str) -> Profile:
    """`profile`. Raises ScheduleError if it has a dense layer where the model has experts, or the other way round; how
    many there are is the cut's to check."""
    same_length = len(profile.pattern) == len(pattern)
    for number, (measured, wanted) in enumerate(zip(profile.pattern, pattern, strict=True) if same_length else ()):
        if {measured, wanted} == {DENSE, EXPERTS}:
            raise ScheduleError(
                f"the profile is of another model: its layer {number} is of kind {measured}, where the model has"
                f" {wanted}; measure this one with megaaccum calibrate --layers CONFIG"
            )
    return profile


def _bytes_over(ranked: Ranked, index: int, layers: list[int]) -> int:
    """Bytes by which the most loaded rank of these stages is over the device's memory; 0 where it fits."""
    work, at = ranked.workload, ranked.layouts.select(slice(index, index + 1))
    model = replace(work.memory_model(), fixed_stages=tuple(make_stages(work.model, layers)))
    return max(0, round(float(model.peak(at).total[0]) - work.hardware.hbm_bytes))


def predicted_profile(work: Workload, at: Layouts) -> Profile:
    """The planner's seconds of the layers in one layout (`at` has one row). The prediction of further tokens counts for
    the head, on whose stage it is."""
    passes = work.time_model(work.memory_model()).passes(at)
    is_moe, further = expert_layers(work.model), work.model.mtp_num_layers or 0
    last = "moe" if is_moe[-1] else "dense"
    heads = passes["head"] * (1 + further) + passes[last] * further
    layers = "".join(EXPERTS if moe else DENSE for moe in is_moe)

    kinds = {EMBEDDING: _TABLE, HEAD: heads}
    kinds |= {kind: passes[name] for kind, name in ((DENSE, "dense"), (EXPERTS, "moe")) if kind in layers}
    return Profile(pattern=EMBEDDING + layers + HEAD, kinds={kind: _cost(each) for kind, each in kinds.items()})


def _cost(seconds: Pass) -> LayerCost:
    passes = seconds.forward, seconds.input_grad, seconds.weight_grad
    forward, input_grad, weight_grad = (float(np.ravel(each)[0]) for each in passes)
    return LayerCost(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


_TABLE = Pass(1e-9, 1e-9, 0.0, 0.0)
"""A look-up in the word table: next to nothing, and a profile wants some time of every layer."""
