"""The meaning of data_path and its relatives: which pairs, with which weights, cut how into training and validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.config.rules import data_problems
from megaaccum.config.schema import Config, DataConfig
from megaaccum.errors import ConfigError, DataError, raise_problems
from megaaccum.pretrain.data.corpus import EMBEDDED, EMBEDDED_VOCAB_SIZE, embedded_prefix
from megaaccum.pretrain.data.files import disk_errors
from megaaccum.pretrain.data.indexed import open_pair
from megaaccum.pretrain.data.tokenizer import Vocabulary, gpt2_tokenizer, read_tokenizer, tokenizer_beside
from megaaccum.pretrain.data.vocabulary import null_vocabulary, read_gpt2_vocabulary, read_vocabulary
from megaaccum.texts import regular_file

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Prefixes and their shares of the samples."""

    prefixes: list[str]
    """Prefixes of .bin/.idx pairs, or 'embedded'."""
    weights: list[float] | None = None
    """Positive, not necessarily with sum 1; None: in proportion to the samples of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of training and validation: one blend cut by `split`, or a blend each."""

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
    """The sources of keys that keep the rules (config/rules/data.py): data_path with split, or train_data_path with
    valid_data_path. No run reads test_data_path or the test share of split."""
    if not data.train_data_path:
        return Sources(train=_read_blend(data.data_path), valid=None, split=data.split)
    valid = _read_blend(data.valid_data_path) if data.valid_data_path else None
    return Sources(train=_read_blend(data.train_data_path), valid=valid, split=None)


def _read_blend(words: list[str]) -> Blend:
    """The blend of weight prefix weight prefix ..., or of prefixes alone: Megatron's two forms."""
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return Blend(prefixes=[word.strip() for word in words])
    return Blend(prefixes=[word.strip() for word in words[1::2]], weights=weights if len(weights) > 1 else None)


def check_files(config: Config) -> None:
    """Check, before ranks start, that every dataset and the tokenizer can be read. Builds nothing and imports no torch.
    Raises like `vocab_size`, and ConfigError if the data keys break a rule."""
    raise_problems(data_problems(config))
    vocab_size(config)
    for prefix in read_sources(config.data).prefixes:
        if config.data.sft:
            with disk_errors("cannot read", Path(prefix)), open(prefix, "rb", opener=regular_file):
                pass
        elif prefix != EMBEDDED:
            open_pair(prefix)


def data_folder(config: Config) -> Path:
    """The folder of datasets that megaaccum builds, and of sample orders: data_cache_path, or data in output_dir."""
    return Path(config.data.data_cache_path or Path(config.run.output_dir) / "data")


def vocab_size(config: Config) -> int:
    """Entries of the vocabulary before padding: vocab_size if it is set, else the tokenizer's. Reads at most the
    tokenizers file; builds nothing.

    Raises:
        ConfigError: vocab_size has no room for the tokenizer.
        DataError: the tokenizer cannot be read, two datasets have different ones, or there is none and model.vocab_size
            is not set.
    """
    return read_run_vocabulary(config).size


def read_run_vocabulary(config: Config) -> Vocabulary:
    """The vocabulary that this configuration trains with. Raises like `vocab_size`."""
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
        DataError: the data have none that encodes text; `wanted_by` is the key that cannot be honoured.
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
        f"{wanted_by} needs a tokenizer that encodes text, but the data have none: set tokenizer_model to a"
        f" Hugging Face tokenizer.json, or leave {wanted_by} out"
    )


def _vocabulary_beside(prefixes: list[str], given_size: int | None) -> Vocabulary:
    """The one tokenizer that lies beside all datasets that have one."""
    found = {prefix: path for prefix in prefixes if (path := tokenizer_beside(prefix))}
    if not found:
        if given_size is None:
            open_pair(prefixes[0])  # a mistyped prefix has no tokenizer beside it either, and this error helps more
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
    """Path of a prefix of data_path; 'embedded' is built on first use. Raises DataError like `embedded_prefix`."""
    if prefix == EMBEDDED:
        return embedded_prefix(data_folder(config), config.data.tokenizer_model)
    return Path(prefix)
