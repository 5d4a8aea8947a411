"""Bounds, cuts and orders: against brute force, against each other, and against what they must never do."""

import random
from itertools import permutations

import pytest

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.bound import Bound
from megaaccum.lab.search.cut import bound_of_cuts, price, tune_cut
from megaaccum.lab.search.profile import LayerCost, Profile, even_cut, read_profile, write_profile
from megaaccum.lab.search.search import compare, proved, search_order
from megaaccum.schedule import Action, Costs, Schedule, build, simulate, validate
from megaaccum.schedule.actions import stage_map
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.pass_numbers import Problem, justified, waves

PROFILE = Profile(
    pattern="E" + "T" * 14 + "L",
    kinds={
        "E": LayerCost(forward=1, input_grad=1, weight_grad=0, activation=1, deferred=0, state=9),
        "T": LayerCost(forward=2, input_grad=2.6, weight_grad=1.5, activation=4, deferred=3, state=6),
        "L": LayerCost(forward=7, input_grad=8, weight_grad=3, activation=5, deferred=2, state=9),
    },
)


def random_costs(seed: int, stages: int) -> Costs:
    chance = random.Random(seed)
    forward, input_grad, weight_grad = ([chance.uniform(0.5, 2) for _ in range(stages)] for _ in range(3))
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, p2p=chance.choice([0, 0.2]))


def all_orders(costs: Costs, limit: float | None) -> float:
    """The least makespan of all orders of two ranks, one chunk each and two micro-batches, by trying them all."""
    names = [(kind, m) for kind in "FIW" for m in (0, 1)]
    ranks = [
        order
        for order in permutations(names)
        if all(order.index((kind, 0)) < order.index((kind, 1)) for kind in "FIW")
        and all(order.index((a, m)) < order.index((b, m)) for a, b in ("FI", "IW") for m in (0, 1))
    ]
    best, memory = float("inf"), Memory.counted(2)
    for first in ranks:
        for second in ranks:
            items = [tuple(Action(kind, 0, m) for kind, m in order) for order in (first, second)]
            table = Schedule(name="", pp=2, num_microbatches=2, stages=((0,), (1,)), items=tuple(items))
            try:
                seconds = simulate(table, costs).makespan
            except ScheduleError:
                continue
            if limit is None or max(memory.peaks(table)) <= limit:
                best = min(best, seconds)
    return best


def bound(schedule: Schedule, costs: Costs, memory: Memory, limit: float | None) -> Bound:
    """The bound of all orders of a schedule's stages and micro-batches."""
    m = schedule.num_microbatches
    return Bound(Problem(costs, stages=schedule.stages, num_microbatches=m, memory=memory, limit=limit))


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_no_order_beats_the_bounds_and_the_search_finds_the_best(seed, limit):
    costs, stages = random_costs(seed, 2), stage_map("loop", pp=2, chunks=1)
    least = all_orders(costs, limit)
    problem = Problem(costs, stages=stages, num_microbatches=2, limit=limit)
    found = search_order(problem, iterations=2000)
    assert found.seconds == pytest.approx(least)
    assert found.bound == pytest.approx(Bound(problem).seconds) and found.bound <= least * (1 + 1e-9)


def test_weight_gradients_that_are_all_done_last_beat_no_bound():
    """After the last weight gradient nothing has to follow, though the last input gradient is on its way for long."""
    stages, memory = stage_map("loop", pp=2, chunks=1), Memory(activation=(5, 1), deferred=(2, 0.1), state=(0, 0))
    costs = Costs(forward=(1, 0.3), input_grad=(0, 0.3), weight_grad=(0.3, 2), p2p=5)
    problem = Problem(costs, stages=stages, num_microbatches=2, memory=memory, limit=20)
    assert Bound(problem).seconds <= search_order(problem, iterations=100).seconds == pytest.approx(12.9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "v-half", "v-min"])
@pytest.mark.parametrize("seed", range(3))
def test_no_named_schedule_beats_its_bound(name, seed):
    for pp, m in ((2, 6), (4, 12)):
        schedule = build(name, pp=pp, num_microbatches=m)
        costs, memory = random_costs(seed, schedule.num_stages), Memory.counted(schedule.num_stages)
        peak = max(memory.peaks(schedule))
        seconds = simulate(schedule, costs, early_send=True).makespan
        for limit in (None, peak, 2 * peak):
            assert bound(schedule, costs, memory, limit).seconds <= seconds * (1 + 1e-9)


