"""High-water marks, and the ledger of what autograd keeps."""

import warnings
import weakref

import torch

from megaaccum.observe.memory import RETRIED, Activations, HighWater, Ledger
from megaaccum.platform import cpu
from megaaccum.upstream import pytorch


def test_marks_are_the_most_at_a_time():
    marks = HighWater()
    whole, shard = torch.zeros(100), torch.zeros(10)
    marks.measure(lambda: {"gradients_whole": [whole, whole.view(10, 10)[1]], "gradients_shard": [shard]})
    marks.measure(lambda: {"gradients_whole": [], "gradients_shard": [torch.zeros(20)]})
    expected = {"gradients": 440, "gradients_whole": 400, "gradients_shard": 80}
    assert marks.pop() == expected
    assert marks.pop() == {}


def test_a_storage_of_two_kinds_counts_for_the_first():
    marks, flat = HighWater(), torch.zeros(64)
    marks.measure(lambda: {"buffers": [flat], "gradients_whole": [flat[:8]]})
    assert marks.pop() == {"buffers": 256}


def test_what_comes_and_goes_is_added_to_what_is_there():
    marks = HighWater()
    marks.measure(lambda: {"parameters_shard": [torch.zeros(4)]})
    for size in (8, 24, 16, 0):
        marks.note("parameters_whole", size)
    assert marks.pop()["parameters"] == 16 + 24


def test_steps_that_hold_the_same_are_measured_one_in_ten():
    marks, sizes = HighWater(), [4, 8, 8, *[8] * 9, 8, *[16] * 9, 16, 16, *[2] * 9, 2]
    measured, seen = [], []
    for number, size in enumerate(sizes):
        marks.measure(
            lambda number=number, size=size: measured.append(number) or {"gradients_whole": [torch.zeros(size)]}
        )
        marks.note("p2p", number + 1)
        held = marks.pop()
        assert held.pop("p2p") == number + 1
        assert held.pop("gradients") == held["gradients_whole"]
        seen.append(held["gradients_whole"] // 4)
    assert measured == [0, 1, 2, 12, 22, 23, 33]
    # A change is seen at the next measurement, and from then on until two in a row agree.
    assert seen == [4, 8, 8, *[8] * 9, 8, *[8] * 9, 16, 16, *[16] * 9, 2]


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
    """A backend releases it and gathers it again: the backward reads its new value, and gradients equal those of a
    model that was left alone."""
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


class Allocator:
    """The part of torch.cuda that counts bytes."""

    def __init__(self) -> None:
        self.now = self.peak = self.resets = self.retries = 0

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def reset_peak_memory_stats(self) -> None:
        self.peak, self.resets = self.now, self.resets + 1

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_stats_as_nested_dict(self) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}


def test_on_a_gpu_activations_are_what_nothing_else_holds(monkeypatch):
    """Parameters are counted once, though their whole and sharded parts have marks of their own."""
    allocator, marks, activations = Allocator(), HighWater(), Activations([])
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_stats_as_nested_dict"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    held = {"parameters_whole": 100, "parameters_shard": 50, "gradients_whole": 200, "optimizer": 300, "buffers": 10}
    allocator.allocate(sum(held.values()))

    def step(size: int) -> int:
        for kind, number in (held | {"host": 1000, "p2p": 7}).items():
            marks.note(kind, number)
        with activations.watching(marks):
            allocator.allocate(size)
            allocator.allocate(-size)
        return marks.pop()["activations"]

    assert step(77) == 77
    assert step(60) == 77
    assert step(90) == 90
    assert allocator.resets == 1, "the peak is the user's too"


def test_an_allocation_that_is_tried_again_is_named(monkeypatch):
    """It waits for the whole device, which two ranks under a V schedule do not survive."""
    allocator, activations = Allocator(), Activations([])
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_stats_as_nested_dict"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for retries in (0, 2, 0):
            with activations.watching(HighWater()):
                allocator.retries += retries
    assert [str(each.message) for each in said] == [RETRIED]


def test_a_watched_send_is_not_kept():
    """On NCCL no rank waits for a send: its tensor goes when the message has left."""
    noted = []

    class Group:
        def size(self) -> int:
            return 2

    send = pytorch.noting(lambda group, tensors, *_: object(), "send", 0)
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    with pytorch.watched_collectives(lambda *args, **_: noted.append(1)):
        work = send(Group(), [tensor], 1, 0)
        del tensor
    assert gone() is None
    assert (work is not None, noted) == (True, [1])
