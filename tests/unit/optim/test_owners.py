"""The owners of matrices, on the shapes of large models."""

from __future__ import annotations

import time

import pytest

from megaaccum.optim.owners import Matrix, assign, balance, rounds

PARAMS = ("qkv", 0), ("qkv", 1), ("qkv", 2), ("proj", 0), ("fc1", 0), ("fc1", 1), ("fc2", 0)
"""Parameter and part: the matrices of one parameter have one owner."""


def dense(layers: int, hidden: int, ffn: int, keys: int, queries: int = 0) -> list[Matrix]:
    """The matrices of a dense model: queries, keys, values, output, gate, up, down."""
    queries = queries or hidden
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), (ffn, hidden), (ffn, hidden)]
    named = list(zip(PARAMS, [*shapes, (hidden, ffn)], strict=True))
    return [Matrix(f"layers.{n}.{name}", part, *shape) for n in range(layers) for (name, part), shape in named]


def experts(layers: int, count: int, hidden: int, ffn: int) -> list[Matrix]:
    shapes = [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    return [
        Matrix(f"layers.{n}.experts.{e}.{name}", part, *shape)
        for n in range(layers) for e in range(count) for (name, part), shape in zip(PARAMS[4:], shapes, strict=True)
    ]  # fmt: skip


LLAMA_3_8B = dense(32, 4096, 14336, 1024)
QWEN3_30B = [m for m in dense(48, 2048, 1, 512, 4096) if ".fc" not in m.name] + experts(48, 128, 2048, 768)
LLAMA_3_405B = dense(126, 16384, 53248, 1024)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("matrices", [LLAMA_3_8B, QWEN3_30B], ids=["Llama-3-8B", "Qwen3-30B-A3B"])
def test_owners_are_within_a_tenth_of_the_mean(matrices, ranks):
    owned = assign(matrices, ranks)
    assert sorted(each for rank in owned for each in rank) == sorted(matrices)
    assert balance(owned) <= 1.10


def test_in_the_order_of_the_model_they_are_not():
    in_order = [LLAMA_3_8B[rank::64] for rank in range(64)]
    assert balance(in_order) > 1.10


def test_the_order_of_the_list_does_not_matter():
    assert assign(LLAMA_3_8B, 8) == assign(LLAMA_3_8B[::-1], 8)


def test_405b_on_16384_ranks_takes_less_cpu_than_a_second():
    start = time.process_time()
    owned = assign(LLAMA_3_405B, 16384)
    assert time.process_time() - start < 1
    assert max(len({matrix.name for matrix in each}) for each in owned) == 1


def test_rounds_hold_each_matrix_once_and_no_more_than_their_size():
    owned = assign(LLAMA_3_8B, 8)
    most = 80_000_000
    found = rounds(owned, most)
    assert sorted(matrix for each in found for _, matrix in each) == sorted(LLAMA_3_8B)
    for each in found:
        for rank in range(8):
            assert sum(matrix.numel for owner, matrix in each if owner == rank) <= most


def test_a_matrix_larger_than_a_round_is_a_round():
    assert [len(each) for each in rounds([LLAMA_3_8B[:3]], 1)] == [1, 1, 1]


def test_flops_do_not_depend_on_which_side_is_long():
    assert Matrix("a", 0, 8, 2).flops(5) == Matrix("a", 0, 2, 8).flops(5) == 5 * (4 * 4 * 8 + 2 * 8)


def test_no_matrices_are_even():
    assert balance(assign([], 4)) == 1.0
