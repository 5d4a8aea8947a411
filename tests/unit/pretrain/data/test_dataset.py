"""Datasets through Megatron: its own order, cached whole or not at all, and refused before they do harm."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from megaaccum.config.batch import BatchPlan
from megaaccum.config.schema import BatchConfig
from megaaccum.errors import ConfigError, DataError
from megaaccum.pretrain.data.dataset import build_datasets
from megaaccum.pretrain.data.loader import MicrobatchLoader
from megaaccum.pretrain.data.tokenizer import train_tokenizer
from tests.support.data_samples import counting_pair, largest_file, make_plan, sentences, write_pair

TOKENS = 50 * 40
"""Tokens of `counting_pair`: ids 0..1999 in 50 documents of 40."""


@pytest.fixture
def corpus(tmp_path) -> str:
    return str(counting_pair(tmp_path / "corpus"))


def plan_over(tmp_path: Path, *corpora: str, **keys: object):
    return make_plan(tmp_path / "run", data_path=list(corpora), **(dict(vocab_size=TOKENS, split="80,20,0") | keys))


def tokens_of(dataset, count: int | None = None) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset) if count is None else count)]


def test_the_default_trains_on_the_embedded_text(tmp_path, built):
    data = build_datasets(make_plan(tmp_path, seq_length=64, data_cache_path=str(built[0])))
    assert len(data.train) >= 40
    assert (data.vocabulary.size, data.vocabulary.eod, data.valid_batches) == (2048, 0, 2)
    sample = data.train[0]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["tokens"].shape == (64,)


@pytest.mark.parametrize("others", [[], [400], [90, 230]])
def test_the_order_is_megatrons(tmp_path, corpus, others):
    """others: documents of more pairs, of a blend without weights."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from megaaccum.pretrain.data.dataset import _MegatronTokenizer

    pairs = [str(counting_pair(tmp_path / f"{n}", num_documents=n, first=5000)) for n in others]
    plan = plan_over(tmp_path, corpus, *pairs, split="80,15,5", vocab_size=30000)
    data = build_datasets(plan)
    config = GPTDatasetConfig(
        random_seed=plan.config.run.seed,
        sequence_length=16,
        blend=([corpus, *pairs], None),
        split="80,15,5",
        path_to_cache=str(tmp_path / "theirs"),
        tokenizer=_MegatronTokenizer(data.vocabulary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [40, 8, 1], lambda: True, config).build()
    assert tokens_of(data.train, 40 if others else None) == tokens_of(train)
    assert others or tokens_of(data.valid) == tokens_of(valid)


def test_training_never_sees_the_documents_of_validation(tmp_path, corpus):
    data = build_datasets(plan_over(tmp_path, corpus, train_iters=100))
    assert max(map(max, tokens_of(data.train))) < 40 * 40
    assert min(map(min, tokens_of(data.valid))) >= 40 * 40


def test_a_run_longer_than_the_data_goes_round(tmp_path, corpus):
    data = build_datasets(plan_over(tmp_path, corpus, train_iters=100))  # 400 samples of 100 a pass
    seen = Counter(token for sample in tokens_of(data.train, 400) for token in sample)
    assert len(seen) >= 40 * 40 - 16
    assert set(seen.values()) <= {2, 3, 4, 5}


def test_the_same_everywhere_and_another_order_for_another_seed(tmp_path, corpus):
    first = build_datasets(plan_over(tmp_path, corpus))
    (tmp_path / "elsewhere").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / "elsewhere")
    copied = plan_over(tmp_path, str(tmp_path / "elsewhere" / "corpus"), data_cache_path=str(tmp_path / "cache"))
    second = build_datasets(copied)
    assert first.digest == second.digest
    assert tokens_of(first.train) == tokens_of(second.train)
    other_seed = build_datasets(plan_over(tmp_path, corpus, seed=5))
    assert other_seed.digest != first.digest
    assert tokens_of(other_seed.train) != tokens_of(first.train)


def test_evaluation_changes_neither_the_digest_nor_the_training_order(tmp_path, corpus):
    with_evaluation, without = (build_datasets(plan_over(tmp_path, corpus, eval_interval=n)) for n in (5, 0))
    assert without.valid is None
    assert without.valid_batches == 0
    assert with_evaluation.digest == without.digest
    assert tokens_of(with_evaluation.train) == tokens_of(without.train)


