"""A look at all ranks every few steps: which is late, and which moves or holds more than the plan says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from megaaccum.observe.phases import by_phase
from megaaccum.platform import cpu
from megaaccum.units import amount

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.observe.traffic import Traffic
    from megaaccum.pretrain.metrics.expected import Expected
    from megaaccum.step.result import StepResult

TOLERANCE = 0.1
"""By how much bytes may leave the plan before it is an alarm."""
ACTIVATIONS_TOLERANCE = 0.25
"""The same of activations, beside which kernels have workspaces of their own."""
LEAST = 2**20
"""Bytes of memory that are no alarm."""
SMALL = 1024
"""Bytes per call below which a collective is one of counts and norms, which no plan has."""
PADDED_TO = 64
"""Elements to a multiple of which Megatron pads a parameter; the others pad to fewer, or to one of the ranks."""

Finding = tuple[str, str]
"""Kind (`alarm`, `straggler`) and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank since the last report. data, compute: seconds of a step, waiting for micro-batches (nan on ranks that are
    sent theirs) and in its forwards: the least and the median. step: median seconds. moved: the most bytes that a step
    received from other data-parallel ranks, by how many calls; nan where no step was as planned. parameters to
    activations: the most bytes held. tensors, largest, frozen: its parameters: how many, elements of the largest,
    whether some are not trained."""

    pp_rank: float
    least_data: float
    data: float
    least_compute: float
    compute: float
    step: float
    moved: float
    calls: float
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    tensors: float
    largest: float
    frozen: float


@dataclass(slots=True)
class _Seen:
    """This rank's steps since the last report."""

    data: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    moved: float = math.nan
    calls: float = math.nan
    memory: dict[str, int] = field(default_factory=dict)