def test_bounds_that_are_reached():
    """ZB-H1 and ZB-V with equal passes are the best possible at their memory, and 1F1B's bound is known in full."""
    for name, seconds in (("zb-h1", 27.0), ("zbv", 25.5)):
        schedule = build(name, pp=4, num_microbatches=8)
        costs = Costs.per_rank(1, 1, 1, chunks=schedule.chunks)
        memory = Memory.counted(schedule.num_stages, chunks=schedule.chunks)
        assert bound(schedule, costs, memory, limit=4).seconds == pytest.approx(seconds)
    tight = bound(
        build("zb-h1", pp=4, num_microbatches=8), Costs.per_rank(1, 1, 1, chunks=1), Memory.counted(4), limit=2
    )
    assert tight.by_work(0) == pytest.approx(24 + 7 - 2), "two forwards in the 7 before the first input gradient"
    # Two places, each taken for 9 by a micro-batch, four times, and one forward and one weight gradient to take turns.
    assert tight.by_area(0) == pytest.approx(8 * 9 / 2 + 1)


@pytest.mark.parametrize(("chunks", "placement"), [(1, "loop"), (2, "v"), (2, "loop")])
def test_a_search_keeps_its_limit_and_repeats(chunks, placement):
    stages = stage_map(placement, pp=3, chunks=chunks)
    costs = random_costs(7, 3 * chunks)
    for limit in (2.0 * chunks, 3.0 * chunks):
        first, again = (
            search_order(Problem(costs, stages=stages, num_microbatches=6, limit=limit), iterations=1500, seed=3)
            for _ in range(2)
        )
        assert first.schedule.items == again.schedule.items
        assert max(first.peaks) <= limit
        assert max(Memory.counted(3 * chunks).peaks(first.schedule)) <= limit
        validate(first.schedule)
        assert simulate(first.schedule, costs).makespan == first.seconds
        assert first.gap >= 0


def test_a_search_is_no_slower_than_what_it_starts_from():
    schedule = build("zbv", pp=4, num_microbatches=8)
    for seed in range(3):
        costs = random_costs(seed, 8)
        problem = Problem(costs, stages=schedule.stages, num_microbatches=8)
        found = search_order(problem, start=[schedule], iterations=200)
        assert found.seconds <= simulate(schedule, costs).makespan


@pytest.mark.parametrize("seed", range(6))
def test_passes_that_take_no_time_keep_their_order(seed):
    """Measured costs are 0 where a chunk took no longer than one between the ends: a gap of no time is before a pass of
    no time as well as after it."""
    chance = random.Random(seed)
    forward, input_grad, weight_grad = ([chance.choice([0, 0, 1, 2]) for _ in range(6)] for _ in range(3))
    costs = Costs(forward=[1 + each for each in forward], input_grad=input_grad, weight_grad=weight_grad)
    if seed % 2:
        costs = Costs(forward=forward, input_grad=[1 + each for each in input_grad], weight_grad=weight_grad)
    named = build("interleaved", pp=2, num_microbatches=6, chunks=3)
    problem = Problem(costs, stages=named.stages, num_microbatches=6, limit=max(Memory.counted(6).peaks(named)))
    validate(search_order(problem, start=[named], iterations=100).schedule)


@pytest.mark.parametrize(("name", "m"), [("interleaved", 2), ("v-half", 1), ("v-half", 2), ("zbv", 3)])
def test_a_search_starts_in_the_memory_of_the_named_schedule(name, m):
    """A recomputed layer waits for its weight gradient in more memory than for its input gradient: one micro-batch
    needs no more at once than it holds when it leaves a rank's chunks in turn, and there is always that order."""
    named = build(name, pp=2, num_microbatches=m)
    for activation, deferred in ((1.0, 9.0), (0.1, 0.7), (2.0, 2.1)):
        n = named.num_stages
        memory = Memory(activation=(activation,) * n, deferred=(deferred,) * n, state=(0.3,) * n)
        costs = Costs(forward=1, input_grad=1, weight_grad=1)
        least = 0.6 + activation + deferred
        for limit, start in ((max(memory.peaks(named)), [named]), (least, [])):
            problem = Problem(costs, stages=named.stages, num_microbatches=m, memory=memory, limit=limit)
            assert max(search_order(problem, start=start, iterations=50).peaks) <= limit * (1 + 1e-9)
        with pytest.raises(ScheduleError, match="does not hold one micro-batch"):
            Problem(costs, stages=named.stages, num_microbatches=m, memory=memory, limit=0.99 * least)


