"""Predicting and ranking every legal layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaaccum.errors import ConfigError
from megaaccum.lab.planner import layout_config
from megaaccum.lab.planner.candidates import Limits
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.lab.planner.memory import Memory
from megaaccum.lab.planner.time import StepTime
from megaaccum.lab.planner.workload import Workload
from megaaccum.units import GIB

RANKINGS = ("default", "time", "memory")
NEAR_FASTEST = 1.05
"""Layouts whose step is at most this many times the fastest count as equal: a prediction does not tell them apart."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Layouts that fit, best first."""

    layouts: Layouts
    memory: Memory
    time: StepTime
    num_legal: int
    """Layouts that keep every rule, of which these fit."""
    workload: Workload
    num_unbeaten: int
    """Number of the first layouts that no other beats: none is as fast in less memory, or faster in as much, and no two
    have the same figures."""

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def headroom(self) -> np.ndarray:
        """Bytes that are left of the device's memory."""
        return self.workload.hardware.hbm_bytes - self.memory.total

    def name_of(self, index: int) -> dict[str, Any]:
        """A layout in the user's names."""
        return self.layouts.axes(index)

    def find(self, wanted: dict[str, Any]) -> np.ndarray:
        """Indices of the layouts with these values, in order of rank."""
        names = [self.name_of(index) for index in range(len(self))]
        return np.array([i for i, name in enumerate(names) if all(name[k] == v for k, v in wanted.items())], dtype=int)


def search(workload: Workload, limits: Limits | None = None, *, rank: str = "default") -> Ranked:
    """Every legal layout that fits, ranked.

    rank: 'default' (of those that count as equal to the fastest the one with the least of everything: cp, tp, pp, ep,
    recompute; then larger device batches and more headroom), 'time' or 'memory'. Layouts that another beats in both
    come after all others.

    Raises:
        ConfigError: no layout is legal, or none fits: the closest miss, its shortage, and what takes the memory.
    """
    assert rank in RANKINGS, rank
    limits = limits or Limits()
    layouts = accepted(workload, workload.candidates(limits).layouts())
    model = workload.memory_model()
    memory = model.peak(layouts)
    fits = memory.total <= workload.hardware.hbm_bytes
    if not fits.any():
        raise ConfigError(_closest_miss(workload, limits, layouts, memory))
    kept, memory = layouts.select(fits), _rows(memory, fits)
    time = workload.time_model(model).step(kept)
    order, unbeaten = _order(kept, memory, time, rank)
    parts = {name: seconds[order] for name, seconds in time.by_part.items()}
    time = StepTime(time.total[order], parts, time.exposed[order], time.bubble[order])
    return Ranked(kept.select(order), _rows(memory, order), time, len(layouts), workload, unbeaten)


def accepted(workload: Workload, layouts: Layouts) -> Layouts:
    """The layouts that `megaaccum check` accepts, judged by one of every kind: what differs within a kind are numbers,
    and the rules on those are the space's own.

    Raises:
        ConfigError: it accepts none; the text is its own on the first.
    """
    groups = workload.model.num_query_groups or workload.model.num_attention_heads
    replicas = workload.sharding.data_parallel_replicas
    kinds = np.stack(
        [layouts.schedule, layouts.sync, layouts.zero_stage, layouts.recompute, np.minimum(layouts.pp, 3),
         layouts.vpp > 1, layouts.tp > 1, groups % layouts.tp > 0, layouts.cp > 1, layouts.ep > 1, layouts.etp > 1,
         workload.model.num_layers % (layouts.pp * layouts.vpp) == 0,
         layouts.dp * layouts.cp % replicas > 0, layouts.edp % replicas > 0,
         np.clip(layouts.num_microbatches - 2 * layouts.pp, -2, 0)], axis=1
    )  # fmt: skip
    _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    problems = [layout_config.problems(workload, layouts.axes(int(index))) for index in first]
    legal = np.array([not each for each in problems])
    if not legal.any():
        raise ConfigError(problems[0])
    return layouts.select(legal[kind.ravel()])


