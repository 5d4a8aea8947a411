"""Seconds of an optimizer step of each layout, by what they go to."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner import comm, compute, pipeline
from megaaccum.lab.planner.activations import regrouped, whole_share
from megaaccum.lab.planner.activations import tokens as tokens_of
from megaaccum.lab.planner.comm import Group
from megaaccum.lab.planner.compute import Gemm
from megaaccum.lab.planner.footprint import sums_of_runs
from megaaccum.lab.planner.hardware import Hardware
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts
from megaaccum.lab.planner.matrices import stage_matrices
from megaaccum.lab.planner.memory import StageSource
from megaaccum.lab.planner.pipeline import Pass
from megaaccum.lab.planner.stages import Stage, rank_kinds
from megaaccum.lab.planner.weights import rank_parameters
from megaaccum.model.sizes import padded_rows
from megaaccum.optim.owners import Cost

OPTIMIZER_BYTES = 30.0
"""Bytes that Adam reads and writes per parameter of a shard: gradient, master weight, two moments, the 16-bit copy."""
PCIE_BANDWIDTH = 25e9
"""Bytes per second and direction between a GPU and its host: PCIe 4 x16, of 32e9 on paper."""
HOST_BANDWIDTH = 200e9
"""Bytes per second of a host's memory, shared by its GPUs' optimizers: two sockets of eight channels, half used."""

EP_LEFT = 0.1
"""Share of overlapped expert-parallel communication that is seen: the first micro-batch's, and SMs that it takes."""
RING_STEP = 30e-6
"""Seconds to start and correct one step of ring attention."""
UNFUSED_KERNELS = 1.27
"""Kernels of a layer that keeps its scores, over those with Megatron's fused softmax, which takes multiples of four
heads of a micro-batch (FusedScaleMaskSoftmax.is_kernel_available)."""
BACKWARD_LIGHT = 1.5
"""Bytes that memory-bound kernels move in the backward pass per byte in the forward pass: they read the saved input
beside the gradient."""
MAIN_GRAD_BYTES = 8.0
"""Bytes read and written per element of a weight's FP32 gradient, for every micro-batch."""
BIASED_ROW_PASSES = 16.0
"""More of `Software.row_passes` for experts with biases: megatron-core 0.19 multiplies each expert's bias with its
rows' probabilities in FP32, adds, joins and casts them, 28 bytes per element forward and some 36 backward."""
MOE_KERNELS = 6.0
"""Kernels of a layer with experts (router, sorting, dispatch, experts, combination) per kernel of a dense one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A framework's habits, as far as it decides the time. The defaults are megaaccum's own."""

    precision: str = "16 bit"
    """Precision of matrix products: '16 bit', 'fp8', 'fp4' or 'fp32'. Bytes of activations are those of 16 bit."""
    flash: bool = True
    """Fused attention."""
    attention: float = 1.0
    """Rate of the fused attention, as a share of the best kernel's on the GPU."""
    fused: bool = True
    """Norms, biases, dropouts and activations in few kernels."""
    grad_bytes: float = 4.0
    """Per element of a gradient that crosses ranks."""
    param_bytes: float = 2.0
    """Per element of a parameter that crosses ranks."""
    added_bytes: float = 0.0
    """Per element of a weight and micro-batch: read and written by the kernel that adds a 16-bit gradient to its FP32
    sum; 0 where the product adds it (gradient_accumulation_fusion)."""
    loss_bytes: float = 14.0
    """Bytes read and written per logit in a pass of the loss: casts to FP32, maximum, exponentials, sum."""
    grads_overlap: bool = True
    """The reduction runs under the last backward."""
    params_overlap: bool = False
    """The gather runs under the first forward."""
    sharded: bool = True
    """Gradients are reduce-scattered and parameters all-gathered; else gradients are all-reduced."""
    in_runs: bool = False
    """A rank sends a gradient for each sum that its run of micro-batches comes to (reproducible: layout)."""
    scattered_messages: bool = False
    """Each tp rank sends its part of a stage's output and the receivers gather, also without sequence parallelism."""
    offloaded: bool = False
    """The optimizer runs on the host, which takes gradients and gives back parameters over PCIe."""
    tp_exposed: float = 1.0
    """Share of tensor-parallel communication that no compute hides."""
    ep_overlap: bool = False
    """Expert-parallel communication runs under the compute of another micro-batch, as far as that lasts."""
    fused_dispatch: bool = False
    """A token crosses once to each rank and node that has experts for it (DeepEP)."""
    imbalance: float = 1.0
    """Rows of the busiest rank's experts over the mean."""
    row_passes: float = 6.0
    """Times that a routed row is read or written between router and experts, and as often on its way back: to sort,
    to sort again after the exchange, and to pad experts' rows for 8 bit (10 with that; 2 where the exchange sorts)."""
    last_recomputes: bool = True
    """The last of several stages recomputes as the others do. In 1F1B it holds one micro-batch either way."""
    barrier: bool = True
    """A step waits for the slowest rank of the one before."""
    pace: float = 1.0
    """Seconds that a rank takes for its passes, over those under Megatron's own schedules."""
    host: float = 1.0
    """Share of `Efficiency.launch` that the host needs: 0 with CUDA graphs."""
    host_order: float = 6.0
    """A layer takes the longer of what the device and the host need, and more where they need about the same: this is
    the order of the norm of both. It is lower where the host is never far ahead, and the device meets its delays."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of each layout."""

    total: np.ndarray
    by_part: dict[str, np.ndarray]
    """compute (of the slowest rank, its model-parallel communication included), bubble, p2p, gather, reduce,
    optimizer, overhead: they add up to `total`."""
    exposed: np.ndarray
    """Seconds of communication that nothing hides, over all parts."""
    bubble: np.ndarray
    """Share of the flush in which the slowest rank waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Everything about a model, a machine and a framework that does not differ between layouts."""

    model: ModelConfig
    vocab_size: int
    hardware: Hardware
    stages: StageSource
    """(pp, vpp) -> stages in model order."""
    software: Software = field(default_factory=Software)
    matrix_flops: Cost | None = None
    """Operations of the update of a matrix on its owner, under Muon and SOAP."""

    def step(self, at: Layouts) -> StepTime:
        """Seconds of an optimizer step of each layout."""
        parts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(at)))
        exposed, bubble = np.zeros(len(at)), np.zeros(len(at))
        for code, pp, vpp, rows in at.by_pipeline():
            here, one_exposed, one_bubble = self._pipeline(at.select(rows), SCHEDULES[code], pp, vpp)
            for name, seconds in here.items():
                parts[name][rows] = seconds
            exposed[rows], bubble[rows] = one_exposed, one_bubble
        return StepTime(np.sum(list(parts.values()), axis=0), parts, exposed, bubble)

    def _pipeline(self, at: Layouts, name: str, pp: int, vpp: int) -> tuple[dict[str, Any], Any, Any]:
        """(seconds by part, exposed communication, bubble share) of layouts with the same pipeline."""
        passes, stages = self.passes(at), self.stages(pp, vpp)
        alike = pp == 1 or self.software.last_recomputes
        at_end = passes if alike else self.passes(replace(at, recompute=np.full(len(at), RECOMPUTE.index("none"))))

        def work_of(chunks: list[Stage]) -> Pass:
            before, end = [c for c in chunks if not c.head], [c for c in chunks if c.head]
            return (rank_pass(passes, before, len(at)) + rank_pass(at_end, end, len(at))) * self.software.pace

        kinds = list(rank_kinds(stages, pp=pp, schedule=name).values())
        slowest = _slowest([work_of(chunks) for chunks in kinds])
        mean = work_of(stages) * (1 / pp)  # a rank's: what the pipeline fills and drains with
        m, e = at.num_microbatches, self.hardware.device.efficiency
        hop = self.hop_seconds(at) * (pp > 1)
        p2p = m * pipeline.exposed_hops(name, pp=pp, vpp=vpp) * hop
        fill = pipeline.fill_seconds(name, mean, hop=hop, pp=pp, vpp=vpp, m=m, barrier=self.software.barrier)
        gather, reduce = self._sharding_seconds(at, kinds, slowest)
        parts = {
            "compute": m * slowest.whole,
            "bubble": fill,
            "p2p": p2p,
            "gather": gather,
            "reduce": reduce,
            "optimizer": self._optimizer_seconds(at, kinds),
            "overhead": e.step + m * e.microbatch * self.software.host,
        }
        exposed = m * slowest.exposed + p2p + gather + reduce
        return parts, exposed, fill / (fill + m * slowest.whole + p2p)

    # --- compute -----------------------------------------------------------------------------------------------

    def passes(self, at: Layouts) -> dict[str, Pass]:
        """One micro-batch through one layer of each kind, and through the head."""
        passes = {"dense": self._layer(at, moe=False), "head": self._head(at)}
        if self.model.num_experts is not None:
            passes["moe"] = self._layer(at, moe=True)
        return passes

    def _layer(self, at: Layouts, *, moe: bool) -> Pass:
        """One transformer layer, one micro-batch."""
        model, device, soft = self.model, self.hardware.device.at(self.software.precision), self.software
        products = [*compute.attention_products(model, at)]
        width: Any = model.ffn_hidden_size or 0
        if moe:
            products += compute.expert_products(model, at, imbalance=soft.imbalance)
            width = (model.moe_ffn_hidden_size or 0) * model.moe_router_topk
        else:
            products += compute.mlp_products(model, at, width)
        matmul = sum(compute.gemm_seconds(product, device, soft.precision) for product in products)
        eight = soft.precision in ("fp8", "fp4")
        weights = compute.weight_seconds(products, device, 1.0 if eight else 2.0)
        casts = [compute.cast_seconds(products, device, backward=back) if eight else 0.0 for back in (False, True)]
        attention, attention_back = (
            compute.attention_seconds(model, at, device, flash=soft.flash, backward=backward) / soft.attention
            for backward in (False, True)
        )
        light = compute.memory_bound_seconds(model, at, device, width=width, fused=soft.fused)
        moved = compute.permute_seconds(model, at, device, passes=soft.row_passes) if moe else 0.0
        busy = matmul + weights + attention + light + moved
        talk = self._layer_talk(at, busy, moe=moe)
        unfused = (at.micro_batch_size * model.num_attention_heads / at.tp % 4 > 0) & (not soft.flash)
        kernels = np.where(unfused, UNFUSED_KERNELS, 1.0) * (MOE_KERNELS if moe else 1.0)
        forward = self._not_below_host(at, busy + casts[0] + talk, kernels)
        backward = attention_back + BACKWARD_LIGHT * light + moved + casts[1] + talk
        written = 2.0 if soft.added_bytes else MAIN_GRAD_BYTES
        weight_grad = matmul + compute.weight_seconds(products, device, written) + 0.0 * forward
        weight_grad += compute.addition_seconds(products, device, soft.added_bytes)
        input_grad = self._not_below_host(at, matmul + weights + backward + weight_grad, 0.9 * kernels) - weight_grad
        again = np.select(
            [at.recompute == RECOMPUTE.index("full"), at.recompute == RECOMPUTE.index("selective")],
            [forward, 0.0 * forward if soft.flash else attention],
            0.0,
        )
        talks = talk * (2 + (at.recompute == RECOMPUTE.index("full")))
        return self._under_gathers(at, Pass(forward, input_grad + again, weight_grad, talks), moe=moe)

    def _not_below_host(self, at: Layouts, seconds: Any, share: Any) -> Any:
        """A layer is not faster than its kernels are started, which takes longer where a node's ranks wait for each
        other."""
        e, links = self.hardware.device.efficiency, self.hardware.links
        crowded = 1 + e.straggler * np.minimum(1.0, at.tp / links.gpus_per_node) ** 3
        host, order = self.software.host * share * e.launch * crowded, self.software.host_order
        return (seconds**order + host**order) ** (1 / order)

    def _head(self, at: Layouts) -> Pass:
        """Output matrix and loss of one micro-batch."""
        model, device = self.model, self.hardware.device.at(self.software.precision)
        t, rows = tokens_of(model, at), padded_rows(model, self.vocab_size, at.tp)
        matrix = Gemm(t, rows / at.tp, model.hidden_size)
        product = compute.gemm_seconds(matrix, device)
        added = compute.addition_seconds([matrix], device, self.software.added_bytes)
        light = self.software.loss_bytes * t * rows / at.tp / (device.hbm_bandwidth * device.efficiency.memory)
        return Pass(product + light, product + light, product + added, 0.0 * product)

    # --- communication -----------------------------------------------------------------------------------------

    def _layer_talk(self, at: Layouts, busy: Any, *, moe: bool) -> Any:
        """Exposed seconds of tensor, context and expert parallel communication in one pass through a layer, which
        computes for `busy` seconds."""
        model, links, soft = self.model, self.hardware.links, self.software
        size = tokens_of(model, at) * model.hidden_size * 2.0
        reductions = 1 if moe else 2
        tensor = Group.strided(at.tp, 1, links)
        talk = soft.tp_exposed * reductions * comm.all_reduce(size, tensor, links)
        product = regrouped(model, at) * 2.0
        talk = talk + np.where(product > 0, comm.gather(product, tensor, links), 0.0)
        if moe:
            group = Group.strided(at.ep, at.etp, links)
            sent = comm.copies(group, model.moe_router_topk, once=soft.fused_dispatch)
            crossing = 2 * comm.all_to_all(size * whole_share(at) * soft.imbalance, group, links, sent)
            # Under the other half of a pair of micro-batches (overlap_moe_expert_parallel_comm).
            talk = talk + (np.maximum(EP_LEFT * crossing, crossing - busy) if soft.ep_overlap else crossing)
        return talk + self._ring_seconds(at)

    def _ring_seconds(self, at: Layouts) -> Any:
        """Seconds of a ring of keys and values beside the attention: each of its cp - 1 hops runs under the attention
        to the keys that are there."""
        model, links, width = self.model, self.hardware.links, 2 * (self.model.kv_channels or 0)
        heads = model.num_query_groups or 0
        if model.multi_latent_attention:  # keys and values are sent as heads, not as the latent
            width = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
            heads = model.num_attention_heads
        size = tokens_of(model, at) * np.maximum(heads / at.tp, 1) * width * 2.0
        group = Group.strided(at.cp, at.tp, links)
        hop = comm.latency(group, links) + size / comm.bandwidth(group, links)
        device = self.hardware.device.at(self.software.precision)
        busy = compute.attention_seconds(model, at, device, flash=self.software.flash) / at.cp
        return np.where(at.cp > 1, (at.cp - 1) * (RING_STEP + np.maximum(0.0, hop - busy)), 0.0)

    def _under_gathers(self, at: Layouts, one: Pass, *, moe: bool) -> Pass:
        """Under `streaming` a layer is gathered for its forward and its backward, and its gradient reduced, each
        under the compute of the layer next to it: the longer of the two counts."""
        streams = at.sync == SYNC_MODES.index("streaming")
        if not streams.any():
            return one
        unit = Stage(0, 1) if moe else Stage(1, 0)
        here = rank_parameters(self.model, [unit], self.vocab_size, at)
        links, soft = self.hardware.links, self.software
        group, experts = self._dp_group(at), self._edp_group(at)
        gather, reduce = (
            comm.gather(here.plain * size, group, links) + comm.gather(here.expert * size, experts, links)
            for size in (soft.param_bytes, soft.grad_bytes)
        )
        wait_forward = np.where(streams, np.maximum(0.0, gather - one.forward), 0.0)
        wait_backward = np.where(streams, np.maximum(0.0, gather + reduce - one.input_grad - one.weight_grad), 0.0)
        waits = wait_forward + wait_backward
        return Pass(one.forward + wait_forward, one.input_grad + wait_backward, one.weight_grad, one.exposed + waits)

    def _dp_group(self, at: Layouts) -> Group:
        return Group.strided(at.dp * at.cp, at.tp, self.hardware.links)

    def _edp_group(self, at: Layouts) -> Group:
        return Group.strided(at.edp, at.ep * at.etp, self.hardware.links)

    def hop_seconds(self, at: Layouts) -> Any:
        """One activation from a pipeline rank to the next, which is on another node if a stage fills one."""
        links = self.hardware.links
        size = tokens_of(self.model, at) * self.model.hidden_size * 2.0
        size = size * np.where((at.sequence_parallel > 0) | self.software.scattered_messages, 1 / at.tp, 1.0)
        return comm.message(size, at.world_size > links.gpus_per_node, links)

    def _sharding_seconds(self, at: Layouts, kinds: list[list[Stage]], slowest: Pass) -> tuple[Any, Any]:
        """Exposed seconds of (the parameters' gather, the gradients' reduction) of the most loaded rank, once per
        step. Under `streaming` both are in the layers."""
        soft, links = self.software, self.hardware.links
        params, experts = self._most_parameters(at, kinds)
        once = at.sync != SYNC_MODES.index("streaming")
        groups = ((params, self._dp_group(at)), (experts, self._edp_group(at)))
        collective = comm.gather if soft.sharded else comm.all_reduce
        grad_bytes = soft.grad_bytes * self._sums_sent(at)
        reduce = sum(collective(count * grad_bytes, group, links) for count, group in groups)
        gather = soft.sharded * sum(comm.gather(count * soft.param_bytes, group, links) for count, group in groups)
        if soft.grads_overlap:
            reduce = np.maximum(0.1 * reduce, reduce - 0.8 * (slowest.input_grad + slowest.weight_grad))
        if soft.params_overlap:
            gather = np.maximum(0.1 * gather, gather - 0.8 * slowest.forward)
        return np.where(once, gather, 0.0), np.where(once, reduce, 0.0)

    def _sums_sent(self, at: Layouts) -> Any:
        """Whole gradients that a rank sends on the average in one reduction, each as often as all ranks but one."""
        if not self.software.in_runs:
            return 1.0
        runs = zip(at.num_microbatches.tolist(), at.dp.tolist(), strict=True)
        sums = np.array([np.mean(sums_of_runs(each, ranks)) for each, ranks in runs])
        return sums if self.software.sharded else (sums + 1) / 2  # the gathers of what is summed are as always

    def _optimizer_seconds(self, at: Layouts, kinds: list[list[Stage]]) -> Any:
        params, experts = self._most_parameters(at, kinds)
        mine = np.where(
            (at.zero_stage > 0) & self.software.sharded, params / (at.dp * at.cp) + experts / at.edp, params + experts
        )
        if self.software.offloaded:
            crossing = (self.software.grad_bytes + self.software.param_bytes) / PCIE_BANDWIDTH
            return mine * (crossing + OPTIMIZER_BYTES * self.hardware.links.gpus_per_node / HOST_BANDWIDTH)
        device = self.hardware.device
        moving = mine * OPTIMIZER_BYTES / (device.hbm_bandwidth * device.efficiency.memory)
        return moving + self._busiest_owner(at, kinds) / device.rate("16 bit")

    def _busiest_owner(self, at: Layouts, kinds: list[list[Stage]]) -> Any:
        """FLOPs of updates of matrices on the busiest owner of any stage: an even share, or the costliest parameter."""
        found: Any = 0.0
        if self.matrix_flops is None:
            return found
        for chunks in kinds:
            costs: Counter[str] = Counter()
            for matrix in stage_matrices(self.model, chunks):
                costs[matrix.name] += self.matrix_flops(matrix)
            share = costs.total() / (at.tp * at.cp * at.dp)
            found = np.maximum(found, np.maximum(share, max(costs.values(), default=0)))
        return found

    def _most_parameters(self, at: Layouts, kinds: list[list[Stage]]) -> tuple[Any, Any]:
        """Parameters (plain, expert) of the rank that holds the most."""
        ranks = [rank_parameters(self.model, chunks, self.vocab_size, at) for chunks in kinds]
        most, column = np.argmax([rank.total for rank in ranks], axis=0), np.arange(len(at))
        plain = np.array([rank.plain + np.zeros(len(at)) for rank in ranks])[most, column]
        return plain, np.array([rank.expert + np.zeros(len(at)) for rank in ranks])[most, column]


def rank_pass(passes: dict[str, Pass], chunks: list[Stage], count: int) -> Pass:
    """One micro-batch through all chunks of a rank. A further token takes a layer like the last and a head."""
    predicted = sum(chunk.prediction for chunk in chunks)
    layers = {"dense": sum(chunk.dense for chunk in chunks), "moe": sum(chunk.moe for chunk in chunks)}
    layers["moe" if "moe" in passes else "dense"] += predicted
    layers["head"] = predicted + sum(chunk.head for chunk in chunks)
    return sum((passes[kind] * times for kind, times in layers.items() if times), Pass(*[np.zeros(count)] * 4))


def _slowest(kinds: list[Pass]) -> Pass:
    """The kind of rank that each layout waits for, of several."""
    whole = np.array([kind.whole for kind in kinds])
    pick = np.argmax(whole, axis=0), np.arange(whole.shape[1])
    return Pass(*(np.array([getattr(kind, f.name) for kind in kinds])[pick] for f in fields(Pass)))
