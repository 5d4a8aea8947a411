"""Tokenizers: trained the same every time, loss-free, and named clearly when they cannot be used."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from megaaccum.errors import DataError
from megaaccum.pretrain.data.tokenizer import (
    END_OF_DOCUMENT,
    end_of_document,
    read_tokenizer,
    read_vocabulary,
    require_end_of_document,
    tokenizer_beside,
    train_tokenizer,
)
from tests.support.data_samples import sentences

STRANGE = [
    "plain words",
    "  spaces \t tabs\r\n and\n\n\nlines  ",
    "accents: naïve façade, emoji: 🤖👩‍🚀, Chinese: 你好, control: \x00\x07",
    "looks special: <|endoftext|> </s> [EOS]",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(sentences(200), 300)


@pytest.fixture
def file(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_training_twice_gives_the_same_file(tokenizer):
    assert train_tokenizer(sentences(200), 300).to_str() == tokenizer.to_str()
    assert train_tokenizer(sentences(200, seed=1), 300).to_str() != tokenizer.to_str()


def test_a_trained_vocabulary_has_the_size_asked_for_and_the_end_first(tokenizer):
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == 0


@pytest.mark.parametrize("text", STRANGE)
def test_every_text_survives(tokenizer, file, text):
    for each in (tokenizer, read_tokenizer(file)):
        ids = each.encode(text, add_special_tokens=False).ids
        assert 0 not in ids, "text that looks like the end of a document became one"
        assert each.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("size", [1, 256])
def test_a_vocabulary_without_room_for_the_bytes(size):
    with pytest.raises(DataError, match=f"--vocab-size {size} is too small: 256 bytes and .* take 257"):
        train_tokenizer(["a"], size)


def test_the_smallest_vocabulary():
    assert train_tokenizer(["abc abc"], 257).get_vocab_size() == 257


def test_an_error_while_reading_the_texts_is_not_lost():
    def texts():
        yield "some text"
        raise DataError("corpus.txt, line 2: broken")

    with pytest.raises(DataError, match="line 2: broken"):
        train_tokenizer(texts(), 300)


def test_reading_from_a_folder_or_a_file(file):
    assert read_vocabulary(file) == read_vocabulary(file.parent)
    assert read_vocabulary(file).size == 300
    assert read_vocabulary(file).eod == 0


def test_size_is_the_largest_id_and_one_where_ids_have_gaps(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(tmp_path / "gaps.json"))
    assert read_vocabulary(tmp_path / "gaps.json").size == 10


def test_a_changed_file_is_read_again(file):
    before = read_vocabulary(file)
    train_tokenizer(sentences(200), 290).save(str(file))
    assert (before.size, read_vocabulary(file).size) == (300, 290)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"version": "1.0"}',
        b"\xff\xfe\x00",
        json.dumps({"model": {"type": "Nonsense"}}).encode(),
    ],
)
def test_a_corrupt_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json cannot be read: .*Hugging Face tokenizers file"):
        read_tokenizer(path)


def test_a_cut_file_is_named(file):
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        read_vocabulary(file)


@pytest.mark.parametrize("read", [read_tokenizer, read_vocabulary])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(DataError, match=r"cannot read tokenizer .*tokenizer\.json: No such file"):
        read(tmp_path)


def test_an_empty_vocabulary(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match="has an empty vocabulary"):
        read_vocabulary(tmp_path / "empty.json")


@pytest.mark.parametrize("name", [END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]"])
def test_known_names_of_the_end(name):
    assert end_of_document(Tokenizer(models.WordLevel({"a": 0, name: 3}, unk_token="a"))) == 3


def test_no_known_name_of_the_end():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens(["<stop>"])
    assert end_of_document(tokenizer) is None
    with pytest.raises(DataError, match=r"--append-eod needs a token that ends a document.*\['<stop>'\]"):
        require_end_of_document(tokenizer)


def test_the_tokenizer_of_the_dataset_comes_before_the_folders(tmp_path):
    assert tokenizer_beside(tmp_path / "corpus") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_beside(tmp_path / "corpus") == tmp_path / "tokenizer.json"
    (tmp_path / "corpus.tokenizer.json").write_text("{}")
    assert tokenizer_beside(tmp_path / "corpus") == tmp_path / "corpus.tokenizer.json"
    assert tokenizer_beside(tmp_path / "other") == tmp_path / "tokenizer.json"
