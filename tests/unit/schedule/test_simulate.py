"""The simulator against closed forms, and our tables against torch's in it."""

import subprocess
import sys

import pytest

from megaaccum.errors import ScheduleError
from megaaccum.schedule import Action, Costs, Pair, build, held, make_schedule, names, simulate, validate

PIPELINES = [(pp, m) for pp in (2, 3, 4, 8) for m in (2 * pp, 3 * pp, 4 * pp)]


def priced(name: str, pp: int, m: int, f: float, i: float, w: float, **options):
    """`name` with a rank's whole work per micro-batch, a backward's gradient sent when the backward is done."""
    schedule = build(name, pp=pp, num_microbatches=m)
    return simulate(schedule, Costs.per_rank(f, i, w, chunks=schedule.chunks), early_send=False, **options)


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (1.0, 2.5, 0.5)])
def test_closed_forms(pp, m, f, i, w):
    """Bubbles of GPipe, 1F1B (arXiv 2104.04473), interleaved (the same) and ZB-H1 (arXiv 2401.10241, table 2)."""
    assert priced("gpipe", pp, m, f, i, w).bubble == pytest.approx((pp - 1) * (f + i + w))
    assert priced("1f1b", pp, m, f, i, w).bubble == pytest.approx((pp - 1) * (f + i + w))
    if m % pp == 0:
        assert priced("interleaved", pp, m, f, i, w).bubble == pytest.approx((pp - 1) * (f + i + w) / 2)


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.25, 0.75)])
def test_zero_bubble_h1(pp, m, f, i, w):
    assert priced("zb-h1", pp, m, f, i, w).bubble == pytest.approx((pp - 1) * (f + i - w))


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
def test_v_shapes_wait_for_one_chunk_per_rank_between_equal_passes(pp, m):
    """In units of a chunk's pass, (pp - 1): with a rank's F = I = W = 1, half of that."""
    assert priced("zbv", pp, m, 1, 1, 1).bubble == pytest.approx((pp - 1) / 2)
    assert priced("dualpipev", pp, m, 1, 1, 1).bubble == pytest.approx((pp - 1) / 2)


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize("fused", [3.0, 2.5, 2.0])
def test_dualpipev_is_no_worse_than_its_closed_form(pp, m, fused):
    """(n - 1)(F&B + B - 3W) of chunk passes for n ranks (DeepSeek-AI/DualPipe's README counts 2n ranks)."""
    schedule = build("dualpipev", pp=pp, num_microbatches=m)
    costs = Costs(forward=1, input_grad=1, weight_grad=1, fused=fused)
    simulation = simulate(schedule, costs, early_send=False)
    assert simulation.bubble <= (pp - 1) * (fused + 2 - 3) + 1e-9


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"])
def test_a_pass_of_no_time_takes_none_from_the_one_after_it(name):
    """Each rank computes as long as its passes take, however many of them take no time."""
    for f, i, w in ((1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0)):
        assert priced(name, 2, 4, f, i, w).busy == pytest.approx([4 * (f + i + w)] * 2)


def test_perfect_makespans():
    """Perfect zero-bubble makespans are 1.0625 at 8 micro-batches and 1.03125 at 16."""
    for name in ("zbv", "dualpipev"):
        for m, ratio in ((8, 1.0625), (16, 1.03125)):
            schedule = build(name, pp=4, num_microbatches=m)
            simulation = simulate(schedule, Costs.per_rank(60, 60, 60, chunks=2))
            assert simulation.makespan / (m * 180) == pytest.approx(ratio)


@pytest.mark.parametrize("name", names())
def test_what_is_busy_is_the_work(name):
    schedule = build(name, pp=4, num_microbatches=8)
    simulation = simulate(schedule, Costs.per_rank(2, 3, 1, chunks=schedule.chunks, p2p=0.25))
    assert simulation.busy == pytest.approx([8 * 6] * 4)
    assert simulation.utilisation == pytest.approx(48 / simulation.makespan)
    assert simulation.bubble == pytest.approx(simulation.makespan - 48)


@pytest.mark.parametrize("name", names())
def test_spans_respect_dependencies(name):
    """Every action starts after what it needs, one action at a time, with latency between ranks only."""
    schedule = build(name, pp=4, num_microbatches=8)
    simulation = simulate(schedule, Costs(forward=1, input_grad=1.5, weight_grad=0.5, p2p=0.25), early_send=False)
    done = {
        (action.kind.replace("I", "B"), schedule.stage(rank, action), action.microbatch): (end, rank)
        for rank in range(4)
        for action, (_, end) in zip(schedule.actions(rank), simulation.spans[rank], strict=True)
    }
    for rank in range(4):
        free = 0.0
        for action, (start, end) in zip(schedule.actions(rank), simulation.spans[rank], strict=True):
            assert start >= free
            free = end
            stage = schedule.stage(rank, action)
            source = stage - 1 if action.kind == "F" else stage + 1
            if action.kind != "W" and 0 <= source < schedule.num_stages:
                ready, other = done["F" if action.kind == "F" else "B", source, action.microbatch]
                assert start >= ready + (0.25 if other != rank else 0.0) - 1e-9


