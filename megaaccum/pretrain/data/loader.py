"""The micro-batches of one data-parallel rank: which samples, in what order, prepared ahead of their step."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megaaccum.config.batch import BatchPlan
from megaaccum.errors import DataError, MegaaccumError
from megaaccum.platform import cpu
from megaaccum.pretrain.data.order import SampleDataset

Batch = dict[str, torch.Tensor | None]
"""One micro-batch on the CPU, b = micro_batch_size, s = seq_length: tokens, labels and position_ids int64 [b, s],
loss_mask float32 [b, s], document_starts bool [b, s] with reset_attention_mask, else None (True at each row's begin and
after each end of a document), num_tokens int64 [] (unmasked); padding_mask bool [b, s] of rows that may be padded, True
after their last token."""

_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "document_starts", "padding_mask")


class MicrobatchLoader:
    """The micro-batches of one data-parallel rank, from the first sample that no step has consumed yet.

    A step that starts at sample c takes samples [c, c + global_batch_size): micro-batch m of data-parallel rank r holds
    the b samples from c + (m * dp_size + r) * b on. So which samples make up a step depends neither on the
    micro-batch size nor on the number of ranks or micro-batches, and a restart at c continues as if it had not stopped.

    Samples count as consumed at `commit`: a step that was pulled but not committed can be pulled again, from memory.
    A context manager; `close` ends the thread that prepares micro-batches.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        batch: BatchPlan,
        *,
        dp_rank: int,
        consumed_samples: int = 0,
        num_workers: int | None = None,
        vocab_size: int | None = None,
        document_end: int | None = None,
        in_runs: bool = False,
    ):
        """Start to prepare micro-batches. On a GPU their tensors are in pinned memory.

        Args:
            batch: the cut of an optimizer step; its global_batch_size is the default of `next_step` and `commit`.
            dp_rank: this rank's number among the data-parallel ranks.
            consumed_samples: sequences that earlier steps consumed, over all ranks.
            num_workers: micro-batches that a thread prepares ahead, and at least those of a whole step; 0 prepares each
                on request. Default: 2 beside a GPU; 0 without one, where the thread would take the step's own cores.
            vocab_size: the bound that every token id is compared with, if given.
            document_end: the token that ends a document, if attention is kept inside documents.
            in_runs: a rank's micro-batches of a step are consecutive (`Plan.in_runs`): micro-batch m of rank r holds
                the samples from c + (r * micro-batches per rank + m) * b on.
        """
        self._global_batch_size = batch.global_batch_size
        self._round = batch.micro_batch_size * batch.data_parallel_size
        self._pulled: deque[Batch] = deque()
        size, device = batch.micro_batch_size, cpu.device() if cpu.has_accelerator() else None
        step = range(0, self._global_batch_size // batch.data_parallel_size, size) if in_runs else range(1)
        first = dp_rank * size * len(step)
        stride = self._global_batch_size if in_runs else self._round
        starts = (start + first + run for start in itertools.count(consumed_samples, stride) for run in step)
        reader = _Reader(dataset, size, starts, vocab_size, document_end, device)
        if num_workers is None:
            num_workers = 2 if cpu.has_accelerator() else 0
        depth = max(num_workers, batch.num_microbatches)
        self._stream = _Prefetcher(reader, depth) if num_workers else reader

    def next_step(self, num_microbatches: int | None = None) -> list[Batch]:
        """The next optimizer step's micro-batches; the same ones until `commit`. Default: global_batch_size's.

        Raises:
            DataError: a sample cannot be read, holds an id outside the vocabulary, or lies beyond the dataset's end.
        """
        count = self._global_batch_size // self._round if num_microbatches is None else num_microbatches
        while len(self._pulled) < count:
            self._pulled.append(self._stream.read())
        return [self._pulled[m] for m in range(count)]

    def try_next_step(self, num_microbatches: int, *, after: int = 0) -> tuple[list[Batch], MegaaccumError | None]:
        """`next_step`'s micro-batches, or none and the error that it raises, so that all ranks learn of it before they
        begin the step. after: micro-batches of an earlier step that is not committed yet."""
        try:
            return self.next_step(after + num_microbatches)[after:], None
        except MegaaccumError as error:
            return [], error

    def commit(self, num_samples: int | None = None) -> None:
        """Count `num_samples` sequences over all ranks, a multiple of micro_batch_size * dp_size as every batch of a
        plan, as consumed (default: global_batch_size)."""
        num_samples = self._global_batch_size if num_samples is None else num_samples
        assert num_samples <= len(self._pulled) * self._round, "a step must be pulled before it is committed"
        for _ in range(num_samples // self._round):
            self._pulled.popleft()

    def close(self) -> None:
        """End the preparing thread. May be called again."""
        self._stream.close()

    def __enter__(self) -> MicrobatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reader:
    """Reader of one rank's micro-batches, one after the other."""

    def __init__(
        self,
        dataset: SampleDataset,
        size: int,
        starts: Iterator[int],
        vocab_size: int | None,
        document_end: int | None,
        pin_for: torch.device | None,
    ):
        """starts: the first sample of each micro-batch."""
        self._dataset = dataset
        self._document_end, self._pin_for = document_end, pin_for
        self._size = size
        self._starts, self._start = starts, next(starts)
        self._vocab_size = vocab_size

    def read(self) -> Batch:
        samples = [self.sample(index) for index in range(self._start, self._start + self._size)]
        batch: Batch = {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS if key in samples[0]}
        tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
        assert tokens is not None and labels is not None and mask is not None
        if self._vocab_size is not None:
            self._check_ids(torch.stack((tokens, labels), 1), self._start, self._vocab_size)
        self._start = next(self._starts)
        if "document_starts" not in batch:
            batch["document_starts"] = None if self._document_end is None else starts_of(tokens, self._document_end)
        batch["num_tokens"] = mask.count_nonzero()
        if self._pin_for is not None:
            with torch.cuda.device(self._pin_for):  # a thread begins with the first one
                batch = {key: None if each is None else each.pin_memory() for key, each in batch.items()}
        return batch

    def sample(self, index: int) -> dict[str, Any]:
        if index >= len(self._dataset):
            raise DataError(
                f"sample {index:,} does not exist: the dataset was built with {len(self._dataset):,}. It is built for "
                f"train_iters * global_batch_size samples; raise train_iters, or stop before"
            )
        try:
            return self._dataset[index]
        except Exception as error:
            raise DataError(f"sample {index:,} cannot be read: {type(error).__name__}: {error}") from error

    @staticmethod
    def _check_ids(ids: torch.Tensor, first: int, vocab_size: int) -> None:
        """ids: [samples, ...], of samples `first` and on."""
        lowest, highest = ids.aminmax()
        if lowest >= 0 and highest < vocab_size:
            return
        wrong = (ids < 0) | (ids >= vocab_size)
        sample = int(wrong.flatten(1).any(1).nonzero()[0])
        raise DataError(
            f"sample {first + sample:,} holds id {int(ids[sample][wrong[sample]][0])}, but the vocabulary has "
            f"{vocab_size} entries; set tokenizer_model to the tokenizer that the dataset was built with"
        )

    def close(self) -> None:
        """Nothing to end."""


def starts_of(tokens: torch.Tensor, document_end: int) -> torch.Tensor:
    """bool of the shape of `tokens` [b, s]: True at the begin of each row and after each `document_end`."""
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == document_end
    return starts


class _Prefetcher:
    """Thread that runs a reader, at most `depth` micro-batches ahead, and one more in its hand."""

    def __init__(self, reader: _Reader, depth: int):
        self._read, self._pool = reader.read, ThreadPoolExecutor(1, "megaaccum-loader")
        # Also runs when the loader is forgotten.
        self.close = weakref.finalize(self, self._pool.shutdown, cancel_futures=True)
        self._ahead = deque(self._pool.submit(self._read) for _ in range(depth + 1))

    def read(self) -> Batch:
        """The next micro-batch. Raises the error of its preparation, also in later calls."""
        assert self.close.alive, "the loader is closed"
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self._ahead.append(self._pool.submit(self._read))
        return batch
