"""Placement of documents in micro-batches: of tens of thousands of a step's documents as of few."""

from __future__ import annotations

import random
from heapq import heapreplace as replace

import pytest
import torch

from megaaccum.errors import DataError
from megaaccum.pretrain.data import packing


def lengths_in(batches: list[packing.Packed]) -> list[int]:
    return [int(length) for batch in batches for length in batch["lengths"]]


def of_lengths(lengths: list[int]) -> list:
    return [torch.arange(length) for length in lengths]


def test_each_document_goes_where_the_fewest_tokens_are():
    documents = of_lengths([3, 9, 4, 8, 4, 4])
    first, second = (packing.pack(documents, 16, dp_rank=rank, dp_size=2) for rank in range(2))
    assert [lengths_in(first), lengths_in(second)] == [[3, 9, 4], [4, 8, 4]]
    with pytest.raises(DataError, match="32 tokens do not fit into 1 micro-batches of 15 on 2 ranks"):
        packing.pack(documents, 15, dp_size=2, num_microbatches=1)


def test_a_micro_batch_is_its_documents_one_after_the_other():
    documents, masks = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [torch.tensor([0, 1, 1]), torch.tensor([1, 1])]
    (both,) = packing.pack(documents, 5, loss_masks=masks)
    assert {name: tensor.squeeze(0).tolist() for name, tensor in both.items()} == {
        "tokens": [5, 6, 7, 8, 9],
        "labels": [6, 7, 8, 9, 5],
        "position_ids": [0, 1, 2, 0, 1],
        "loss_mask": [0, 1, 0, 1, 0],
        "lengths": [3, 2],
    }
    assert packing.document_mask(both["lengths"]).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    blank = packing.pack(documents, 5, num_microbatches=3)[2]
    assert lengths_in([blank]) == [2] and not blank["loss_mask"].any(), "the shortest document, which counts nowhere"


def test_documents_that_fit_no_micro_batch_are_refused_and_others_take_as_few_as_hold_them():
    for wrong in ([], [1, 3], [3, 6]):
        with pytest.raises(DataError, match=f"{len(wrong)} documents of up to {max(wrong, default=0)} tokens"):
            packing.pack(of_lengths(wrong), 5)
    assert [lengths_in([each]) for each in packing.pack(of_lengths([3, 3, 3]), 5)] == [[3], [3], [3]]


def test_a_step_of_many_documents_is_placed_at_once(monkeypatch):
    """Looking for the lightest of all micro-batches took ten seconds of every step, on every rank."""
    drawn, token = random.Random(0), torch.zeros((), dtype=torch.int64)
    documents = [token.expand(drawn.randint(2, 1600)) for _ in range(60_000)]
    looked_at = []
    monkeypatch.setattr(packing.heapq, "heapreplace", lambda heap, each: looked_at.append(heap) or replace(heap, each))
    batches = packing.pack(documents, 8192, dp_size=1024, dp_rank=7)
    assert len(documents) <= len(looked_at) <= 4 * len(documents), "the lightest is at hand"
    tokens = [sum(lengths_in([batch])) for batch in batches]
    assert max(tokens) - min(tokens) < 200 and len(tokens) * 1024 * 8192 >= sum(map(len, documents))
