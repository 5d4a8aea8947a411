"""Fill in the middle: Megatron's GPTFIMDataset, whose draws for a sample come from the seed and the sample's number.

Megatron's own come from a state that each reader advances, so that another layout or a restart would train other
samples.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from megaaccum.config.schema import Config, DataConfig
from megaaccum.errors import DataError
from megaaccum.platform import quiet
from megaaccum.pretrain.data.sources import read_run_tokenizer

if TYPE_CHECKING:
    import tokenizers

_PARTS = ("prefix", "middle", "suffix", "pad", "eod")


def dataset_classes() -> tuple[Any, Any]:
    """The classes of a dataset and of its configuration (megatron-core 0.19)."""
    with quiet.root_logger_kept():
        from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

    class FIMDataset(GPTFIMDataset):  # type: ignore[misc]
        def __init__(self, *args: Any, **keys: Any):
            self._reading = threading.Lock()  # a reader draws from the dataset's one state
            super().__init__(*args, **keys)

        def __getitem__(self, idx: int) -> dict[str, Any]:
            with self._reading:
                self.np_rng = np.random.RandomState([self.config.random_seed, idx])
                return super().__getitem__(idx)  # type: ignore[no-any-return]

    return FIMDataset, GPTFIMDatasetConfig


def settings(data: DataConfig) -> dict[str, Any]:
    """The fields of the dataset's configuration that fill in the middle."""
    return {
        "fim_rate": data.fim_rate,
        "fim_spm_rate": data.fim_spm_rate,
        "fim_split_sample": data.fim_split_sample,
        "fim_fragment_rate": data.fim_fragment_rate,
        "fim_no_prefix": data.fim_no_prefix,
        "fim_extra_tokens": {part: getattr(data, f"fim_{part}_token") for part in _PARTS},
    }


class FIMTokenizer:
    """The three methods that the dataset converts tokens and text with."""

    def __init__(self, config: Config):
        """Raise DataError if no tokenizer encodes text, or if it lacks one of the tokens."""
        data = config.data
        self._tokenizer: tokenizers.Tokenizer = read_run_tokenizer(config, "fim_data")
        keys = [*(f"fim_{part}_token" for part in _PARTS), "fim_split_sample"]
        wanted = {key: token for key in keys if (token := getattr(data, key)) is not None}
        missing = [f"{key} {token}" for key, token in wanted.items() if self._tokenizer.token_to_id(token) is None]
        if missing:
            raise DataError(
                f"fim_data: the tokenizer has no token {', '.join(missing)}; set each to a token that it has, or add"
                " them to it and to the vocabulary"
            )

    def tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of one token, or a list of ids of several."""
        return self._tokenizer.token_to_id(tokens) if isinstance(tokens, str) else list(map(self.tokens_to_ids, tokens))

    def ids_to_text(self, ids: Any, remove_special_tokens: bool) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=remove_special_tokens)

    def text_to_ids(self, text: str) -> list[int]:
        """The token ids of a text, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids
