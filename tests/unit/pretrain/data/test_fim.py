"""Fill in the middle: Megatron's dataset, whose samples depend on the seed and their number alone."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megaaccum.errors import DataError
from megaaccum.pretrain.data import fim
from megaaccum.pretrain.data.dataset import build_datasets
from megaaccum.pretrain.data.tokenizer import train_tokenizer
from tests.support.data_samples import make_plan, sentences, write_pair

TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
SEQ = 64


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Texts with <|endoftext|> after each, and their tokenizer beside them."""
    texts = sentences(80)
    tokenizer = train_tokenizer(texts, 320)
    tokenizer.add_special_tokens(list(TOKENS))
    documents = [[*tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")] for text in texts]
    tokenizer.save(str(tmp_path / "corpus.tokenizer.json"))
    return write_pair(tmp_path / "corpus", documents)


def built(corpus: Path, **keys: object):
    keys = dict(seq_length=SEQ, data_path=[str(corpus)], eval_interval=0, fim_data=True) | keys
    return build_datasets(make_plan(corpus.parent / "run", **keys))


def sample(data, index: int) -> list[int]:
    found = data.train[index]
    return [*found["tokens"].tolist(), int(found["labels"][-1])]


def test_tokens_that_fill_up_a_sample_do_not_count(tmp_path: Path) -> None:
    """A text is shorter when it is tokenized again, as that of special tokens or of another tokenizer's merges."""
    texts = sentences(80)
    tokenizer = train_tokenizer(texts, 320)
    tokenizer.add_special_tokens(list(TOKENS))
    letters = [[token for letter in text for token in tokenizer.encode(letter).ids] for text in texts]
    tokenizer.save(str(tmp_path / "corpus.tokenizer.json"))
    data = built(write_pair(tmp_path / "corpus", letters), fim_rate=1.0)
    samples = [data.train[index] for index in range(len(data.train))]
    counted = [sample["loss_mask"].long() for sample in samples]
    assert sum(int(each.sum()) for each in counted) < SEQ * len(samples) / 2, "texts became shorter"
    assert all(bool((each.diff() <= 0).all()) for each in counted), "what does not count is the end of a sample"
    pad = tokenizer.token_to_id("<fim_pad>")
    assert not any(bool((sample["labels"] == pad).any()) for sample in samples), "Megatron writes 0 in their place"


def parts(ids: list[int], at: int) -> list[list[int]]:
    """Token ids between those that are `at`."""
    found: list[list[int]] = [[]]
    for token in ids:
        if token == at:
            found.append([])
        else:
            found[-1].append(token)
    return found


def put_back(text: list[int], prefix: int, middle: int, suffix: int) -> list[int]:
    """A text with its middle where it was, from either order of the parts."""
    if middle not in text:
        return text
    (before, rest), last_first = parts(text, middle), text[:2] == [prefix, suffix]
    if last_first:
        return rest + before[2:]
    start, end = parts(before[1:], suffix)
    return start + rest + end


def test_a_text_is_cut_in_three_and_its_middle_comes_last(corpus):
    tokenizer = Tokenizer.from_file(f"{corpus}.tokenizer.json")
    prefix, middle, suffix, _, eod = (tokenizer.token_to_id(token) for token in (*TOKENS, "<|endoftext|>"))
    plain, cut = built(corpus, fim_data=False), built(corpus, fim_rate=1.0)
    seen: Counter[bool] = Counter()
    for index in range(30):
        whole, made = parts(sample(plain, index), eod), parts(sample(cut, index), eod)
        assert len(sample(cut, index)) == SEQ + 1
        for before, after in zip(whole, made[:-1], strict=False):  # the last one is cut off
            assert middle in after
            assert tokenizer.decode(put_back(after, prefix, middle, suffix)) == tokenizer.decode(before)
            seen[after[1] == suffix] += 1
    assert min(seen[True], seen[False]) > 5


def in_another_order(corpus: Path) -> tuple[list[list[int]], list[list[int]]]:
    first, again = built(corpus), built(corpus)
    return [sample(first, index) for index in range(12)], [sample(again, index) for index in range(11, -1, -1)][::-1]


def test_a_sample_does_not_depend_on_what_was_read_before(corpus):
    forwards, backwards = in_another_order(corpus)
    assert forwards == backwards
    assert forwards != [sample(built(corpus, seed=7), index) for index in range(12)]


def test_threads_do_not_take_each_others_draws(corpus, monkeypatch):
    class Slow(np.random.RandomState):
        def binomial(self, *args):
            time.sleep(1e-3)  # in which the other thread begins a sample
            return super().binomial(*args)

    data = built(corpus)
    alone = [sample(data, index) for index in range(12)]
    monkeypatch.setattr(np.random, "RandomState", Slow)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(partial(sample, data), range(12))) == alone


def test_with_a_state_that_each_reader_advances_it_would(corpus, monkeypatch):
    from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

    monkeypatch.setattr(fim, "dataset_classes", lambda: (GPTFIMDataset, GPTFIMDatasetConfig))
    forwards, backwards = in_another_order(corpus)
    assert forwards != backwards


def test_other_rates_are_other_data(corpus):
    digests = {built(corpus, **keys).digest for keys in ({}, dict(fim_rate=0.25), dict(fim_data=False))}
    assert len(digests) == 3


def test_parts_of_a_text_are_cut_at_a_rate_of_their_own(corpus):
    tokenizer = Tokenizer.from_file(f"{corpus}.tokenizer.json")
    fox = "Ġfox"  # with the blank before it, as nearly every one in the texts has
    made = built(corpus, fim_rate=1.0, fim_split_sample=fox, fim_fragment_rate=1.0)
    at = tokenizer.token_to_id(fox)
    assert any(sample(made, index).count(at) > 1 for index in range(12))
    assert any(len(parts(sample(made, index), tokenizer.token_to_id(TOKENS[1]))) > 3 for index in range(12))


def test_a_tokenizer_without_the_tokens_is_an_error_that_names_them(corpus):
    with pytest.raises(DataError, match="no token fim_prefix_token <PRE>, fim_pad_token <PAD>;"):
        built(corpus, fim_prefix_token="<PRE>", fim_pad_token="<PAD>")


def test_token_ids_alone_are_not_enough(corpus):
    with pytest.raises(DataError, match="fim_data needs a tokenizer that encodes text"):
        built(corpus, tokenizer_type="NullTokenizer", vocab_size=400)
