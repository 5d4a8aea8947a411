"""The backends and sync modes: what each moves between ranks in a step, and what it keeps per parameter. Numbers, no
torch. sync_mode.py puts both together for a plan; counters of real steps (metrics/) are held to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from megaaccum.config import Plan
from megaaccum.config.schema import ShardingConfig

BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Per element."""


def mode_name(sharding: ShardingConfig) -> str:
    """The backend, its ZeRO stage or replicas, and when it communicates."""
    stage = f" zero-{sharding.zero_stage}" if sharding.backend == "deepspeed" else ""
    replicas = f" x{sharding.data_parallel_replicas}" if sharding.data_parallel_replicas > 1 else ""
    return f"{sharding.backend}{stage}{replicas} {sharding.sync}"


def every(plan: Plan) -> Iterator[ShardingConfig]:
    """The plan's keys with every sharding mode by name, on the layout of `plan`: HSDP with its replicas, else with two
    where they divide the ranks, those that hold the same experts too; with its max_live_parameters. Whether a schedule
    or a model can run it is for config.rules to say."""
    mine, at = plan.config.sharding, plan.layout
    plain = replace(mine, sync="resident", zero_stage=3, max_live_parameters=0, data_parallel_replicas=1)
    ranks, replicas = math.gcd(at.dp * at.cp, at.edp), max(mine.data_parallel_replicas, 2)
    yield replace(plain, backend="deepspeed")
    yield replace(plain, backend="deepspeed", sync="streaming", max_live_parameters=mine.max_live_parameters)
    yield replace(plain, backend="deepspeed", zero_stage=2)
    yield replace(plain, backend="deepspeed", zero_stage=1)
    for count in (1, replicas) if ranks % replicas == 0 and ranks > replicas else (1,):
        yield replace(plain, backend="fsdp2", data_parallel_replicas=count)
        yield replace(plain, backend="fsdp2", sync="streaming", data_parallel_replicas=count)
    yield replace(plain, backend="megatron")
    yield replace(plain, backend="ddp")


# --- bytes moved -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank receives from other data-parallel ranks in a step, for parameters and for gradients."""

    gathered: float
    reduced: float

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.gathered + other.gathered, self.reduced + other.reduced)

    @property
    def total(self) -> float:
        return self.gathered + self.reduced


def moved(
    sharding: ShardingConfig,
    elements: float,
    ranks: int,
    *,
    microbatches: int,
    live: float = 0,
    rank: int | None = None,
    cp: int = 1,
) -> Moved:
    """The cost of `elements` parameters that `ranks` ranks share: K ranks, R replicas of S = K / R ranks, P and G bytes
    of parameters and gradients, L of them `live` elements', m micro-batches per step. rank: which of them receives it;
    None: the one that receives the most. cp: how many of them share a sequence.

    | resident: ZeRO-3, Megatron, FSDP2 (R = 1) | (K-1)/K * (P + G) |
    | streaming | (K-1)/K * (2 (P - L) * m + L + G * m) |
    | ZeRO-1 and -2 | (K-1)/K * (P + 2 G): DeepSpeed all-reduces buckets, of which each rank keeps a part; with
      `deterministic` (K-1)/K * (P + G) |
    | HSDP | as above with S for K, and 2 (R-1)/R * G / S |
    | torch DDP | 2 (K-1)/K * G, in FP32 for 16-bit parameters |
    | `reproducible: layout`, resident | G / K for each sum of another rank in place of (K-1)/K * G: one each where K is
      a power of two, else as many as its run of micro-batches comes to; as many for each block of a sequence |

    Padding is left out: to a multiple of K per parameter (ZeRO-3), of whole rows (FSDP2), of 64 elements per parameter
    and 128 * K per bucket (Megatron), of the alignment of a group (ZeRO-1 and -2).
    """
    param, grad = BYTES[sharding.params_dtype or "fp32"], reduce_bytes(sharding)
    copies = sharding.data_parallel_replicas
    inner = ranks // copies
    share, between = (inner - 1) / inner, (copies - 1) / copies
    p, g = param * elements, grad * elements
    sums = sums_of_others(sharding, ranks, microbatches, cp)
    others = max(sums) if rank is None else sums[rank]
    once = others / ranks
    if sharding.backend == "ddp":
        return Moved(0.0, (others + ranks - 1) * max(param, 4.0) * elements / ranks)
    if sharding.backend == "deepspeed" and sharding.zero_stage < 3:
        return Moved(share * p, (once if sharding.deterministic else 2 * share) * g)
    replicas = 2 * between * g / inner
    if sharding.sync == "resident":
        return Moved(share * p, (once if copies == 1 else share) * g + replicas)
    live *= param
    return Moved(share * (2 * (p - live) * microbatches + live), share * g * microbatches + replicas)


