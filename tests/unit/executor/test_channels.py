"""The order in which stages connect, without ranks."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megaaccum.executor import p2p
from megaaccum.executor.p2p import in_turn
from megaaccum.schedule.registry import build
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


def test_a_lane_that_waits_holds_two_multiprocessors(monkeypatch):
    given = {}
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=32))
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **keys: given.update(keys))
    p2p._lane_group([0, 1], True, None)
    assert given["backend"] == "nccl" and given["pg_options"].config.max_ctas <= 2
