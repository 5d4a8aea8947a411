"""Muon: which parameters are matrices, what a fused one consists of, and the update of a shard.

The update of a matrix needs all of it: `sharding/ownership` makes it whole on its owner, where emerging-optimizers
iterates, and puts the result in place of the gradient. The optimizer here applies it to whatever part of the matrix a
rank holds, as AdamW does with all other parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.config.schema import OptimizerConfig
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.errors import ConfigError, as_product
from megaaccum.model import names
from megaaccum.model.torch_chunk import layers_of
from megaaccum.optim import owners
from megaaccum.platform import cpu
from megaaccum.platform.replacing import replaced
from megaaccum.upstream import emerging

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_NO_MATRIX = re.compile(r"\.router\.|\.gate\.weight$|gate_weight$|embed|norm")
"""Two-dimensional weights of layers that AdamW steps: routers, gates of shared experts, embeddings of positions."""
_STATE_SPACE = re.compile(r"\.mixer\.in_proj\.")


class Part(NamedTuple):
    """A matrix inside a parameter, or inside a tensor-parallel rank's part of it: in every `period` rows the `length`
    rows from `offset`."""

    offset: int
    length: int
    period: int


def mark_matrices(plan: Plan, chunks: list[torch.nn.Module]) -> set[str]:
    """Mark the matrices of this rank (`names.is_matrix`), and return the names of them.

    Collective over the world. Raises ConfigError on every rank if there are none in the whole model, if a pattern fits
    no parameter, or if one asks for a parameter that is no matrix.
    """
    keys = plan.config.optimizer
    patterns = keys.muon_matrices
    wanted, hits = raise_on_all_ranks(matrices_of, keys, chunks)
    counts = torch.tensor([len(wanted), *hits], dtype=torch.int64, device=cpu.device())
    dist.all_reduce(counts)
    total, *fits = counts.tolist()
    if idle := [pattern for pattern, count in zip(patterns, fits, strict=True) if not count]:
        raise ConfigError(
            f"muon_matrices: {', '.join(idle)} fits no trained parameter: correct it, or leave it out"
        ).printed_once()
    if not total:
        raise ConfigError(
            f"optimizer {keys.optimizer}: no trained parameter is a weight matrix of a layer: set optimizer to adam"
        ).printed_once()
    raise_on_all_ranks(_mark, plan, wanted, chunks)
    return wanted


def _mark(plan: Plan, wanted: set[str], chunks: list[torch.nn.Module]) -> None:
    at_owner = plan.config.optimizer.optimizer == "soap" or owners.at_owners(plan.config, plan.batch.num_microbatches)
    for name, param in names.named_parameters(chunks):
        if name in wanted:
            names.mark_matrix(param, parts_of(plan, name, param, chunks[0].config), at_owner=at_owner)


def matrices_of(keys: OptimizerConfig, chunks: list[torch.nn.Module]) -> tuple[set[str], list[int]]:
    """Names of this rank's matrices, and how many parameters each pattern fits."""
    patterns, optimizer = keys.muon_matrices, f"optimizer {keys.optimizer}"
    if not emerging.is_installed():
        raise ConfigError(f"{optimizer} needs emerging-optimizers: install megaaccum[muon], or set optimizer to adam")
    if keys.optimizer == "soap" and (default := torch.get_default_dtype()) is not torch.float32:
        raise ConfigError(f"{optimizer} computes in torch's default precision: make that torch.float32, not {default}")
    in_layers = {id(param) for chunk in chunks for layer in layers_of(chunk) for param in layer.parameters()}
    found, hits = set(), [0] * len(patterns)
    for name, param in names.named_parameters(chunks):
        if not param.requires_grad:
            continue
        is_2d = len(getattr(param, "ds_shape", param.shape)) == 2
        is_in_layer = id(param) in in_layers or _IN_LAYER.search(name) is not None
        wanted, asked = is_2d and is_in_layer and _NO_MATRIX.search(name) is None, ""
        for number, pattern in enumerate(patterns):
            if fnmatchcase(name, pattern.removeprefix("!")):
                hits[number] += 1
                wanted, asked = not pattern.startswith("!"), pattern
        if wanted and not is_2d:
            raise ConfigError(
                f"muon_matrices: {asked} asks for {name} ({as_product(param.shape)}), but a matrix has two dimensions:"
                f" narrow the pattern, or add !{name} after it"
            )
        if wanted and names.is_tied(param):
            raise ConfigError(f"muon_matrices: {asked} asks for {name}, which embedding and head share: add !{name}")
        if wanted and _STATE_SPACE.search(name):
            raise ConfigError(
                f"{optimizer}: {name} of a state-space layer is several matrices of several kinds: give it to AdamW"
                ' (muon_matrices: "!*.mixer.in_proj.*")'
            )
        if wanted:
            found.add(name)
    return found, hits


def parts_of(plan: Plan, name: str, param: torch.nn.Parameter, config: Any) -> tuple[Part, ...]:
    """The matrices of a parameter, by the rows that this rank's tensor-parallel part has of each."""
    keys, rows = plan.config.optimizer, int(getattr(param, "ds_shape", param.shape)[0])
    widths = [rows]
    if keys.muon_split_qkv and name.endswith(".linear_qkv.weight"):
        queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
        widths = [queries, config.kv_channels, config.kv_channels]
        if getattr(config, "attention_output_gate", False):
            widths = [queries, *widths]
    elif keys.muon_split_gated and name.endswith(".linear_fc1.weight") and getattr(config, "gated_linear_unit", False):
        widths = [rows // 2, rows // 2]
    period = sum(widths)
    if rows % period:
        raise ConfigError(
            f"optimizer {keys.optimizer}: {rows} rows of {name} are no groups of {period}: set muon_split_qkv to false"
        )
    return tuple(Part(sum(widths[:number]), width, period) for number, width in enumerate(widths))


class Muon(torch.optim.AdamW):
    """Steps groups with `matrices` on updates that stand where their gradients were, and all others by AdamW.

    A subclass of AdamW because DeepSpeed and Megatron ask for its state's form. decoupled: matrices shrink by
    lr * weight_decay.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, decoupled: bool, **options: Any):
        super().__init__(groups, **options)
        self._decoupled = decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        with replaced(self, param_groups=[group for group in every if not group.get("matrices")]):
            if any(group["params"] for group in self.param_groups):
                super().step(closure)
        for group in every:
            for param in group["params"] if group.get("matrices") else ():
                if param.grad is not None:
                    self._apply(param, group["lr"], group["weight_decay"])

    def _apply(self, param: torch.Tensor, lr: float, weight_decay: float) -> None:
        if self._decoupled and weight_decay:
            param.mul_(1 - lr * weight_decay)
        # Two roundings everywhere: a fused one may differ between the body and the end of a shard.
        param.sub_(param.grad.mul_(lr))  # type: ignore[union-attr]
