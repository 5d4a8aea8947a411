"""The meaning of data_path and its relatives: which pairs, with which weights, cut how into training and validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.config.schema import Config, DataConfig
from megaaccum.errors import ConfigError, DataError
from megaaccum.pretrain.data.corpus import EMBEDDED, EMBEDDED_VOCAB_SIZE, embedded_prefix
from megaaccum.pretrain.data.indexed import open_pair
from megaaccum.pretrain.data.tokenizer import Vocabulary, gpt2_tokenizer, read_tokenizer, tokenizer_beside
from megaaccum.pretrain.data.vocabulary import null_vocabulary, read_gpt2_vocabulary, read_vocabulary

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Prefixes and their shares of the samples."""

    prefixes: list[str]
    """Prefixes of .bin/.idx pairs, or 'embedded'."""
    weights: list[float] | None = None
    """Positive, not necessarily with sum 1; None: in proportion to the tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where training and validation come from: one blend cut by `split`, or a blend each."""

    train: Blend
    valid: Blend | None
    """None: validation is part of `train` (see split), or there is none."""
    split: str | None
    """Shares of train, valid, test in the documents of every prefix; None where each has a blend of its own."""

    @property
    def prefixes(self) -> list[str]:
        """Every prefix once, in the order of first mention."""
        blends = [self.train, self.valid] if self.valid else [self.train]
        return list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))


def read_sources(data: DataConfig) -> Sources:
    """Reads data_path with split, or train_data_path with valid_data_path.

    test_data_path, and the test share of split, are kept apart: no run reads them.

    Raises:
        ConfigError: a list mixes weights and prefixes, a weight is not positive, a split is not three shares, or
            data_path is given along with train_data_path. One text per mistake.
    """
    problems: list[str] = []
    train = _read_blend("train_data_path" if data.train_data_path else "data_path", data, problems)
    valid = _read_blend("valid_data_path", data, problems) if data.valid_data_path else None
    if data.train_data_path and data.data_path != [EMBEDDED]:
        problems.append(
            f"data_path {' '.join(data.data_path)} and train_data_path {' '.join(data.train_data_path)} are both "
            f"given; keep one"
        )
    if data.valid_data_path and not data.train_data_path:
        problems.append("valid_data_path is given without train_data_path; write train_data_path in place of data_path")
    split = None if data.train_data_path else data.split
    problems += _split_problems(split)
    if problems:
        raise ConfigError(problems)
    return Sources(train=train, valid=valid, split=split)


def _read_blend(key: str, data: DataConfig, problems: list[str]) -> Blend:
    """Weight prefix weight prefix ..., or prefixes alone: Megatron's two forms."""
    words = [str(word).strip() for word in getattr(data, key)]
    numbers = [_number(word) for word in words]
    if not any(n is not None for n in numbers):
        if not words:
            problems.append(f"{key} is empty; give the prefix of a .bin/.idx pair, or 'embedded'")
        return Blend(prefixes=words)
    weights = [n for n in numbers[::2] if n is not None]
    if len(words) % 2 or len(weights) < len(words) // 2 or any(n is not None for n in numbers[1::2]):
        problems.append(
            f"{key} {' '.join(words)} mixes weights and prefixes: write prefixes alone, or a weight before each of them"
        )
    if wrong := [w for w in weights if not (w > 0 and math.isfinite(w))]:
        problems.append(
            f"{key}: weight {wrong[0]:g} is not positive; leave that prefix out, or give it a positive weight"
        )
    return Blend(prefixes=words[1::2], weights=weights if len(weights) > 1 else None)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _split_problems(split: str | None) -> list[str]:
    """At most three shares, none negative, the first positive."""
    if split is None:
        return []
    shares = [_number(word) for word in split.split(",")]
    good = [s for s in shares if s is not None and s >= 0 and math.isfinite(s)]
    if len(good) < len(shares) or len(shares) > 3 or good[0] == 0:
        return [f"split {split!r} has to be shares of train, valid and test, train above 0; for example 969,30,1"]
    return []


def check_files(config: Config) -> None:
    """Every dataset and the tokenizer can be read, known before a rank is started: nothing is built, no torch imported.
    Raises as `vocab_size`."""
    vocab_size(config)
    for prefix in read_sources(config.data).prefixes:
        if prefix != EMBEDDED:
            open_pair(prefix)


def data_folder(config: Config) -> Path:
    """Where datasets that megaaccum makes, and sample orders, are kept: data_cache_path, or data in output_dir."""
    return Path(config.data.data_cache_path or Path(config.run.output_dir) / "data")


