"""Weights of Megatron's and DeepSpeed's checkpoints into an engine, one whole parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from megaaccum.checkpoint.pieces import held_pieces
from megaaccum.config.schema import Config
from megaaccum.distributed.agreement import gathered, raise_on_all_ranks
from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights import deepspeed_folder
from megaaccum.pretrain.weights.torch_dist import TorchDist, is_torch_dist

if TYPE_CHECKING:
    from megaaccum.engine import Engine

_ROWS_ARE_TOKENS = ("embedding.word_embeddings.weight", "output_layer.weight")
_SHOWN = 4
"""Names that a message lists."""


class Source(Protocol):
    """A checkpoint of another program under our names."""

    folder: Path

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter, which has `shape` in the run. Raises CheckpointError if there is none."""

    def rest(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors of the model that are none of these parameters."""


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of Megatron or DeepSpeed."""
    return is_torch_dist(folder) or deepspeed_folder.is_deepspeed(folder)


def load(engine: Engine, folder: Path, *, vocab_size: int) -> None:
    """Replace the engine's weights by those of the checkpoint in `folder`. vocab_size: of the run, before padding.
    Collective over the world. Raises CheckpointError on every rank for what it lacks or has besides."""
    source = raise_on_all_ranks(_open, folder, engine.plan.config, vocab_size)
    held = {p.name: p.shape for p, _, _ in held_pieces(engine.backend, engine.groups, only_weights=True)}
    held |= {name: tuple(buffer.shape) for name, buffer in engine.trained_buffers.items()}
    everyone = gathered(held, engine.groups.host)
    raise_on_all_ranks(_check_rest, source, {name: shape for each in everyone for name, shape in each.items()})
    engine.load_weights(_tensors(source, held, vocab_size))


def _open(folder: Path, config: Config, vocab_size: int) -> Source:
    if is_torch_dist(folder):
        return TorchDist(folder)
    return deepspeed_folder.DeepSpeedFolder(folder, config, vocab_size)


def _check_rest(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if rest := source.rest(shapes):
        more = f", and {len(rest) - _SHOWN} more" if rest[_SHOWN:] else ""
        raise CheckpointError(f"{source.folder} has {', '.join(rest[:_SHOWN])}{more}, which the model does not have")


def _tensors(
    source: Source, held: Mapping[str, tuple[int, ...]], vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in held.items():
        tensor = source.whole(name, shape)
        if name in _ROWS_ARE_TOKENS and tensor.shape[0] != shape[0] and min(tensor.shape[0], shape[0]) >= vocab_size:
            padded = torch.zeros(shape, dtype=tensor.dtype)  # rows of padding belong to a layout, not to the model
            padded[:vocab_size] = tensor[:vocab_size]
            tensor = padded
        yield name, tensor
