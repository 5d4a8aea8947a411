"""The loader: the same samples however a batch is cut, resumable, ahead of its user, and clean in its endings."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from megaaccum.config.batch import BatchPlan
from megaaccum.config.schema import BatchConfig
from megaaccum.errors import DataError
from megaaccum.platform import cpu
from megaaccum.pretrain.data.dataset import build_datasets
from megaaccum.pretrain.data.loader import MicrobatchLoader
from tests.support.data_samples import counting_pair, make_plan

SEQ = 4


class Numbered:
    """Sample i is i, i+1, ...; it remembers what was asked of it."""

    def __init__(self, length: int = 1000, bad: int | None = None):
        self.length = length
        self.bad = bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked.append(index)
        if index == self.bad:
            raise OSError(5, "Input/output error")
        text = torch.arange(index, index + SEQ + 1)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(SEQ),
            "position_ids": torch.arange(SEQ),
            "dataset_id": torch.tensor(0),
        }


def open_loader(dataset=None, *, mbs=2, rank=0, dp=1, gbs=8, consumed=0, num_workers=2, **options) -> MicrobatchLoader:
    sizes = BatchConfig(micro_batch_size=mbs, global_batch_size=gbs)
    batch = BatchPlan.solve(sizes, data_parallel_size=dp, seq_length=SEQ)
    dataset, places = dataset or Numbered(), dict(dp_rank=rank, consumed_samples=consumed)
    return MicrobatchLoader(dataset, batch, num_workers=num_workers, **places, **options)


def samples(batches) -> list[list[int]]:
    """Sample numbers of each micro-batch."""
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def steps(loader: MicrobatchLoader, count: int) -> list[list[list[int]]]:
    """Sample numbers of `count` committed steps."""
    taken = []
    for _ in range(count):
        taken.append(samples(loader.next_step()))
        loader.commit()
    return taken


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megaaccum-loader")]


@pytest.fixture(scope="module", autouse=True)
def a_short_collection():
    """After each test what it made is collected, not all that is imported, which takes half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert not loader_threads()


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_order_of_one_rank(workers):
    with open_loader(rank=1, dp=2, num_workers=workers) as loader:
        assert steps(loader, 2) == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]


def test_shapes_and_types():
    with open_loader() as loader:
        batch = loader.next_step()[0]
    assert sorted(batch) == ["document_starts", "labels", "loss_mask", "num_tokens", "position_ids", "tokens"]
    assert batch.pop("document_starts") is None
    assert batch.pop("num_tokens") == 2 * SEQ
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, SEQ), torch.int64),
        "labels": ((2, SEQ), torch.int64),
        "loss_mask": ((2, SEQ), torch.float32),
        "position_ids": ((2, SEQ), torch.int64),
    }


def test_documents_are_where_they_begin_and_nothing_of_length_squared():
    with open_loader(document_end=2) as loader:
        first, second, *_ = loader.next_step()
    assert first["document_starts"].tolist() == [[True, False, False, True], [True, False, True, False]]
    assert second["document_starts"].tolist() == [[True, True, False, False], [True, False, False, False]]
    assert sum(each.nbytes for each in first.values()) <= 2 * SEQ * (3 * 8 + 4 + 1) + 8


def test_documents_that_a_sample_tells_are_taken_from_it():
    class Packed(Numbered):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return super().__getitem__(index) | {"document_starts": torch.arange(SEQ) == index % SEQ}

    with open_loader(Packed(), document_end=2) as loader:
        assert loader.next_step()[1]["document_starts"].int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_tensor_is_pinned_for_the_gpu_of_its_rank(monkeypatch, workers):
    """By stand-ins, without a GPU: pinning needs the current device of the thread that reads."""
    current, pinned = threading.local(), []

    @contextmanager
    def device(of):
        current.is_in = of
        yield
        current.is_in = None

    def pin_memory(tensor):
        assert current.is_in == torch.device("cuda", 1)
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(cpu, "has_accelerator", lambda: True)
        on_a_gpu.setattr(cpu, "device", lambda: torch.device("cuda", 1))
        loader = open_loader(document_end=2, num_workers=workers)
    with loader:
        batch = loader.next_step()[0]
        assert all(any(each is one for one in pinned) for each in batch.values())
    with open_loader(num_workers=workers) as loader:
        pinned.clear()
        loader.next_step()
        assert not pinned


def test_a_whole_step_is_ready_when_the_one_before_took_longer():
    """120 micro-batches: the thread is ahead by as many, so none is waited for."""
    with open_loader(Numbered(10_000), mbs=1, gbs=120, num_workers=2) as loader:
        for _ in range(4):
            loader.next_step()
            wait_until(lambda: all(each.done() for each in loader._stream._ahead))  # the step takes longer than reading
            assert len(loader._stream._ahead) == 121
            loader.commit()


@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (1, 24), (2, 1), (2, 3), (3, 4), (4, 2), (8, 1), (24, 1)])
def test_a_step_has_the_same_samples_however_it_is_cut(dp, mbs):
    loaders = [open_loader(mbs=mbs, rank=rank, dp=dp, gbs=24) for rank in range(dp)]
    for step in range(3):
        taken = [sample for loader in loaders for batch in samples(loader.next_step()) for sample in batch]
        assert sorted(taken) == list(range(24 * step, 24 * (step + 1)))
        for loader in loaders:
            loader.commit()
    for loader in loaders:
        loader.close()


def test_a_restart_goes_on_where_the_last_commit_was():
    with open_loader(rank=1, dp=2) as loader:
        whole = steps(loader, 7)
    for k in range(7):
        with open_loader(rank=1, dp=2, consumed=8 * k) as loader:
            assert steps(loader, 7 - k) == whole[k:]


