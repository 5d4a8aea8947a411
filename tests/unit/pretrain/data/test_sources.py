"""The meaning of data_path and its relatives, the documents of each part, and the vocabulary of a configuration."""

from __future__ import annotations

import random
import re

import pytest

from megaaccum.config.schema import DataConfig
from megaaccum.errors import ConfigError, DataError
from megaaccum.pretrain.data.corpus import EMBEDDED_VOCAB_SIZE, chapters, embedded_prefix
from megaaccum.pretrain.data.indexed import check_tables, open_pair
from megaaccum.pretrain.data.sources import Blend, Sources, check_files, data_folder, read_sources, vocab_size
from megaaccum.pretrain.data.tokenizer import read_tokenizer, train_tokenizer
from megaaccum.pretrain.data.train_valid_split import check_ranges, epoch_samples, split_ranges
from tests.support.configs import make, plan
from tests.support.data_samples import counting_pair, sentences, write_pair


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["0.3", "a", "7", "b"], ["a", "b"], [0.3, 7.0]),
        (["1.0", "a"], ["a"], None),
        (["embedded"], ["embedded"], None),
    ],
)
def test_blends(words, prefixes, weights):
    assert read_sources(DataConfig(data_path=words)).train == Blend(prefixes=prefixes, weights=weights)


@pytest.mark.parametrize("words", [["a", "b"], ["0.3", "a", "7", "b"], ["30", "a", "70", "b", "1", "c"], ["x"]])
def test_blends_are_read_as_megatron_reads_them(words):
    from megatron.core.datasets.utils import get_blend_from_list

    blend = read_sources(DataConfig(data_path=words)).train
    assert get_blend_from_list(words) == (blend.prefixes, blend.weights)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["0.3", "a", "b"], "data_path 0.3 a b: a blend alternates weights and prefixes"),
        (["a", "0.3", "b", "0.7"], "alternates weights and prefixes"),
        (["0.3", "a", "b", "c"], "alternates weights and prefixes"),
        (["0.3", "0.7"], "alternates weights and prefixes"),
        (["0.3"], "alternates weights and prefixes"),
        (["0", "a", "1", "b"], "weights must be more than 0"),
        (["-1", "a", "1", "b"], "weights must be more than 0"),
        (["inf", "a", "1", "b"], "weights must be more than 0"),
        ([], "data_path is empty"),
    ],
)
def test_blends_that_make_no_sense(words, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_files(make(data_path=words))


@pytest.mark.parametrize("split", ["", ",", "100,,", "a,b", "1,2,3,4", "-1,1,1", "0,1,1", "nan,1", "969;30;1"])
def test_splits_that_make_no_sense(split):
    with pytest.raises(ConfigError, match="must be shares of train, valid and test"):
        check_files(make(split=split))


def test_a_split_may_end_in_a_comma_as_megatrons_may():
    assert plan(split="100,").config.data.split == "100,"


def test_a_path_per_split():
    sources = read_sources(DataConfig(train_data_path=["a"], valid_data_path=["1", "b", "2", "c"]))
    assert sources == Sources(train=Blend(prefixes=["a"]), valid=Blend(prefixes=["b", "c"], weights=[1, 2]), split=None)
    assert sources.prefixes == ["a", "b", "c"]


def test_every_contradiction_at_once():
    with pytest.raises(ConfigError) as caught:
        check_files(make(data_path=["x"], train_data_path=["0", "a", "1", "b"]))
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="valid_data_path needs train_data_path beside it"):
        check_files(make(valid_data_path=["v"]))


