"""A small configuration that keeps every rule, for tests that break one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megaaccum.config import Config, Plan, resolve
from megaaccum.config.keys import all_keys
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.deepspeed.reconcile import reconcile

SMALL: dict[str, object] = dict(
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    seq_length=64,
    micro_batch_size=1,
    pp_microbatches=16,
    train_iters=100,
    lr=1e-3,
)


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """A configuration file of this text."""
    path = folder / name
    path.write_text(text)
    return path


def problems_of(load: Callable[..., Config], *args: object) -> list[str]:
    """The problems of the ConfigError that `load(*args)` raises."""
    import pytest  # which a machine with a GPU need not have (tests/gpu)

    with pytest.raises(ConfigError) as caught:
        load(*args)
    return caught.value.problems


def make(**keys: object) -> Config:
    """SMALL with these keys over it, as if written in a file; a key that is None here is left out. megatron: fields of
    Megatron's model configuration."""
    config = Config()
    for name, value in (SMALL | keys).items():
        if name in ("deepspeed", "megatron"):
            setattr(config, name, value)
        elif value is not None:
            setattr(getattr(config, all_keys()[name].section), name, value)
            config.origin[name] = "test.yaml"
    return config


def plan(world_size: int = 1, *, deepspeed: dict[str, object] | None = None, **keys: object) -> Plan:
    """SMALL with these keys and this DeepSpeed block, resolved."""
    config = make(**keys)
    if deepspeed is not None and (problems := reconcile(config, deepspeed, "test.yaml")):
        raise ConfigError(problems)
    return resolve(config, world_size=world_size)