class Ranks:
    """Reports of the ranks of a run. interval: steps between two looks, 0 for none; the first look is after the second
    step. threshold: share of a step by which a rank is late. stages: by pipeline rank, what is planned."""

    def __init__(self, plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module], stages: Sequence[Expected]):
        run = plan.config.run
        self._interval, self._threshold = run.rank_report_interval, run.straggler_threshold
        self._plan, self._stages, self._pp_rank = plan, stages, groups.pp.rank()
        sizes = [getattr(p, "ds_numel", p.numel()) for chunk in chunks for p in chunk.parameters()]
        frozen = any(not param.requires_grad for chunk in chunks for param in chunk.parameters())
        self._parameters = {"tensors": len(sizes), "largest": max(sizes, default=0), "frozen": float(frozen)}
        self._seen, self._num_steps = _Seen(), 0
        self._named: set[str] = set()

    def after(self, result: StepResult, *, data: float, whole_batch: bool = True) -> list[Finding]:
        """Take note of a step; every `interval` steps, what stands out, on every rank alike. Collective over the world
        then. data: seconds that this rank waited for its own reading, nan where it is sent its micro-batches.
        whole_batch: the step took the configured batch, whose bytes are planned, and no smaller one of a warm-up."""
        if not self._interval:
            return []
        self._note(result, data, counts=whole_batch or self._plan.config.sharding.sync != "streaming")
        self._num_steps += 1
        if self._num_steps != 2 and self._num_steps % self._interval:
            return []
        mine, self._seen = self._report(), _Seen()
        reports = _gathered(mine)
        late = self.stragglers(reports) if self._num_steps >= self._interval else {}
        found = late | self.alarms(reports)
        new = [("straggler" if key in late else "alarm", text) for key, text in found.items() if key not in self._named]
        # A straggler is named again once it was not one; an alarm once in a start.
        self._named = {key for key in self._named if key in found or not key.startswith("late")} | found.keys()
        return new

    def _note(self, result: StepResult, data: float, *, counts: bool) -> None:
        seen = self._seen
        seen.data.append(data)
        seen.compute.append(result.forward_seconds)
        seen.step.append(by_phase(result.seconds)["seconds_per_step"])
        for kind, size in result.memory.items():
            seen.memory[kind] = max(size, seen.memory.get(kind, 0))
        # The first step sets up; one that went wrong may be run again.
        if self._num_steps and counts and not result.note:
            moved, calls = _moved(result.traffic, with_experts=self._plan.layout.ep == 1)
            seen.moved, seen.calls = max(moved, seen.moved), max(calls, seen.calls)  # nan in second place gives way

    def _report(self) -> RankReport:
        seen = self._seen
        return RankReport(
            pp_rank=self._pp_rank,
            least_data=min(seen.data),
            data=statistics.median(seen.data),
            least_compute=min(seen.compute),
            compute=statistics.median(seen.compute),
            step=statistics.median(seen.step),
            moved=seen.moved,
            calls=seen.calls,
            **{kind: seen.memory.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "activations")},
            **self._parameters,
        )

    # --- stragglers ---

    def stragglers(self, reports: Sequence[RankReport]) -> dict[str, str]:
        """Each rank whose best step was later than its peers' usual one, in words, by a key of its own. Peers are, for
        data, those that read, and for compute those of its stage."""
        readers = [rank for rank, each in enumerate(reports) if not math.isnan(each.data)]
        found = dict(self._late("data", "waits for data", reports, readers))
        for stage in sorted({each.pp_rank for each in reports}):
            peers = [rank for rank, each in enumerate(reports) if each.pp_rank == stage]
            found |= dict(self._late("compute", "takes in its forwards", reports, peers))
        return found

    def _late(
        self, what: str, words: str, reports: Sequence[RankReport], peers: Sequence[int]
    ) -> Iterator[tuple[str, str]]:
        if len(peers) < 2:
            return
        usual = statistics.median_low(getattr(reports[rank], what) for rank in peers)
        for rank in peers:
            report, least = reports[rank], getattr(reports[rank], f"least_{what}")
            if least - usual > self._threshold * report.step:
                yield (
                    f"late in {what} {rank}",
                    f"rank {rank} {words} at least {least:.3g} s in each of the last {self._interval} steps, and its"
                    f" peers {usual:.3g} s, of a step of {report.step:.3g} s (straggler_threshold"
                    f" {self._threshold:g})",
                )

    # --- alarms ---

    def alarms(self, reports: Sequence[RankReport]) -> dict[str, str]:
        """Each thing that left the plan, in words, with the first rank on which it did."""
        found: dict[str, str] = {}
        for rank, report in enumerate(reports):
            if self._stages:
                for key, text in self._left(report, self._stages[int(report.pp_rank)]):
                    found.setdefault(key, f"rank {rank} {text}")
        return found

    def _left(self, report: RankReport, planned: Expected) -> Iterator[tuple[str, str]]:
        yield from self._left_by_traffic(report, planned)
        kinds = dict(planned.memory)
        if self._plan.config.model.num_experts is None:  # the tokens of an expert vary
            kinds["activations"] += kinds["loss"] + kinds["workspace"]
        else:
            del kinds["activations"]
        slack = LEAST + 16 * report.largest  # ZeRO-1 and -2 keep a gradient whole that two ranks share
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            held, tolerance = getattr(report, kind), ACTIVATIONS_TOLERANCE if kind == "activations" else TOLERANCE
            if kind in kinds and held > kinds[kind] * (1 + tolerance) + slack:
                yield (
                    f"memory {kind}",
                    f"holds {amount(held)} of {kind}, and the plan says {amount(kinds[kind])}",
                )

    def _left_by_traffic(self, report: RankReport, planned: Expected) -> Iterator[tuple[str, str]]:
        """A step that reduces or gathers for each micro-batch what it should once moves a multiple; the least are the
        gradients, since an evaluation may have left the parameters gathered."""
        expected = planned.gathered + planned.reduced
        ranks = self._plan.layout.dp * self._plan.layout.cp
        padding = planned.per_element * (report.tensors * max(PADDED_TO, ranks) + 256 * ranks)
        whole = self._plan.layout.ep == 1 and not report.frozen
        too_much = report.moved > (expected + padding) * (1 + TOLERANCE)
        if too_much or (whole and report.moved < planned.reduced * planned.least_share * (1 - TOLERANCE)):
            yield (
                "bytes",
                f"received {amount(report.moved)} from data-parallel ranks in a step, and the plan says"
                f" {amount(expected)}: a reduction that is made for every micro-batch, or none, is the usual cause",
            )
        most = report.tensors * self._passes()
        if report.calls > most:
            yield (
                "calls",
                f"made {report.calls:.0f} collectives with data-parallel ranks in a step, and the plan has at most"
                f" {most:.0f}: {report.tensors:.0f} parameters, {self._passes()} times",
            )

    def _passes(self) -> int:
        """How often a step may gather or reduce a parameter, each in a call of its own: once each and once more over
        replicas, and for every micro-batch where layers are streamed, with a third gather for recomputation."""
        once = 2 + (self._plan.config.sharding.data_parallel_replicas > 1)
        streams = self._plan.config.sharding.sync == "streaming"
        return once + (1 + once) * self._plan.batch.num_microbatches if streams else once


def _moved(traffic: Traffic, *, with_experts: bool) -> tuple[float, float]:
    """(bytes, calls) of this rank's collectives with the ranks that hold the same parameters."""
    groups = ("dp_cp", "dp", "other") if with_experts else ("dp_cp", "dp")
    large = [
        count
        for lane, count in traffic.items()
        if lane.split("/")[1] in groups and count.num_bytes > SMALL * count.calls
    ]
    return sum(each.num_bytes for each in large), float(sum(each.calls for each in large))


def _gathered(mine: RankReport) -> list[RankReport]:
    """Every rank's report, in rank order."""
    numbers = torch.tensor(astuple(mine), dtype=torch.float64, device=cpu.device())
    world = torch.distributed.get_world_size()
    everyone = torch.empty(world * len(numbers), dtype=numbers.dtype, device=numbers.device)
    torch.distributed.all_gather_into_tensor(everyone, numbers)
    names = [each.name for each in fields(RankReport)]
    return [RankReport(**dict(zip(names, row, strict=True))) for row in everyone.view(world, -1).tolist()]
