"""Peak memory of the most loaded rank of each layout, by kind, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner import activations, pipeline
from megaaccum.lab.planner.activations import Kernels
from megaaccum.lab.planner.compute import attention_products
from megaaccum.lab.planner.footprint import StateBytes, most_waiting, sums_of_runs
from megaaccum.lab.planner.gather_units import Units, units_of
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts
from megaaccum.lab.planner.matrices import rank_matrices, stage_matrices
from megaaccum.lab.planner.stages import Stage, chunks_of_rank, make_stages, rank_kinds, split_layers, with_head_apart
from megaaccum.lab.planner.weights import Elements, rank_parameters
from megaaccum.model.sizes import padded_rows
from megaaccum.schedule.registry import by_executor


class PipelineRank(NamedTuple):
    """A rank of a pipeline."""

    name: str
    """Its schedule."""
    pp: int
    vpp: int
    rank: int


StageSource = Callable[[int, int], list[Stage]]
"""(pp, vpp) -> the stages of the model in order."""

KINDS = ("parameters", "gradients", "optimizer", "activations", "loss", "workspace", "buffers", "runtime", "margin")
"""Kinds of memory. activations, loss and workspace are what autograd keeps;
units that streaming gathers count as parameters and gradients; buffers are those of reductions, and a matrix' input and
its gradient gathered by sequence parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory that a device keeps beside tensors: constants of a machine, in bytes, and a share."""

    runtime_bytes: float = 0.0
    """CUDA context, NCCL's buffers, libraries' workspaces."""
    fragmentation: float = 0.0
    """Share of what comes and goes (activations, loss, workspace) that the allocator cannot reuse."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the most loaded rank of each layout."""

    by_kind: dict[str, np.ndarray]
    """One array per kind of KINDS, one entry per layout."""
    rank: np.ndarray
    """Pipeline rank that is the most loaded."""
    in_flight: np.ndarray
    """Micro-batches whose activations that rank holds at its peak, chunks added up and divided by vpp."""

    @property
    def total(self) -> np.ndarray:
        """Bytes of all kinds together."""
        return sum(self.by_kind.values(), np.zeros(len(self.rank)))