def test_a_rank_that_holds_state_alone_bounds_nothing():
    """An embedding of its own, which keeps nothing of a micro-batch, may be the fullest rank."""
    named = build("1f1b", pp=2, num_microbatches=4)
    costs, memory = Costs(forward=1, input_grad=1, weight_grad=1), Memory(
        activation=(0.0, 1.0), deferred=(0.0, 1.0), state=(10.0, 1.0)
    )  # fmt: skip
    problem = Problem(costs, stages=named.stages, num_microbatches=4, memory=memory, limit=10.0)
    found = search_order(problem, start=[named], iterations=2000)
    assert Bound(problem).seconds <= found.seconds < simulate(named, costs).makespan


def test_what_is_not_proved_does_not_leave():
    """An order that deadlocks, one over the limit, and one that the search has timed wrongly."""
    problem = Problem(random_costs(0, 2), stages=stage_map("loop", pp=2, chunks=1), num_microbatches=2, limit=2)
    good = problem.order_of(build("zb-h1", pp=2, num_microbatches=2))
    proved(problem, good, name="good")
    f0, i0 = problem.number(0, 1, 0), problem.number(1, 1, 0)
    swapped = [good[0], [{f0: i0, i0: f0}.get(each, each) for each in good[1]]]
    with pytest.raises(ScheduleError, match=r"0I0 .* comes before 0F0"):
        proved(problem, swapped, name="swapped")
    late = [problem.order_of(build("gpipe", pp=2, num_microbatches=2))[0], good[1]]
    problem.limit = 1
    with pytest.raises(ScheduleError, match="which is over the limit 1"):
        proved(problem, late, name="late")
    problem.limit = None
    problem.seconds[0] *= 2
    with pytest.raises(ScheduleError, match="the search timed its order at"):
        proved(problem, good, name="wrong")


def test_gaps_are_closed_within_the_limit():
    problem = Problem(random_costs(5, 6), stages=stage_map("v", pp=3, chunks=2), num_microbatches=6, limit=5)
    for wave in waves(problem):
        order = wave.order(problem)
        if problem.fits(order):
            then = justified(problem, order)
            assert problem.fits(then)
            assert problem.time(then) <= problem.time(order) * (1 + 1e-12)
            assert [sorted(passes) for passes in then] == [sorted(passes) for passes in order]


def test_an_order_is_taken_only_if_it_gains():
    named, slow = (build(name, pp=4, num_microbatches=8) for name in ("zb-h1", "1f1b"))
    costs = Costs.per_rank(1, 1, 1, chunks=1)
    assert compare(named, slow, costs).adopted
    assert not compare(named, named, costs).adopted
    assert compare(named, named, costs).gain == 0
    assert not compare(slow, named, costs).adopted


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "interleaved"])
def test_a_tuned_cut_is_faster_and_above_the_bound_of_all_cuts(name):
    schedule = build(name, pp=2, num_microbatches=6)
    even = price(PROFILE, even_cut(PROFILE, schedule.num_stages), schedule)
    tuned = tune_cut(PROFILE, schedule)
    least = bound_of_cuts(PROFILE, schedule)
    assert least <= tuned.seconds < even.seconds
    assert sum(tuned.cut) == 16 and min(tuned.cut) >= 1


@pytest.mark.parametrize(("pattern", "pp"), [("TTTT", 4), ("ETTL", 4), ("ETL", 2), ("ETTL", 1), ("TTL", 3), ("ETT", 3)])
def test_a_cut_without_another_beside_it(pattern, pp):
    """One stage, or a layer for each: the embedding and the head may be alone."""
    schedule, profile = build("1f1b", pp=pp, num_microbatches=4), Profile(pattern=pattern, kinds=PROFILE.kinds)
    tuned = tune_cut(profile, schedule)
    assert len(tuned.cut) == pp and sum(tuned.cut) == len(pattern) and min(tuned.cut) >= 1
    assert min(even_cut(profile, pp)) >= 1


def test_the_best_of_all_cuts_of_one_chunk():
    schedule = build("zb-h1", pp=3, num_microbatches=6)
    cuts = [(a, b, 16 - a - b) for a in range(1, 15) for b in range(1, 16 - a)]
    best = min(price(PROFILE, cut, schedule).seconds for cut in cuts)
    assert tune_cut(PROFILE, schedule).seconds == best
    assert bound_of_cuts(PROFILE, schedule) <= best