def test_the_digest_sees_a_changed_token(tmp_path, corpus):
    before = build_datasets(plan_over(tmp_path, corpus))
    content = bytearray(Path(f"{corpus}.bin").read_bytes())
    content[:2] = content[2:4]
    Path(f"{corpus}.bin").write_bytes(content)
    assert build_datasets(plan_over(tmp_path, corpus)).digest != before.digest


def test_orders_are_written_once(tmp_path, corpus):
    plan = plan_over(tmp_path, corpus)
    first = tokens_of(build_datasets(plan).train)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.npy")}
    assert len(files) == 6, "three tables each for train and valid"
    assert tokens_of(build_datasets(plan).train) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.npy")} == files


def test_a_dataset_that_was_rebuilt_in_place_gets_a_new_order(tmp_path, corpus):
    build_datasets(plan_over(tmp_path, corpus))
    counting_pair(Path(corpus), num_documents=20)
    data = build_datasets(plan_over(tmp_path, corpus))
    assert {token for sample in tokens_of(data.train) for token in sample} <= set(range(16 * 40))


def test_an_interrupted_build_of_orders_leaves_none(tmp_path, corpus, monkeypatch):
    saved = []

    def save(path, *args, **kwargs):
        saved.append(path)
        if len(saved) == 3:
            raise KeyboardInterrupt
        real_save(path, *args, **kwargs)

    real_save = np.save
    monkeypatch.setattr(np, "save", save)
    with pytest.raises(KeyboardInterrupt):
        build_datasets(plan_over(tmp_path, corpus))
    assert not list((tmp_path / "run").rglob("*.npy"))
    monkeypatch.setattr(np, "save", real_save)
    assert len(build_datasets(plan_over(tmp_path, corpus)).train) >= 40


class Planted:
    """An object that makes a file if it is unpickled."""

    def __init__(self, at: Path):
        self.at = at

    def __reduce__(self):
        return (Path.touch, (self.at,))


def test_a_planted_order_is_not_unpickled_or_waited_for(tmp_path, corpus):
    plan = plan_over(tmp_path, corpus)
    build_datasets(plan)
    order = next((tmp_path / "run").rglob("*shuffle_index.npy"))
    whole = order.read_bytes()

    def plant(make) -> None:
        order.unlink()
        make()
        with pytest.raises(DataError, match=r"the sample order .* is damaged \(.*\): delete .*, and start again"):
            build_datasets(plan)

    plant(lambda: np.save(order, np.array([Planted(tmp_path / "ran")]), allow_pickle=True))
    plant(lambda: np.save(order, np.ones(80)))
    plant(lambda: os.mkfifo(order))
    plant(lambda: order.symlink_to("/dev/zero"))
    plant(lambda: order.write_bytes(whole[:100]))
    plant(lambda: order.write_bytes(whole[:10] + b"(" * 50 + whole[60:]))
    plant(lambda: order.write_bytes(whole[:200]))
    assert not (tmp_path / "ran").exists()


def test_weights_of_a_blend(tmp_path):
    a, b = (str(counting_pair(tmp_path / name, first=first)) for name, first in (("a", 0), ("b", 5000)))
    data = build_datasets(make_plan(tmp_path / "run", data_path=["1", a, "3", b], vocab_size=7000, train_iters=50))
    from_b = sum(sample[0] >= 5000 for sample in tokens_of(data.train, 200))
    assert from_b == 150
    first_batches = [
        sum(sample[0] >= 5000 for sample in tokens_of(data.train, 200)[i : i + 4]) for i in range(0, 200, 4)
    ]
    assert set(first_batches) == {3}, "the blend holds in every batch, not only in the whole"


def test_a_blend_without_weights_is_by_size_and_goes_round(tmp_path):
    small = str(counting_pair(tmp_path / "small", num_documents=60))
    large = str(counting_pair(tmp_path / "large", num_documents=180, first=5000))
    data = build_datasets(make_plan(tmp_path / "run", data_path=[small, large], vocab_size=20000, train_iters=250))
    assert len(data.train) >= 1000, "one pass is about 580 samples"
    # The training shares have 144 and 434 samples.
    assert sum(sample[0] >= 5000 for sample in tokens_of(data.train, 1000)) == round(1000 * 434 / 578)


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("iters", [1, 2, 3])
def test_small_blends_have_the_samples_they_were_asked_for(tmp_path, parts, iters):
    prefixes = [str(counting_pair(tmp_path / f"{n}")) for n in range(parts)]
    words = [word for n, prefix in enumerate(prefixes) for word in (str(10 ** (n % 3)), prefix)]
    plan = make_plan(tmp_path / "run", data_path=words, vocab_size=TOKENS, train_iters=iters, eval_iters=iters)
    data = build_datasets(plan)
    assert len(data.train) >= iters * 4
    assert len(data.valid) >= data.valid_batches * 4


