"""Weights and optimizer state of a sharding backend in the form of Megatron's checkpoints.

Weights are written as Megatron writes them: whole, by the model's own `sharded_state_dict`. Masters and moments are
flat pieces of each parameter, keyed by its name in the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.tensor import DTensor

from megaaccum.checkpoint import pieces
from megaaccum.distributed.groups import Groups
from megaaccum.errors import CheckpointError, listed
from megaaccum.model import names
from megaaccum.sharding import ShardingBackend
from megaaccum.sharding.base import StatePiece

STATE = "state"
"""The key of the pieces in an optimizer's state."""


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with its tensors copied to host memory."""
    return {name: _copy(each) if isinstance(each, torch.Tensor) else each for name, each in state.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, in host memory; a DTensor of fully_shard's is gathered."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)


def write_whole(chunk: torch.nn.Module, whole: Callable[[], AbstractContextManager[None]]) -> None:
    """Make `chunk.sharded_state_dict`, which Megatron's saver calls on the unwrapped chunk, return copies of whole
    weights in host memory."""
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
    """Load whole weights of `chunk`, named as in its state_dict: parameters into the backend's masters, everything else
    into the chunk. Raises CheckpointError if a parameter is missing."""
    own = [name for name, _ in chunk.named_parameters()]
    if strict and (missing := [name for name in own if name not in state]):
        raise CheckpointError(f"the weights lack {listed(missing)}: they are of another model")
    copy_in(backend, {names.global_name(chunk, name): state[name] for name in own if name in state})
    chunk.load_state_dict({name: each for name, each in state.items() if name not in own}, strict=False)


@torch.no_grad()
def copy_in(backend: ShardingBackend, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of whole `weights`, by their names in the model, into the backend's state."""
    for piece in backend.state():
        if piece.name in weights and "param" in piece.tensors:
            mine = piece.tensors["param"]
            mine.copy_(weights[piece.name].reshape(-1)[piece.start : piece.start + mine.numel()])


def sharded_state(backend: ShardingBackend, groups: Groups) -> dict[str, Any]:
    """Masters and moments as ShardedTensors of one dimension: an element's offset is its index in the flattened
    parameter. (`axis_fragmentations` is None because this rank's share of ZeRO-1 may end anywhere.)"""
    state = {}
    for key, piece, tensor in _parts(backend, groups):
        whole = getattr(piece.param, "ds_shape", piece.param.shape) if piece.shape is None else piece.shape
        state[key] = ShardedTensor(
            key="optimizer/" + key.removesuffix("copy"),
            data=_copy(tensor),
            dtype=tensor.dtype,
            local_shape=tuple(tensor.shape),
            global_shape=(math.prod(whole),),
            global_offset=(piece.start,),
            axis_fragmentations=None,
            replica_id=int(pieces.is_elsewhere(piece, groups)),
        )
    return {STATE: state}


def local_state(backend: ShardingBackend, groups: Groups) -> dict[str, Any]:
    """This rank's masters and moments, copied to host memory."""
    return {STATE: {key: _copy(tensor) for key, _, tensor in _parts(backend, groups)}}


@torch.no_grad()
def load_state(backend: ShardingBackend, groups: Groups, state: dict[str, Any]) -> None:
    """Copy `state` into the backend's state. Raises CheckpointError if a tensor of this rank is missing."""
    read = state[STATE]
    parts = {key: tensor for key, _, tensor in _parts(backend, groups)}
    if missing := sorted(parts.keys() - read.keys()):
        raise CheckpointError(f"the optimizer state lacks {listed(missing)}: it is of another model or layout")
    for key, tensor in parts.items():
        tensor.copy_(read[key])


def _parts(backend: ShardingBackend, groups: Groups) -> Iterator[tuple[str, StatePiece, torch.Tensor]]:
    """(key, piece, flat view) for every tensor that is not empty on this rank."""
    for piece in backend.state():
        copy = "copy" if names.is_tied_copy(piece.param) else ""  # a V has both on one rank
        is_part = piece.shape is None and names.is_sharded_over_tp(piece.param)
        rank = names.tp_group(piece.param, groups).rank() if is_part else 0
        for kind, tensor in piece.tensors.items():
            if tensor.numel():
                yield f"{piece.name}/{kind}/tp{rank}/{copy}", piece, tensor
