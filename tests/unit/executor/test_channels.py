"""The order in which stages connect, without ranks."""

import pytest

from megaaccum.executor.p2p import in_turn
from megaaccum.schedule.build import build
from megaaccum.schedule.validate import sends


def waits(order: list[tuple[int, int, str]]) -> int:
    """Connections that come after each other on the longest way: a rank makes its own one by one, and both wait."""
    done: dict[int, int] = {}
    for source, target, _ in order:
        done[source] = done[target] = max(done.get(source, 0), done.get(target, 0)) + 1
    return max(done.values())


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zbv", "dualpipev"])
def test_neighbours_connect_side_by_side(name):
    """16 stages wait as often as 4; rank by rank, they would wait once per channel."""
    channels = {}
    for pp in (4, 16):
        schedule = build(name, pp=pp, num_microbatches=2 * pp)
        channels[pp] = {at for rank in range(pp) for at in sends(schedule, rank)}
        assert sorted(in_turn(channels[pp])) == sorted(channels[pp])
    assert waits(in_turn(channels[16])) == waits(in_turn(channels[4])) <= 8
    assert waits(sorted(channels[16])) >= 15