def test_a_path_for_each_part(tmp_path):
    a, b = (str(counting_pair(tmp_path / name, first=first)) for name, first in (("a", 0), ("b", 5000)))
    data = build_datasets(make_plan(tmp_path / "run", train_data_path=[a], valid_data_path=[b, a], vocab_size=7000))
    assert max(map(max, tokens_of(data.train))) < TOKENS
    valid = [sample[0] >= 5000 for sample in tokens_of(data.valid)]
    assert 0 < sum(valid) < len(valid)


def test_validation_is_cut_to_one_pass(tmp_path, corpus):
    data = build_datasets(plan_over(tmp_path, corpus, eval_iters=1000))
    assert data.valid_batches == (10 * 40 - 1) // 16 // 4 == 6
    seen = [tuple(sample) for sample in tokens_of(data.valid, 24)]
    assert len(set(seen)) == 24, "an evaluation counts a sample twice"


def test_validation_smaller_than_a_batch_is_repeated_to_fill_it(tmp_path, corpus):
    data = build_datasets(plan_over(tmp_path, corpus, global_batch_size=64, eval_iters=3))
    assert data.valid_batches == 1
    assert len(data.valid) >= 64


@pytest.mark.parametrize("mmap", [True, False])
def test_reading_without_a_map_gives_the_same(tmp_path, corpus, mmap):
    mapped = build_datasets(plan_over(tmp_path, corpus))
    assert tokens_of(build_datasets(plan_over(tmp_path, corpus, mmap_bin_files=mmap)).train) == tokens_of(mapped.train)


