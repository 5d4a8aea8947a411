"""The tree in which gradients are added: one sum to the bit, whatever the order and the ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megaaccum.errors import FlushError
from megaaccum.lab.planner.footprint import partial_sums, sums_of_runs
from megaaccum.sharding.sum_tree import MicrobatchSums, Runs, SumTree, nodes_of

COUNTS = (1, 2, 3, 5, 12, 16, 20, 33)


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randn(count, generator=generator).tolist()
    return [torch.randn(7, generator=generator) * 10.0**exponent for exponent in exponents]


def summed(parts: list[torch.Tensor], order: list[int], *, lent: bool = False) -> torch.Tensor:
    tree = SumTree(len(parts))
    done = [tree.add(leaf, parts[leaf].clone(), lent=lent) for leaf in order]
    assert done == [False] * (len(parts) - 1) + [True]
    total = tree.total()
    assert total is not None
    return total


def rows_of(runs: Runs, parts: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The rows of each rank's run, in the precision of its messages."""
    rows: list[torch.Tensor] = []
    for rank in range(runs.ranks):
        (start,) = runs.starts(rank)
        stop = start + runs.each
        mine = SumTree(runs.leaves, dtype, nodes=nodes_of(runs.leaves, (start, stop)))
        order = random.Random(rank).sample(range(start, stop), runs.each)
        done = [mine.add(leaf, parts[leaf].clone()) for leaf in order]
        assert done == [False] * (runs.each - 1) + [True]
        rows += [each for each in mine.totals() if each is not None]
    return rows


@pytest.mark.parametrize("count", COUNTS)
def test_the_order_of_arrival_does_not_matter(count):
    parts = leaves(count)
    first = summed(parts, list(range(count)))
    assert torch.allclose(first.double(), torch.stack(parts).double().sum(0), rtol=1e-5, atol=1e-5)
    for seed in range(5):
        order = random.Random(seed).sample(range(count), count)
        assert torch.equal(summed(parts, order, lent=bool(seed % 2)), first)
    assert torch.equal(Runs(1, count).add(torch.stack(parts), torch.float32), first)


