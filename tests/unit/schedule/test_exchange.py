"""The all-to-all of experts: two lanes of a rank, what a fused pair hides of them, and orders that pair passes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.bound import Bound
from megaaccum.lab.search.cut import bound_of_cuts, tune_cut
from megaaccum.lab.search.profile import LayerCost, Profile, even_cut
from megaaccum.lab.search.search import compare, search_order
from megaaccum.pretrain.metrics.schedule_plots import exchanges, figure, text
from megaaccum.schedule import Action, Costs, Pair, build, make_schedule, parse, simulate, validate
from megaaccum.schedule.exchange import Layer, together
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.pass_numbers import Problem

EXPERTS = LayerCost(forward=4.0, input_grad=4.0, weight_grad=2.0, exchange=0.5, experts=2 / 3)
PROFILE = Profile(
    pattern="ETTXXXXXXL",
    kinds={
        "E": LayerCost(forward=0.1, input_grad=0.0, weight_grad=0.1),
        "T": LayerCost(forward=2.0, input_grad=2.0, weight_grad=2.0),
        "X": EXPERTS,
        "L": LayerCost(forward=1.0, input_grad=1.0, weight_grad=1.0),
    },
)


def problem(pp: int = 2, m: int = 8, **keys) -> Problem:
    schedule = build("dualpipev", pp=pp, num_microbatches=m)
    cut = even_cut(PROFILE, schedule.num_stages)
    return Problem(
        PROFILE.costs(cut), stages=schedule.stages, num_microbatches=m, memory=PROFILE.memory(cut, chunks=2), **keys
    )


def test_a_pair_hides_what_its_streams_can():
    """Compute: attention, the experts' gradient, experts, attention's gradient. Exchanges beside it, in Megatron's
    order; the combine of the forward begins when its experts are done."""
    layer = Layer(forward=(1.0, 2.0), input_grad=(1.0, 2.0), exchange=1.0)
    assert together((layer,), ()).seconds == together((), (layer,)).seconds == 5
    joint = together((layer,), (layer,))
    assert joint.seconds == 6  # all of its compute, and no exchange
    assert [(kind, of_forward, span) for kind, of_forward, _, span in joint.exchanges] == [
        ("C", False, (0, 1)), ("D", True, (1, 2)), ("D", False, (3, 4)), ("C", True, (5, 6)),
    ]  # fmt: skip


def test_a_pair_is_between_its_lanes_and_its_passes():
    chance = random.Random(0)

    def layers() -> tuple[Layer, ...]:
        part = lambda: (chance.random(), chance.random())  # noqa: E731
        return tuple(
            Layer(part(), part(), chance.choice((0.0, chance.random()))) for _ in range(chance.randrange(1, 5))
        )

    for _ in range(200):
        up, down = layers(), layers()
        alone, computed = together(up, ()).seconds + together((), down).seconds, 0.0
        computed = sum(map(sum, (each.forward for each in up))) + sum(map(sum, (each.input_grad for each in down)))
        lane = 2 * sum(each.exchange for each in (*up, *down))
        assert max(computed, lane, alone / 2) - 1e-9 <= together(up, down).seconds <= alone + 1e-9


def test_the_lane_of_a_schedule():
    """Every dispatch and combine is there, within its pass, and one after the other."""
    schedule = build("dualpipev", pp=2, num_microbatches=8)
    costs = PROFILE.costs(even_cut(PROFILE, 4))
    simulation = simulate(schedule, costs)
    for rank in range(2):
        lane = list(exchanges(schedule, simulation, costs, rank))
        passes = [each for each in schedule.actions(rank) if each.kind != "W"]
        layers = sum(cost is EXPERTS for stage in schedule.stages[rank] for cost in _stage(stage))
        assert len(lane) == 2 * 2 * layers * schedule.num_microbatches
        assert {each.action for each, _ in lane} <= set(passes)
        assert all(end <= start + 1e-9 for (_, (_, end)), (_, (start, _)) in pairwise(sorted(lane, key=lambda x: x[1])))
        spans = dict(zip(schedule.actions(rank), simulation.spans[rank], strict=True))
        assert all(spans[each.action][0] - 1e-9 <= start and end <= spans[each.action][1] + 1e-9
                   for each, (start, end) in lane)  # fmt: skip
    assert str(lane[0][0]) == "D0 of 0F0"
    rows = text(schedule, simulation, costs=costs).splitlines()
    assert len(rows) == 4
    assert {"D", "C"} <= set(rows[1])
    assert "dispatch" in [
        each.get_text() for each in figure(schedule, simulation, costs=costs).axes[0].get_legend().texts
    ]


def _stage(stage: int) -> list[LayerCost]:
    cut = even_cut(PROFILE, 4)
    return PROFILE.layers[sum(cut[:stage]) : sum(cut[: stage + 1])]


def _pairs(schedule) -> list[Pair]:
    return [item for rank in schedule.items for item in rank if isinstance(item, Pair)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
def test_an_order_of_halves_is_the_table_of_full_backwards(name):
    schedule = build(name, pp=2, num_microbatches=8)
    at = Problem(Costs(forward=1, input_grad=1, weight_grad=1), stages=schedule.stages, num_microbatches=8)
    assert at.schedule_of(at.order_of(schedule), name).items == schedule.items


def test_an_order_with_pairs_is_the_table_with_pairs():
    schedule, at = build("dualpipev", pp=2, num_microbatches=8), problem()
    order = at.order_of(schedule)
    again = at.schedule_of(order, "again")
    assert _pairs(again) == _pairs(schedule)
    assert len(_pairs(schedule)) > 8
    assert at.time(order) == pytest.approx(simulate(schedule, at.costs).makespan)
    peaks = [at.peak(passes) for passes in order]
    assert peaks == pytest.approx(at.memory.peaks(schedule))
    f0, f1, f2, b0, b1 = (at.number(kind, 0, mb) for kind, mb in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)))
    half = Memory(activation=(2,) * 4, deferred=(1,) * 4, state=(0,) * 4)
    tight = Problem(at.costs, stages=at.stages, num_microbatches=8, memory=half)
    assert tight.peak([f0, b0, f1]) == tight.peak([f0, f1]) == 4, "a pair holds both at once"
    assert at.paired([[f0, b0], [f0, f1, b0, f2, b1]]) == [[f0, b0], [f0, b0, f1, b1, f2]]


def test_a_rank_that_waits_for_a_pairs_forward_goes_on():
    """Rank 1 waits for the second forward, which rank 0 fuses with its first backward."""
    at = Problem(PROFILE.costs(even_cut(PROFILE, 2)), stages=((0,), (1,)), num_microbatches=2)
    passes = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    order = [[at.number(kind, stage, mb) for kind, mb in passes] for stage in (0, 1)]
    order[1][1:2] = [order[1][1], order[1][4]]  # a weight gradient between them: no pair
    del order[1][5]
    assert at.time(order) == pytest.approx(simulate(at.schedule_of(order, "mine"), at.costs).makespan)


@pytest.mark.parametrize("limit", [None, 4.0])
def test_a_search_pairs_passes_to_hide_exchanges(limit):
    at = problem(limit=limit)
    named = build("dualpipev", pp=2, num_microbatches=8)
    found = search_order(at, start=[named], iterations=2000)  # it holds its order against validate and simulate
    assert found.schedule.has_pairs
    hidden = at.costs.computed()
    assert Bound(at).seconds <= found.seconds
    assert simulate(found.schedule, hidden).makespan <= found.seconds
    unaware = Problem(
        PROFILE.costs(even_cut(PROFILE, 4)).__class__(
            forward=at.costs.forward, input_grad=at.costs.input_grad, weight_grad=at.costs.weight_grad
        ),
        stages=at.stages, num_microbatches=8, memory=at.memory, limit=limit,
    )  # fmt: skip
    without = search_order(unaware, iterations=2000)
    assert not without.schedule.has_pairs
    assert found.seconds < 0.95 * without.seconds
    assert compare(found.schedule, without.schedule, at.costs).gain > 0.05


def test_a_pair_of_passes_that_take_no_time():
    """Embeddings have no input gradient: a pair with such a pass may take no time at all."""
    schedule = build("dualpipev", pp=2, num_microbatches=8)
    layers = (
        (Layer((0, 0), (0, 0)),),
        (Layer((1, 2), (1, 2), 1.0),),
        (Layer((1, 2), (1, 2)),),
        (Layer((0, 0), (0, 0)),),
    )
    costs = Costs(forward=(0, 5, 3, 0), input_grad=(0, 5, 3, 0), weight_grad=1, layers=layers)
    at = Problem(costs, stages=schedule.stages, num_microbatches=8)
    assert at.time(at.order_of(schedule)) == pytest.approx(simulate(schedule, costs).makespan)
    found = search_order(at, start=[schedule], iterations=100)
    assert compare(found.schedule, schedule, costs).gain >= 0


def test_no_cut_beats_the_bound_of_all_that_pairs_hide():
    """A bound with exchanges that nothing hides would be above what DualPipeV takes."""
    exchanged = LayerCost(forward=3.0, input_grad=3.0, weight_grad=1.0, exchange=1.0)
    profile = Profile(pattern="XXXX", kinds={"X": exchanged})
    schedule = build("dualpipev", pp=1, num_microbatches=12)
    seconds = tune_cut(profile, schedule).seconds
    every_pass = 12 * 4 * exchanged.seconds
    assert bound_of_cuts(profile, schedule) <= seconds < every_pass


def test_a_pair_needs_both_inputs():
    """One after the other these passes run; at once each rank's pair waits for the other's."""
    pair = "0F0 (0F1;0B0) 0B1"
    rows = [[parse(cell) for cell in pair.split()]] * 2
    apart = [[parse(cell) for cell in "0F0 0F1 0B0 0B1".split()]] * 2
    validate(make_schedule("apart", num_microbatches=2, placement="loop", chunks=1, items=apart))
    with pytest.raises(ScheduleError) as caught:
        validate(make_schedule("mine", num_microbatches=2, placement="loop", chunks=1, items=rows))
    assert str(caught.value).splitlines()[1:] == [
        "rank 0 waits in 0B0 (backward, chunk 0, micro-batch 0) for 0I0 of rank 1",
        "rank 1 waits in 0F1 (forward, chunk 0, micro-batch 1) for 0F1 of rank 0",
    ]


def test_an_input_gradient_can_be_in_a_pair():
    pair = parse("(0F4;1I2)")
    assert pair == Pair(Action("F", 0, 4), Action("I", 1, 2))
    assert str(pair) == "(0F4;1I2)"
    with pytest.raises(ScheduleError, match="a backward"):
        parse("(0F4;1W2)")


@pytest.mark.parametrize("keys", [dict(exchange=2.1), dict(exchange=-1.0), dict(experts=1.5)])
def test_exchanges_that_are_no_part_of_their_passes(keys):
    with pytest.raises(ScheduleError, match="of which forward and input_grad include two each"):
        Profile(pattern="X", kinds={"X": LayerCost(forward=4.0, input_grad=4.0, weight_grad=2.0, **keys)})
