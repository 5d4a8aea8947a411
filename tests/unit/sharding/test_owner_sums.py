"""Gradients that are summed on their owners: which of them, in what precision, over what divisor; without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.sharding.owner_sums import Owned, OwnerSums
from tests.support.configs import plan

ME = 1
"""This rank, of two with the same gradients."""


def sums(monkeypatch: pytest.MonkeyPatch, homes: dict[str, int], **keys: object) -> tuple[OwnerSums, dict, list]:
    """Sums of matrices of four elements, of which `d` is an expert's; the matrices; the (destination, dtype, elements)
    of every reduction."""
    sent: list[tuple[int, torch.dtype, int]] = []

    def reduce(flat: torch.Tensor, *, group: Any, group_dst: int, async_op: bool) -> Any:
        sent.append((group_dst, flat.dtype, flat.numel()))
        return SimpleNamespace(wait=lambda: flat.mul_(group.size))

    monkeypatch.setattr(torch.distributed, "reduce", reduce)
    dense, experts = SimpleNamespace(rank=lambda: ME, size=2), SimpleNamespace(rank=lambda: 0, size=1)
    named: list[tuple[str, Any]] = [(name, torch.nn.Parameter(torch.zeros(2, 2))) for name in "abcd"]
    named[3][1].allreduce = False
    found = OwnerSums(SimpleNamespace(dp_cp=dense, expert_dp=experts))  # type: ignore[arg-type]
    found.keep(plan(**keys), homes, named, 2)
    return found, dict(named), sent


def grad(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2, 2), value, dtype=dtype)


def test_each_owner_has_the_mean_of_its_own_and_buckets_go_when_they_are_full(monkeypatch) -> None:
    owner, params, sent = sums(monkeypatch, {"a": 1, "b": 0, "c": 1}, reduce_bucket_size=12, grad_reduce_dtype="fp32")
    assert [owner.takes(params[name]) for name in "abcd"] == [True, True, True, False]
    assert sorted(owner.owned) == ["a", "c"]
    for first in (1.0, 5.0):
        sent.clear()
        owner.begin()
        assert all(each.grad is None for each in owner.owned.values())
        for name, value in (("a", first), ("b", 7.0)):
            owner.add(params[name], grad(value))
        assert not sent
        owner.add(params["c"], grad(3.0))
        assert sent == [(1, torch.float32, 8), (0, torch.float32, 4)]
        owner.add(params["c"], grad(0.5))
        owner.finish()
        assert sent[2:] == [(1, torch.float32, 4)]
        means = {name: each.grad.tolist() for name, each in owner.owned.items() if each.grad is not None}
        assert means == {"a": [first] * 4, "c": [3.5] * 4}


def test_experts_are_summed_over_their_own_ranks(monkeypatch) -> None:
    owner, params, sent = sums(monkeypatch, {"a": ME, "d": 0}, grad_reduce_dtype="fp32")
    owner.begin()
    for name in "ada":
        owner.add(params[name], grad(8.0))
    owner.finish()
    assert [dst for dst, _, _ in sent] == [ME, 0, ME]
    means = {name: each.grad.tolist() for name, each in owner.owned.items() if each.grad is not None}
    assert means == {"a": [16.0] * 4, "d": [4.0] * 4}


@pytest.mark.parametrize(
    ("keys", "crosses", "adds_up"),
    [
        (dict(params_dtype="bf16", grad_reduce_dtype="fp32"), torch.float32, torch.float32),
        (dict(params_dtype="bf16", grad_reduce_dtype="bf16"), torch.bfloat16, torch.float32),
        (dict(params_dtype="fp64", backend="fsdp2"), torch.float64, torch.float64),
    ],
)
def test_sums_cross_in_the_precision_of_reductions_and_add_up_in_that_of_the_momenta(
    monkeypatch, keys, crosses, adds_up
) -> None:
    owner, params, sent = sums(monkeypatch, {"a": ME}, **keys)
    given = torch.float64 if crosses is torch.float64 else torch.bfloat16
    owner.begin()
    for value in (256.0, 1.0):  # 257 has one digit more than BF16
        owner.add(params["a"], grad(value, given))
        owner.send()
    owner.finish()
    total = owner.owned["a"].grad
    assert total is not None and total.dtype is adds_up and total.tolist() == [257.0] * 4
    assert {dtype for _, dtype, _ in sent} == {crosses}


def test_a_sum_is_kept_apart_from_the_bucket_it_came_in() -> None:
    bucket, own = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0])
    owned = Owned(torch.nn.Parameter(torch.zeros(1)), torch.zeros(1))
    owned.add(own, bucket[1:2])
    bucket.zero_()
    assert owned.grad is not None and owned.grad.tolist() == [2.0]