def test_ranges_are_megatrons(tmp_path):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    numbers = random.Random(0)
    for case in range(60):
        count = numbers.randint(1, 400)
        split = ",".join(str(numbers.choice([1, 2, 0.5, 30, 969, 33.3])) for _ in range(numbers.randint(1, 3)))
        split += numbers.choice(["", ","])
        pair = open_pair(write_pair(tmp_path / str(case), [[1]] * count))
        sources = Sources(train=Blend(prefixes=["p"]), valid=None, split=split)
        ours = [parts[0] for parts in split_ranges(sources, {"p": pair})]
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        for part, bounds in zip(ours, matrix, strict=False):
            if bounds is None:
                assert part.first == part.end
            else:
                assert (part.first, part.end) == tuple(round(bound * count) for bound in bounds), (split, count)


def test_whole_pairs_without_a_split(tmp_path):
    pairs = {name: open_pair(counting_pair(tmp_path / name, num_documents=5)) for name in ("a", "b")}
    sources = Sources(train=Blend(prefixes=["a"]), valid=Blend(prefixes=["b", "a"]), split=None)
    train, valid = split_ranges(sources, pairs)
    assert [(part.pair.prefix.name, part.first, part.end) for part in train + valid] == [
        ("a", 0, 5),
        ("b", 0, 5),
        ("a", 0, 5),
    ]


def test_samples_of_one_pass_over_a_blend(tmp_path):
    pairs = {f"{n}": open_pair(counting_pair(tmp_path / f"{n}", num_documents=n, tokens=16)) for n in (11, 101)}
    sources = Sources(train=Blend(prefixes=["11", "101"]), valid=None, split="1")
    train, _ = split_ranges(sources, pairs)
    counts = [part.num_samples(16) for part in train]
    assert epoch_samples(counts[:1], None) == 10
    assert epoch_samples(counts, [1, 1]) == 20
    assert epoch_samples(counts, [1, 9]) == 100
    assert epoch_samples([train[0].num_samples(1000)], None) == 1
    assert train[0].num_samples(25) == 7, "176 tokens: 7 times 25, and the next one"


def ranges(tmp_path, split, **options):
    pair = open_pair(counting_pair(tmp_path / "corpus", **options))
    return split_ranges(Sources(train=Blend(prefixes=["p"]), valid=None, split=split), {"p": pair})


def test_validation_without_a_document(tmp_path):
    _, valid = ranges(tmp_path, "999,1,0")
    with pytest.raises(
        DataError, match=r"valid has no sample .*corpus: it has 0 of 50 documents \(split 999,1,0\)"
    ) as caught:
        check_ranges("valid", valid, "999,1,0", 100)
    suggested = re.search(r"Write split: ([\d,]+),", str(caught.value) + ",").group(1).rstrip(",")
    assert suggested == "47,3,0", "101 tokens are in three documents of 40"
    train, valid = ranges(tmp_path, suggested)
    check_ranges("train", train, suggested, 100)
    check_ranges("valid", valid, suggested, 100)


def test_one_token_decides(tmp_path):
    train, _ = ranges(tmp_path, "1", num_documents=1, tokens=101)
    check_ranges("train", train, "1", 100)
    with pytest.raises(DataError, match=r"with 101 tokens, and a sample takes 102 \(seq_length \+ 1\)"):
        check_ranges("train", train, "1", 101)


def test_a_dataset_shorter_than_a_sequence_has_no_split_to_suggest(tmp_path):
    train, _ = ranges(tmp_path, "969,30,1", num_documents=2)
    with pytest.raises(DataError, match=r"Set seq_length lower \(80 tokens are there in all\), or add data$"):
        check_ranges("train", train, "969,30,1", 100)
    with pytest.raises(DataError, match=r"or eval_interval 0$"):
        check_ranges("valid", train, None, 100)


def test_the_embedded_text_is_every_chapter_in_a_mixed_order():
    documents = chapters()
    assert len(documents) == 55 + 48 + 24 + 61 + 50
    assert 3_500_000 < sum(len(text.encode()) for text in documents) < 3_600_000
    assert not any(re.search("gutenberg", text, re.IGNORECASE) for text in documents)
    last = documents[-7:]
    novels = {name for name in ("Emma", "Fanny", "Anne", "Elizabeth", "Elinor") if any(name in text for text in last)}
    assert len(novels) >= 3, "validation would be of one novel"


