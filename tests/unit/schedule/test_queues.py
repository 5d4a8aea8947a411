"""On NCCL a receive is a kernel that waits on the device: with how many hardware queues no schedule can be stuck."""

import pytest

from megaaccum.errors import ConfigError
from megaaccum.executor import p2p
from megaaccum.schedule.validate import sends_needed
from tests.support import queues as simulated
from tests.support.queues import OWN, schedule, stuck, stuck_places


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


@pytest.mark.parametrize("name", OWN)
def test_a_host_that_waits_for_its_device_before_any_pass_goes_on(name):
    """CUDA makes a host wait to load a kernel, to free memory and to set up a communicator."""
    assert not stuck_places(schedule(name, 4))


@pytest.mark.parametrize(("name", "places"), [("1f1b", 3), ("zb-h1", 3), ("interleaved", 32), ("zbv", 39)])
def test_receives_that_wait_for_passes_of_their_own_rank_would_hang_it(name, places):
    """The same with receives posted ahead whatever they wait for."""
    assert len(stuck_places(schedule(name, 4), at_once=True)) == places


def test_the_command_prints_how_many_places_are_stuck(capsys, monkeypatch):
    """`python -m tests.support.queues`."""
    monkeypatch.setattr(simulated, "OWN", ["1f1b", "zbv"])
    assert simulated.main(["2"]) == 0
    *_, first, last = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["1f1b", "24", "0"] and last.split()[:3] == ["zbv", "72", "0"]
    assert int(last.split()[3]) > 0


def test_a_message_needs_the_sends_that_it_answers():
    """1F1B on two ranks: the gradient of micro-batch m answers this rank's activation m."""
    made = schedule("1f1b", 2)
    assert sends_needed(made, 0) == {("F", (0, m)): m + 1 for m in range(6)} | {("B", (1, m)): m + 1 for m in range(6)}
    # Rank 0 sends activation m when gradient m - 2 has come.
    assert sends_needed(made, 1) == {("F", (0, m)): max(m - 1, 0) for m in range(6)} | {
        ("B", (1, m)): m + 1 for m in range(6)
    }
    assert set(sends_needed(made, 1, forward_only=True).values()) == {0}


@pytest.mark.parametrize(
    ("name", "needed", "too_few"), [("1f1b", 5, 3), ("zb-h1", 5, 3), ("zbv", 9, 5), ("dualpipev", 9, 5)]
)
def test_with_fewer_queues_a_flush_can_be_stuck(name, needed, too_few):
    made = schedule(name, 4)
    assert p2p.queues_needed(made) == needed
    assert any(stuck(made, too_few, offset) for offset in range(too_few - 1))
    assert not stuck(made, needed)


@pytest.mark.parametrize("name", OWN)
def test_any_number_of_queues_passes_where_a_kernel_that_has_started_lets_others_start(name, monkeypatch):
    """Two receives ahead whatever they wait for would not: the second waits for the first in its stream, and everything
    in the same queue waits for it."""
    made = schedule(name, 4)
    assert not any(stuck(made, queues, lenient=True) for queues in (1, 2, 4, 8))
    monkeypatch.setattr(p2p, "AHEAD_ON_NCCL", 2)
    assert stuck(made, 1, lenient=True, at_once=True)


def test_the_default_of_cuda_is_too_few_for_a_v(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    p2p.check_queues(schedule("zb-h1", 8))
    with pytest.raises(ConfigError, match="has 8 hardware queues for them and for compute"):
        p2p.check_queues(schedule("dualpipev", 8))
