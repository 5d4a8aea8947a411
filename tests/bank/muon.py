"""Muon's matrices: what is orthogonalised, how often, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.model import names
from megaaccum.optim import adamw, muon
from megaaccum.sharding.ownership import MatrixUpdates
from megaaccum.step.train_step import TrainStep
from megaaccum.upstream import emerging
from tests.bank.mistake import added_by_microbatch, mistake, replaced, wrapped

QKV = r"decoder\.layers\.0\.self_attention\.linear_qkv\.weight"
PROJ = r"decoder\.layers\.0\.self_attention\.linear_proj\.weight"


def _iterated(updates: MatrixUpdates, matrix: torch.Tensor) -> torch.Tensor:
    keys = updates._keys
    found = emerging.newton_schulz(
        matrix, steps=keys.muon_num_ns_steps, coefficients=keys.muon_coefficient_type, precision="highest"
    )
    return found * emerging.scale_factor(*matrix.shape, keys.muon_scale_mode)


def _gathered(updates: MatrixUpdates) -> dict[str, torch.Tensor]:
    """Whole momenta, flat, by name, from the ranks that keep them. Collective over the stage."""
    mine = {name: owned.momentum for name, owned in updates._backend.at_owners.owned.items()}
    everyone: list[Any] = [None] * updates._group.size()
    dist.all_gather_object(everyone, mine, group=updates._group)
    return {name: momentum for of_rank in everyone for name, momentum in of_rank.items()}


@mistake(
    "each rank orthogonalises its shard of a matrix",
    "https://github.com/deepspeedai/DeepSpeed/issues/8600",
    base="Muon, FSDP2", axes="dp, backend", parameter=rf"{QKV}|{PROJ}",
)  # fmt: skip
def shards_orthogonalised(plan: Plan) -> Iterator[None]:
    def alone(original: Any, self: MatrixUpdates) -> None:
        original(self)  # which moves the momenta on
        momenta = _gathered(self)
        for shard in self._backend.own_shards():
            if shard.name in momenta and shard.grad.numel():
                mine = momenta[shard.name][shard.start : shard.start + shard.grad.numel()]
                shard.grad.copy_(_iterated(self, mine.view(-1, shard.param.shape[1])).reshape(-1))

    with wrapped(MatrixUpdates, "orthogonalise", alone):
        yield


@mistake(
    "Newton-Schulz runs once per micro-batch, on each one's gradient",
    "https://github.com/deepspeedai/DeepSpeed/issues/8443",
    base="Muon, micro-batches", axes="micro-batches", parameter=rf"{QKV}|{PROJ}",
)  # fmt: skip
def orthogonalised_by_microbatch(plan: Plan) -> Iterator[None]:
    count = plan.batch.num_microbatches

    def often(original: Any, self: MatrixUpdates) -> None:
        shards = [shard for shard in self._backend.shards() if names.is_matrix(shard.param)]
        sums = [torch.zeros_like(shard.grad) for shard in shards]
        for index in range(count):
            for shard in shards:
                shard.grad.copy_(added[id(shard.param)][index].flatten())
                dist.all_reduce(shard.grad, group=self._group)
            original(self)
            for shard, total in zip(shards, sums, strict=True):
                total.add_(shard.grad, alpha=1 / count)
        for shard, total in zip(shards, sums, strict=True):
            shard.grad.copy_(total)

    with added_by_microbatch() as added, wrapped(MatrixUpdates, "orthogonalise", often):
        yield


@mistake(
    "each tensor-parallel rank orthogonalises its block of a matrix",
    "https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.optimizer.emerging_optimizers.html",
    base="Muon, tensor parallel", axes="tp", parameter=rf"{QKV}|{PROJ}",
)  # fmt: skip
def blocks_orthogonalised(plan: Plan) -> Iterator[None]:
    def blockwise(original: Any, self: MatrixUpdates, matrix: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        form = self._form[matrix]
        whole = emerging.scale_factor(matrix.rows, matrix.columns, self._keys.muon_scale_mode)
        return [(_iterated(self, part.view(-1, form.columns)) / whole).reshape(-1) for part in parts]

    with wrapped(MatrixUpdates, "iterate", blockwise):
        yield


@mistake(
    "queries, keys and values of a fused weight are orthogonalised as one matrix",
    "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/emerging_optimizers.py",
    base="Muon, micro-batches", axes="", parameter=QKV,
)  # fmt: skip
def fused_weight_as_one(plan: Plan) -> Iterator[None]:
    original = muon.parts_of

    def parts(plan: Plan, name: str, param: torch.nn.Parameter, config: Any) -> tuple[muon.Part, ...]:
        rows = param.shape[0]
        return (muon.Part(0, rows, rows),) if "linear_qkv" in name else original(plan, name, param, config)

    with replaced(muon, "parts_of", parts):
        yield


@mistake(
    "the momentum moves on with a step that is skipped",
    "https://github.com/pytorch/pytorch/issues/64077",
    base="Muon, FP16", axes="overflow", parameter=r".*",
)  # fmt: skip
def momentum_of_a_skipped_step(plan: Plan) -> Iterator[None]:
    def moved(original: Any, self: TrainStep, *args: Any) -> None:
        shards = [shard for shard in self.backend.shards() if names.is_matrix(shard.param)]
        for shard in shards:
            shard.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.backend.matrices._with_momentum({shard.name: shard.grad for shard in shards})
        original(self, *args)

    with wrapped(TrainStep, "roll_back", moved):
        yield


@mistake(
    "matrices fall back to AdamW unnoticed",
    "https://github.com/deepspeedai/DeepSpeed/issues/8441",
    base="Muon, micro-batches", axes="", parameter=PROJ,
)  # fmt: skip
def matrix_falls_back(plan: Plan) -> Iterator[None]:
    original = muon.matrices_of

    def fewer(patterns: list[str], chunks: list[torch.nn.Module]) -> tuple[set[str], list[int]]:
        found, hits = original(patterns, chunks)
        return {name for name in found if "linear_proj" not in name}, hits

    assert adamw.muon is muon
    with replaced(muon, "matrices_of", fewer):
        yield
