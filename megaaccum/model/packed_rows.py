"""The rows of a micro-batch as one packed row, for Transformer Engine's core of attention: it reads no mask, but takes
each document as a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams

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


def documents_of(starts: torch.Tensor, device: torch.device, *, in_rows: bool) -> PackedSeqParams:
    """The documents of a packed row. starts: [rows, tokens] bool in host memory, True where one begins, at each row's
    begin too. in_rows: layers of experts split the tokens into rows again, for statistics of a row; not if sequence
    parallelism cuts the packed row."""
    bounds = torch.cat([starts.view(-1).nonzero().view(-1), torch.tensor([starts.numel()])]).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
        tokens_per_sample=starts.shape[1] if in_rows else None,
    )  # fmt: skip


def whole_rows(shape: torch.Size) -> torch.Tensor:
    """The starts of documents in [rows, tokens] if each row is one document."""
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    return starts
