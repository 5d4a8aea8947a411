"""The tokenizer: a Hugging Face tokenizers file, read, trained, and looked up beside a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.errors import DataError
from megaaccum.platform.replacing import environment
from megaaccum.pretrain.data.files import digest_of_file, disk_errors, with_suffix
from megaaccum.texts import read_text

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
"""The token that ends a document in tokenizers that are trained here."""

_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", _DEEPSEEK_END, "<|eod|>", "<eod>", "</s>", "<eos>", "[EOS]")
"""That token in known tokenizers: GPT-2 and Qwen have the first, Llama 3 the second, Llama 2 </s>, Gemma <eos>."""

_BYTES = 256
_PARALLEL = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The facts about tokens that training needs. The same on every rank."""

    size: int
    """Ids are below this: the largest of the tokenizer + 1, or vocab_size if that is more. Before any padding."""
    eod: int | None
    """Id of the token that ends a document; None if the tokenizer has none of the known names."""
    digest: str
    """Hash of the file, 16 hexadecimal digits."""


def read_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizers file, or of the tokenizer.json in a folder.

    Raises:
        DataError: the file is missing, unreadable, or not a tokenizers file.
    """
    path = tokenizer_file(path)
    try:
        with disk_errors("cannot read tokenizer", path):
            text = read_text(path, most=256 << 20)
        return parse_tokenizer(text)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception, or UnicodeDecodeError before it
        raise DataError(
            f"tokenizer {path} cannot be read: {error}. It must be a Hugging Face tokenizers file (tokenizer.json)"
        ) from error


def parse_tokenizer(text: str) -> tokenizers.Tokenizer:
    """The tokenizer that the text of a tokenizers file describes, which encodes texts whole.

    Text that merely looks like a special token ("<|endoftext|>" in a web page) is encoded as ordinary text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def gpt2_tokenizer(vocab_file: str, merge_file: str) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of GPT-2's vocab.json and merges.txt. Raises DataError if they cannot be read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        tokenizer = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"vocab_file {vocab_file} and merge_file {merge_file} cannot be read: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_file(path: str | Path) -> Path:
    """`path` itself, or the tokenizer.json in it when it is a folder."""
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Size, end-of-document id and hash of a tokenizers file; read once per process while the file does not change.

    Raises:
        DataError: like `read_tokenizer`, or the tokenizer has no token at all.
    """
    return read_once(_read_vocabulary, tokenizer_file(path))


def read_once(read: Callable[[Path], Vocabulary], path: str | Path) -> Vocabulary:
    """The result of `read`, once per process while the file does not change. Raises DataError if it is missing."""
    with disk_errors("cannot read tokenizer", Path(path)):
        status = Path(path).stat()
    return _cached(read, Path(path), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _cached(read: Callable[[Path], Vocabulary], path: Path, _modified: int, _size: int) -> Vocabulary:
    return read(path)


def _read_vocabulary(path: Path) -> Vocabulary:
    tokenizer = read_tokenizer(path)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"tokenizer {path} has an empty vocabulary")
    return Vocabulary(size=max(ids) + 1, eod=end_of_document(tokenizer), digest=digest_of_file(path))


def end_of_document(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Id of the token that ends a document: the first of the known names that the tokenizer has, or None."""
    known = (tokenizer.token_to_id(name) for name in _END_NAMES)
    return next((i for i in known if i is not None), None)


def require_end_of_document(tokenizer: tokenizers.Tokenizer) -> int:
    """Id of the token that ends a document, which --append-eod needs.

    Raises:
        DataError: the tokenizer has none.
    """
    if (found := end_of_document(tokenizer)) is None:
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values()][:20]
        raise DataError(
            f"--append-eod needs a token that ends a document, but the tokenizer has none of {', '.join(_END_NAMES)}. "
            f"Its special tokens are {special or 'none'}; add one of those names to it, or leave --append-eod out"
        )
    return found


def tokenizer_beside(prefix: str | Path) -> Path | None:
    """The tokenizer of a dataset: PREFIX.tokenizer.json, else tokenizer.json in the same folder, else None."""
    prefix = Path(prefix)
    candidates = (with_suffix(prefix, ".tokenizer.json"), prefix.parent / "tokenizer.json")
    return next((path for path in candidates if path.is_file()), None)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` entries: <|endoftext|>, the 256 bytes, and merges.

    The same texts in the same order give the same file. Fewer entries come out when the text has no more pairs to
    merge. Every text survives encoding and decoding unchanged.

    Raises:
        DataError: `vocab_size` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _BYTES + 1:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: {_BYTES} bytes and {END_OF_DOCUMENT} take {_BYTES + 1} entries"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with single_threaded():
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def single_threaded() -> AbstractContextManager[None]:
    """Keeps the tokenizers library to one thread in the block.

    Its thread pool makes every later fork of the process print a warning, and megaaccum has processes for speed.
    """
    return environment({_PARALLEL: "false"})
