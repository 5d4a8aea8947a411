"""The vocabulary of a tokenizer of any kind that Megatron names: how many entries, and which one ends a document.

Training reads token ids, so nothing else of a tokenizer is needed.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

from megaaccum.errors import DataError
from megaaccum.pretrain.data import tokenizer
from megaaccum.pretrain.data.files import digest_of_file
from megaaccum.pretrain.data.tokenizer import END_OF_DOCUMENT, Vocabulary
from megaaccum.texts import parse_json, read_text

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def null_vocabulary(size: int | None) -> Vocabulary:
    """Megatron's NullTokenizer: `size` ids, and one more that ends a document."""
    if size is None:
        raise DataError("tokenizer_type NullTokenizer needs vocab_size, the number of tokens")
    return Vocabulary(size=size, eod=size - 1, digest=f"null {size}")


def read_gpt2_vocabulary(path: str) -> Vocabulary:
    """A GPT-2 vocab.json. Raises DataError if it cannot be read."""
    return tokenizer.read_once(_read_gpt2, path)


def read_vocabulary(path: str | Path, kind: str | None = None) -> Vocabulary:
    """The vocabulary of a Hugging Face tokenizers file or folder, or of the file of another kind that Megatron names.

    Raises:
        DataError: it cannot be read, or a package is missing.
    """
    if kind in _SENTENCEPIECE and Path(path).suffix != ".json" and not Path(path).is_dir():
        return tokenizer.read_once(_read_sentencepiece, path)
    if kind == "TikTokenizer":
        return tokenizer.read_once(_read_tiktoken, path)
    if kind == "HuggingFaceTokenizer":
        return tokenizer.read_once(_read_hugging_face, tokenizer.tokenizer_file(path))
    return tokenizer.read_vocabulary(path)


def _read_hugging_face(path: Path) -> Vocabulary:
    """The vocabulary whose documents end with the eos_token of the settings beside it, if these name one, as in
    Megatron."""
    found, settings = tokenizer.read_vocabulary(path), path.with_name("tokenizer_config.json")
    try:
        eos = parse_json(read_text(settings))["eos_token"] if settings.is_file() else None
        name = eos["content"] if isinstance(eos, dict) else eos
        end = None if name is None else tokenizer.read_tokenizer(path).token_to_id(name)
    except (OSError, ValueError, LookupError, TypeError):
        return found
    return found if end is None else replace(found, eod=end)


def _read_gpt2(path: Path) -> Vocabulary:
    try:
        ids = parse_json(read_text(path))
        return Vocabulary(size=max(ids.values()) + 1, eod=ids.get(END_OF_DOCUMENT), digest=digest_of_file(path))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"vocab_file {path} is not GPT-2's vocab.json, an object of tokens and ids: {error}") from error


def _read_sentencepiece(path: Path) -> Vocabulary:
    try:
        from sentencepiece import SentencePieceProcessor  # type: ignore[import-not-found]
    except ImportError as error:
        raise DataError(
            f"tokenizer {path} is a SentencePiece model, which needs a package: pip install sentencepiece, or set"
            " vocab_size and tokenizer_type NullTokenizer"
        ) from error
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"tokenizer {path} is not a SentencePiece model: {error}") from error
    return Vocabulary(
        size=model.vocab_size(), eod=model.eos_id() if model.eos_id() >= 0 else None, digest=digest_of_file(path)
    )


TIKTOKEN_SIZE, TIKTOKEN_EOD = 131072, 2
"""The defaults of Megatron's TikTokenizer (megatron-core 0.19: it cuts the file to that size)."""


def _read_tiktoken(path: Path) -> Vocabulary:
    try:
        entries = parse_json(read_text(path))
        for entry in entries[:1]:
            base64.b64decode(entry["token_bytes"], validate=True)
        return Vocabulary(size=TIKTOKEN_SIZE, eod=TIKTOKEN_EOD, digest=digest_of_file(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"tokenizer {path} is no tiktoken vocabulary in JSON (rank, token_bytes): {error}") from error