def test_a_restart_may_cut_the_batch_another_way():
    with open_loader(consumed=8, mbs=1, dp=2, rank=1, gbs=4) as loader:
        assert steps(loader, 2) == [[[9], [11]], [[13], [15]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_did_not_commit_is_pulled_again_without_reading_again(workers):
    dataset = Numbered()
    with open_loader(dataset, num_workers=workers) as loader:
        first = loader.next_step()
        again = loader.next_step()
        assert samples(first) == samples(again) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        loader.commit()
        assert samples(loader.next_step()) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert len(dataset.asked) == len(set(dataset.asked))


def test_a_batch_may_grow_from_step_to_step():
    with open_loader(gbs=8) as loader:
        assert samples(loader.next_step(1)) == [[0, 1]]
        loader.commit(2)
        assert samples(loader.next_step(2)) == [[2, 3], [4, 5]]
        loader.commit(4)
        assert samples(loader.next_step()) == [[6, 7], [8, 9], [10, 11], [12, 13]]


def test_a_step_that_was_not_pulled_cannot_be_committed():
    with open_loader() as loader, pytest.raises(AssertionError, match="pulled before"):
        loader.commit()


@pytest.mark.parametrize(("workers", "depth"), [(1, 4), (7, 7)])
def test_it_reads_a_step_or_more_ahead_and_no_further(workers, depth):
    dataset = Numbered()
    with open_loader(dataset, num_workers=workers) as loader:
        wait_until(lambda: len(dataset.asked) == 2 * (depth + 1))  # `depth` in the queue, one in the thread's hand
        loader.next_step(1)
        wait_until(lambda: len(dataset.asked) == 2 * (depth + 2))
        time.sleep(0.05)
        assert len(dataset.asked) == 2 * (depth + 2)


def test_without_workers_nothing_is_read_before_it_is_asked_for():
    dataset = Numbered()
    with open_loader(dataset, num_workers=0) as loader:
        assert dataset.asked == []
        loader.next_step(1)
    assert dataset.asked == [0, 1]
    assert not loader_threads()


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_reaches_the_user_with_its_cause(workers):
    with open_loader(Numbered(bad=5), num_workers=workers) as loader:
        assert samples(loader.next_step(2)) == [[0, 1], [2, 3]]
        for _ in range(2):
            with pytest.raises(DataError, match=r"sample 5 cannot be read: OSError: \[Errno 5\]") as caught:
                loader.next_step(3)
            assert isinstance(caught.value.__cause__, OSError)
        assert samples(loader.next_step(2)) == [[0, 1], [2, 3]], "what was read before the error is lost"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_the_dataset(workers):
    with open_loader(Numbered(length=10), num_workers=workers) as loader:
        assert steps(loader, 1) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
        assert samples(loader.next_step(1)) == [[8, 9]]
        with pytest.raises(DataError, match="sample 10 does not exist: the dataset was built with 10"):
            loader.next_step()


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_outside_the_vocabulary(workers):
    with open_loader(vocab_size=8, num_workers=workers) as loader:
        assert samples(loader.next_step(2)) == [[0, 1], [2, 3]]
        with pytest.raises(DataError, match="sample 4 holds id 8, but the vocabulary has 8 entries"):
            loader.next_step()


def test_negative_ids():
    loader = open_loader(consumed=-4, vocab_size=100, num_workers=0)
    with pytest.raises(DataError, match="sample -4 holds id -4"):
        loader.next_step()


def test_a_thread_reads_ahead_where_a_gpu_leaves_it_a_core(monkeypatch):
    with open_loader(num_workers=None):
        assert not loader_threads()
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(cpu, "device", lambda: torch.device("cuda", 1))
    with open_loader(num_workers=None):
        assert len(loader_threads()) == 1


def test_closing_ends_the_thread_wherever_it_is():
    for depth in (1, 2):
        loader = open_loader(num_workers=depth)
        assert len(loader_threads()) == 1
        loader.close()
        loader.close()
        assert not loader_threads()
    loader = open_loader(Numbered(length=2))
    time.sleep(0.05)  # the thread has met the end
    loader.close()
    assert not loader_threads()


def test_a_forgotten_loader_ends_its_thread():
    open_loader().next_step()
    gc.collect()
    wait_until(lambda: not loader_threads())


def test_a_slow_dataset_does_not_hold_up_the_closing():
    class Slow(Numbered):
        def __getitem__(self, index: int):
            time.sleep(0.01)
            return super().__getitem__(index)

    with open_loader(Slow()) as loader:
        loader.next_step(1)


def test_the_files_of_a_run_in_the_same_order_after_a_restart(tmp_path):
    corpus = str(counting_pair(tmp_path / "corpus"))

    def run(consumed: int, count: int) -> list[torch.Tensor]:
        data = build_datasets(make_plan(tmp_path / "run", data_path=[corpus], vocab_size=2000, split="80,20,0"))
        with open_loader(data.train, gbs=4, consumed=consumed) as loader:
            taken = []
            for _ in range(count):
                taken += [batch["tokens"] for batch in loader.next_step()]
                loader.commit()
        return taken

    whole, rest = run(0, 10), run(24, 4)
    assert len(whole) == 20
    assert all(torch.equal(a, b) for a, b in zip(whole[12:], rest, strict=True))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_in_runs_a_rank_takes_samples_that_follow_each_other(dp):
    """Steps of 8 samples from sample 3 on; the ranks' runs, one after the other, are the batch in order."""
    ranks = []
    for rank in range(dp):
        with open_loader(rank=rank, dp=dp, mbs=1, consumed=3, in_runs=True) as loader:
            ranks.append(steps(loader, 2))
    for step in range(2):
        order = [sample for taken in ranks for microbatch in taken[step] for sample in microbatch]
        assert order == list(range(3 + 8 * step, 11 + 8 * step))