def test_one_and_two_threads_make_one_sum():
    """Sums of tensors that are large enough for several threads do not depend on the number of threads."""
    parts = [part.repeat(20_000) for part in leaves(12)]
    threads, sums = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            order = random.Random(count).sample(range(12), 12)
            sums += [summed(parts, order), Runs(1, 12).add(torch.stack(parts), torch.float32)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, sums[0]) for each in sums)


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (12, 2), (12, 4), (20, 4), (16, 1), (12, 3), (18, 6), (7, 7)])
def test_sums_of_16_bits_are_the_same_whatever_crosses_ranks(count, ranks):
    """Messages of 16 bits: what a rank has is rounded on its way, and so is every sum but the last where it stays."""
    parts, half = leaves(count), torch.bfloat16
    whole = SumTree(count, half)
    for leaf, part in enumerate(parts):
        whole.add(leaf, part.clone())
    total = whole.total()
    assert total is not None and total.dtype is torch.float32 and not torch.equal(total, total.to(half).float())
    runs = Runs(count // ranks, ranks)
    rows = torch.stack(rows_of(runs, parts, half))
    assert ranks == 1 or rows.dtype is half
    assert torch.equal(runs.add(rows, torch.float32), total)
    exact, largest = torch.stack(parts).double().sum(0), torch.stack(parts).abs().sum(0)
    assert ((total.double() - exact).abs() <= 2.0**-9 * math.ceil(math.log2(count) + 1) * largest).all()
    assert not torch.equal(total, summed(parts, list(range(count))))


@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_a_leaf_that_comes_twice_is_an_error_though_its_sum_is_made(leaf):
    tree = SumTree(3)
    for place, tensor in enumerate(leaves(3)):
        tree.add(place, tensor)
    with pytest.raises(FlushError, match="a second gradient in one micro-batch"):
        tree.add(leaf, torch.ones(1))


def test_an_order_that_is_another_trees_is_seen():
    """One after the other, as autograd adds."""
    parts = leaves(16)
    one_by_one = parts[0].clone()
    for part in parts[1:]:
        one_by_one += part
    assert not torch.equal(one_by_one, summed(parts, list(range(16))))


@pytest.mark.parametrize(("count", "ranks"), [(12, 2), (12, 4), (20, 4), (16, 8), (24, 8)])
def test_the_run_of_a_rank_is_a_subtree(count, ranks):
    parts, run = leaves(count), count // ranks
    rows = [summed(parts[start : start + run], list(range(run))) for start in range(0, count, run)]
    assert torch.equal(Runs(run, ranks).add(torch.stack(rows), torch.float32), summed(parts, list(range(count))))


@pytest.mark.parametrize(("count", "ranks"), [(12, 3), (12, 6), (20, 5), (48, 3), (18, 6), (14, 7), (36, 12), (33, 3)])
def test_the_runs_of_any_number_of_ranks_make_one_tree(count, ranks):
    parts, runs = leaves(count), Runs(count // ranks, ranks)
    whole, rows = summed(parts, list(range(count))), torch.stack(rows_of(runs, parts))
    assert torch.equal(runs.add(rows.clone(), torch.float32), whole)
    assert runs.counts == sums_of_runs(runs.each, ranks) and sum(runs.counts) == len(rows) > ranks
    one_by_one = rows[0].clone()
    for row in rows[1:]:
        one_by_one += row
    assert not torch.equal(one_by_one, whole), "the order of the rows is seen"


@pytest.mark.parametrize(
    ("each", "dp", "cp", "blocks"),
    [(4, 1, 2, 2), (4, 2, 1, 2), (2, 2, 2, 2), (4, 3, 1, 2), (4, 3, 2, 2), (2, 2, 2, 4), (4, 1, 1, 4)],
)
def test_blocks_of_sequences_make_one_tree(each, dp, cp, blocks):
    """Whatever data-parallel and context ranks there are, and as many sums as the planner says."""
    parts, runs = leaves(each * dp * blocks), Runs(each, dp * cp, blocks, cp)
    rows = []
    for rank in range(runs.ranks):
        mine = SumTree(runs.leaves, nodes=runs.nodes(rank))
        for leaf in (start + index for index in range(each) for start in runs.starts(rank)):
            mine.add(leaf, parts[leaf].clone())
        rows += [total for total in mine.totals() if total is not None]
    assert torch.equal(runs.add(torch.stack(rows), torch.float32), summed(parts, list(range(len(parts)))))
    assert runs.counts == sums_of_runs(each, dp * cp, blocks // cp, cp)


@pytest.mark.parametrize(
    ("each", "dp", "cp", "blocks", "sources"),
    [
        (4, 2, 1, 1, 2),
        (4, 2, 2, 2, 2),
        (4, 2, 2, 2, 4),
        (2, 4, 1, 2, 2),
        (4, 1, 2, 2, 2),
        (3, 3, 2, 2, 3),
        (2, 4, 2, 4, 4),
    ],
)
def test_the_runs_of_ranks_that_send_to_one_make_the_same_tree(each, dp, cp, blocks, sources):
    """An expert's gradients, whose tokens come from several ranks, each with blocks of sequences."""
    parts, runs = leaves(each * dp * blocks), Runs(each, dp * cp, blocks, cp, sources)
    rows, found = [], []
    for rank in range(runs.ranks // sources):
        mine = SumTree(runs.leaves, nodes=runs.nodes(rank))
        found += [start + index for index in range(each) for start in runs.starts(rank)]
        for leaf in found[-each * len(runs.starts(rank)) :]:
            mine.add(leaf, parts[leaf].clone())
        rows += [total for total in mine.totals() if total is not None]
    assert sorted(found) == list(range(len(parts))) and len(rows) == sum(runs.counts)
    assert torch.equal(runs.add(torch.stack(rows), torch.float32), summed(parts, list(range(len(parts)))))
    alone = Runs(each, dp * cp, blocks, cp)
    of_all = [alone.starts(source)[0] for source in range(sources)]
    assert runs.starts(0)[:sources] == of_all, "of one block, those of all ranks"


def test_a_rank_whose_run_is_no_subtree_gives_its_sums_apart():
    """Rank 1 of three, with four micro-batches each: of twelve, 4 and 5 have a node, 6 and 7 are in two others."""
    sums, param, parts = MicrobatchSums(runs=Runs(1, 3), rank=1), torch.nn.Parameter(torch.zeros(7)), leaves(12)
    sums.count = 4
    for index in (2, 0, 3, 1):
        sums.begin_backward(0, index)
        param.grad = parts[4 + index].clone()
        sums.accept(param)
    assert param.grad is not None and torch.equal(param.grad, parts[4] + parts[5])
    first, second = sums.others(param)
    assert first is not None and second is not None
    assert torch.equal(first, parts[6]) and torch.equal(second, parts[7]) and len(list(sums.tensors())) == 2
    assert sums.pop_others(param) == [first, second] and not list(sums.tensors())
    assert sums.pop_others(param) == [None, None], "of a parameter that none came of"


@pytest.mark.parametrize("count", COUNTS)
def test_partial_sums_are_few(count):
    tree, most = SumTree(count), 0
    for leaf, part in enumerate(leaves(count)):
        most = max(most, len(list(tree.tensors())))
        tree.add(leaf, part)
    assert most == math.ceil(math.log2(count)) == max(partial_sums(count, 0, done) for done in range(count))


@pytest.mark.parametrize(("rounds", "ranks"), [(1, 4), (4, 2), (3, 4), (5, 3), (16, 1), (7, 8)])
def test_partial_sums_after_rounds_of_all_ranks_are_predicted(rounds, ranks):
    tree, most = SumTree(rounds * ranks), 0
    for leaf, part in enumerate(leaves(rounds * ranks)):
        tree.add(leaf, part)
        if leaf % ranks == ranks - 1:
            most = max(most, len(list(tree.tensors())))
    assert most == max(partial_sums(rounds * ranks, 0, ranks * done) for done in range(1, rounds + 1))


def test_what_did_not_come_counts_nothing():
    parts = leaves(5)
    tree = SumTree(5)
    assert tree.total() is None
    assert not any(tree.add(leaf, parts[leaf].clone()) for leaf in (4, 0, 3))
    total = tree.total()
    assert total is not None and torch.equal(total, parts[0] + (parts[3] + parts[4]))


def test_a_parameter_gets_its_sum_back_with_the_last_micro_batch():
    sums, param = MicrobatchSums(), torch.nn.Parameter(torch.zeros(7))
    sums.count, parts = 4, leaves(4)
    for flush, first in enumerate((0, 2)):
        sums.begin_flush(first, first + 2)
        assert sums.in_last_flush is bool(flush)
        for index in (1, 0):  # a W comes by its number in the flush, a backward by that in the step
            sums.begin_weight_grad(index) if flush else sums.begin_backward(0, first + index)
            param.grad = parts[first + index].clone()
            assert sums.accept(param) is ((first, index) == (2, 0))
            assert (param.grad is None) is ((first, index) != (2, 0))
    assert param.grad is not None and torch.equal(param.grad, summed(parts, [0, 1, 2, 3]))
    sums.clear()
    sums.begin_backward(0, 3)
    assert not sums.accept(param), "another step has sums of its own"


def test_a_step_with_another_number_of_micro_batches_is_named():
    sums = MicrobatchSums()
    sums.count = 4
    assert sums.missing(4) == ""
    assert "had 3 micro-batches" in sums.missing(3) and "the 4 of the plan" in sums.missing(3)