def sums_of_others(sharding: ShardingConfig, ranks: int, microbatches: int, cp: int = 1) -> list[int]:
    """Number of sums of whole gradients, by rank, that the other ranks send pieces of in one reduction."""
    if sharding.reproducible != "layout" or sharding.sync == "streaming":
        return [ranks - 1] * ranks
    sums = sums_of_runs(microbatches, ranks, max(1, (sharding.reproducible_context_blocks or 1) // cp), cp)
    return [sum(sums) - own for own in sums]


@cache
def partial_sums(leaves: int, start: int, stop: int) -> int:
    """Number of sums left of the leaves `start` to `stop` of sharding/sum_tree.py's tree when all that can be added
    is."""
    if start <= 0 and stop >= leaves:
        return 1
    if stop <= 0 or start >= leaves:
        return 0
    half = leaves // 2
    return partial_sums(half, start, stop) + partial_sums(leaves - half, start - half, stop - half)


@cache
def sums_of_runs(each: int, ranks: int, blocks: int = 1, cp: int = 1) -> tuple[int, ...]:
    """Number of sums that each rank's run of `each` leaves is reduced to: one if `ranks` is a power of two. cp: ranks
    that have the same run, each in `blocks` blocks; without others that have another run, they are one sum."""
    if cp > 1 or blocks > 1:
        times = blocks if ranks > cp else 1
        return tuple(times * sums for sums in sums_of_runs(each, ranks // cp) for _ in range(cp))
    odd = ranks // (ranks & -ranks)  # halving an even number of ranks halves the tree alike
    return tuple(partial_sums(odd * each, rank * each, (rank + 1) * each) for rank in range(odd)) * (ranks // odd)


@cache
def most_waiting(each: int, ranks: int, *, in_turns: bool) -> int:
    """Largest number of partial sums of one gradient that wait on a rank before its last micro-batch.

    in_turns: the rank adds the micro-batches of all ranks, `ranks` at a time; else the run of `each` of its own.
    """
    if in_turns:
        return max(partial_sums(each * ranks, 0, done * ranks) for done in range(each))
    odd = ranks // (ranks & -ranks)
    starts = range(0, odd * each, each)
    return max(partial_sums(odd * each, start, start + done) for start in starts for done in range(each))


def reduce_bytes(sharding: ShardingConfig) -> float:
    """Per element of a gradient that crosses ranks; float64 stays what it is."""
    return 8.0 if sharding.params_dtype == "fp64" else BYTES[sharding.grad_reduce_dtype]


# --- bytes kept ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank keeps: of every parameter of its stage, of its shard, and of the units that are
    gathered for a while."""

    param: float = 2.0
    param_shard: float = 0.0
    grad: float = 4.0
    grad_shard: float = 0.0
    """Beside the whole gradients."""
    grad_step: float = 0.0
    """Bytes of the shard's gradients while the optimizer steps, when whole ones are gone."""
    optimizer: float = 0.0
    optimizer_shard: float = 12.0
    unit_param: float = 0.0
    unit_grad: float = 0.0
    waiting: float = 0.0
    """Bytes of every parameter, for each partial sum over a rank's micro-batches that waits (reproducible: layout)."""
    waiting_shard: float = 0.0
    """Bytes of the shard, for each that waits over the micro-batches of all ranks, which come in turns."""
    waiting_totals: float = 0.0
    """Elements whose finished sums stay among those that wait, until the last flush is over."""
    waiting_total: float = 4.0
    """Bytes of each such element, for the first of its sums."""
    alone: bool = False
    """Whether a gathered parameter that no other rank shares is its shard, and takes no bytes of its own."""

    @property
    def waits(self) -> bool:
        """Whether there are partial sums."""
        return self.waiting > 0 or self.waiting_shard > 0

    def partial_sums(self, elements: Any, num_waiting: Any, num_final: Any) -> Any:
        """Upper bound of the bytes of partial sums: every gradient has `num_waiting` of them, or, as far as finished
        ones stay, its `num_final` final ones, whichever is more. elements: those that are added up."""
        waiting = (self.waiting + self.waiting_shard) * num_waiting
        final = self.waiting_total + (self.waiting + self.waiting_shard) * (num_final - 1)
        stay = np.minimum(elements, self.waiting_totals)
        return elements * waiting + stay * np.maximum(0.0, final - waiting)

    def gradients(self, whole: Any, shard: Any, moving: Any) -> Any:
        """Bytes at the worse of two moments: the last backward, and the optimizer's step. moving: bytes of what comes
        and goes, when it is most: gradients of gathered units, and partial sums."""
        backward = self.grad * whole + self.grad_shard * shard + moving
        step = self.grad_step * shard
        return backward + (step > backward) * (step - backward)


def state_bytes(
    sharding: ShardingConfig,
    *,
    with_experts: bool = False,
    with_undo: bool = False,
    moments: int = 2,
) -> StateBytes:
    """Bytes a sync mode keeps, as DeepSpeed 0.19, torch 2.13 and Megatron-core 0.19 allocate (counted by tests).
    with_experts: finished sums of experts wait for their turn. with_undo: and the copy of `speculative_step`. moments:
    of the optimizer, 1 for Lion."""
    kept = _usual_bytes(sharding, moments)
    if with_undo:
        kept = _with_undo(kept, sharding, moments)
    if sharding.reproducible != "layout":
        return kept
    each = BYTES[sharding.grad_reduce_dtype]
    if sharding.sync == "streaming":  # FSDP2 adds the finished sum to the shard's gradient at once
        return replace(kept, waiting_shard=each, waiting_totals=0.0 if sharding.backend == "fsdp2" else math.inf)
    in_place = 0.0 if sharding.backend == "megatron" else 4.0  # the last of them becomes the gradient that is reduced
    waits_in_bucket = math.inf if with_experts else float(sharding.reduce_bucket_size)
    totals = {"deepspeed": waits_in_bucket, "fsdp2": 0.0}.get(sharding.backend, math.inf)
    return replace(kept, grad=kept.grad - in_place, waiting=each, waiting_totals=totals, waiting_total=in_place)


def _with_undo(kept: StateBytes, sharding: ShardingConfig, moments: int) -> StateBytes:
    """`kept` with a copy of masters, moments and the gradient that the optimizer reads (`speculative_step`). It lives
    from the update to the verdict, so beside fewer activations than a step's most."""
    if sharding.backend == "ddp":
        return replace(kept, optimizer=kept.optimizer + (2 + moments) * kept.param)
    state, grad = BYTES[sharding.optimizer_dtype], BYTES[sharding.grad_accum_dtype]
    return replace(kept, optimizer_shard=kept.optimizer_shard + (1 + moments) * state + grad)


def _usual_bytes(sharding: ShardingConfig, moments: int) -> StateBytes:
    param, grad = BYTES[sharding.params_dtype or "fp32"], BYTES[sharding.grad_accum_dtype]
    if sharding.backend == "ddp":
        # Gradients and DDP's buckets of the masters' precision; masters of their own beside 16-bit parameters.
        master = max(param, 4.0)
        held = (moments + (param < master)) * master
        return StateBytes(param=param, grad=2 * master, optimizer=held, optimizer_shard=0)
    if sharding.backend == "megatron":
        main = 4.0 if sharding.grad_reduce_dtype == "fp32" else param
        return StateBytes(param=param, grad=main, optimizer_shard=4.0 * (moments + (param < 4)))
    if sharding.backend == "fsdp2":
        return _fsdp2_bytes(sharding, param, reduce_bytes(sharding), BYTES[sharding.optimizer_dtype], moments)
    state = 0.0 if sharding.offload_optimizer == "cpu" else BYTES[sharding.optimizer_dtype]
    return _deepspeed_bytes(sharding, param, grad, state, moments)


def _fsdp2_bytes(sharding: ShardingConfig, param: float, reduce: float, state: float, moments: int) -> StateBytes:
    """Shards are the masters, in the optimizer's precision (or FP64). Whole gradients are added up in the
    reduction's."""
    master = max(param, state)
    shards: dict[str, Any] = dict(param_shard=master, optimizer_shard=moments * master, grad_step=master)
    if sharding.sync == "resident":
        return StateBytes(param=param, grad=reduce, **shards)
    return StateBytes(param=0, grad=0, grad_shard=master, unit_param=param, unit_grad=param, **shards)


def _deepspeed_bytes(sharding: ShardingConfig, param: float, grad: float, state: float, moments: int) -> StateBytes:
    """A master and moments of `state` bytes (0: offloaded) per element of the shard, and for the step a copy of its
    gradients in that precision: beside them, but for ZeRO-1 and -2 with 16-bit parameters, where it takes their
    place."""
    shards: dict[str, Any] = dict(optimizer_shard=(1 + moments) * state, grad_step=grad + state)
    if sharding.zero_stage < 3:
        shards["grad_step"] -= 0 if grad == param else grad
        return StateBytes(param=param, grad=grad, **shards)
    if sharding.sync == "resident":
        return StateBytes(param=param, param_shard=param, grad=grad, grad_shard=grad, alone=True, **shards)
    return StateBytes(
        param=0, param_shard=param, grad=0, grad_shard=grad, unit_param=param, unit_grad=grad, alone=True, **shards
    )
