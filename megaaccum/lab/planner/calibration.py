"""Measurements of this machine for a hardware entry: matrix products, copies, collectives. It needs torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaaccum.lab.planner.comm import START
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.platform import cpu
from megaaccum.pretrain.metrics.flops import peak_flops
from megaaccum.units import GIB

SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Sides of the matrices of the sweep; on a CPU only those up to 1024."""
MESSAGES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)
"""Bytes of the collectives."""


def measure(like: str, *, seconds: float) -> dict[str, Any] | None:
    """The entry of this machine, over what `like` says of what is not measured; None on ranks other than 0.

    Collective where a launcher has started several ranks.
    """
    base = load_hardware(like)
    links = _links(seconds)
    device = cpu.device()
    name = torch.cuda.get_device_name() if device.type == "cuda" else None
    products = list(sweep_products(device, seconds))
    peak = peak_flops(name, "bf16") or max(flops for *_, flops in products)
    rate, halves = fit_products(products)
    copied = copy_bandwidth(device, seconds)
    memory = base.device.hbm_bandwidth if device.type == "cuda" else copied
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return None
    efficiency = {
        "gemm": min(0.99, rate / peak),
        "memory": min(0.99, copied / memory),
        **dict(zip(("half_m", "half_n", "half_k"), halves, strict=True)),
        **({"network": 1.0} if "net_gb_per_s" in links else {}),
    }
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return {
        "like": like,
        "hbm_gib": round(memory_bytes / GIB, 2),
        "peak_tflops": round(peak / 1e12, 4),
        **({} if device.type == "cuda" else {"hbm_tb_per_s": round(memory / 1e12, 5)}),
        **links,
        "efficiency": {key: float(f"{value:.4g}") for key, value in efficiency.items()},
        "source": f"measured on {name or 'a CPU'} with torch {torch.__version__}",
    }


def timed(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Seconds of one `run`: the fastest of the batches of repetitions that fit `seconds`, after one to warm up."""
    run()
    best, end = float("inf"), time_when_done(device) + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time_when_done(device)
        best = min(best, now - start)
        if now >= end:
            return best


def time_when_done(device: torch.device) -> float:
    """The clock in seconds, when `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def sweep_products(device: torch.device, seconds: float) -> Iterator[tuple[int, int, int, float]]:
    """Yields (m, n, k, FLOP/s) of 16-bit products: square ones, and those with one short side (FP32 on a CPU)."""
    sides = [side for side in SIDES if device.type == "cuda" or side <= 1024]
    largest = sides[-1]
    shapes = {(s, s, s) for s in sides}
    shapes |= {shape for s in sides for shape in ((s, largest, largest), (largest, s, largest), (largest, largest, s))}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for m, n, k in sorted(shapes):
        left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        took = timed(partial(torch.matmul, left, right), device, seconds)
        yield m, n, k, 2.0 * m * n * k / took


def fit_products(products: Sequence[tuple[int, int, int, float]]) -> tuple[float, tuple[float, float, float]]:
    """(FLOP/s of large products, (half_m, half_n, half_k)) of the planner's curve: seconds per FLOP =
    (1 + half_m / m)(1 + half_n / n)(1 + half_k / k) / rate, to first order in the halves: linear least squares."""
    table = np.array(products, dtype=float)
    sides = np.c_[np.ones(len(table)), 1 / table[:, 0], 1 / table[:, 1], 1 / table[:, 2]]
    # Weighted by the measured rate, so that the error is relative.
    found, *_ = np.linalg.lstsq(sides * table[:, 3:], np.ones(len(table)), rcond=None)
    rate = 1 / max(found[0], 1 / (1.5 * float(table[:, 3].max())))
    halves = np.maximum(1.0, found[1:] * rate)
    rate = float(np.median(table[:, 3] * (1 + (halves / table[:, :3]).sum(axis=1))))  # with halves that noise made less
    return rate, (float(halves[0]), float(halves[1]), float(halves[2]))


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes per second that a copy reads and writes."""
    size = (1 << 28) if device.type == "cuda" else (1 << 25)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device, seconds)


def _links(seconds: float) -> dict[str, float]:
    """Latency and bandwidth of the links between the ranks of this start; empty for one rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return {}
    if not dist.is_initialized():
        device = cpu.device()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    latency, bandwidth = fit_link(list(ring_seconds(dist.get_world_size(), seconds)), dist.get_world_size())
    latency = max(latency - START / (dist.get_world_size() - 1), latency / 10)  # the model adds a collective's start
    # One link is measured by one start: that inside the node, or, over several nodes, the network.
    kind = "net" if dist.get_world_size() > per_node else "node"
    return {f"{kind}_gb_per_s": round(bandwidth / 1e9, 4), f"{kind}_latency_us": round(latency * 1e6, 2)}


def ring_seconds(ranks: int, seconds: float) -> Iterator[tuple[int, float]]:
    """Yields (bytes, seconds) of all-gathers over all ranks, by size of what is gathered. Collective."""
    device = cpu.device()
    for size in MESSAGES:
        part = torch.zeros(max(1, size // ranks), dtype=torch.uint8, device=device)
        whole = torch.zeros(part.numel() * ranks, dtype=torch.uint8, device=device)
        # The same number of repetitions on every rank, or ranks would wait for collectives that others do not make.
        repeats = max(3, min(50, int(seconds * 2e9 / size)))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            dist.all_gather_into_tensor(whole, part)
            times.append(time_when_done(device) - start)
        yield whole.numel(), float(np.median(times))


def fit_link(points: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """(seconds of latency per step, bytes per second) of a ring: t = (K - 1) alpha + (K - 1) / K * S / beta, by least
    squares of relative errors."""
    table = np.array(points, dtype=float)
    model = np.c_[np.full(len(table), ranks - 1.0), (ranks - 1) / ranks * table[:, 0]] / table[:, 1:2]
    (alpha, inverse), *_ = np.linalg.lstsq(model, np.ones(len(table)), rcond=None)
    smallest = table[np.argmin(table[:, 1])]
    if alpha <= 0:
        alpha = smallest[1] / (ranks - 1) / 10
    if inverse <= 0:
        inverse = float(np.min(table[:, 1] / table[:, 0]))
    return float(alpha), float(1 / inverse)
