"""The planner's closed forms against the schedules' own tables: what they prove to be in flight, and what they take."""

from __future__ import annotations

from typing import Any

import pytest

from megaaccum.lab.planner import pipeline
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.registry import build

CASES = [
    (name, pp, vpp, m)
    for name, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2),
                      ("dualpipev", 2), ("v-half", 2), ("v-min", 2))
    for pp in (2, 4, 8) for m in (2 * pp, 4 * pp) if pp < 8 or not name.startswith("v-")
]  # fmt: skip


def made(name: str, pp: int, vpp: int, m: int) -> Any:
    return build(name, pp=pp, num_microbatches=m, **({"chunks": vpp} if name == "interleaved" else {}))


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), CASES)
def test_a_rank_never_holds_more_than_is_planned(name: str, pp: int, vpp: int, m: int) -> None:
    """Chunks in flight on the rank that holds the most. Schedules that put off weight gradients free a part of a
    micro-batch early, so their tables may hold a little less than the formula's whole ones."""
    from megaaccum.schedule.validate import validate

    footprint = validate(made(name, pp, vpp, m))
    planned = max(
        sum(int(n) for n in pipeline.in_flight(name, pp=pp, vpp=vpp, rank=rank, microbatches=m)) for rank in range(pp)
    )
    real = max(footprint.in_flight)
    assert real <= planned <= real + 1


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "group_size"), [(4, 2, 16, 8), (4, 2, 16, 16), (4, 3, 22, 6), (2, 4, 11, 3)]
)
def test_larger_groups_of_micro_batches_hold_more(pp: int, vpp: int, m: int, group_size: int) -> None:
    from megaaccum.schedule.validate import validate

    real = validate(build("interleaved", pp=pp, num_microbatches=m, chunks=vpp, group_size=group_size)).in_flight
    held = [
        pipeline.in_flight("interleaved", pp=pp, vpp=vpp, rank=rank, microbatches=m, group_size=group_size)
        for rank in range(pp)
    ]
    assert [sum(int(n) for n in each) for each in held] == list(real)


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 1.0), (1.0, 2.2, 1.0)])
@pytest.mark.parametrize(("name", "pp", "vpp", "m"), CASES)
def test_filling_takes_what_the_simulator_says(
    name: str, pp: int, vpp: int, m: int, f: float, i: float, w: float
) -> None:
    """Also where the halves of a backward are unequal, as with attention and recomputation in the first."""
    from megaaccum.schedule.simulate import Costs, simulate

    chunks = vpp
    simulation = simulate(made(name, pp, vpp, m), Costs.per_rank(f, i, w, chunks=chunks))
    planned = pipeline.fill_seconds(name, pipeline.Pass(f, i, w), pp=pp, vpp=vpp, m=m)
    assert m * (f + i + w) + planned == pytest.approx(simulation.makespan, rel=0.03)


@pytest.mark.parametrize(
    ("f", "i", "w"), [(1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 1), (1, 2.2, 1), (1, 0.65, 0.7), (1, 1, 0.5)]
)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_without_a_barrier_it_takes_what_consecutive_flushes_take(pp: int, f: float, i: float, w: float) -> None:
    from megaaccum.lab.planner.pipeline import seconds_without_barrier
    from megaaccum.schedule.simulate import Costs

    m = 2 * pp
    simulated = seconds_without_barrier(made("zbv", pp, 2, m), Costs.per_rank(f, i, w, chunks=2))
    planned = pipeline.fill_seconds("zbv", pipeline.Pass(f, i, w), pp=pp, vpp=2, m=m, barrier=False)
    assert m * (f + i + w) + planned == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zbv", "dualpipev", "v-half", "v-min"])
def test_a_longer_flush_owes_no_more(name: str, pp: int) -> None:
    def owed(rank: int, *microbatches: int) -> list[float]:
        return pipeline.owed(name, pp=pp, rank=rank, microbatches=microbatches).tolist()

    table = build(name, pp=pp, num_microbatches=4 * pp)
    counted = Memory(activation=(0.0,) * table.num_stages, deferred=(1.0,) * table.num_stages,
                     state=(0.0,) * table.num_stages).peaks(table)  # fmt: skip
    assert [owed(rank, 2 * pp, 4 * pp) for rank in range(pp)] == [[most, most] for most in counted]
