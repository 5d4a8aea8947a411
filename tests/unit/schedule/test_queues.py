"""On NCCL a receive is a kernel that waits on the device: with how many hardware queues no schedule can be stuck."""

import pytest

from megaaccum.errors import ConfigError
from megaaccum.executor import p2p
from megaaccum.schedule import build
from tests.support.queues import stuck

OWN = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "v-half", "v-min"]


def schedule(name: str, pp: int):
    return build(name, pp=pp, num_microbatches=3 * pp, chunks=2 if name == "interleaved" else None)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", OWN)
def test_every_number_of_queues_passes_or_is_refused(name, pp, monkeypatch):
    made = schedule(name, pp)
    for queues in (1, 8, 32):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        if queues >= p2p.queues_needed(made):
            p2p.check_queues(made)
            assert not any(stuck(made, queues, offset) for offset in range(queues - 1))
        else:
            with pytest.raises(ConfigError, match=f"set CUDA_DEVICE_MAX_CONNECTIONS to {p2p.queues_needed(made)} or"):
                p2p.check_queues(made)


@pytest.mark.parametrize(
    ("name", "needed", "too_few"), [("gpipe", 5, 4), ("zb-h1", 5, 3), ("zbv", 9, 8), ("dualpipev", 9, 8)]
)
def test_with_fewer_queues_a_flush_can_be_stuck(name, needed, too_few):
    made = schedule(name, 4)
    assert p2p.queues_needed(made) == needed
    assert stuck(made, too_few)
    assert not stuck(made, needed)


@pytest.mark.parametrize("name", OWN)
def test_one_receive_ahead_passes_wherever_a_kernel_that_has_started_lets_others_start(name, monkeypatch):
    """Why one receive is posted ahead over NCCL and not two: the second waits for the first in its stream, and on a
    shared queue everything waits for it."""
    made = schedule(name, 4)
    assert not any(stuck(made, queues, lenient=True) for queues in (1, 2, 4, 8))
    monkeypatch.setattr(p2p, "AHEAD_ON_NCCL", 2)
    assert stuck(made, 1, lenient=True)


def test_the_default_of_cuda_is_too_few_for_a_v(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    p2p.check_queues(schedule("zb-h1", 8))
    with pytest.raises(ConfigError, match="has 8 hardware queues for them and for compute"):
        p2p.check_queues(schedule("dualpipev", 8))
