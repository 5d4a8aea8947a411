"""Documents of different lengths packed into micro-batches by a budget of tokens, balanced over data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from megaaccum.errors import DataError

Packed = dict[str, torch.Tensor]
"""tokens, labels, position_ids [1, T] int64; loss_mask [1, T], 0 at the last token of each document and wherever its
own mask says so; lengths [documents] int64, which add up to T. On the CPU."""


def pack(
    sequences: Sequence[torch.Tensor],
    max_tokens: int,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_microbatches: int | None = None,
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> list[Packed]:
    """This data-parallel rank's micro-batches of `sequences`, each of at most max_tokens tokens; the same number on
    every rank, filled up with weightless ones (one document that counts nowhere).

    Args:
        sequences: token ids of each document, 1-D; all of the global batch, the same on every rank.
        max_tokens: the most tokens that a micro-batch may have.
        dp_rank: this rank's place among those with other data.
        dp_size: how many of those there are.
        num_microbatches: of each rank; default: as few as the budget allows.
        loss_masks: 1 where a token's prediction of the next one counts, for each document; default everywhere.

    Longest documents are placed first, each into the micro-batch that has the fewest tokens, so that micro-batches and
    ranks get about as many (the LPT rule, Graham 1969). Raises DataError if that does not fit.
    """
    longest = max(map(len, sequences), default=0)
    if not sequences or longest > max_tokens or min(map(len, sequences)) < 2:
        raise DataError(
            f"{len(sequences)} documents of up to {longest} tokens, but max_tokens is {max_tokens}: every document"
            " needs at least 2 tokens and no more than that"
        )
    total = sum(map(len, sequences))
    count = num_microbatches or -(-total // (max_tokens * dp_size))
    while (bins := _placed(sequences, count * dp_size, max_tokens)) is None:
        if num_microbatches is not None:
            raise DataError(
                f"{total} tokens do not fit into {count} micro-batches of {max_tokens} on {dp_size} ranks: raise"
                " max_tokens or num_microbatches"
            )
        count += 1
    masks = loss_masks or [torch.ones(()).expand(len(sequence)) for sequence in sequences]
    mine = [[(sequences[index], masks[index]) for index in sorted(each)] for each in bins[dp_rank::dp_size]]
    blank = min(sequences, key=len)
    return [_joined(documents or [(blank, torch.zeros(len(blank)))]) for documents in mine]


def _placed(sequences: Sequence[torch.Tensor], count: int, max_tokens: int) -> list[list[int]] | None:
    """The documents of each of `count` micro-batches; None if one would be too long."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]  # tokens of each; of equal ones the first is taken
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        tokens, lightest = heap[0]
        if (tokens := tokens + len(sequences[index])) > max_tokens:
            return None
        bins[lightest].append(index)
        heapq.heapreplace(heap, (tokens, lightest))
    return bins


def _joined(documents: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Packed:
    tokens = torch.cat([sequence for sequence, _ in documents])
    keep = [torch.cat([mask[:-1].float(), torch.zeros(1)]) for _, mask in documents]
    return {
        "tokens": tokens[None],
        "labels": tokens.roll(-1)[None],
        "position_ids": torch.cat([torch.arange(len(sequence)) for sequence, _ in documents])[None],
        "loss_mask": torch.cat(keep)[None],
        "lengths": torch.tensor([len(sequence) for sequence, _ in documents]),
    }


def document_mask(lengths: torch.Tensor) -> torch.Tensor:
    """[T, T] bool, True where a token may attend: to itself and the tokens before it in its own document. On the device
    of `lengths` [documents]."""
    number = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return (number[:, None] == number).tril()
