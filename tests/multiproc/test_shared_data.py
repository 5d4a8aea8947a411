"""One reader for each model-parallel group: it reads one copy, and every stage is sent what it reads, and no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaaccum.lab.verification.testing import run_ranks

MICROBATCHES, SIZE, SEQ, VOCAB, STEPS = 4, 2, 8, 50, 2
LAYOUTS = {
    "pp 4": dict(pipeline_model_parallel_size=4),
    "pp 2, dp 2": dict(pipeline_model_parallel_size=2),
    "tp 2, pp 2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "cp 2, pp 2": dict(context_parallel_size=2, pipeline_model_parallel_size=2),
    "tp 2, cp 2": dict(tensor_model_parallel_size=2, context_parallel_size=2),
    "a V": dict(pipeline_model_parallel_size=4, schedule="dualpipev"),
    "dp 4": {},
}


class Samples:
    """Made-up documents, and which of them were asked for. bad: one that cannot be read."""

    def __init__(self, bad: int = -1):
        self.asked: list[int] = []
        self.bad = bad

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int):
        import torch

        self.asked.append(index)
        if index == self.bad:
            raise OSError(5, "Input/output error")
        text = torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(index))
        mask = (text[1:] % 3 > 0).float()
        made = dict(tokens=text[:-1], labels=text[1:], loss_mask=mask, position_ids=torch.arange(SEQ))
        return made | dict(padding_mask=torch.arange(SEQ) >= 1 + index % SEQ)


def opened(groups, dataset, *, mine: bool = False):
    """The loader of this rank; mine: one that reads for itself."""
    from functools import partial

    from megaaccum.config.batch import BatchPlan
    from megaaccum.config.schema import BatchConfig
    from megaaccum.pretrain.data.loader import MicrobatchLoader
    from megaaccum.pretrain.data.shared import SharedLoader
    from megaaccum.pretrain.model.gpt_forward import read_by

    at = groups.layout
    last = at.pp * at.vpp - 1
    stages = [groups.stage(chunk) for chunk in range(at.vpp)]
    config = SimpleNamespace(num_moe_experts=4)
    chunks = [SimpleNamespace(config=config, pre_process=stage == 0, post_process=stage == last) for stage in stages]
    sizes = BatchConfig(micro_batch_size=SIZE, pp_microbatches=MICROBATCHES)
    batch = BatchPlan.solve(sizes, data_parallel_size=groups.dp.size(), seq_length=SEQ)
    open_loader = partial(MicrobatchLoader, dataset, batch, dp_rank=groups.dp.rank(), document_end=0)
    if mine:
        return open_loader(), read_by(chunks)
    return SharedLoader(open_loader, groups, read_by(chunks), shape=(SIZE, SEQ)), read_by(chunks)


def taken(layouts: list[dict], bad: int = -1):
    """For each layout on this rank: samples read, parts received but not used, differences from reading alone, and the
    error."""
    import torch

    from megaaccum.distributed import groups as process_groups
    from tests.support.configs import plan

    results = []
    for keys in layouts:
        of = plan(4, seq_length=SEQ, num_layers=8, **keys)
        process_groups.destroy()
        groups = process_groups.build(of.layout, timeout_minutes=1)
        dataset = Samples(bad)
        shared, names = opened(groups, dataset)
        alone, _ = opened(groups, Samples(), mine=True)
        wrong, more, error = [], set(), None
        for _ in range(STEPS):
            found, error = shared.try_next_step(MICROBATCHES)
            again, _ = shared.try_next_step(MICROBATCHES)
            if error or not found:
                break
            assert [id(each) for each in again] == [id(each) for each in found]
            for one, other in zip(found, alone.next_step(), strict=True):
                wrong += [n for n in (*names, "num_tokens") if not torch.equal(one[n], other[n])]
                more |= {name for name, each in one.items() if each is not None} - {*names, "num_tokens"}
            shared.commit(MICROBATCHES * SIZE * groups.dp.size())
            alone.commit()
        torch.distributed.barrier()  # a rank that ends takes what it has sent and no other has received with it
        shared.close()
        alone.close()
        is_reader = shared._loader is not None
        read = [index for index in dataset.asked if index < STEPS * MICROBATCHES * SIZE * groups.dp.size()]
        results.append((is_reader, read, set() if is_reader else more, wrong, str(error or "")))
    return results


@pytest.fixture(scope="module")
def seen():
    ranks = run_ranks(taken, 4, list(LAYOUTS.values()), timeout=90)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_group_reads_one_copy(name, seen):
    sizes = [size for key, size in LAYOUTS[name].items() if key != "schedule"]
    dp = 4
    for size in sizes:
        dp //= size
    readers = [read for is_reader, read, *_ in seen[name] if is_reader]
    assert len(readers) == dp
    everything = sorted(index for read in readers for index in read)
    assert everything == list(range(STEPS * MICROBATCHES * SIZE * dp))
    assert not any(read for is_reader, read, *_ in seen[name] if not is_reader)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stage_has_what_it_reads_and_no_more(name, seen):
    for _, _, more, wrong, _ in seen[name]:
        assert (more, wrong) == (set(), [])


def test_what_the_reader_cannot_read_leaves_no_rank_waiting():
    for name in ("tp 2, pp 2", "pp 4"):
        ranks = run_ranks(taken, 4, [LAYOUTS[name]], bad=MICROBATCHES * SIZE + 1, timeout=60)
        errors = [rank[0][-1] for rank in ranks]
        assert "sample 9 cannot be read" in errors[0] and errors[1:] == ["", "", ""]
