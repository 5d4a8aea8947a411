"""What a step counts of its own collectives is what the plan predicts, for every boundary and policy."""

import pytest

from megaaccum import policies
from megaaccum.testing import run_ranks
from megaaccum.traffic import Meter
from tests.multiproc.parity import Case, make, microbatches

SPLIT = "--pipeline_model_parallel_size 2 --num_chunks 4 --grad_accum_steps 2 "
UNTIED = "--untie_embeddings_and_output_weights"
CASES = {
    "deepspeed resident": Case(4, SPLIT, UNTIED),
    "deepspeed streaming": Case(4, SPLIT + "--sync streaming", UNTIED),
    "fsdp2 resident": Case(4, SPLIT + "--boundary fsdp2", UNTIED),
    "fsdp2 streaming": Case(4, SPLIT + "--boundary fsdp2 --sync streaming", UNTIED),
    "megatron resident": Case(4, SPLIT + "--boundary megatron", UNTIED),
    "ddp resident": Case(4, SPLIT + "--boundary ddp", UNTIED),
}
LARGE = 256
"""Bytes of a call over dp_cp up to which it is bookkeeping."""


def counted(cases: list[Case]) -> list[tuple[float, int, list[int]]]:
    """Of the second step of each case on this rank: bytes of gathers and reductions over the data-parallel ranks, their
    calls, and the elements of each parameter of the stage."""
    results = []
    for case in cases:
        plan, built, chunks, _, stepper = make(case)
        stepper.train(microbatches(plan, built.dp.rank()), step=0)
        traffic = stepper.train(microbatches(plan, built.dp.rank()), step=1).traffic
        mine = [count for lane, count in traffic.items() if "/dp" in lane and count.num_bytes > LARGE * count.calls]
        sizes = [getattr(p, "ds_numel", p.numel()) for chunk in chunks for p in chunk.parameters()]
        results.append((sum(c.num_bytes for c in mine), sum(c.calls for c in mine), sizes))
    return results


@pytest.fixture(scope="module")
def seen():
    """By rank: results in the order of CASES."""
    return run_ranks(counted, 4, list(CASES.values()), timeout=150)


@pytest.mark.parametrize("policy", CASES)
def test_counted_bytes_are_the_predicted_ones(policy, seen):
    index, plan = list(CASES).index(policy), CASES[policy].plan()
    for rank in seen:
        num_bytes, calls, sizes = rank[index]
        (row,) = (row for row in policies.predictions(plan, sum(sizes), 0) if row.policy == policy)
        assert policies.chosen(plan) == policy
        padding = policies.predictions(plan, sum(padded(sizes, policy)), 0)
        (most,) = (row for row in padding if row.policy == policy)
        assert row.total <= num_bytes <= most.total
        assert calls > 0


def padded(sizes: list[int], policy: str) -> list[int]:
    """Elements with the padding of each: to a multiple of dp (ZeRO-3), to whole rows (FSDP2: none here), each bucket to
    a multiple of 128 * dp (Megatron), nothing (DDP)."""
    if policy.startswith("megatron"):
        return [-(-size // 64) * 64 for size in sizes] + [2 * 2 * 128]
    return [-(-size // 2) * 2 for size in sizes]


def one_of_each():
    import torch
    import torch.distributed as dist

    meter = Meter()
    with meter.counting() as traffic:
        dist.all_reduce(torch.ones(10))
        dist.all_gather_into_tensor(torch.empty(8, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
        work = dist.reduce_scatter_tensor(torch.empty(3), torch.ones(6), async_op=True)
        work.wait()
    dist.all_reduce(torch.ones(10))  # after it: not counted
    return {lane: (count.calls, count.num_bytes, count.seconds > 0) for lane, count in traffic.items()}


def test_the_meter_counts_what_passes_inside_it():
    expected = {
        "all_reduce/world/float32": (1, 2 * 0.5 * 40, True),
        "all_gather/world/bfloat16": (1, 0.5 * 16, True),
        "reduce_scatter/world/float32": (1, 0.5 * 24, True),
    }
    assert run_ranks(one_of_each, 2) == [expected, expected]
