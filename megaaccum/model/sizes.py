"""Sizes of a model that follow from its configuration and the layout. No torch.

Arithmetic of numbers and of NumPy's arrays of any dtype is `Any`.
"""

from __future__ import annotations

from typing import Any, cast

from megaaccum.config.schema import Config, ModelConfig


def padded_vocab_size(config: Config, vocab_size: int) -> int:
    """Rows of the embedding under the configuration's tp, or every tp that `reproducible_tensor_blocks` allows."""
    ranks = max(config.parallel.tensor_model_parallel_size, config.sharding.reproducible_tensor_blocks or 1)
    return cast("int", padded_rows(config.model, vocab_size, ranks))


def padded_rows(model: ModelConfig, vocab_size: int, tp: Any) -> Any:
    """Rows of the embedding: `vocab_size` up to a multiple of make_vocab_size_divisible_by * tp, as in Megatron. tp: a
    number, or a NumPy column of them."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple
