"""Ranks with too few micro-batches for a step, and the micro-batches of weight zero that stand in for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.distributed.agreement import MOST_SHOWN, any_rank, describe
from megaaccum.errors import RankDisagreement, StepError, listed

Microbatch = dict[str, torch.Tensor]
"""A micro-batch of `megaaccum train`: tokens, labels, position_ids [micro_batch_size, seq_length] int64, loss_mask of
the same shape; if known num_tokens, the unmasked ones, and, bool of that shape in host memory, document_starts, which
keeps attention inside documents, and padding_mask, of tokens that routers do not count. A tensor that no stage of this
rank reads may be None."""

_ZEROED = ("tokens", "labels", "loss_mask")
"""Names by which a micro-batch of ours is known. They are zero in a dummy, as is its count of tokens."""

_OURS = {*_ZEROED, "num_tokens", "position_ids", "document_starts", "padding_mask", "lengths"}
"""Names that a micro-batch of ours may have. Another field is a user's, and may be what is not finite."""


def too_few(counts: Sequence[int], dp_ranks: Sequence[int], *, wanted: int, policy: str, step: int) -> str:
    """Which ranks have fewer micro-batches than planned, in words. Some rank has another number than planned.

    counts, dp_ranks: each rank's number of micro-batches and data-parallel rank, in rank order. wanted: micro-batches
    of this step. policy: the key short_batch. Raises RankDisagreement where ranks that share their sequences differ or
    a rank has too many, and StepError for `short_batch: error`.
    """
    told, of_dp_rank = describe("num_microbatches", list(counts)), dict(zip(dp_ranks, counts, strict=True))
    for dp_rank, count in zip(dp_ranks, counts, strict=True):
        if of_dp_rank[dp_rank] != count:
            raise RankDisagreement(f"step {step}: {told}, and those of data-parallel rank {dp_rank} have to agree.")
    if any(count > wanted for count in counts):
        raise RankDisagreement(f"step {step}: {told}, but {wanted} are planned.")
    short = listed((f"rank {rank} has {n}" for rank, n in enumerate(counts) if n < wanted), most=MOST_SHOWN)
    if policy == "error":
        raise StepError(
            f"step {step} needs {wanted} micro-batches on every rank, but {short}: set short_batch to pad or drop, or"
            " end the run with the last whole batch (train_iters)."
        )
    return f"of {wanted} micro-batches {short} (short_batch: {policy})"


def check_can_pad(microbatches: Sequence[Any], note: str) -> None:
    """A rank that has no micro-batch makes dummies of our format only. Collective over the world; raises StepError on
    every rank. microbatches: this rank's. note: which ranks have too few."""
    if any_rank(not microbatches) and any_rank(not all(_is_ours(each) for each in microbatches)):
        raise StepError(
            f"{note}: a rank without any cannot make one of your format: give it one, or set short_batch to drop"
        )


def _is_ours(microbatch: Any) -> bool:
    return isinstance(microbatch, dict) and set(_ZEROED) <= microbatch.keys() <= _OURS


def filled(microbatches: Sequence[Microbatch], plan: Plan, batch: BatchPlan) -> Sequence[Microbatch]:
    """`microbatches` with dummies after them up to the number of `batch`."""
    dummy = stand_in(microbatches[0], microbatches[0]) if microbatches else _new_dummy(plan)
    return [*microbatches, *[dummy] * (batch.num_microbatches - len(microbatches))]


def stand_in(bad: Any, healthy: Any | None) -> Any:
    """The micro-batch that runs in place of `bad`, with a weight of zero: a dummy of its shape. If the user defines the
    format, it is `healthy`, another one; without that it is `bad` itself, and the step is skipped."""
    if isinstance(bad, dict) and bad.keys() >= set(_ZEROED) and (healthy is None or bad.keys() <= _OURS):
        # Token 0 everywhere, all of it masked.
        present = {name: each for name in (*_ZEROED, "num_tokens") if (each := bad.get(name)) is not None}
        return {**bad, **{name: torch.zeros_like(each) for name, each in present.items()}}
    return bad if healthy is None else healthy


def _new_dummy(plan: Plan) -> Microbatch:
    rows, length = plan.batch.micro_batch_size, plan.batch.seq_length
    zeros = torch.zeros(rows, length, dtype=torch.int64)
    dummy = {"tokens": zeros, "labels": zeros, "loss_mask": zeros.float(), "position_ids": zeros}
    starts = torch.arange(length).eq(0).repeat(rows, 1)
    return dummy | ({"document_starts": starts} if plan.config.data.reset_attention_mask else {})
