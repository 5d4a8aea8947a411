"""The rows of a micro-batch as one packed row, for Transformer Engine's core of attention: it reads no mask, but takes
each document as a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaaccum.config.batch import BatchPlan


def packs_rows(chunk: torch.nn.Module) -> bool:
    """Whether a chunk reads micro-batches as one row of all their tokens; all chunks of a pipeline do, or none."""
    return getattr(chunk, "packs_rows", False)


def sent_shape(chunks: Sequence[torch.nn.Module], batch: BatchPlan) -> dict[str, int]:
    """micro_batch_size and seq_length of the messages between stages, arguments of Megatron's schedules."""
    rows, length = batch.micro_batch_size, batch.seq_length
    if packs_rows(chunks[0]):
        rows, length = 1, rows * length
    return {"micro_batch_size": rows, "seq_length": length}