def test_the_embedded_text_is_built_once_with_the_vocabulary_it_promises(built):
    folder, prefix = built
    pair, tokenizer = open_pair(prefix), read_tokenizer(f"{prefix}.tokenizer.json")
    check_tables(pair)
    assert tokenizer.get_vocab_size() == EMBEDDED_VOCAB_SIZE == 2048
    assert pair.num_sequences == 238
    assert tokenizer.decode(pair.ids[: pair.lengths[0] - 1].tolist()) == chapters()[0]
    assert pair.ids[pair.lengths[0] - 1] == tokenizer.token_to_id("<|endoftext|>") == 0
    written = {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    assert embedded_prefix(folder) == prefix
    assert {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == written


def test_the_embedded_text_takes_another_tokenizer(tmp_path, built):
    train_tokenizer(sentences(200), 300).save(str(tmp_path / "other.json"))
    folder, by_default = built
    prefix = embedded_prefix(folder, str(tmp_path / "other.json"))
    assert int(open_pair(prefix).ids.max()) < 300
    assert prefix.parent != by_default.parent
    assert vocab_size(make(tokenizer_model=str(tmp_path / "other.json"))) == 300


def with_tokenizer(prefix, size: int = 300):
    counting_pair(prefix)
    train_tokenizer(sentences(200), size).save(f"{prefix}.tokenizer.json")
    return str(prefix)


def test_vocabulary_of_the_default_needs_no_files(tmp_path):
    assert vocab_size(make(output_dir=str(tmp_path))) == 2048
    assert not list(tmp_path.iterdir())


def test_vocabulary_of_a_dataset_is_its_tokenizers(tmp_path):
    a, b = with_tokenizer(tmp_path / "a"), with_tokenizer(tmp_path / "b")
    assert vocab_size(make(data_path=[a])) == 300
    assert vocab_size(make(data_path=["1", a, "2", b])) == 300
    train_tokenizer(sentences(200), 290).save(str(tmp_path / "other.json"))
    assert vocab_size(make(data_path=[a], tokenizer_model=str(tmp_path / "other.json"))) == 290


def test_a_vocabulary_may_be_larger_than_the_tokenizers_but_not_smaller(tmp_path):
    prefix = with_tokenizer(tmp_path / "a")
    assert vocab_size(make(data_path=[prefix], vocab_size=300)) == 300
    assert vocab_size(make(data_path=[prefix], vocab_size=512)) == 512
    with pytest.raises(ConfigError, match=r"vocab_size 299 has no room for the tokenizer, which has 300 entries"):
        vocab_size(make(data_path=[prefix], vocab_size=299))


def test_datasets_of_different_tokenizers(tmp_path):
    a, b = with_tokenizer(tmp_path / "a"), with_tokenizer(tmp_path / "b", 290)
    with pytest.raises(DataError, match=r"/a and .*/b were built with different tokenizers"):
        vocab_size(make(data_path=[a, b]))
    with pytest.raises(DataError, match="blends 'embedded' with datasets of another tokenizer"):
        vocab_size(make(data_path=[a, "embedded"]))


def test_a_dataset_without_a_tokenizer(tmp_path):
    prefix = str(counting_pair(tmp_path / "a"))
    assert vocab_size(make(data_path=[prefix], vocab_size=5000)) == 5000
    with pytest.raises(DataError, match=r"has no tokenizer beside it .*Set tokenizer_model .* or vocab_size"):
        vocab_size(make(data_path=[prefix]))


def test_a_mistyped_prefix_is_a_missing_file_not_a_missing_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"typo\.idx does not exist"):
        vocab_size(make(data_path=[str(tmp_path / "typo")]))


def test_where_built_files_go():
    assert str(data_folder(make(output_dir="runs/x"))) == "runs/x/data"
    assert str(data_folder(make(output_dir="runs/x", data_cache_path="cache"))) == "cache"
