"""Rules on data keys. Whether the files are there and whole is checked when they are opened."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from megaaccum.config.rules.subject import Subject, them

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def one_source(subject: Subject) -> Iterator[str]:
    """The data are one data_path that is split, or a path per split."""
    if (per_split := subject.given(*_PER_SPLIT)) and subject.given("data_path"):
        yield f"data_path and {', '.join(per_split)} are both given: use data_path with split, or a path per split."
    if per_split and subject.given("split"):
        yield f"split cuts data_path, but {', '.join(per_split)} is given: leave split out."
    if per_split and "train_data_path" not in per_split:
        yield f"{', '.join(per_split)} needs train_data_path beside it: set it."


def shares_of(split: str) -> list[float]:
    """The shares that a split lists, which may end in a comma, as Megatron's may. Raises ValueError."""
    return [float(share) for share in split.removesuffix(",").split(",")]


def split_shares(subject: Subject) -> Iterator[str]:
    """A split has up to three shares, none negative, the first above 0."""
    text = subject.data.split
    try:
        shares = shares_of(text)
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(map(isfinite, shares)) or min(shares) < 0 or shares[0] <= 0:
        yield f"split is {text!r}: it must be shares of train, valid and test, the first above 0, such as 969,30,1."


def blends(subject: Subject) -> Iterator[str]:
    """A blend alternates weights and prefixes."""
    for name in ("data_path", *_PER_SPLIT):
        parts = getattr(subject.data, name)
        if parts is not None and not parts:
            yield f"{name} is empty: give a prefix, or weight prefix weight prefix ..."
        elif parts and (problem := _blend_problem(parts)):
            yield f"{name} {' '.join(parts)}: {problem}."


def _blend_problem(parts: list[str]) -> str | None:
    weights = [_as_weight(part) for part in parts[::2]]
    if all(weight is None for weight in map(_as_weight, parts)):
        # Prefixes alone: Megatron weighs them by their sizes.
        return None
    if len(parts) % 2 or None in weights or any(_as_weight(part) is not None for part in parts[1::2]):
        return "a blend alternates weights and prefixes (0.7 first 0.3 second), or lists prefixes alone"
    if any(not (weight > 0 and isfinite(weight)) for weight in weights if weight is not None):
        return "weights must be more than 0"
    return None


def _as_weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def fill_in_the_middle(subject: Subject) -> Iterator[str]:
    """Fill in the middle needs text to cut, and a rate for its parts."""
    data = subject.data
    if data.fim_data and data.mock_data:
        yield "fim_data cuts text, but mock_data has none: leave one of them out."
    if data.fim_split_sample is not None and data.fim_fragment_rate is None:
        yield f"fim_split_sample {data.fim_split_sample} needs the share of parts that are cut: set fim_fragment_rate."


def conversations(subject: Subject) -> Iterator[str]:
    """Supervised fine-tuning reads JSONL files of conversations by a chat template."""
    data = subject.data
    if not data.sft:
        return
    if data.tokenizer_model is None:
        yield "sft makes tokens by a chat template: set tokenizer_model to the folder of a Hugging Face tokenizer."
    if not (data.train_data_path or subject.given("data_path")):
        yield "sft reads conversations: set data_path to JSONL files of messages, or of prompt and completion."
    if unread := subject.given("mock_data", "fim_data", "eod_mask_loss", "tokenizer_type", "vocab_file", "merge_file"):
        yield f"{', '.join(unread)} with sft, whose rows are made of conversations: leave {them(unread)} out."
