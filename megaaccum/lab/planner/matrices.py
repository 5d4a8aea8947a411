"""Muon's matrices of a configured model: their shapes in closed form, owners, FLOPs and bytes. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megaaccum.config.plan import Plan
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.footprint import BYTES
from megaaccum.lab.planner.stages import Stage, chunks_of_rank, stages_of
from megaaccum.lab.planner.weights import Elements
from megaaccum.optim.owners import Matrix, assign, balance
from megaaccum.pretrain.metrics.flops import expert_layers

Shape = tuple[int, int]


def rank_matrices(model: ModelConfig, chunks: Iterable[Stage], *, tp: Any, ep: Any = 1, etp: Any = 1) -> Elements:
    """Elements of matrices of one rank with these chunks, as `rank_parameters` has all parameters."""
    total = Elements(0, 0)
    for stage in chunks:
        for moe, count in ((False, stage.dense), (True, stage.moe), *_predicted(model, stage)):
            cut, whole, expert = (sum(r * c for r, c in shapes) for shapes in _layer(model, moe))
            total = total + Elements(cut // tp + whole, expert // (ep * etp)) * count
        total = total + Elements(2 * model.hidden_size**2 // tp, 0) * stage.prediction
    return total


def stage_matrices(model: ModelConfig, chunks: Iterable[Stage]) -> Iterator[Matrix]:
    """Every whole matrix of these chunks."""
    for number, stage in enumerate(chunks):
        kinds = [False] * stage.dense + [True] * stage.moe
        kinds += [moe for moe, count in _predicted(model, stage) for _ in range(count)]
        for layer, moe in enumerate(kinds):
            shapes = [shape for kind in _layer(model, moe) for shape in kind]
            yield from (Matrix(f"{number}.{layer}", part, *shape) for part, shape in enumerate(shapes))
        for layer in range(stage.prediction):
            yield Matrix(f"{number}.prediction.{layer}", 0, model.hidden_size, 2 * model.hidden_size)


def _predicted(model: ModelConfig, stage: Stage) -> list[tuple[bool, int]]:
    return [(expert_layers(model)[-1], stage.prediction)] if stage.prediction else []


def _layer(model: ModelConfig, moe: bool) -> tuple[list[Shape], list[Shape], list[Shape]]:
    """A layer's matrices: those that tp cuts, those that every tp rank holds whole, and those of routed experts."""
    cut, whole = _attention(model)
    if not moe or model.num_experts is None:
        return [*cut, *_mlp(model, model.ffn_hidden_size or 0)], whole, []
    shared = model.moe_shared_expert_intermediate_size
    experts = _mlp(model, model.moe_ffn_hidden_size or 0) * model.num_experts
    return [*cut, *(_mlp(model, shared) if shared else ())], whole, experts


def _mlp(model: ModelConfig, width: int) -> list[Shape]:
    return [(width, model.hidden_size)] * (2 if model.swiglu else 1) + [(model.hidden_size, width)]


def _attention(model: ModelConfig) -> tuple[list[Shape], list[Shape]]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        queries, keys = heads * (model.kv_channels or 0), (model.num_query_groups or heads) * (model.kv_channels or 0)
        return [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)], []
    latent, wide = model.q_lora_rank, heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    down = [(model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden), *([(latent, hidden)] if latent else [])]
    up = [(heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank), (wide, latent or hidden)]
    return [*up, (hidden, heads * model.v_head_dim)], down


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step of Muon on the stage with the most work.

    flops: of the busiest owner's iterations. balance: its cost over the mean. to_owners, back: bytes that a rank
    receives, in the mean over the stage, if each holds an even share of every matrix; the owner of a part of a fused
    weight may hold none of it, and receives at most ranks / (ranks - 1) as much. saved: bytes of second moments that
    the stage does not hold.
    """

    count: int
    flops: int
    balance: float
    to_owners: float
    back: float
    saved: float


def forecast(plan: Plan) -> Forecast:
    """The prediction for a plan with `optimizer: muon`."""
    at, keys, sharding = plan.layout, plan.config.optimizer, plan.config.sharding
    stages, ranks = stages_of(plan.config), at.tp * at.cp * at.dp
    chunks = [chunks_of_rank(stages, pp_rank, pp=at.pp, schedule=at.schedule) for pp_rank in range(at.pp)]
    of_stages = [list(stage_matrices(plan.config.model, each)) for each in chunks]
    most = max(of_stages, key=lambda matrices: sum(matrix.flops(1) for matrix in matrices))
    owned = assign(most, ranks)
    numel, width = sum(matrix.numel for matrix in most), BYTES["fp64" if sharding.params_dtype == "fp64" else "fp32"]
    wire = BYTES["bf16"] if keys.muon_fp32_matmul_prec == "medium" and width == BYTES["fp32"] else width
    # Replicas that hold all of a matrix send nothing to an owner among them, and all of them get its update.
    copies = at.dp * at.cp if sharding.backend == "ddp" else sharding.data_parallel_replicas
    parts = ranks // copies
    return Forecast(
        len(most),
        max(sum(matrix.flops(keys.muon_num_ns_steps) for matrix in matrices) for matrices in owned),
        balance(owned),
        numel * width * (parts - 1) / parts / ranks,
        numel * wire * (ranks - 1) / ranks / parts,
        numel * width,
    )
