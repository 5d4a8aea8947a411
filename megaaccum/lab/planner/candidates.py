"""The legal layouts of a model on a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megaaccum.config.schema import ModelConfig
from megaaccum.errors import ConfigError, either, nearest_multiples
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts, from_rows
from megaaccum.lab.planner.pipeline import is_simulated
from megaaccum.lab.planner.stages import split_layers
from megaaccum.schedule.builders import interleaved_problems
from megaaccum.schedule.registry import BUILT_IN, is_v_shaped

LARGEST_MICRO_BATCH = 64
"""Sequences of a micro-batch beyond which no layout is looked at."""
MOST_CHUNKS = 24
"""Model chunks per rank beyond which no layout is looked at unless vpp is given: the most of a published run
(Qwen3-30B-A3B on H100, NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md, 25.11)."""
AXES = "tp cp pp vpp ep etp dp mbs dbs ga recompute schedule sync zero".split()
"""Axes that --fix and --why-not may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The user's bounds. fixed: axis -> value (a number, or a name for recompute, schedule and mode). most: axis -> the
    largest value, None for none."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    most: Mapping[str, int | None] = field(default_factory=dict)

    def allows(self, axis: str, value: Any) -> bool:
        """Whether a value of an axis may be looked at."""
        wanted, most = self.fixed.get(axis), self.most.get(axis)
        return (wanted is None or wanted == value) and (most is None or value <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A model, its batch and the GPUs: what the layouts divide."""

    model: ModelConfig
    """A resolved configuration's."""
    world_size: int
    """GPUs."""
    gpus_per_node: int
    """GPUs that tensor parallelism may span."""
    global_batch_size: int
    """Sequences per optimizer step."""
    zero_stage: int = 3
    fused_attention: bool = True
    """Attention keeps no scores, and can be cut along the sequence."""
    least_fill: int = 2
    """Micro-batches of a flush per pipeline rank, at least; 1 with allow_underfilled_pipeline: with fewer than ranks,
    a shorter pipeline does the same."""
    limits: Limits = field(default_factory=Limits)

    def layouts(self) -> Layouts:
        """Every legal layout.

        Raises:
            ConfigError: there is none; the text says which number divides nothing, and the nearest that does.
        """
        rows = list(self.rows())
        if not rows:
            raise ConfigError(self._nothing_legal())
        return from_rows(rows)

    def rows(self) -> Iterator[dict[str, int]]:
        """Every legal layout as a row of `Layouts`."""
        for tp, cp, pp in self.grids():
            dp = self.world_size // (tp * cp * pp)
            if not self.limits.allows("dp", dp) or self.global_batch_size % dp:
                continue
            experts = self._expert_sizes(tp, pp)
            for name, vpp in self._schedules(pp):
                for batch in self._batches(dp, pp, name):
                    for ep, etp in experts:
                        yield from self._choices(
                            dict(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp, schedule=SCHEDULES.index(name))
                            | batch
                        )

    def _choices(self, row: dict[str, int]) -> Iterator[dict[str, int]]:
        """The row under every recompute and sync mode; streaming is ZeRO-3's."""
        stage = int(self.limits.fixed.get("zero", self.zero_stage))
        row |= dict(zero_stage=stage, sequence_parallel=int(row["tp"] > 1))
        modules = set(self.model.recompute_modules or ["core_attn"])
        # Recomputing only the scores saves nothing if attention is fused and keeps none.
        keeps_none = self.fused_attention and modules == {"core_attn"}
        for recompute in ("none", "full") if keeps_none else RECOMPUTE:
            if not self.limits.allows("recompute", recompute):
                continue
            # Without another rank that shares parameters, streaming is the program that resident is.
            alone = row["dp"] * row["cp"] == 1 and row["tp"] == row["ep"] * row["etp"]
            for mode in SYNC_MODES if stage == 3 else ("resident",):
                if self.limits.allows("sync", mode) and not (alone and mode == "streaming"):
                    yield row | dict(recompute=RECOMPUTE.index(recompute), sync=SYNC_MODES.index(mode))

    def grids(self) -> Iterator[tuple[int, int, int]]:
        """(tp, cp, pp) that divide the world and the model."""
        for tp in self._tensor_sizes():
            for cp in self._context_sizes(tp):
                for pp in divisors(self.world_size // (tp * cp)):
                    if self.limits.allows("pp", pp) and pp <= self.model.num_layers + 3:
                        yield tp, cp, pp

    def _tensor_sizes(self) -> Iterator[int]:
        model = self.model
        widths = model.num_attention_heads, model.ffn_hidden_size or 0, model.moe_shared_expert_intermediate_size or 0
        for tp in divisors(math.gcd(self.world_size, self.gpus_per_node)):
            cuts = not any(width % tp for width in widths) and self.limits.allows("tp", tp)
            groups = model.num_query_groups or model.num_attention_heads
            if cuts and (groups % tp == 0 or tp % groups == 0) and model.seq_length % tp == 0:
                yield tp

    def _context_sizes(self, tp: int) -> Iterator[int]:
        """Context parallelism needs fused attention, and two even pieces of a sequence per rank. A search without a
        fixed cp looks at powers of two alone that leave a rank at least 1,024 tokens."""
        for cp in divisors(self.world_size // tp):
            whole = self.model.seq_length % (2 * cp) == 0 and self.model.seq_length % (tp * cp) == 0
            usual = (cp.bit_count() == 1 and self.model.seq_length // cp >= 1024) or "cp" in self.limits.fixed
            if (cp == 1 or (whole and usual and self.fused_attention)) and self.limits.allows("cp", cp):
                yield cp

    def _expert_sizes(self, tp: int, pp: int) -> list[tuple[int, int]]:
        """(ep, etp): experts divide over their ranks, and those over the pipeline stage's."""
        if self.model.num_experts is None:
            return [(1, tp)] if self.limits.allows("ep", 1) else []
        stage_ranks, found = self.world_size // pp, []
        for ep in divisors(self.model.num_experts):
            for etp in sorted({1, tp, self.limits.fixed.get("etp", 1)}):
                rests = stage_ranks % (ep * etp), tp % etp, (self.model.moe_ffn_hidden_size or 0) % etp
                if not any(rests) and self.limits.allows("ep", ep) and self.limits.allows("etp", etp):
                    found.append((ep, etp))
        return found

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, vpp) of a pipeline: those that the configuration can name and whose stages balance."""
        for name in schedules():
            for vpp in _chunk_counts(self.model.num_layers, pp, name):
                usual = vpp <= MOST_CHUNKS or "vpp" in self.limits.fixed
                if usual and self.limits.allows("schedule", name) and self.limits.allows("vpp", vpp):
                    yield name, vpp

    def _batches(self, dp: int, pp: int, name: str) -> Iterator[dict[str, int]]:
        """Cuts of a rank's share of the batch: micro-batches, and the device batch that fills the pipeline once."""
        per_rank = self.global_batch_size // dp
        for micro in divisors(per_rank):
            if micro > LARGEST_MICRO_BATCH or not self.limits.allows("mbs", micro):
                continue
            count = per_rank // micro
            if pp > 1 and (
                count < self.least_fill * pp or (name == "interleaved" and any(interleaved_problems(count, pp, pp)))
            ):
                continue
            for chunks in self._device_batches(count, pp, micro):
                if self.limits.allows("ga", count // chunks):
                    yield dict(micro_batch_size=micro, pp_microbatches=chunks, grad_accum_steps=count // chunks)

    def _device_batches(self, count: int, pp: int, micro: int) -> list[int]:
        """pp_microbatches: as many as fill the pipeline (2 * pp), unless the device batch or ga is fixed."""
        if "dbs" in self.limits.fixed:
            chunks, rest = divmod(int(self.limits.fixed["dbs"]), micro)
            return [chunks] if not rest and count % chunks == 0 else []
        if "ga" in self.limits.fixed:
            steps = int(self.limits.fixed["ga"])
            return [count // steps] if count % steps == 0 else []
        return [next(n for n in divisors(count) if n >= min(count, 2 * pp if pp > 1 else 1))]

    # --- when there is none ----------------------------------------------------------------------------------------

    def _nothing_legal(self) -> str:
        """Why no layout is legal: the first axis that leaves none, and what would."""
        grids, text = list(self.grids()), f"no layout of {self.world_size} GPUs"
        cut = {pp for _, _, pp in grids if next(iter(self._schedules(pp)), None)}
        if not cut:
            every = zip(*replace(self, limits=Limits()).grids(), strict=True)
            legal = "; ".join(f"{axis} {_some(sizes)}" for axis, sizes in zip(("tp", "cp", "pp"), every, strict=True))
            layers = f" and cuts {self.model.num_layers} layers into stages of which at most three are a layer short"
            return f"{text} keeps {self._told()}{layers if grids else ''}: {self._released() or f'legal are {legal}'}."
        fitting = [self.world_size // (tp * cp * pp) for tp, cp, pp in grids if pp in cut]
        if all(self.global_batch_size % dp for dp in fitting):
            near = sorted({n for dp in fitting for n in nearest_multiples(self.global_batch_size, dp)})
            near.sort(key=lambda n: abs(n - self.global_batch_size))
            return (
                f"global_batch_size {self.global_batch_size} divides over no data-parallel size that"
                f" {self.world_size} GPUs allow ({_some(fitting)}): set it to {either(sorted(near[:2]))}."
            )
        flushes = (self.least_fill * pp if pp > 1 else 1 for _, _, pp in grids if pp in cut)
        least, text = min(map(math.prod, zip(fitting, flushes, strict=True))), f"{text} with global_batch_size"
        if self.global_batch_size >= least:
            return f"{text} {self.global_batch_size} keeps {self._told()}: {self._released() or 'leave one open'}."
        fill, more = "2 * pp" if self.least_fill > 1 else "pp", self._released()
        return (
            f"{text} {self.global_batch_size} has the {fill} micro-batches that a pipeline of pp ranks needs, and keeps"
            f" {self._told()}: raise global_batch_size to {least}{more and f', or {more}'}."
        )

    def _released(self) -> str:
        """The legal values of the first fixed axis that has some with the others as they are."""
        for axis in self.limits.fixed:
            others = {name: value for name, value in self.limits.fixed.items() if name != axis}
            if found := list(replace(self, limits=replace(self.limits, fixed=others)).rows()):
                at = from_rows(found)
                values = sorted({at.axes(index)[axis] for index in range(len(at))})
                return f"of {axis} take {', '.join(map(str, values[:10]))}"
        return ""

    def _told(self) -> str:
        bounds = {f"max_{axis}": value for axis, value in self.limits.most.items() if value is not None}
        told = {**self.limits.fixed, **bounds}
        return ", ".join(f"{name}={value}" for name, value in told.items()) or "the rules"


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(small + [number // n for n in reversed(small) if n * n != number])


@cache
def schedules() -> tuple[str, ...]:
    """The built-in schedules that a search looks at: simulating one for every layout would take too long."""
    return ("none", *(name for name in BUILT_IN if not is_simulated(name)))


def _chunk_counts(num_layers: int, pp: int, name: str) -> Iterable[int]:
    """Model chunks per rank under a schedule, with a layer in every stage but the first and the last."""
    if pp == 1:
        return [1] if name == "none" else []
    if name == "none":
        return []
    if is_v_shaped(name):
        return [2] if split_layers(num_layers, 2 * pp) else []
    if name != "interleaved":
        return [1] if split_layers(num_layers, pp) else []
    most = (num_layers + 3) // pp
    return [vpp for vpp in range(2, most + 1) if split_layers(num_layers, pp * vpp)]


def _some(values: Iterable[int]) -> str:
    """'1, 2, 4, 8' of the values, ten at most."""
    ordered = sorted(set(values))
    return ", ".join(str(value) for value in ordered[:10]) + (", ..." if len(ordered) > 10 else "")
