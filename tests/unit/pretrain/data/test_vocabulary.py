"""Vocabularies of every kind of tokenizer that Megatron names: sizes, and the token that ends a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaaccum.errors import DataError
from megaaccum.pretrain.data.sources import read_run_vocabulary
from tests.support.chats import write_tokenizer
from tests.support.configs import make


def test_a_gpt2_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    found = read_run_vocabulary(make(vocab_file=str(tmp_path / "vocab.json")))
    assert (found.size, found.eod) == (3, 2)
    (tmp_path / "vocab.json").write_text("[1]")
    with pytest.raises(DataError, match=r"not GPT-2's"):
        read_run_vocabulary(make(vocab_file=str(tmp_path / "vocab.json")))


def test_sizes_alone() -> None:
    found = read_run_vocabulary(make(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (found.size, found.eod) == (100, 99)
    assert read_run_vocabulary(make(mock_data=True, vocab_size=50)).size == 50
    with pytest.raises(DataError, match="set vocab_size"):
        read_run_vocabulary(make(mock_data=True))


def test_a_hugging_face_tokenizer_ends_documents_as_megatrons(tmp_path: Path) -> None:
    """By eos_token, which in models for chats is not the first of the names that `data build` looks for."""
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    theirs = HuggingFaceTokenizer(str(write_tokenizer(tmp_path))).eod
    ours = read_run_vocabulary(make(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    own = read_run_vocabulary(make(tokenizer_model=str(tmp_path)))
    assert (theirs, ours.eod, own.eod) == (258, 258, 256)


def test_a_tiktoken_vocabulary_is_cut_as_megatron_cuts_it(tmp_path: Path) -> None:
    entries = [{"rank": rank, "token_bytes": "YQ==", "token_str": "a"} for rank in range(3)]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    found = read_run_vocabulary(make(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "vocab.json")))
    assert (found.size, found.eod) == (131072, 2)
    (tmp_path / "vocab.json").write_text('[{"rank": 0}]')
    with pytest.raises(DataError, match="no tiktoken vocabulary"):
        read_run_vocabulary(make(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "vocab.json")))


def test_a_tokenizer_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "t.model").write_text("not a model")
    for kind, words in (("Llama2Tokenizer", r"SentencePiece model"), ("HuggingFaceTokenizer", r"tokenizer\.json")):
        with pytest.raises(DataError, match=words):
            read_run_vocabulary(make(tokenizer_type=kind, tokenizer_model=str(tmp_path / "t.model")))
    with pytest.raises(DataError, match="cannot read tokenizer"):
        read_run_vocabulary(make(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "none.model")))