def test_a_cut_keeps_the_memory_of_every_rank():
    schedule = build("1f1b", pp=2, num_microbatches=6)
    free = tune_cut(PROFILE, schedule)
    limit = max(free.peaks) - 5
    tight = tune_cut(PROFILE, schedule, limit=limit)
    assert max(tight.peaks) <= limit < max(free.peaks)
    assert tight.seconds > free.seconds
    with pytest.raises(ScheduleError, match=r"the closest is .* where rank 0 needs .*, rank 1 needs"):
        tune_cut(PROFILE, schedule, limit=40)


@pytest.mark.parametrize(
    ("pattern", "heavy", "light", "limit", "cut"),
    [("XTTXX", (3, 5), (2, 1), 14, (1, 1, 3)), ("TXTXXXX", (3, 4), (2, 1), 15, (1, 2, 4)),
     ("TTTTXXX", (2, 3), (1, 1), 14, (1, 2, 4))],
)  # fmt: skip
def test_the_least_memory_of_all_cuts_is_found(pattern, heavy, light, limit, cut):
    """Steps on the way hold no less on the fullest rank, or more."""
    each = dict(forward=1, input_grad=1, weight_grad=1, deferred=0)
    kinds = {k: LayerCost(activation=a, state=s, **each) for k, (a, s) in {"T": heavy, "X": light}.items()}
    profile, schedule = Profile(pattern=pattern, kinds=kinds), build("1f1b", pp=3, num_microbatches=6)
    tuned = tune_cut(profile, schedule, limit=limit)
    assert (tuned.cut, max(tuned.peaks)) == (cut, limit)
    with pytest.raises(ScheduleError, match="fits the memory limit"):
        tune_cut(profile, schedule, limit=limit - 1)


def test_bad_input(tmp_path):
    with pytest.raises(ScheduleError, match="layers of kind X, for which kinds has no costs"):
        Profile(pattern="ETXL", kinds=PROFILE.kinds)
    for value in (float("nan"), -1.0):
        with pytest.raises(ScheduleError, match="forward of kind T is"):
            Profile(pattern="T", kinds={"T": LayerCost(forward=value, input_grad=1, weight_grad=1)})
    with pytest.raises(ScheduleError, match="kind T takes no time at all"):
        Profile(pattern="T", kinds={"T": LayerCost(forward=0, input_grad=0, weight_grad=0)})
    stages = stage_map("loop", pp=2, chunks=1)
    for costs in (Costs(forward=(1, 0), input_grad=(1, 0), weight_grad=(1, 0)),
                  Costs(forward=1, input_grad=(1, -1), weight_grad=1),
                  Costs(forward=(1, float("nan")), input_grad=1, weight_grad=1)):  # fmt: skip
        with pytest.raises(ScheduleError, match=r"stage 1 takes (no time|nan|-1)"):
            Problem(costs, stages=stages, num_microbatches=4)
    with pytest.raises(ScheduleError, match=r"rank 0 needs 1 \(0 of it state\); rank 1 needs 1"):
        Problem(Costs(forward=1, input_grad=1, weight_grad=1), stages=stages, num_microbatches=4, limit=0.5)
    (tmp_path / "p.json").write_text("[1]")
    with pytest.raises(ScheduleError, match="needs pattern and kinds"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(ScheduleError, match=r"cannot be cut into 17 stages: .* at most 16"):
        even_cut(PROFILE, 17)


def test_a_profile_in_a_file(tmp_path):
    write_profile(PROFILE, tmp_path / "p.json", device="a test")
    assert read_profile(tmp_path / "p.json") == PROFILE


# --- V-Half and V-Min -------------------------------------------------------------------------------------------------

PUBLISHED = {(4, 8): (53, 59), (4, 16): (101, 107), (8, 16): (113, 123)}
"""Passes of equal length that the generator of arXiv 2405.15362's authors takes, for V-Half and V-Min."""


@pytest.mark.parametrize(("pp", "m"), PUBLISHED)
def test_v_half_and_v_min_are_no_slower_than_published_at_their_memory(pp, m):
    for name, published, held in zip(("v-half", "v-min"), PUBLISHED[pp, m], ((6, 10), (4, 8)), strict=True):
        schedule = build(name, pp=pp, num_microbatches=m)
        validate(schedule)
        assert max(Memory.counted(2 * pp).peaks(schedule)) <= held[pp == 8]
        assert simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)).makespan <= published