def _order(at: Layouts, memory: Memory, time: StepTime, rank: str) -> tuple[np.ndarray, int]:
    """(indices, best first; how many of them no other beats in time and memory both). np.lexsort sorts by its last key
    first."""
    digits = 2 - np.floor(np.log10(time.total))
    seconds, held = np.round(time.total * 10**digits) / 10**digits, np.round(memory.total / GIB, 1)  # as they are shown
    # A group of cp ranks has one batch between them: without the division cp would make "larger" ones of the same.
    wishes = (at.cp, at.tp, at.pp, at.ep, at.recompute, -at.device_batch_size / at.cp, held)
    by_time = np.lexsort((*reversed(wishes), held, seconds))
    least = np.minimum.accumulate(held[by_time])
    beaten = np.ones(len(at), dtype=bool)
    beaten[by_time[np.append(True, least[1:] < least[:-1])]] = False
    if rank == "default":
        near = seconds <= NEAR_FASTEST * seconds.min()
        keys = (*(np.where(near, wish, 0) for wish in wishes), np.where(near, 0, seconds))
        order = np.lexsort((held, seconds, *reversed(keys), ~near, beaten))
    else:
        order = np.lexsort((*((held, seconds) if rank == "time" else (seconds, held)), beaten))
    return order, int((~beaten).sum())


def _rows(memory: Memory, rows: np.ndarray) -> Memory:
    return Memory({k: v[rows] for k, v in memory.by_kind.items()}, memory.rank[rows], memory.in_flight[rows])


def _closest_miss(workload: Workload, limits: Limits, layouts: Layouts, memory: Memory) -> str:
    """The layout that lacks the least, by how much, for what, and what would fit."""
    least = int(np.argmin(memory.total))
    name = ", ".join(f"{key}={value}" for key, value in layouts.axes(least).items())
    short = (memory.total[least] - workload.hardware.hbm_bytes) / GIB
    kinds = sorted(memory.by_kind, key=lambda kind: -memory.by_kind[kind][least])
    most = ", ".join(f"{kind} {memory.by_kind[kind][least] / GIB:.1f} GiB" for kind in kinds[:4])
    odds = fit_probability(memory.total[least], workload.hardware.hbm_bytes)
    return (
        f"no layout fits {workload.world_size} GPUs of {workload.hardware.name} with"
        f" {workload.hardware.hbm_bytes / GIB:.1f} GiB: the closest of {len(layouts):,}, {name}, lacks {short:.1f} GiB"
        f" ({most}) and fits with probability {odds:.0%}. {_remedies(workload, limits)}"
    )


def _remedies(workload: Workload, limits: Limits) -> str:
    """The least multiple of the GPUs and the key of `sharding` that make a layout fit, tried one by one."""
    found = []
    for times in (2, 4, 8, 16, 32, 64):
        if _fits(replace(workload, world_size=times * workload.world_size), limits):
            found.append(f"{times * workload.world_size:,} of these GPUs fit it")
            break
    offloaded = replace(workload.sharding, offload_optimizer="cpu")
    if workload.sharding.backend == "deepspeed" and _fits(replace(workload, sharding=offloaded), limits):
        found.append(f"on {workload.world_size}, offload_optimizer cpu does")
    halves = replace(workload.model, seq_length=workload.model.seq_length // 2)
    if not found and _fits(replace(workload, model=halves), limits):
        found.append(f"on {workload.world_size}, seq_length {halves.seq_length} does")
    return "; ".join(found or [f"{64 * workload.world_size:,} of them do not fit it either: use a smaller model"]) + "."


def _fits(workload: Workload, limits: Limits) -> bool:
    try:
        layouts = workload.candidates(limits).layouts()
    except ConfigError:
        return False
    return bool((workload.memory_model().peak(layouts).total <= workload.hardware.hbm_bytes).any())


MEASURED = (
    0.820, 0.937, 0.971, 0.974, 0.978, 0.984, 0.986, 0.991, 0.993, 0.995, 0.996,
    0.997, 0.999, 1.004, 1.009, 1.011, 1.017, 1.026, 1.055, 1.079, 1.454,
)  # fmt: skip
"""Measured over predicted peaks of 68 published runs whose figures no constant was fitted to: every twentieth of them
(`python -m benchmarks planner_accuracy` prints these)."""


def fit_probability(predicted: Any, capacity: float) -> Any:
    """The share of those runs that would have fitted into `capacity` if `predicted` had been their prediction."""
    return np.interp(capacity / np.asarray(predicted, dtype=float), MEASURED, np.linspace(0, 1, len(MEASURED)))