def test_latency_is_paid_once_per_hop_of_the_fill():
    free, slow = (
        simulate(build("gpipe", pp=4, num_microbatches=8), Costs(forward=1, input_grad=1, weight_grad=1, p2p=p2p))
        for p2p in (0.0, 0.1)
    )
    assert slow.makespan == pytest.approx(free.makespan + 6 * 0.1)


def test_stages_that_differ():
    """A head that costs as much as two layers holds everyone up, by the slowest stage."""
    schedule = build("1f1b", pp=2, num_microbatches=4)
    simulation = simulate(schedule, Costs(forward=[1, 2], input_grad=[1, 2], weight_grad=[1, 2]), early_send=False)
    assert simulation.makespan == pytest.approx(1 + 4 * 6 + 2)
    with pytest.raises(ScheduleError, match="3 durations for 2 stages"):
        simulate(schedule, Costs(forward=[1, 2, 3], input_grad=1, weight_grad=1))


def test_fused_pairs_with_a_cost_end_together():
    pair = Pair(Action("F", 0, 1), Action("B", 0, 0))
    items = [[Action("F", 0, 0), pair, Action("B", 0, 1)]]
    schedule = make_schedule("mine", num_microbatches=2, placement="loop", chunks=1, items=items)
    apart = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1))
    assert apart.spans[0] == ((0, 1), (1, 2), (2, 4), (4, 6))
    fused = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1, fused=2.5))
    assert fused.spans[0] == ((0, 1), (1, 3.5), (1, 3.5), (3.5, 5.5))
    assert fused.busy == (5.5,)


def test_a_schedule_that_cannot_end():
    items = [[Action(k, 0, m) for k, m in row] for row in (["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"])]
    items = [[action._replace(microbatch=int(action.microbatch)) for action in row] for row in items]
    schedule = make_schedule("cycle", num_microbatches=2, placement="loop", chunks=1, items=items)
    with pytest.raises(ScheduleError, match="cannot end"):
        simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1))


@pytest.mark.parametrize("name", names())
def test_memory_over_time_peaks_where_the_validator_says(name):
    schedule = build(name, pp=4, num_microbatches=8)
    simulation = simulate(schedule, Costs.per_rank(1, 1, 1, chunks=schedule.chunks))
    footprint = validate(schedule)
    for rank in range(4):
        in_flight = held(schedule, simulation, rank)
        assert max(amount for _, amount in in_flight) == footprint.in_flight[rank]
        assert in_flight[-1][1] == 0
        deferred = held(schedule, simulation, rank, activation=0.0, deferred=1.0)
        assert max(amount for _, amount in deferred) == footprint.deferred[rank]


def torch_table(cls, pp: int, m: int):
    """The table that a schedule of torch.distributed.pipelining makes, and nothing of its runtime."""
    maker = object.__new__(cls)
    maker.pp_group_size, maker.num_stages, maker._n_microbatches = pp, 2 * pp, m
    stages = [(rank, 2 * pp - 1 - rank) for rank in range(pp)]
    rows = [[a for a in maker._calculate_single_rank_operations(rank) if a is not None] for rank in range(pp)]

    def ours(rank, action):
        if action.sub_actions:
            return Pair(*(ours(rank, each) for each in action.sub_actions))
        return Action(action.computation_type.value, stages[rank].index(action.stage_index), action.microbatch_index)

    return tuple(tuple(ours(rank, action) for action in row) for rank, row in enumerate(rows))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_the_same_tables_as_torch(name, pp):
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

    cls = {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}[name]
    for m in range(2 * pp, 4 * pp + 1):
        assert build(name, pp=pp, num_microbatches=m).items == torch_table(cls, pp, m)


def test_planners_can_call_this_without_torch():
    """pp 64 x 1,024 micro-batches in one process that has imported neither torch nor numpy nor matplotlib."""
    code = (
        "import sys; from megaaccum.schedule import *\n"
        "s = build('dualpipev', pp=64, num_microbatches=1024); f = validate(s)\n"
        "r = simulate(s, Costs(forward=1, input_grad=1, weight_grad=1))\n"
        "assert f.in_flight == (129,) * 64, f\n"
        "assert r.makespan == 6 * 1024 + 63, r.makespan\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
