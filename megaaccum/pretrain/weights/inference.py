"""A model that is not trained: for text, and for logits to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from megaaccum.config import Config, resolve
from megaaccum.config.keys import all_keys
from megaaccum.config.load import assemble
from megaaccum.config.source import read_command_line, read_yaml
from megaaccum.distributed.start import build_groups
from megaaccum.engine import Engine, initialize
from megaaccum.errors import raise_problems
from megaaccum.pretrain.model import gpt

_FIXED = dict(
    attention_dropout=0.0, hidden_dropout=0.0, backend="ddp", micro_batch_size=1, global_batch_size=1, lr=1.0,
    train_iters=1, data_path=["none"],
)  # fmt: skip
"""Keys of an engine without an optimizer, whose stages are whole on each rank."""


def config_of(keys: dict[str, Any], source: str, words: Sequence[str] = ()) -> Config:
    """The configuration of a model's keys, fields of Megatron's among them, and of command-line words, not resolved
    yet. source: named in messages. Raises ConfigError."""
    fields = {name: value for name, value in keys.items() if name not in all_keys()}
    given = {name: value for name, value in (keys | _FIXED).items() if value is not None and name not in fields}
    config, problems = assemble([read_yaml(yaml.safe_dump(given), source), read_command_line(words)])
    raise_problems(problems)
    config.megatron = fields
    return config


def engine_of(config: Config, *, world_size: int, vocab_size: int) -> Engine:
    """An engine of the model, with weights of its own, of which nothing is trained. Collective over the world."""
    plan = resolve(config, world_size=world_size)
    built = build_groups(plan)
    chunks = gpt.build_chunks(plan, built, vocab_size=vocab_size)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return initialize(plan, chunks, groups=built)