def _of_several(waiting: Any, runs: Any) -> Any:
    """Upper bound of the sums that wait on a rank with several runs of micro-batches, of each of which `waiting` do."""
    return np.maximum(waiting * runs, np.ceil(np.log2(runs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Everything about a model and how it is run that does not differ between layouts."""

    model: ModelConfig
    """A resolved configuration's."""
    vocab_size: int
    """Entries of the vocabulary before padding."""
    kernels: Kernels = field(default_factory=Kernels)
    split_kernels: Kernels | None = None
    """The kernels under schedules that split backwards, if the backend has other layers there (`layers.choose`)."""
    usage: Usage = field(default_factory=Usage)
    states: dict[tuple[int, int], StateBytes] = field(default_factory=dict)
    """By (ZeRO stage, index of the sync mode)."""
    buffer_bytes: float = 0.0
    """Bytes of buffers of constant size."""
    bucket_elements: float = 0.0
    """Elements that are reduced together; a stage with fewer parameters fills less."""
    bucket_bytes: float = 0.0
    """Bytes per element of the buckets, all of them together."""
    boundary_tensors: float = 0.0
    """Copies of a stage's input and of its output, where these are activations, that an engine holds per micro-batch in
    flight beside what autograd keeps."""
    weight_cache: float = 0.0
    """Bytes per parameter of the layers that are kept through a step as converted weights (FP8)."""
    sharded_over_dp: bool = True
    """False where nothing is sharded, whatever dp is."""
    replicas: int = 1
    """Groups of data-parallel ranks that hold the whole sharded model each."""
    second_moment: float = 0.0
    """Bytes per element of a moment of AdamW's that a matrix does not have under Muon or SOAP."""
    most_owned: Callable[[list[Stage]], float] | None = None
    """Elements of momenta and sums, or of SOAP's state, of a rank's chunks on the rank that keeps the most, if they are
    on their owners; if it is not known, the mean (`at_owners`)."""
    at_owners: bool = False
    """Whether matrices' gradients are reduced straight to their owners, who keep the momenta."""
    soap: bool = False
    """Whether owners keep SOAP's state of matrices, in FP32."""
    live_elements: float = 0.0
    """Parameters that stay gathered under streaming (max_live_parameters)."""
    flushes: int = 1
    """Flushes of a step, each over the micro-batches that a layout names."""
    head_copy: bool = False
    """A tied head has a copy of the word table on the table's own stage too (reproducible: layout)."""
    context_blocks: int = 1
    """Blocks of each sequence (reproducible: layout)."""
    joined_units: bool = False
    """Whether all that is in no layer is one unit, gathered from a pass' begin to its end (FSDP2)."""
    fixed_stages: tuple[Stage, ...] | None = None
    """The stages of a layout that was given; else split_layers' of each pipeline."""
    group_size: int | None = None
    """microbatch_group_size_per_vp_stage of a layout that was given."""

    def peak(self, at: Layouts) -> Memory:
        """Bytes of each layout's most loaded rank."""
        count = len(at)
        best = {kind: np.zeros(count) for kind in KINDS}
        worst, rank, flying = np.full(count, -1.0), np.zeros(count, dtype=np.int64), np.zeros(count)
        for rows, number, held, kinds in self._ranks(at):
            total = np.sum(list(kinds.values()), axis=0)
            heavier = total > worst[rows]
            where = rows[heavier]
            worst[where], rank[where] = total[heavier], number
            flying[where] = held[heavier]
            for kind, values in kinds.items():
                best[kind][where] = values[heavier]
        return Memory(best, rank, flying)

    def _ranks(self, at: Layouts) -> Iterator[tuple[np.ndarray, int, np.ndarray, dict[str, np.ndarray]]]:
        """(rows of the layouts, pipeline rank, micro-batches in flight, bytes by kind) of every kind of rank."""
        for code, pp, vpp, rows in at.by_pipeline():
            part, name = at.select(rows), SCHEDULES[code]
            layers = self._layer_bytes(part)
            for rank, chunks in rank_kinds(self.stages(pp, vpp), pp=pp, schedule=name).items():
                held, kinds = self._of_rank(part, PipelineRank(name, pp, vpp, rank), chunks, layers)
                yield rows, rank, np.mean(held, axis=0), kinds

    def on_rank(self, at: Layouts, rank: int) -> dict[str, np.ndarray]:
        """Bytes by kind on one pipeline rank, for layouts of one schedule, pp and vpp."""
        ((code, pp, vpp, _),) = at.by_pipeline()
        chunks = chunks_of_rank(self.stages(pp, vpp), rank, pp=pp, schedule=SCHEDULES[code])
        here = PipelineRank(SCHEDULES[code], pp, vpp, rank)
        return self._of_rank(at, here, chunks, self._layer_bytes(at))[1]

    def _kernels(self, at: Layouts) -> Kernels:
        """The kernels of layouts of one schedule."""
        return (by_executor(SCHEDULES[at.schedule[0]]) and self.split_kernels) or self.kernels

    def _gathered_until_w(self, at: Layouts, here: PipelineRank, chunks: list[Stage]) -> Any:
        """Transformer Engine gathers the inputs of a layer's two column-parallel matrices over tp in I and keeps them
        until W (2.20: delay_wgrad_compute), where local layers keep this rank's part alone."""
        kernels = self._kernels(at)
        gathered = activations.gathered_input(self.model, at, kernels) * kernels.saved_input
        if kernels.local or not np.any(gathered):
            return 0.0
        layers = sum(chunk.layers for chunk in chunks) / len(chunks)
        owed = pipeline.owed(here.name, pp=here.pp, rank=here.rank, microbatches=at.num_microbatches)
        return owed * layers * 2 * (1 - 1 / at.tp) * gathered / kernels.element

    def stages(self, pp: int, vpp: int) -> list[Stage]:
        """The stages of a pipeline of `pp` ranks with `vpp` chunks each, in model order."""
        if self.fixed_stages is not None:
            return list(self.fixed_stages)
        layers = split_layers(self.model.num_layers, pp * vpp)
        assert layers is not None, f"{self.model.num_layers} layers have no split over {pp * vpp} stages"
        return make_stages(self.model, layers)

    def _layer_bytes(self, at: Layouts) -> dict[str, Any]:
        """Bytes that one layer of each kind keeps of a micro-batch, and those that it brings back at once."""
        out: dict[str, Any] = {}
        others = 0 if self.model.recompute_method == "block" else (self.model.recompute_num_layers or 1) - 1
        others = others * (at.recompute == RECOMPUTE.index("full"))  # layers that are run again with one
        for kind in ("dense", "moe") if self.model.num_experts is not None else ("dense",):
            moe = kind == "moe"
            out[kind] = activations.kept_per_layer(self.model, at, self._kernels(at), moe=moe)
            again = activations.recomputed_at_once(self.model, at, self._kernels(at), moe=moe)
            out[kind + " again"] = again + others * (again + out[kind])
        return out

    def _in_layers(self, chunk: Stage, layers: dict[str, Any], kind: str = "") -> Any:
        """Bytes of a chunk's layers together. Further tokens are predicted by a layer like the last."""
        sparse = chunk.moe + (chunk.prediction if self.model.num_experts is not None else 0)
        dense = chunk.layers + chunk.prediction - sparse
        return dense * layers["dense" + kind] + (sparse * layers["moe" + kind] if sparse else 0)

    def _beyond_first(self, at: Layouts, chunk: Stage, layers: dict[str, Any]) -> Any:
        """Bytes that the layers of a chunk keep beyond what is kept of recomputed ones: with recompute_method block all
        but the first recompute_num_layers keep everything."""
        if self.model.recompute_method != "block":
            return 0.0
        first = self.model.recompute_num_layers or 1  # layers with experts come later
        rest = replace(chunk, dense=max(0, chunk.dense - first), moe=min(chunk.moe, max(0, chunk.layers - first)))
        return np.where(at.recompute == RECOMPUTE.index("full"), self._in_layers(rest, layers, " again"), 0.0)

    def _of_rank(
        self, at: Layouts, here: PipelineRank, chunks: list[Stage], layers: dict[str, Any]
    ) -> tuple[list[Any], dict[str, np.ndarray]]:
        """(micro-batches in flight of each chunk, bytes by kind)."""
        held = pipeline.in_flight(**here._asdict(), microbatches=at.num_microbatches, group_size=self.group_size)
        params = self._parameters(at, chunks)
        zero = np.zeros(len(at))
        kinds = self._states(at, params, chunks)
        of_chunk = {chunk: self._kept(at, chunk, layers) for chunk in dict.fromkeys(chunks)}
        kinds["activations"] = zero + sum(of_chunk[chunk] * count for chunk, count in zip(chunks, held, strict=True))
        kinds["activations"] += self._gathered_until_w(at, here, chunks)
        kinds["loss"] = self._loss(at, chunks)
        # The logits, and layers that keep everything, are gone when the first layer is recomputed: only what is more
        # than they were counts.
        again = [layers[kind + " again"] for kind in ("dense", "moe") if any(getattr(c, kind) for c in chunks)]
        gone = kinds["loss"] + np.min([zero + self._beyond_first(at, chunk, layers) for chunk in chunks], axis=0)
        kinds["workspace"] = np.maximum(zero, np.max([zero, *again], axis=0) - gone)
        kinds["workspace"] += self._weight_grads(at, chunks)
        gathered = 2 * activations.gathered_input(self.model, at, self._kernels(at))
        bucket = np.minimum(self.bucket_elements, params.total) * self.bucket_bytes * self._bucket_copies(at)
        kinds["buffers"] = self.buffer_bytes + gathered + bucket + zero
        kinds["runtime"] = np.full(len(at), float(self.usage.runtime_bytes))
        kinds["margin"] = self.usage.fragmentation * (kinds["activations"] + kinds["loss"] + kinds["workspace"])
        return held, kinds

    def _bucket_copies(self, at: Layouts) -> Any:
        """Copies of what a bucket holds while it crosses ranks. Under `reproducible: layout` a rank holds the
        partial sums that it sends, and those that arrive from all ranks."""
        if not any(per.waiting for per in self.states.values()):
            return 1.0
        columns = at.num_microbatches * self.flushes, at.dp * at.cp, self._blocks(at), at.cp
        sums = [sums_of_runs(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        copies = np.array([max(each) + np.mean(each) for each in sums])
        return np.where(at.sync == SYNC_MODES.index("streaming"), 1.0, copies)

    def _parameters(self, at: Layouts, chunks: list[Stage]) -> Elements:
        holds = with_head_apart(chunks) if self.head_copy else chunks
        return rank_parameters(self.model, holds, self.vocab_size, at)

    def _shard(self, at: Layouts, params: Elements) -> Any:
        """Elements of a rank's part of `params`: experts are sharded over fewer ranks than the rest."""
        shards = at.dp * at.cp / self.replicas if self.sharded_over_dp else np.ones(len(at))
        return params.plain / shards + params.expert / (at.edp if self.sharded_over_dp else 1)

    def _states(self, at: Layouts, params: Elements, chunks: list[Stage]) -> dict[str, np.ndarray]:
        """Parameters, gradients and optimizer state."""
        whole, zero = params.total + np.zeros(len(at)), np.zeros(len(at))
        shard = self._shard(at, params)
        shared = params.plain * (at.dp * at.cp > self.replicas) + params.expert * (at.edp > 1)
        streams = at.sync == SYNC_MODES.index("streaming")
        units = self.units(at, chunks) if streams.any() else Units(zero, zero)
        cache = self.weight_cache * self._of_layers(at, chunks) if self.weight_cache else zero
        totals = {name: np.zeros(len(at)) for name in ("parameters", "gradients", "optimizer")}
        for (stage, mode), per in self.states.items():
            here = (at.zero_stage == stage) & (at.sync == mode)
            gathered = per.param * whole + per.unit_param * units.params
            if per.alone:
                gathered = per.param * shared + per.unit_param * units.params * (at.dp * at.cp > 1)
            totals["parameters"] += here * (gathered + cache + per.param_shard * shard)
            moving = per.unit_grad * units.grads + (self._partial_sums(at, per, params) if per.waits else 0.0)
            totals["gradients"] += here * per.gradients(whole, shard, moving)
            totals["optimizer"] += here * (per.optimizer * whole + per.optimizer_shard * shard)
        if not self.second_moment:
            return totals
        matrices = rank_matrices(self.model, chunks, at)
        of_owners = self.at_owners or self.soap
        totals["optimizer"] -= self.second_moment * self._shard(at, matrices) * (2 if of_owners else 1)
        if self.soap:
            every = sum(each.soap_elements for each in stage_matrices(self.model, chunks))
            mean = every / (at.tp * at.cp * at.dp)
            totals["optimizer"] += 4 * (mean if self.most_owned is None else self.most_owned(chunks))
        elif self.at_owners:
            mean = matrices.plain / (at.dp * at.cp) + matrices.expert / at.edp
            owned = zero + (mean if self.most_owned is None else self.most_owned(chunks))
            totals["optimizer"] += self.second_moment * owned
            totals["gradients"] += self.second_moment * owned * streams
        return totals

    def _partial_sums(self, at: Layouts, per: StateBytes, params: Elements) -> Any:
        """Upper bound of the bytes of partial sums (reproducible: layout), as if all gradients had their most at
        once."""
        in_turns = per.waiting_shard > 0
        runs = list(zip((at.num_microbatches * self.flushes).tolist(), at.dp.tolist(), strict=True))
        waiting = np.array([most_waiting(each, ranks, in_turns=in_turns) for each, ranks in runs])
        if in_turns:
            return per.partial_sums(self._shard(at, params), waiting, 1)
        final = np.array([max(sums_of_runs(each, ranks)) for each, ranks in runs])
        blocks = self._blocks(at)
        dense = per.partial_sums(params.plain, _of_several(waiting, blocks), final * np.where(at.dp > 1, blocks, 1))
        # An expert has the micro-batches of all ranks that send it tokens, some of each.
        sources = np.maximum(1, at.dp * at.cp // at.edp)
        apart = np.where(at.dp > 1, blocks * np.minimum(sources, at.cp), 1)
        return dense + per.partial_sums(params.expert, _of_several(waiting, sources * blocks), final * apart)

    def _blocks(self, at: Layouts) -> Any:
        """Blocks of a sequence, each with a sum of its own, that a rank has."""
        return np.maximum(1, self.context_blocks // at.cp)

    def _of_layers(self, at: Layouts, chunks: list[Stage]) -> Any:
        """Parameters of a rank's layers, without embedding and head, which FP8 leaves alone."""
        layers = [replace(chunk, embedding=False, head=False, final_norm=False) for chunk in chunks]
        return rank_parameters(self.model, layers, self.vocab_size, at).total

    def units(self, at: Layouts, chunks: list[Stage]) -> Units:
        """Parameters that are whole at a time under streaming."""

        def size(piece: Stage) -> Any:
            return rank_parameters(self.model, [piece], self.vocab_size, at).total + np.zeros(len(at))

        return units_of(chunks, size, live=self.live_elements, joined=self.joined_units)

    def _kept(self, at: Layouts, chunk: Stage, layers: dict[str, Any]) -> Any:
        """Bytes that one micro-batch leaves in one chunk."""
        kept = self._in_layers(chunk, layers) + self._beyond_first(at, chunk, layers)
        if chunk.embedding:
            kept = kept + activations.embedding(self.model, at, self._kernels(at))
        ends = (not chunk.embedding) + (not chunk.head)
        boundary = np.where(at.pp > 1, self.boundary_tensors * ends, 0.0)
        return kept + boundary * activations.layer_input(self.model, at, self._kernels(at))

    def _weight_grads(self, at: Layouts, chunks: list[Stage]) -> Any:
        """Gradients of weights beside those that are summed up: the largest until it is added, or one of each shape
        (`kept_weight_grads`). None for local layers, whose sum autograd writes itself."""
        model, kernels = self.model, self._kernels(at)
        if kernels.local:
            return 0.0
        rows = padded_rows(model, self.vocab_size, at.tp)
        head = rows * model.hidden_size / at.tp if any(chunk.head for chunk in chunks) else 0.0
        fused = 2 if model.swiglu else 1
        shared, expert = model.moe_shared_expert_intermediate_size or 0, model.moe_ffn_hidden_size or 0
        dense = (model.ffn_hidden_size or 0) if any(chunk.dense for chunk in chunks) else 0
        if not any(chunk.moe or chunk.prediction for chunk in chunks):
            shared = expert = 0
        widths = (dense / at.tp, shared / at.tp, expert / at.etp)
        if not kernels.kept_weight_grads:
            return kernels.element * np.max(
                [head + 0.0 * at.tp, *(fused * each * model.hidden_size for each in widths)], axis=0
            )
        attention = sum(each.n * each.k for each in attention_products(model, at))
        return kernels.element * (head + attention + (1 + fused) * model.hidden_size * sum(widths))

    def _loss(self, at: Layouts, chunks: list[Stage]) -> np.ndarray:
        """Logits are there for one micro-batch at a time: its backward follows its forward on the last stage."""
        heads = sum(chunk.head + chunk.prediction for chunk in chunks)
        rows = padded_rows(self.model, self.vocab_size, at.tp)
        return heads * activations.loss(self.model, rows, at, self._kernels(at)) + np.zeros(len(at))
