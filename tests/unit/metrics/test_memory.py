"""High-water marks, and the ledger of what autograd keeps."""

import torch

from megaaccum.metrics.memory import HighWater, Ledger, bytes_by_kind


def test_marks_are_the_most_at_a_time():
    marks = HighWater()
    whole, shard = torch.zeros(100), torch.zeros(10)
    marks.look({"gradients_whole": [whole, whole.view(10, 10)[1]], "gradients_shard": [shard]})
    marks.look({"gradients_whole": [], "gradients_shard": [torch.zeros(20)]})
    expected = {"gradients": 440, "gradients_whole": 400, "gradients_shard": 80}
    assert marks.take() == expected
    assert marks.take() == {}
    assert bytes_by_kind({"optimizer": 5}) == {"memory_optimizer_bytes": 5}


def test_a_storage_of_two_kinds_counts_for_the_first():
    marks, flat = HighWater(), torch.zeros(64)
    marks.look({"buffers": [flat], "gradients_whole": [flat[:8]]})
    assert marks.take() == {"buffers": 256}


def test_what_comes_and_goes_is_added_to_what_is_there():
    marks = HighWater()
    marks.look({"parameters_shard": [torch.zeros(4)]})
    for size in (8, 24, 16, 0):
        marks.note("parameters_whole", size)
    assert marks.take()["parameters"] == 16 + 24


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def test_the_ledger_counts_what_waits_for_backwards_once_and_no_parameters():
    ledger, model = Ledger(), net()
    first, second = torch.randn(32, 8), torch.randn(32, 8)
    with ledger.watching([model]):
        one = model(first).sum()
        # The input of the first layer, and the output of tanh, which is also the input of the second.
        assert ledger.now == 4 * (32 * 8 + 32 * 16)
        two = model(second).sum()
        one.backward()
        two.backward()
    assert ledger.peak == 2 * 4 * (32 * 8 + 32 * 16)
    assert ledger.now == 0


def test_a_parameter_may_move_between_forward_and_backward():
    """As when a backend releases it and gathers it again: the backward reads what it is then, and gradients are those
    of a model that was left alone."""
    torch.manual_seed(0)
    watched, plain = net(), net()
    plain.load_state_dict(watched.state_dict())
    batch = torch.randn(32, 8)
    with Ledger().watching([watched]):
        loss = watched(batch).square().sum()
        for param in watched.parameters():
            kept, param.data = param.data.clone(), torch.empty(0)
            param.data = kept
        loss.backward()
    plain(batch).square().sum().backward()
    for mine, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert mine.grad.equal(theirs.grad)