def test_a_pass_that_is_built_ahead_hides_no_ranks(tmp_path, corpus, monkeypatch):
    """Megatron's layers, which run while the loader's thread builds, would take ranks for one process."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    data = build_datasets(plan_over(tmp_path, corpus))
    later = data.after(data.state(20) | {"digest": "another"}, consumed=20, needed=40)
    begun, looked, seen, build = threading.Event(), threading.Event(), [], Builder.build

    def slowly(self):
        seen.append(torch.distributed.is_initialized())
        begun.set()
        looked.wait(60)
        return build(self)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(Builder, "build", slowly)
    with ThreadPoolExecutor(1) as thread:
        sample = thread.submit(lambda: later.train[20])
        assert begun.wait(60)
        seen.append(torch.distributed.is_initialized())
        looked.set()
        assert len(sample.result()["tokens"]) == 16
    assert seen == [False, True] and torch.distributed.is_initialized()


# --- documents inside a sample ---------------------------------------------------------------------------------------


@pytest.fixture
def short_documents(tmp_path) -> str:
    """Documents of 4 tokens and id 0, which ends them; with the tokenizer that says so beside."""
    write_pair(tmp_path / "short", [[7, 8, 9, 10, 0]] * 100, 300)
    train_tokenizer(sentences(200), 300).save(str(tmp_path / "short.tokenizer.json"))
    return str(tmp_path / "short")


def first_batch(plan) -> dict:
    data = build_datasets(plan)
    end = data.vocabulary.eod if plan.config.data.reset_attention_mask else None
    sizes = BatchConfig(micro_batch_size=2, global_batch_size=4)
    batch = BatchPlan.solve(sizes, data_parallel_size=1, seq_length=plan.batch.seq_length)
    with MicrobatchLoader(data.train, batch, dp_rank=0, document_end=end) as loader:
        return loader.next_step()[0]


def test_ends_of_documents_leave_the_loss(tmp_path, short_documents):
    batch = first_batch(make_plan(tmp_path / "run", data_path=[short_documents], split="80,20,0", eod_mask_loss=True))
    assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == 0)
    assert (batch["tokens"] == 0).any()
    plain = first_batch(make_plan(tmp_path / "run", data_path=[short_documents], split="80,20,0"))
    assert plain["loss_mask"].all()


def test_positions_start_again_in_each_document(tmp_path, short_documents):
    batch = first_batch(
        make_plan(tmp_path / "run", data_path=[short_documents], split="80,20,0", reset_position_ids=True)
    )
    after_end = batch["position_ids"][:, 1:][batch["tokens"][:, :-1] == 0]
    assert len(after_end) > 2
    assert (after_end == 0).all()


def test_attention_stays_inside_documents(tmp_path, short_documents):
    batch = first_batch(
        make_plan(tmp_path / "run", data_path=[short_documents], split="80,20,0", reset_attention_mask=True)
    )
    ends = batch["tokens"] == 0
    assert ends.any()
    # An end belongs to what it ends.
    assert torch.equal(batch["document_starts"], torch.cat([torch.ones(len(ends), 1).bool(), ends[:, :-1]], dim=1))


def test_an_end_of_document_is_needed_and_not_there(tmp_path, corpus):
    with pytest.raises(DataError, match=r"eod_mask_loss, reset_position_ids needs the token that ends a document"):
        build_datasets(plan_over(tmp_path, corpus, eod_mask_loss=True, reset_position_ids=True))


def test_an_end_of_document_that_no_document_has(tmp_path, short_documents):
    """Without --append-eod, or with the end of another tokenizer, documents would see each other."""
    write_pair(Path(short_documents), [[7, 8, 9, 10, 11]] * 100, 300)
    keys = dict(data_path=[short_documents], split="80,20,0", reset_attention_mask=True)
    with pytest.raises(DataError, match=r"reset_attention_mask needs .*, but id 0 is not in .*, which ends with 11: "):
        build_datasets(make_plan(tmp_path / "run", **keys))


# --- what cannot be trained on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file(tmp_path, corpus, suffix):
    Path(corpus + suffix).unlink()
    with pytest.raises(DataError, match=rf"corpus\{suffix} does not exist"):
        build_datasets(plan_over(tmp_path, corpus))


def test_a_truncated_bin(tmp_path, corpus):
    content = Path(f"{corpus}.bin").read_bytes()
    Path(f"{corpus}.bin").write_bytes(content[:1000])
    with pytest.raises(DataError, match=r"corpus\.bin is truncated: 1,000 bytes, where .* says 4,000"):
        build_datasets(plan_over(tmp_path, corpus))


@pytest.mark.parametrize("place", [0, 40, 49])
def test_an_index_that_points_elsewhere(tmp_path, corpus, place):
    with open(f"{corpus}.idx", "r+b") as stream:
        stream.seek(34 + 4 * 50 + 8 * place)
        stream.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(DataError, match=r"corpus\.(idx: offset 1099511627776 of sequence|bin is truncated)"):
        build_datasets(plan_over(tmp_path, corpus))


def test_ids_that_the_vocabulary_lacks(tmp_path, corpus):
    with pytest.raises(DataError, match=r"token 1,500 has id 1500, but the vocabulary has 1500 entries"):
        build_datasets(plan_over(tmp_path, corpus, vocab_size=1500))


def test_a_sequence_longer_than_the_data(tmp_path, corpus):
    with pytest.raises(DataError, match=r"train has no sample .* 40 of 50 documents .* 1,600 tokens, .* takes 3,001"):
        build_datasets(plan_over(tmp_path, corpus, seq_length=3000))


def test_a_split_that_leaves_validation_nothing(tmp_path, corpus):
    with pytest.raises(DataError, match=r"valid has no sample .* Write split: 49,1,0"):
        build_datasets(plan_over(tmp_path, corpus, split="999,1,0"))
    assert build_datasets(plan_over(tmp_path, corpus, split="999,1,0", eval_interval=0)).valid is None
    assert build_datasets(plan_over(tmp_path, corpus, split="49,1,0")).valid_batches == 1


def test_a_share_that_is_empty_everywhere_does_not_hang(tmp_path, corpus):
    data = build_datasets(plan_over(tmp_path, corpus, split="90,10"))
    assert data.valid is not None


def test_training_paths_without_validation_paths(tmp_path, corpus):
    with pytest.raises(ConfigError, match="eval_interval is 5, but train_data_path has no valid_data_path beside it"):
        build_datasets(make_plan(tmp_path / "run", train_data_path=[corpus], vocab_size=TOKENS))


def test_a_cache_folder_that_cannot_be_made(tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot lock .*file"):
        build_datasets(plan_over(tmp_path, corpus, data_cache_path=str(tmp_path / "file")))


def test_a_full_disk_while_the_order_is_written(tmp_path, corpus):
    plan = plan_over(tmp_path, corpus, train_iters=1000)
    with largest_file(2000), pytest.raises(DataError, match=r"cannot write the order of samples to .*: no space left"):
        build_datasets(plan)
    assert not list((tmp_path / "run").rglob("*.npy"))
    assert len(build_datasets(plan).train) >= 4000


def test_megatron_without_its_index_builder(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(DataError, match=r"Megatron-core .* without its index builder .*C\+\+ compiler.*megatron-core"):
        build_datasets(plan_over(tmp_path, corpus))
