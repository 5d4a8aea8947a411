"""The embedded text: five novels that ship with the package (data/text/SOURCE.md), as a dataset built at first use."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from megaaccum.pretrain.data.files import make_once, with_suffix
from megaaccum.pretrain.data.tokenizer import read_tokenizer, read_vocabulary, train_tokenizer

EMBEDDED = "embedded"
"""The name of this text in data_path."""
EMBEDDED_VOCAB_SIZE = 2048
"""Entries of the tokenizer that is trained on it: enough for English prose, small enough for the smallest model."""

_CHAPTER = re.compile(r"^(?:CHAPTER|Chapter) (?:[0-9]+|[IVXL]+)$", re.MULTILINE)
_RECIPE = 1
"""Counts changes in how the dataset is made, so that a new version of megaaccum does not take an old one's files."""


@cache
def chapters() -> list[str]:
    """The chapters of all novels, one document each, in an order that mixes the novels and is always the same.

    Splits take documents from one end, so validation would be the last chapters of one novel if they were not mixed.
    """
    documents = []
    for file in sorted((Path(__file__).parent / "text").glob("*.txt")):
        novel = file.read_text(encoding="utf-8")
        starts = [match.start() for match in _CHAPTER.finditer(novel)]
        ends = [*starts[1:], len(novel)]
        starts[0] = 0  # the title belongs to the first chapter
        documents += [novel[start:end].strip() + "\n" for start, end in zip(starts, ends, strict=True)]
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())


def embedded_prefix(folder: Path, tokenizer_model: str | None = None) -> Path:
    """Prefix of the embedded text's pair inside `folder`; built there in a few seconds if it is not there yet.

    Any number of processes may call it at once: one builds, the others wait. `tokenizer_model` is a tokenizers file to
    use in place of the one that is trained on the text.

    Raises:
        DataError: the folder cannot be written, or the tokenizer cannot be read.
    """
    prefix = folder / f"embedded-{_digest(tokenizer_model)}" / "text"
    make_once(with_suffix(prefix, ".idx"), folder / ".lock", lambda: _build(prefix, tokenizer_model))
    return prefix


def _digest(tokenizer_model: str | None) -> str:
    recipe = read_vocabulary(tokenizer_model).digest if tokenizer_model else f"bpe {EMBEDDED_VOCAB_SIZE}"
    text = hashlib.sha256("\0".join(chapters()).encode()).hexdigest()
    return hashlib.sha256(f"{_RECIPE} {text} {recipe}".encode()).hexdigest()[:12]


def _build(prefix: Path, tokenizer_model: str | None) -> None:
    from megaaccum.pretrain.data.build import build_pair  # imports pools of processes, which only a build needs

    tokenizer = read_tokenizer(tokenizer_model) if tokenizer_model else train_tokenizer(chapters(), EMBEDDED_VOCAB_SIZE)
    build_pair(chapters(), prefix, tokenizer, append_eod=True, num_workers=1)
