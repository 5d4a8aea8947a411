"""Weights and optimizer state of a sharding backend in the form that Megatron's checkpoints take.

A model's weights are written as Megatron writes them: whole, by its own `sharded_state_dict`. Masters and moments are
flat pieces of each parameter, by its name in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.tensor import DTensor

from megaaccum.checkpoint import pieces
from megaaccum.errors import CheckpointError
from megaaccum.model import names

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend
    from megaaccum.sharding.base import StatePiece

STATE = "state"
"""The key of the pieces in an optimizer's state."""


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with its tensors copied to host memory."""
    return {name: _copy(each) if isinstance(each, torch.Tensor) else each for name, each in state.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; one of fully_shard's is gathered."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)


def write_whole(chunk: torch.nn.Module, whole: Callable[[], AbstractContextManager[None]]) -> None:
    """Have `chunk.sharded_state_dict`, which Megatron's saver calls on the chunk without its wrappers, give copies of
    whole weights in host memory."""
    theirs: Callable[..., dict[str, Any]] = chunk.sharded_state_dict  # type: ignore[assignment]

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with whole():
            state = theirs(*args, **kwargs)
            for each in nested_values(state):
                if isinstance(getattr(each, "data", None), torch.Tensor):
                    each.data = _copy(each.data)
        return state

    chunk.sharded_state_dict = sharded_state_dict  # type: ignore[assignment]


def load_weights(backend: ShardingBackend, chunk: torch.nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Take the whole weights of `chunk`, named as in its state_dict: parameters into the backend's state, whose masters
    they become, and the rest into the chunk. Raises CheckpointError where a parameter is missing."""
    param_names = [name for name, _ in chunk.named_parameters()]
    if strict and (missing := [name for name in param_names if name not in state]):
        raise CheckpointError(f"the weights lack {', '.join(missing[:3])}: they are of another model")
    _take(backend, {names.global_name(chunk, name): state[name] for name in param_names if name in state})
    chunk.load_state_dict({name: each for name, each in state.items() if name not in param_names}, strict=False)


def reload_weights(backend: ShardingBackend, chunks: list[torch.nn.Module]) -> None:
    """Make the weights of `chunks`, which are whole now, the masters."""
    _take(backend, dict(names.named_parameters(chunks)))


@torch.no_grad()
def _take(backend: ShardingBackend, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of whole `weights`, by their names in the model, into the backend's state."""
    for piece in backend.state():
        if piece.name in weights:
            mine = piece.tensors["param"]
            mine.copy_(weights[piece.name].reshape(-1)[piece.start : piece.start + mine.numel()])


def sharded_state(backend: ShardingBackend, groups: Groups) -> dict[str, Any]:
    """Masters and moments as ShardedTensors of one dimension: an element's offset is its place in the flattened
    parameter. (Cut by no grid: this rank's share of ZeRO-1 ends anywhere.)"""
    return {
        STATE: {key: _sharded(key, piece, tensor, backend, groups) for key, piece, tensor in _parts(backend, groups)}
    }


def local_state(backend: ShardingBackend, groups: Groups) -> dict[str, Any]:
    """This rank's masters and moments, copied to host memory."""
    return {STATE: {key: _copy(tensor) for key, _, tensor in _parts(backend, groups)}}


@torch.no_grad()
def take_state(backend: ShardingBackend, groups: Groups, state: dict[str, Any]) -> None:
    """Copy what was read into the backend's state. Raises CheckpointError where something of this rank is not there."""
    read = state[STATE]
    parts = {key: tensor for key, _, tensor in _parts(backend, groups)}
    if missing := sorted(parts.keys() - read.keys()):
        raise CheckpointError(f"the optimizer state lacks {', '.join(missing[:3])}: it is of another model or layout")
    for key, tensor in parts.items():
        tensor.copy_(read[key])


def _parts(backend: ShardingBackend, groups: Groups) -> Iterator[tuple[str, StatePiece, torch.Tensor]]:
    """(key, piece, flat view) of every tensor that this rank holds a part of."""
    for piece in backend.state():
        copy = "copy" if names.is_tied_copy(piece.param) else ""  # a V has both on one rank
        rank = groups.tp.rank() if names.is_sharded_over_tp(piece.param) else 0
        for kind, tensor in piece.tensors.items():
            if tensor.numel():
                yield f"{piece.name}/{kind}/tp{rank}/{copy}", piece, tensor


def _sharded(
    key: str, piece: StatePiece, tensor: torch.Tensor, backend: ShardingBackend, groups: Groups
) -> ShardedTensor:
    data = _copy(tensor)
    return ShardedTensor(
        key="optimizer/" + key.removesuffix("copy"),
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=(getattr(piece.param, "ds_numel", piece.param.numel()),),
        global_offset=(piece.start,),
        axis_fragmentations=None,
        replica_id=int(pieces.is_elsewhere(piece, backend, groups)),
    )
