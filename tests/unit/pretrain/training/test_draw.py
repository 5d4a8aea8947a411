"""How a token is drawn from logits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megaaccum.pretrain.training.sampling import Draw

LIKELY = torch.tensor([0.1, 0.5, 0.05, 0.35])


def drawn(draw: Draw, count: int = 4000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(draw.token(LIKELY.log(), generator) for _ in range(count))


@pytest.mark.parametrize(
    ("draw", "tokens"),
    [
        (Draw(temperature=0), {1}),
        (Draw(temperature=1), {0, 1, 2, 3}),
        (Draw(temperature=1, top_k=2), {1, 3}),
        (Draw(temperature=1, top_p=0.49), {1}),
        (Draw(temperature=1, top_p=0.51), {1, 3}),
        (Draw(temperature=1, top_p=0.9, top_k=1), {1}),
    ],
)
def test_among_which_tokens(draw: Draw, tokens: set[int]) -> None:
    assert drawn(draw).keys() == tokens


def test_by_their_probabilities() -> None:
    found = drawn(Draw(temperature=1))
    assert all(abs(found[i] / 4000 - float(LIKELY[i])) < 0.03 for i in range(4))
    colder = drawn(Draw(temperature=0.5))
    squares = LIKELY.square() / LIKELY.square().sum()
    assert all(abs(colder[i] / 4000 - float(squares[i])) < 0.03 for i in range(4))
