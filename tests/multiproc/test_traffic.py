"""Messages of torch.distributed are counted; test_sync_modes.py compares the counts of steps with predictions."""

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.observe.traffic import Meter
from tests.support.parity import Case


def one_of_each():
    import torch
    import torch.distributed as dist

    meter = Meter()
    with meter.counting() as traffic:
        dist.all_reduce(torch.ones(7))
        first = meter.pop()
        dist.all_reduce(torch.ones(10))
        dist.all_gather_into_tensor(torch.empty(8, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
        work = dist.reduce_scatter_tensor(torch.empty(3), torch.ones(6), async_op=True)
        work.wait()
    dist.all_reduce(torch.ones(10))  # after it: not counted
    counts = [
        {lane: (count.calls, count.num_bytes, count.seconds > 0) for lane, count in each.items()}
        for each in (first, traffic)
    ]
    other = 1 - dist.get_rank()
    with meter.counting() as traffic:  # two receives of 40 bytes at once, then one of 12 after both were read
        for sizes in ((10, 10), (3,)):
            works = [dist.irecv(torch.empty(size), other) for size in sizes]
            works += [dist.isend(torch.ones(size), other) for size in sizes]
            for each in works:
                each.wait()
    return *counts, meter.most_receiving, traffic["send/world/float32"].num_bytes


def test_the_meter_counts_what_passes_inside_it():
    expected = {
        "all_reduce/world/float32": (1, 2 * 0.5 * 40, True),
        "all_gather/world/bfloat16": (1, 0.5 * 16, True),
        "reduce_scatter/world/float32": (1, 0.5 * 24, True),
    }
    before = {"all_reduce/world/float32": (1, 2 * 0.5 * 28, True)}
    assert run_ranks(one_of_each, 2) == [(before, expected, 80, 92)] * 2


def unequal_parts():
    """Rank r sends r + 1 numbers to each, and a tensor of its own to each."""
    import torch
    import torch.distributed as dist

    rank, meter = dist.get_rank(), Meter()
    with meter.counting() as traffic:
        sent = torch.ones(2 * (rank + 1))
        dist.all_to_all_single(torch.empty(3), sent, [1, 2], [rank + 1, rank + 1])
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
    return traffic["all_to_all/world/float32"].num_bytes


def test_of_an_all_to_all_what_other_ranks_send_is_counted():
    assert run_ranks(unequal_parts, 2) == [4 * 2 + 4 * 2, 4 * 1 + 4 * 2]


def beside_a_save(folder):
    """The traffic of a step in which a checkpoint is written."""
    import torch
    import torch.distributed as dist

    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave
    from tests.support.restarts import Run

    meter, run, group = Meter(), Run.of(Case(2, "--pp_microbatches 4", "--num_layers 2")), groups.for_background(1)
    with meter.counting() as traffic:
        dist.all_reduce(torch.ones(10))
        BackgroundSave(folder, run.backend, run.groups, run.engine.progress(), keep_last=1, group=group).finish()
    return [lane for lane in traffic if "/other/" in lane], "all_reduce/world/float32" in traffic


def test_what_a_save_in_the_background_sends_is_no_steps(tmp_path):
    assert run_ranks(beside_a_save, 2, str(tmp_path)) == [([], True)] * 2
