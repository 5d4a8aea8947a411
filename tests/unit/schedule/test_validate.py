"""Every schedule proves itself, and every way to break one is named."""

import pytest

from megaaccum.errors import ConfigError, ScheduleError
from megaaccum.schedule import Action, build, make_schedule, names, parse, validate
from megaaccum.schedule.validate import receives


def sizes(name: str, pp: int) -> list[int]:
    step = pp if name == "interleaved" else 1
    return list(range(2 * pp, 4 * pp + 1, step))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_every_schedule_is_valid(name, pp):
    for m in sizes(name, pp):
        validate(build(name, pp=pp, num_microbatches=m))


@pytest.mark.parametrize("group_size", [4, 5, 6, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_with_other_groups(chunks, group_size):
    for m in (8, 12, 16, 24):
        if m >= group_size and (m % group_size == 0 or m % group_size >= 4):
            validate(build("interleaved", pp=4, num_microbatches=m, chunks=chunks, group_size=group_size))


def footprint(name: str, pp: int = 4, m: int = 16):
    return validate(build(name, pp=pp, num_microbatches=m))


def test_footprints():
    """Ranks hold as many micro-batches as the papers state (1F1B: p - i; ZB-V: 2p half stages; DualPipeV: 2p + 1)."""
    assert footprint("gpipe").in_flight == (16,) * 4
    assert footprint("1f1b").in_flight == (4, 3, 2, 1)
    assert footprint("interleaved").in_flight == (11, 9, 7, 5)
    assert footprint("zb-h1").in_flight == (4, 3, 2, 1)
    assert footprint("zbv").in_flight == (8,) * 4
    assert footprint("dualpipev").in_flight == (9,) * 4
    for name in ("gpipe", "1f1b", "interleaved"):
        assert footprint(name).deferred == (0,) * 4
    assert footprint("dualpipev").deferred == (1, 2, 3, 4)


def table(*rows: str, chunks: int = 1, placement: str = "loop", m: int = 2):
    items = [[parse(cell) for cell in row.split()] for row in rows]
    return make_schedule("mine", num_microbatches=m, placement=placement, chunks=chunks, items=items)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0F0 0F1 0I0 0W0 0I1", "0W1 (weight gradient, chunk 0, micro-batch 1) is missing"),
        ("0F0 0B0", "0F1 (forward, chunk 0, micro-batch 1) is missing"),
        ("0F0 0F1 0B0", "0I1 (input gradient, chunk 0, micro-batch 1) is missing"),
        ("0F0 0F1 0B0 0B1 0B1", "0B1 (backward, chunk 0, micro-batch 1) comes when that is done already"),
        ("0F0 0F1 0F1 0B0 0B1", "0F1 (forward, chunk 0, micro-batch 1) comes when that is done already"),
        ("0F0 0B0 0W0 0F1 0B1", "0W0 (weight gradient, chunk 0, micro-batch 0) comes when that is done already"),
        ("0F0 0W0 0I0 0F1 0B1", "0W0 (weight gradient, chunk 0, micro-batch 0) comes before 0I0 (input gradient)"),
        ("0B0 0F0 0F1 0B1", "0B0 (backward, chunk 0, micro-batch 0) comes before 0F0 (forward)"),
        ("0F1 0F0 0B0 0B1", "0F1 (forward, chunk 0, micro-batch 1) comes before 0F0; forwards of a chunk"),
        ("0F0 0F1 0F2 0B0 0B1", "0F2 (forward, chunk 0, micro-batch 2) is outside 1 chunks and 2 micro-batches"),
        ("0F0 0F1 1F0 0B0 0B1", "1F0 (forward, chunk 1, micro-batch 0) is outside 1 chunks"),
    ],
)
def test_what_is_wrong_on_one_rank(row, said):
    good = "0F0 0B0 0F1 0B1"
    with pytest.raises(ScheduleError) as caught:
        validate(table(good, row))
    assert "schedule mine, rank 1: " + said in str(caught.value)


def test_a_cycle():
    """Rank 0 wants the gradient of micro-batch 0 before it makes micro-batch 1; rank 1 wants it the other way round."""
    with pytest.raises(ConfigError) as caught:
        validate(table("0F0 0B0 0F1 0B1", "0F0 0F1 0B0 0B1"))
    assert str(caught.value).splitlines()[1:] == [
        "rank 0 waits in 0B0 (backward, chunk 0, micro-batch 0) for 0I0 of rank 1",
        "rank 1 waits in 0F1 (forward, chunk 0, micro-batch 1) for 0F1 of rank 0",
    ]


def test_messages_may_be_asked_for_in_another_order_than_they_are_sent():
    schedule = table("0F0 0F1 0B0 0B1", "0F0 0F1 0B1 0B0")
    validate(schedule)
    assert receives(schedule, 0) == {(1, 0, "B"): [(1, 1), (1, 0)]}, "the sender's order"


def test_two_chunks_of_a_v_feed_each_other():
    validate(table("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", chunks=2, placement="v"))
    with pytest.raises(ScheduleError, match=r"rank 0 waits in 1F0 .* for 0F0 of rank 0"):
        validate(table("1F0 0F0 1B0 0B0 0F1 1F1 1B1 0B1", chunks=2, placement="v"))


def test_leaving_out_any_action_is_noticed():
    schedule = build("dualpipev", pp=2, num_microbatches=4)
    for rank in range(2):
        for at, item in enumerate(schedule.items[rank]):
            rows = [list(row) for row in schedule.items]
            rows[rank].pop(at)
            broken = make_schedule("broken", num_microbatches=4, placement="v", chunks=2, items=rows)
            with pytest.raises(ScheduleError):
                validate(broken)
            assert item  # every action of the table was tried


def test_swapping_dependent_neighbours_is_noticed():
    rows = [list(row) for row in build("zb-h1", pp=2, num_microbatches=4).items]
    at = rows[1].index(Action("I", 0, 2))
    assert rows[1][at - 1] == Action("F", 0, 2)
    rows[1][at - 1], rows[1][at] = rows[1][at], rows[1][at - 1]
    with pytest.raises(ScheduleError, match=r"0I2 .* comes before 0F2"):
        validate(make_schedule("swapped", num_microbatches=4, placement="loop", chunks=1, items=rows))
