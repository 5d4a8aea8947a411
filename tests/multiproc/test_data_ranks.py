"""Data on several ranks that start at once: one builds, all agree, and a rank with bad data holds up no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaaccum.lab.verification.testing import run_ranks


def first_step(folder: str) -> tuple[str, list[list[int]], list[int]]:
    """Digest of the data, and this rank's first tokens of each sample of one step, and of one evaluation."""
    from megaaccum.pretrain.data.dataset import build_datasets
    from megaaccum.pretrain.data.loader import MicrobatchLoader
    from tests.support.data_samples import make_plan

    world = int(os.environ["WORLD_SIZE"])
    plan = make_plan(Path(folder), world_size=world, global_batch_size=8)
    data = build_datasets(plan)

    def pull(dataset) -> list[list[int]]:
        rank = int(os.environ["RANK"])
        with MicrobatchLoader(dataset, plan.batch, dp_rank=rank, vocab_size=data.vocabulary.size) as loader:
            return [batch["tokens"][0].tolist() for batch in loader.next_step()]

    return data.digest, pull(data.train), pull(data.valid)


def test_ranks_that_start_at_once_see_one_dataset_and_share_its_batch(tmp_path, texts):
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "data").symlink_to(texts)
    alone = run_ranks(first_step, 1, str(tmp_path / "alone"))
    for init in (True, False):
        folder = tmp_path / f"init-{init}"
        ranks = run_ranks(first_step, 4, str(folder), init=init)
        assert {digest for digest, _, _ in ranks} == {alone[0][0]}
        for part in (1, 2):
            together = sorted(sample for rank in ranks for sample in rank[part])
            assert together == sorted(alone[0][part])
        assert len(list(folder.glob("data/embedded-*"))) == len(list(folder.glob("data/index/*"))) == 1


def with_a_bad_rank(folder: str) -> int | str:
    """Rank 1 is given a dataset that does not exist and returns the error; the others return the length of theirs."""
    from megaaccum.errors import DataError
    from megaaccum.pretrain.data.dataset import build_datasets
    from tests.support.data_samples import counting_pair, make_plan

    rank = os.environ["RANK"]
    prefix = counting_pair(Path(folder) / rank / "corpus")
    if rank == "1":
        prefix.with_suffix(".bin").unlink()
    plan = make_plan(Path(folder) / rank, world_size=2, data_path=[str(prefix)], vocab_size=2000, split="80,20")
    try:
        return len(build_datasets(plan).train)
    except DataError as error:
        return str(error)


def of_two_hosts(folder: str) -> str:
    """The error of a run on ranks whose hosts have different corpora under one name."""
    from megaaccum.cli import train
    from megaaccum.errors import RankDisagreement
    from tests.support.data_samples import counting_pair
    from tests.support.whole_runs import flags

    rank = int(os.environ["RANK"])
    host = Path(folder) / f"host{rank}"
    counting_pair(host / "corpus", num_documents=50 - 25 * rank)
    os.chdir(host)
    keys = dict(data_path="corpus", data_cache_path="cache", output_dir=Path(folder) / "run")
    try:
        train.main(flags(host, pipeline_model_parallel_size=1, pp_microbatches=2, **keys))
    except RankDisagreement as error:
        return str(error)
    return ""


def test_hosts_with_different_data_end_before_the_first_step(tmp_path):
    """Their ranks trained on both corpora, or made other numbers of evaluations."""
    for error in run_ranks(of_two_hosts, 2, str(tmp_path), init=False, timeout=60):
        assert "ranks disagree about the data of their hosts (rank 0: data 1 of 2,000 tokens of corpus" in error
        assert "rank 1: data 1 of 1,000 tokens of corpus" in error


@pytest.mark.parametrize("init", [True, False])
def test_a_rank_with_bad_data_fails_alone_and_at_once(tmp_path, init):
    """Hosts need no shared file system. Megatron's own builder would leave rank 0 in a barrier."""
    good, bad = run_ranks(with_a_bad_rank, 2, str(tmp_path), init=init)
    assert good >= 40
    assert "corpus.bin does not exist" in bad
