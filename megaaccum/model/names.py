"""Names of tensors in the whole model, the same under every layout, and Megatron's marks on parameters.

Megatron's modules, and the attributes by which it marks a parameter, have no types: `Any` here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megaaccum.distributed.groups import Groups
from megaaccum.model.torch_chunk import TorchChunk
from megaaccum.upstream import pytorch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Torch's dtypes by their names in the configuration."""

_COMPILED = "_orig_mod."
"""Part of the names of parameters in a module that torch.compile wraps, which are to be those of the module itself."""

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine's layers fuse with the matrix after them, by their names in Megatron's local layers."""


def as_in_local_layers(name: str) -> str:
    """A parameter's name in a chunk of Transformer Engine's layers, as a chunk of Megatron's local ones has it."""
    for fused, local in FUSED_NORMS.items() if "layer_norm_" in name else ():
        name = name.replace(fused, local)
    return re.sub(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2", name)


def over_stages(chunk: torch.nn.Module, local_name: str) -> str:
    """`local_name` with its layer numbered over all stages, by the layer's `layer_number` (from 1). A user's chunk
    whose layers have none may have a prefix, `name_in_model` ("stages.3.")."""
    match = re.match(r"(|.*\.)layers\.(\d+)\.(.*)", local_name)
    layer: Any = chunk.get_submodule(f"{match[1]}layers.{match[2]}") if match else None
    name = f"{getattr(chunk, 'name_in_model', '')}{local_name}"
    if match is not None and hasattr(layer, "layer_number"):
        name = f"{match[1]}layers.{layer.layer_number - 1}.{match[3]}"
    return name.replace(_COMPILED, "")


def global_name(chunk: torch.nn.Module, local_name: str) -> str:
    """A parameter's name in the whole model, the same whatever layers hold it: that of Megatron's local layers, with
    layers numbered over all stages and experts over all expert-parallel ranks. Copies of the embedding have its
    name."""
    if isinstance(chunk, TorchChunk):
        return local_name.removeprefix("module.").replace(_COMPILED, "")
    local_name = as_in_local_layers(local_name).removeprefix("mtp." if local_name.startswith("mtp.embedding.") else "")
    if match := re.match(r"(.*)\.experts\.local_experts\.(\d+)\.(.*)", local_name):
        layer: Any = chunk.get_submodule(match[1])
        expert = layer.local_expert_indices[int(match[2])]
        local_name = f"{match[1]}.experts.local_experts.{expert}.{match[3]}"
    if local_name == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    return over_stages(chunk, local_name)


def named_parameters(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of every parameter on this rank, in a fixed order."""
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            yield global_name(chunk, name), param


def named_buffers(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, tensor) of the buffers that training changes (expert biases), the same on all ranks of a stage; in
    a fixed order."""
    for chunk in chunks:
        for name, buffer in pytorch.saved_buffers(chunk):
            yield global_name(chunk, name), buffer


def is_tied(param: torch.nn.Parameter) -> bool:
    """Whether the embedding and the head share this weight."""
    return bool(getattr(param, "shared_embedding", False))


def is_tied_copy(param: torch.nn.Parameter) -> bool:
    """Whether this is the last stage's copy of a tied embedding: it gets the same update as the first stage's
    original, and is not counted again in a norm."""
    return is_tied(param) and bool(getattr(param, "shared", False))


def tied_pair(chunks: Iterable[torch.nn.Module]) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """(embedding, its copy in the head) if one rank holds both in two chunks: pipeline rank 0 of a V."""
    held = {is_tied_copy(param): param for _, param in named_parameters(chunks) if is_tied(param)}
    return (held[False], held[True]) if len(held) == 2 else None


def is_expert(param: torch.Tensor) -> bool:
    """Whether this is a parameter of routed experts with ranks of their own: spread over expert-parallel ranks, or not
    cut over tp as the dense matrices are."""
    return not getattr(param, "allreduce", True)


def tp_group(param: torch.nn.Parameter, groups: Groups) -> torch.distributed.ProcessGroup:
    """The ranks that share this matrix, if it is cut. Experts that Megatron marks as cut are whole where theirs is a
    group of one."""
    return groups.expert_tp if is_expert(param) else groups.tp


def dp_group(param: torch.Tensor, groups: Groups) -> torch.distributed.ProcessGroup:
    """The ranks that hold the same part of this parameter, over which its gradient is summed."""
    return groups.expert_dp if is_expert(param) else groups.dp_cp


def is_sharded_over_tp(param: torch.nn.Parameter) -> bool:
    """Whether each rank of its `tp_group` holds a piece of its own of this matrix."""
    return bool(getattr(param, "tensor_model_parallel", False))


def mark_cut_offsets(chunk: torch.nn.Module) -> None:
    """Mark the offsets of a softmax, one per head, as cut over tp, which Megatron-core 0.19 does not say."""
    for param in (each for name, each in chunk.named_parameters() if name.endswith("softmax_offset")):
        vars(param).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def is_same_over_tp(param: torch.nn.Parameter) -> bool:
    """Whether all tp ranks hold the same numbers of this parameter."""
    return not is_sharded_over_tp(param) and not is_expert(param)


def is_partial_over_tp(name: str, param: torch.nn.Parameter) -> bool:
    """Whether each tp rank computes only a part of this parameter's gradient, though all hold the whole parameter:
    under sequence parallelism (it sees a part of the sequence), and norms of queries and keys (a part of the heads)."""
    of_heads = ("q_layernorm" in name or "k_layernorm" in name) and not getattr(param, "is_of_latent", False)
    # The biases of experts have Megatron's mark too, but are summed over expert_dp, whose ranks are those of tp. An
    # indexer of sparse attention has it as well, but sees the whole sequence on every rank.
    is_whole = is_expert(param) or getattr(param, "average_gradients_across_tp_domain", False)
    return (bool(getattr(param, "sequence_parallel", False)) and not is_whole) or of_heads


def mark_matrix(param: torch.nn.Parameter, parts: tuple[Any, ...], *, at_owner: bool) -> None:
    """Let Muon or SOAP step `param`. parts: the matrices that it consists of (optim/muon.Part). at_owner: their owners
    keep the momenta, and not the optimizer."""
    marked: Any = param
    marked.matrix_parts, marked.momentum_at_owner = parts, at_owner


def is_matrix(param: torch.nn.Parameter) -> bool:
    """Whether Muon or SOAP steps this parameter."""
    return hasattr(param, "matrix_parts")


def whole_shape(param: torch.nn.Parameter, groups: Groups) -> list[int]:
    """Shape of all tensor-parallel ranks' parts and all data-parallel ranks' shards together."""
    shape = list(getattr(param, "ds_shape", param.shape))  # of a parameter that ZeRO-3 has released nothing is left
    if is_sharded_over_tp(param):
        marked: Any = param
        shape[marked.partition_dim] *= tp_group(param, groups).size()
    return shape
