"""Seconds of matrix products, attention and memory-bound kernels on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.activations import tokens as tokens_of
from megaaccum.lab.planner.activations import whole_share
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.pretrain.metrics.flops import score_macs


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How near a GPU comes to its datasheet: fitted to measurements of that GPU, never of one run or publication."""

    gemm: float = 0.80
    """Share of the 16-bit peak, for large matrices."""
    gemm_fp8: float = 0.65
    """Share of the 8-bit peak."""
    gemm_fp4: float = 0.50
    """Share of the 4-bit peak."""
    half_m: float = 300.0
    """Rows (tokens) at which a product is half as fast as a large one; likewise columns and inner width."""
    half_n: float = 200.0
    half_k: float = 100.0
    attention: float = 0.55
    """Share of the 16-bit peak, in fused attention."""
    scores: float = 0.40
    """Share of the 16-bit peak, in the two products of attention that keeps its scores."""
    memory: float = 0.80
    """Share of the HBM's bandwidth, in memory-bound kernels."""
    launch: float = 5e-4
    """Seconds that the host needs to start one layer's forward kernels: a layer is never faster."""
    straggler: float = 0.4
    """By how much more when the tensor-parallel ranks fill a node, all of whose hosts' threads must be on time."""
    step: float = 5e-3
    """Seconds of a step beside its micro-batches and its bytes."""
    microbatch: float = 1e-3
    """Seconds of a micro-batch beside its layers."""
    network: float = 0.8
    """Share of the network's bandwidth, between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU's datasheet and how near to it one comes."""

    peak: float
    """FLOP/s, dense, 16 bit."""
    peak_fp8: float
    peak_fp4: float
    peak_fp32: float
    """FP32 without TF32, which torch allows only if it is asked."""
    hbm_bandwidth: float
    """Bytes per second."""
    efficiency: Efficiency

    def rate(self, precision: str) -> float:
        """FLOP/s of large products in '16 bit', 'fp8', 'fp4' or 'fp32'."""
        e = self.efficiency
        wide = e.gemm * self.at(precision).peak
        rates = {"16 bit": wide, "fp32": wide, "fp8": e.gemm_fp8 * self.peak_fp8, "fp4": e.gemm_fp4 * self.peak_fp4}
        return rates[precision]

    def at(self, precision: str) -> Device:
        """The device for layers in `precision`: in FP32 its `peak` is that of FP32."""
        return replace(self, peak=min(self.peak, self.peak_fp32)) if precision == "fp32" else self


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products of an m x k by a k x n matrix."""

    m: Any
    n: Any
    k: Any
    count: Any = 1
    grouped: bool = False
    """One of several experts' products in one kernel."""


def gemm_seconds(product: Gemm, device: Device, precision: str = "16 bit") -> Any:
    """Seconds of a product: its FLOPs at the rate of large ones, slowed where a side is short of the tiles."""
    e = device.efficiency
    flops = 2.0 * product.m * product.n * product.k * product.count
    slowed = (1 + e.half_m / product.m) * (1 + e.half_n / product.n) * (1 + e.half_k / product.k)
    slowed = slowed * np.where((product.n % 8 > 0) | (product.k % 8 > 0), UNALIGNED, 1.0)
    return flops / device.rate(precision) * slowed


UNALIGNED = 2.2
"""Times that a 16-bit product takes where rows of one of its matrices are no multiple of 16 bytes, which tensor cores
want (NVIDIA's Matrix Multiplication Background User's Guide): fitted to vTrain's runs, whose vocabulary is 50257."""
UNALIGNED_HEADS = 16.0
"""The same for the products of unfused attention, whose inputs are all such: an A100's 312 TFLOP/s of tensor cores over
19.5 without. BigScience's runs with heads of 225 channels were slower by a quarter than those with 224."""


def weight_seconds(products: Iterable[Gemm], device: Device, element: float) -> Any:
    """Seconds to move `element` bytes of each weight of grouped products. Few rows hide no part of it: with this term
    the kernels of MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json (4dcaae5), need no rate of their own."""
    elements = sum(each.n * each.k * each.count for each in products if each.grouped)
    return elements * element / device.hbm_bandwidth


def addition_seconds(products: Iterable[Gemm], device: Device, element: float) -> Any:
    """Seconds of the kernels that move `element` bytes of each weight to add its gradient to a sum."""
    elements = sum(each.n * each.k * each.count for each in products)
    return elements * element / (device.hbm_bandwidth * device.efficiency.memory)


def cast_seconds(products: Iterable[Gemm], device: Device, *, backward: bool) -> Any:
    """Seconds to write the products' inputs (or their outputs' gradients) in 8 bit, as they are and transposed."""
    elements = sum(each.m * (each.n if backward else each.k) * each.count for each in products)
    return CAST_BYTES * elements / (device.hbm_bandwidth * device.efficiency.memory)


CAST_BYTES = 4.0
"""Bytes read and written per element that is cast to 8 bit: 16 bit in, two copies out."""


