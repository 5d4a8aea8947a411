"""Texts to token ids, in this process or in several; the result never depends on how many.

Worker processes import the tokenizers library and numpy, nothing else of weight.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

import numpy as np

from megaaccum.errors import DataError
from megaaccum.pretrain.data.indexed import Ids
from megaaccum.pretrain.data.tokenizer import parse_tokenizer, single_threaded

CHUNK_CHARACTERS = 1 << 18
"""Text per task. Fixed, so that the same input makes the same tasks whatever the number of workers."""
_TASKS_PER_WORKER = 4
"""Tasks that wait per worker: enough to keep it busy, few enough to hold little text in memory."""


Encoded = tuple[Ids, list[int]]
"""Token ids of all documents back to back, and the number of tokens of each, none of them 0."""


class Encoder:
    """Turns texts into ids with one tokenizer."""

    def __init__(self, tokenizer_json: str, eod: int | None):
        """`tokenizer_json`: text of a tokenizers file. `eod`: id that ends each document, or None for no such id."""
        self._tokenizer = parse_tokenizer(tokenizer_json)
        self._end = [] if eod is None else [eod]

    def encode(self, texts: list[str]) -> Encoded:
        """Ids of `texts` in their order. A text of which the tokenizer makes no token is dropped."""
        with single_threaded():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        documents = [encoding.ids + self._end for encoding in encodings if encoding.ids]
        flat = [i for document in documents for i in document]
        return np.array(flat, dtype=np.int32), [len(document) for document in documents]


def encode_all(texts: Iterable[str], tokenizer_json: str, eod: int | None, *, num_workers: int) -> Iterator[Encoded]:
    """Encodes `texts` chunk by chunk, in order; `num_workers` 1 does it in this process.

    Raises:
        DataError: a worker process died; and whatever reading `texts` raises.
    """
    chunks = _chunks(texts)
    if num_workers == 1:
        yield from map(Encoder(tokenizer_json, eod).encode, chunks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(tokenizer_json, eod))
    try:
        yield from _in_order(pool, chunks, num_workers * _TASKS_PER_WORKER)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended early, most likely for lack of memory; use fewer with --workers, "
            "or split very long documents"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _in_order(pool: ProcessPoolExecutor, chunks: Iterator[list[str]], ahead: int) -> Iterator[Encoded]:
    """Results in the order of `chunks`, with at most `ahead` tasks given out."""
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(_encode_in_worker, chunk))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_encoder: Encoder | None = None


def _start_worker(tokenizer_json: str, eod: int | None) -> None:
    """Initialize a worker process."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; only the parent answers it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(tokenizer_json, eod)


def _end_with_parent() -> None:
    """A worker of a killed parent would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(texts)
