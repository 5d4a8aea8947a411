"""Traffic of a resident ZeRO-3 step, counted below every collective: one gather, one reduction."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import Case, Rig

DP = 2
GATHER, SCATTER = "all-gather", "reduce-scatter"
# Methods of torch's ProcessGroup, through which all of torch.distributed and deepspeed.comm goes, and the argument that
# holds the elements of all ranks: (method, name in the count, position of the tensors).
METHODS = [
    ("_allgather_base", GATHER, 0),
    ("all_gather_single", GATHER, 0),
    ("all_gather_single_coalesced", GATHER, 0),
    ("allgather", GATHER, 0),
    ("allgather_coalesced", GATHER, 0),
    ("allgather_into_tensor_coalesced", GATHER, 0),
    ("_reduce_scatter_base", SCATTER, 1),
    ("reduce_scatter", SCATTER, 1),
    ("reduce_scatter_single", SCATTER, 1),
    ("reduce_scatter_single_coalesced", SCATTER, 1),
    ("reduce_scatter_tensor_coalesced", SCATTER, 1),
    ("all_to_all_single", "other", 0),
    ("allreduce", "other", 0),
    ("allreduce_coalesced", "other", 0),
    ("alltoall", "other", 0),
    ("alltoall_base", "other", 0),
    ("broadcast", "other", 0),
    ("gather", "other", 0),
    ("reduce", "other", 0),
    ("scatter", "other", 0),
]
SMALL = 64
"""Elements up to which a collective is bookkeeping: the agreement, token counts, norm, loss, overflow."""


def elements(tensors) -> int:
    return tensors.numel() if hasattr(tensors, "numel") else sum(elements(each) for each in tensors)


@contextmanager
def counted():
    """Counter of elements by kind of collective on this rank; collectives of at most SMALL elements are `small`.
    Point-to-point messages of the pipeline are not counted."""
    from torch.distributed import ProcessGroup

    count: Counter[str] = Counter()
    here = [row for row in METHODS if hasattr(ProcessGroup, row[0])]  # torch renames some of them now and then
    patches = [patch.object(ProcessGroup, name, _counting(name, kind, at, count)) for name, kind, at in here]
    for each in patches:
        each.start()
    try:
        yield count
    finally:
        for each in patches:
            each.stop()


def _counting(name: str, kind: str, position: int, count: Counter[str]):
    from torch.distributed import ProcessGroup

    method = getattr(ProcessGroup, name)

    def call(group, *args, **kwargs):
        if group.size() == 1:
            return method(group, *args, **kwargs)  # nothing crosses ranks
        moved = elements(args[position])
        count[kind if moved > SMALL else "small"] += moved
        count[f"calls of {kind if moved > SMALL else 'small'}"] += 1
        return method(group, *args, **kwargs)

    return call


def traffic(cases: list[Case]) -> list[tuple[Counter[str], int, int]]:
    """For the second step of each case (the first has its parameters as they were built): the counts, the parameters
    of this rank's stage, and their number with each rounded up to a multiple of dp, as ZeRO-3 cuts them."""
    results = []
    for case in cases:
        rig = Rig.of(case)
        rig.train(step=0)
        with counted() as count:
            rig.train(step=1)
        sizes = [param.ds_numel for param in rig.backend.driver.params]
        results.append((count, sum(sizes), sum(-(-size // DP) * DP for size in sizes)))
    return results


MODEL = "--untie_embeddings_and_output_weights"
PIPELINE = "--pipeline_model_parallel_size 2 "
BUCKET = 20_000
"""Elements of a reduction bucket: parity.py's."""
CASES = [
    Case(4, PIPELINE + "--pp_microbatches 4", MODEL),
    Case(4, PIPELINE + "--pp_microbatches 4 --grad_accum_steps 4", MODEL),
    Case(4, PIPELINE + "--pp_microbatches 4 --grad_accum_steps 4 --flush per_round", MODEL),
    Case(4, PIPELINE + "--pp_microbatches 4 --virtual_pipeline_model_parallel_size 2", MODEL),
]


@pytest.fixture(scope="module")
def seen():
    """By rank, by case: (count, stage parameters, padded)."""
    return run_ranks(traffic, 4, CASES, timeout=120)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_step_gathers_its_stage_once_and_reduces_it_once(case, seen):
    for rank in seen:
        count, params, padded = rank[case]
        assert params <= padded < params + DP * 100
        assert count[GATHER] == count[SCATTER] == padded
        assert count[f"calls of {GATHER}"] == 1
        # A bucket is sent when the next gradient overflows it, so two in a row hold more than BUCKET elements.
        assert count[f"calls of {SCATTER}"] <= 2 * padded // BUCKET + 1
        assert count["other"] == 0


def test_more_microbatches_move_nothing_more(seen):
    for rank in seen:
        four, sixteen, per_round, _ = (count for count, _, _ in rank)
        assert four == sixteen == per_round


def between_two_steps(case: Case) -> tuple[Counter[str], list[float], list[float]]:
    """Traffic of a request for parameters that were gathered ahead; norms of two steps without and with that request,
    and with a model in between that is written to but not adopted."""
    import torch

    rig = Rig.of(case)
    norms = [rig.train(step=step).grad_norm for step in range(2)]
    rig.backend.gather_ahead()
    with counted() as count:
        rig.backend.gather()
    rig = Rig.of(case)
    written = [rig.train(step=0).grad_norm]
    rig.backend.gather_ahead()
    with rig.backend.whole(), torch.no_grad():
        for param in rig.backend.driver.params:
            assert param.numel() == param.ds_numel
            param.fill_(1.0)
    return count, norms, [*written, rig.train(step=1).grad_norm]


def test_what_is_gathered_ahead_is_gathered_once_and_what_is_only_written_there_does_not_last():
    for count, norms, written in run_ranks(between_two_steps, 2, Case(2, "--pp_microbatches 4", ""), timeout=60):
        assert not count
        assert written == norms


def operators_of_a_gather(case: Case) -> dict[str, int]:
    """How often each operator runs while a rank gathers its stage."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    rig, found = Rig.of(case), Counter[str]()
    rig.train()
    with Operators():
        rig.backend.gather()
    return dict(found)


def test_a_gather_takes_as_many_operators_on_any_number_of_ranks():
    """One collective and one copy; DeepSpeed's own takes a slice per parameter and rank."""
    two, four = (run_ranks(operators_of_a_gather, n, Case(n, "--pp_microbatches 4", MODEL))[0] for n in (2, 4))
    assert two == four
    assert two["_allgather_base_"] == two["split_with_sizes_copy"] == two["cat"] == 1


def gathered_in_pieces(case: Case) -> tuple[Counter[str], list[float]]:
    """Traffic of a gather in pieces of 8,000 elements, and norms of two steps with such gathers."""
    from megaaccum.upstream import zero_partitions

    rig = Rig.of(case)
    with patch.object(zero_partitions, "MOST_GATHERED", 8_000):
        norms = [rig.train(step=step).grad_norm for step in range(2)]
        with counted() as count:
            rig.backend.gather()
    return count, norms


def test_a_large_stage_is_gathered_in_pieces():
    """A piece of it is held twice for a moment, as it came and as parameters."""
    case = Case(2, "--pp_microbatches 4", MODEL)
    whole = run_ranks(between_two_steps, 2, case, timeout=60)
    for (count, norms), (_, expected, _) in zip(run_ranks(gathered_in_pieces, 2, case), whole, strict=True):
        assert count["calls of " + GATHER] > count[GATHER] // 8_000
        assert norms == expected


def groups_used(case: Case) -> set[str]:
    """Names of this rank's process groups that a step communicates over, its messages between stages aside."""
    from torch.distributed import ProcessGroup

    rig, used = Rig.of(case), set()

    def noting(method):
        return lambda group, *args, **keys: (used.add(group), method(group, *args, **keys))[1]

    with ExitStack() as stack:
        for name in (name for name, _, _ in METHODS if hasattr(ProcessGroup, name)):
            stack.enter_context(patch.object(ProcessGroup, name, noting(getattr(ProcessGroup, name))))
        rig.train()
    known = {"dp": rig.groups.dp, "dp_cp": rig.groups.dp_cp, "tp": rig.groups.tp, "embedding": rig.groups.embedding}
    return {name for name, group in known.items() if group in used}


def test_no_communicator_is_made_for_two_numbers():
    """NCCL makes one for each group that communicates, and dp x cp has one already."""
    used = run_ranks(groups_used, 4, Case(4, PIPELINE + "--pp_microbatches 4", MODEL), timeout=60)
    assert all("dp_cp" in names and "dp" not in names for names in used), used


def timeouts_of_groups(case: Case) -> list[str]:
    """Lines that create groups without the configuration's time limit, which Rig sets to 1 minute; and their number."""
    import torch.distributed as dist

    from megaaccum.distributed import groups
    from megaaccum.executor.p2p import PipelineChannels

    places: list[str] = []
    new_group = dist.new_group

    def noted(*args, timeout=None, **keys):
        at = "as configured" if timeout == timedelta(minutes=1) else str(traceback.extract_stack()[-2])
        places.append(at)
        return new_group(*args, timeout=timeout, **keys)

    with patch.object(dist, "new_group", noted), patch.object(dist.distributed_c10d, "new_group", noted):
        rig = Rig.of(case)
        PipelineChannels(rig.groups.pp, separate=True, timeout_minutes=1)
        with patch.object(groups, "carries_by_nccl", lambda group: True):
            assert rig.groups.host is not None
        rig.train()
    return places


@pytest.mark.parametrize("layout", ["", "--backend fsdp2 --data_parallel_replicas 2 ", "--backend megatron "])
def test_every_group_waits_as_long_as_is_configured(layout):
    case = Case(4, "--pipeline_model_parallel_size 2 --pp_microbatches 4 " + layout, MODEL)
    for places in run_ranks(timeouts_of_groups, 4, case, timeout=60):
        assert len(places) > 10
        assert set(places) == {"as configured"}


def twice_gathered() -> Counter[str]:
    import torch
    import torch.distributed as dist

    with counted() as count:
        for _ in range(2):
            dist.all_gather_into_tensor(torch.empty(2 * SMALL), torch.ones(SMALL))
        dist.all_reduce(torch.ones(SMALL + 1))
        dist.reduce_scatter_tensor(torch.empty(SMALL), torch.ones(2 * SMALL))
    return count


def test_the_count_sees_what_passes():
    for count in run_ranks(twice_gathered, 2):
        assert count[GATHER] == 4 * SMALL
        assert count["calls of all-gather"] == 2
        assert count["other"] == SMALL + 1
        assert count[SCATTER] == 2 * SMALL