def attention_products(model: ModelConfig, at: Layouts) -> Iterator[Gemm]:
    """The projections of one attention, on one rank and micro-batch."""
    t, hidden, heads = tokens_of(model, at), model.hidden_size, model.num_attention_heads
    if model.multi_latent_attention:
        head = model.qk_head_dim + model.qk_pos_emb_head_dim
        if model.q_lora_rank is None:
            yield Gemm(t, heads * head / at.tp, hidden)
        else:
            yield Gemm(t, model.q_lora_rank, hidden)
            yield Gemm(t, heads * head / at.tp, model.q_lora_rank)
        yield Gemm(t, model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)
        yield Gemm(t, heads * (model.qk_head_dim + model.v_head_dim) / at.tp, model.kv_lora_rank)
        yield Gemm(t, hidden, heads * model.v_head_dim / at.tp)
        return
    channels = model.kv_channels or 0
    yield Gemm(t, (heads + 2 * (model.num_query_groups or 0)) * channels / at.tp, hidden)
    yield Gemm(t, hidden, heads * channels / at.tp)


def mlp_products(model: ModelConfig, at: Layouts, width: int) -> Iterator[Gemm]:
    """The products of one dense MLP."""
    t = tokens_of(model, at)
    yield Gemm(t, width * (2 if model.swiglu else 1) / at.tp, model.hidden_size)
    yield Gemm(t, model.hidden_size, width / at.tp)


def expert_products(model: ModelConfig, at: Layouts, *, imbalance: float) -> Iterator[Gemm]:
    """Router, a rank's routed experts, with `imbalance` times an even share of the tokens, and the shared expert."""
    t, hidden, width = tokens_of(model, at) * whole_share(at), model.hidden_size, model.moe_ffn_hidden_size or 0
    experts = np.maximum(1, (model.num_experts or 1) // at.ep)
    rows = t * model.moe_router_topk * at.etp / experts * imbalance
    yield Gemm(t, model.num_experts or 1, hidden)
    yield Gemm(rows, width * (2 if model.swiglu else 1) / at.etp, hidden, experts, grouped=True)
    yield Gemm(rows, hidden, width / at.etp, experts, grouped=True)
    if model.moe_shared_expert_intermediate_size:
        yield from mlp_products(model, at, model.moe_shared_expert_intermediate_size)


def attention_seconds(model: ModelConfig, at: Layouts, device: Device, *, flash: bool, backward: bool = False) -> Any:
    """The two products of scores and values in a pass: half of them under a causal mask where they are fused
    (arXiv 2307.08691, whose backward pass makes five), all of them and the traffic of the scores where they are not."""
    t, keys = tokens_of(model, at), model.seq_length
    flops = 2.0 * t * keys * score_macs(model) / at.tp
    e = device.efficiency
    if flash:
        # Short sequences leave most of a tile to the mask; a ring attends to one rank's keys at a time.
        return flops * (2.5 if backward else 1.0) / 2 * (1 + 512 * at.cp / keys) / (device.peak * e.attention)
    traffic = t * keys * model.num_attention_heads / at.tp * 2 * SCORE_PASSES[backward]
    flops = flops * (UNALIGNED_HEADS if (model.kv_channels or 0) % 8 else 1.0)
    return flops * (2 if backward else 1) / (device.peak * e.scores) + traffic / (device.hbm_bandwidth * e.memory)


SCORE_PASSES = (6.5, 9.5)
"""Times that each score is read or written in a (forward, backward) pass that keeps them. Forward: written by the first
product, read and written by the fused softmax and by the dropout with its mask, read by the second product."""


def permute_seconds(model: ModelConfig, at: Layouts, device: Device, *, passes: float) -> Any:
    """Tokens sorted by expert before they are sent, again by local expert after, and back: topk rows of each are read
    or written `passes` times, and the token itself twice."""
    rows = tokens_of(model, at) * whole_share(at) * (passes * model.moe_router_topk + 2)
    return 2.0 * rows * model.hidden_size / (device.hbm_bandwidth * device.efficiency.memory)


def memory_bound_seconds(model: ModelConfig, at: Layouts, device: Device, *, width: Any, fused: bool) -> Any:
    """Norms, residuals, dropouts, biases and activation functions of a forward pass: 2 bytes per element, times
    how often it is read or written. `width`: of the MLP."""
    whole_passes, inner_passes = (8.0, 2.0) if fused else (13.0, 2.5)
    t, inner = tokens_of(model, at), (1.5 if model.swiglu else 1.0)
    elements = whole_passes * model.hidden_size * whole_share(at) + inner_passes * inner * width / at.tp
    if model.multi_latent_attention:  # queries and keys are put together of two parts, the second one rotated
        head = 2 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + model.v_head_dim
        elements = elements + 2 * model.num_attention_heads * head / at.tp
    return 2.0 * t * elements / (device.hbm_bandwidth * device.efficiency.memory)
