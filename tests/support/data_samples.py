"""Small datasets and plans for the tests of megaaccum.pretrain.data."""

from __future__ import annotations

import random
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megaaccum.config import Plan
from megaaccum.pretrain.data.indexed import PairWriter, id_type
from tests.support.configs import plan

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew strong tea in old copper pots".split()


def sentences(count: int, seed: int = 0) -> list[str]:
    """`count` documents of 5 to 40 words."""
    random_words = random.Random(seed)
    return [" ".join(random_words.choices(WORDS, k=random_words.randint(5, 40))) for _ in range(count)]


def write_pair(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> Path:
    """A pair whose documents are the given ids."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with PairWriter(prefix, id_type(vocab_size)) as writer:
        for ids in documents:
            writer.add(np.array(ids), [len(ids)])
    return prefix


def counting_pair(prefix: Path, num_documents: int = 50, tokens: int = 40, first: int = 0) -> Path:
    """Documents of equal length whose ids count up from `first` without a break, so a token tells where it is from."""
    starts = range(first, first + num_documents * tokens, tokens)
    return write_pair(prefix, [list(range(start, start + tokens)) for start in starts], first + num_documents * tokens)


def make_plan(folder: Path, *, world_size: int = 1, **keys: object) -> Plan:
    """A plan of 10 steps of 4 sequences of 16 tokens, changed by `keys`; everything it writes goes to `folder`."""
    defaults: dict[str, object] = dict(
        seq_length=16,
        pp_microbatches=None,
        global_batch_size=4,
        train_iters=10,
        eval_interval=5,
        eval_iters=2,
        output_dir=str(folder),
    )
    return plan(world_size, **(defaults | keys))


@contextmanager
def largest_file(size: int):
    """No file that this process writes may grow beyond `size` bytes: what a full disk looks like to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
