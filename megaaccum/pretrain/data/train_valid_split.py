"""Each dataset's documents split into training and validation, and the check that each part holds a sample."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from megaaccum.config.rules.data import shares_of
from megaaccum.errors import DataError
from megaaccum.pretrain.data.indexed import IndexedPair, check_tables
from megaaccum.pretrain.data.sources import Blend, Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The documents [first, end) of one pair."""

    pair: IndexedPair
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of these documents."""
        return self.pair.tokens_between(self.first, self.end)

    def num_samples(self, seq_length: int) -> int:
        """Samples of these documents: each is seq_length tokens and the next one."""
        return (self.num_tokens - 1) // seq_length


def split_ranges(sources: Sources, pairs: dict[str, IndexedPair]) -> tuple[list[Range], list[Range]]:
    """The documents of training and of validation, one range per prefix of the blend that they come from.

    Validation's list is empty if it has no source. The bounds are rounded as Megatron's builder rounds them
    (BlendedMegatronDatasetBuilder._build_megatron_dataset_splits).
    """
    if sources.split is None:
        return _whole(sources.train, pairs), _whole(sources.valid, pairs) if sources.valid else []
    whole, bounds = _whole(sources.train, pairs), split_ends(sources.split)
    first, last = ([round(bound * each.end) for each in whole] for bound in bounds)
    train = [replace(each, end=end) for each, end in zip(whole, first, strict=True)]
    return train, [replace(each, first=start, end=end) for each, start, end in zip(whole, first, last, strict=True)]


def split_ends(split: str) -> tuple[float, float]:
    """The shares of a dataset at which training and validation end."""
    shares = [*shares_of(split), 0.0, 0.0]
    train_end = shares[0] / sum(shares)
    return train_end, train_end + shares[1] / sum(shares)


def _whole(blend: Blend, pairs: dict[str, IndexedPair]) -> list[Range]:
    return [Range(pair=pairs[prefix], first=0, end=pairs[prefix].num_sequences) for prefix in blend.prefixes]


def epoch_samples(counts: list[int], weights: list[float] | None) -> int:
    """Samples that a blend has before it draws any sample of its parts twice; at least 1. counts: samples of each
    part. weights: None for a blend of one."""
    shares = [1.0] if weights is None else [weight / sum(weights) for weight in weights]
    return max(1, int(min(count / share for count, share in zip(counts, shares, strict=True))))


def check_ranges(name: str, ranges: list[Range], split: str | None, seq_length: int) -> None:
    """Check that every range holds one sample, which is seq_length tokens and the next one.

    Raises:
        DataError: one does not; with the numbers, and the nearest split or seq_length under which it would.
    """
    for part in ranges:
        if (tokens := part.num_tokens) <= seq_length:
            check_tables(part.pair)  # the count is read from the .idx: a damaged one is the better thing to report
            raise DataError(
                f"{name} has no sample in dataset {part.pair.prefix}: it has {part.end - part.first:,} of "
                f"{part.pair.num_sequences:,} documents ({'all of it' if split is None else f'split {split}'}) with "
                f"{tokens:,} tokens, and a sample takes {seq_length + 1:,} (seq_length + 1). "
                f"{_remedy(name, part.pair, split, seq_length)}"
            )


def _remedy(name: str, pair: IndexedPair, split: str | None, seq_length: int) -> str:
    documents = None if split is None else _valid_documents(pair, seq_length)
    off = ", or eval_interval 0" if name == "valid" else ""
    if documents is not None:
        return f"Write split: {pair.num_sequences - documents},{documents},0, or a larger share for {name}{off}"
    return f"Set seq_length lower ({pair.num_tokens:,} tokens are there in all), or add data{off}"


def _valid_documents(pair: IndexedPair, seq_length: int) -> int | None:
    """The least number of documents, counted from the end, that hold a sample and leave one for training."""
    count = pair.num_sequences
    candidates = range(1, count)
    at = bisect_left(candidates, True, key=lambda k: pair.tokens_between(count - k, count) > seq_length)
    if at == len(candidates) or pair.tokens_between(0, count - candidates[at]) <= seq_length:
        return None
    return candidates[at]