def vocab_size(config: Config) -> int:
    """Entries of the vocabulary before padding. Reads at most the tokenizers file; builds nothing.

    It is vocab_size where that is set, else the tokenizer's.

    Raises:
        ConfigError: data_path and its relatives contradict each other, or vocab_size has no room for the tokenizer.
        DataError: the tokenizer cannot be read, two datasets have different ones, or there is none and model.vocab_size
            is not set.
    """
    return read_run_vocabulary(config).size


def read_run_vocabulary(config: Config) -> Vocabulary:
    """The vocabulary that this configuration trains with. Raises as `vocab_size`."""
    given = config.model.vocab_size
    if config.data.mock_data and given is not None and config.data.tokenizer_model is None:
        return null_vocabulary(given)
    vocabulary = _tokenizers_vocabulary(config)
    if given is None:
        return vocabulary
    if given < vocabulary.size:
        raise ConfigError(
            f"vocab_size {given} has no room for the tokenizer, which has {vocabulary.size} entries; leave vocab_size "
            f"out, or set it to {vocabulary.size} or more"
        )
    return replace(vocabulary, size=given)


def _tokenizers_vocabulary(config: Config) -> Vocabulary:
    data = config.data
    if data.vocab_file is not None and data.tokenizer_type in (None, "GPT2BPETokenizer"):
        return read_gpt2_vocabulary(data.vocab_file)
    if data.tokenizer_type == "NullTokenizer":
        return null_vocabulary(config.model.vocab_size)
    if data.tokenizer_model:
        return read_vocabulary(data.tokenizer_model, data.tokenizer_type)
    if data.mock_data:
        raise DataError("mock_data has no tokenizer beside it: set vocab_size, or tokenizer_model")
    prefixes = read_sources(config.data).prefixes
    if prefixes == [EMBEDDED]:
        return Vocabulary(size=EMBEDDED_VOCAB_SIZE, eod=0, digest=EMBEDDED)
    if EMBEDDED in prefixes:
        raise DataError(
            f"data_path blends {EMBEDDED!r} with datasets of another tokenizer; set tokenizer_model to theirs, and the "
            f"embedded text is built with it"
        )
    return _vocabulary_beside(prefixes, config.model.vocab_size)


def read_run_tokenizer(config: Config, wanted_by: str) -> tokenizers.Tokenizer:
    """The tokenizer of this configuration's data, to make tokens of text and text of tokens.

    Raises:
        DataError: the data come without one that encodes text; `wanted_by` is the key that cannot be honoured.
    """
    data = config.data
    if data.tokenizer_model and data.tokenizer_type in (None, "HuggingFaceTokenizer"):
        return read_tokenizer(data.tokenizer_model)
    if data.vocab_file is not None and data.merge_file is not None:
        return gpt2_tokenizer(data.vocab_file, data.merge_file)
    prefixes = [] if data.mock_data or data.tokenizer_type is not None else read_sources(data).prefixes
    for prefix in prefixes:
        if path := tokenizer_beside(resolve_prefix(prefix, config)):
            return read_tokenizer(path)
    raise DataError(
        f"{wanted_by} needs a tokenizer that encodes text, but the data come without one: set tokenizer_model to a"
        f" Hugging Face tokenizer.json, or leave {wanted_by} out"
    )


def _vocabulary_beside(prefixes: list[str], given_size: int | None) -> Vocabulary:
    """The one tokenizer that lies beside all datasets that have one."""
    found = {prefix: path for prefix in prefixes if (path := tokenizer_beside(prefix))}
    if not found:
        if given_size is None:
            open_pair(
                prefixes[0]
            )  # a mistyped prefix has no tokenizer beside it either: say the more helpful of the two
            raise DataError(
                f"dataset {prefixes[0]} has no tokenizer beside it ({prefixes[0]}.tokenizer.json, or tokenizer.json in "
                f"its folder). Set tokenizer_model to a Hugging Face tokenizers file, or vocab_size to the size of the "
                f"vocabulary"
            )
        return Vocabulary(size=given_size, eod=None, digest=f"vocab_size {given_size}")
    first, *others = found
    vocabulary = read_vocabulary(found[first])
    for other in others:
        if read_vocabulary(found[other]).digest != vocabulary.digest:
            raise DataError(
                f"datasets {first} and {other} were built with different tokenizers ({found[first]}, {found[other]}). "
                f"Build them with one, or set tokenizer_model if the ids agree all the same"
            )
    return vocabulary


def resolve_prefix(prefix: str, config: Config) -> Path:
    """Path of a prefix of data_path; 'embedded' is built on first use. Raises DataError as `embedded_prefix`."""
    if prefix == EMBEDDED:
        return embedded_prefix(data_folder(config), config.data.tokenizer_model)
    return Path(prefix)
