"""Agreement of thousands of ranks: what a message names, and what ranks send each other of their groups."""

from __future__ import annotations

from unittest import mock

import pytest

from megaaccum.distributed import agreement, groups
from megaaccum.distributed.agreement import MOST_SHOWN, describe
from megaaccum.errors import ConfigError


class Value:
    """A number that counts comparisons."""

    comparisons = 0

    def __init__(self, number: int):
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        Value.comparisons += 1
        return isinstance(other, Value) and self.number == other.number

    def __str__(self) -> str:
        return str(self.number)


def test_every_rank_with_another_value_is_described_in_a_line():
    ranks = 16_384
    text = describe("step", [Value(rank) for rank in range(ranks)])
    assert text.startswith("ranks disagree about step (rank 0: 0; rank 1: 1; ")
    assert text.endswith(f"; and {ranks - MOST_SHOWN} more)") and len(text) < 200
    assert Value.comparisons <= 2 * ranks  # each with every other would be 268 million


def test_few_values_are_all_named():
    assert describe("dp", [4, 4, 2, 4]) == "ranks disagree about dp (ranks 0, 1, 3: 4; rank 2: 2)"


def test_errors_of_thousands_of_ranks_are_cut():
    errors = [(ConfigError, f"host {rank} has no file") for rank in range(5000)]
    with (
        mock.patch.object(agreement, "any_rank", return_value=True),
        mock.patch.object(agreement, "gathered", return_value=errors),
        pytest.raises(ConfigError, match="and 4992 more") as raised,
    ):
        agreement.raise_together(ConfigError("host 0 has no file"))
    assert len(str(raised.value).splitlines()) == MOST_SHOWN + 1


@pytest.mark.parametrize("everyone", [[[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 5, 1], [4, 2, 3]]])
def test_two_numbers_of_each_rank_name_all_groups(everyone):
    """The place in a group too: ranks need not be in rising order."""
    of = {rank: members for members in everyone for rank in members}
    sent = {rank: [of[rank][0], of[rank].index(rank)] for rank in range(6)}
    columns = [list(column) for column in zip(*(sent[rank] for rank in range(6)), strict=True)]
    for rank in range(6):
        asked: list[list[int]] = []
        with (
            mock.patch.object(groups.dist, "get_rank", lambda rank=rank: rank),
            mock.patch.object(groups, "numbers_of_all", lambda mine, asked=asked: (asked.append(mine), columns)[1]),
        ):
            assert groups.all_like(of[rank]) == sorted(everyone)
        assert asked == [sent[rank]]
