"""Comparing all ranks every few steps: stragglers, and ranks that move or hold more bytes than the plan predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import torch

from megaaccum.platform import cpu
from megaaccum.pretrain.metrics.step_record import by_phase
from megaaccum.units import amount

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.observe.traffic import Traffic
    from megaaccum.pretrain.metrics.expected import Expected
    from megaaccum.step.result import StepResult

TOLERANCE = 0.1
"""Relative deviation of bytes from the plan above which an alarm is raised."""
ACTIVATIONS_TOLERANCE = 0.25
"""Relative deviation of activations, which include workspaces of kernels."""
WORKSPACES = 256 * 2**20
"""Bytes that cuBLAS's and Transformer Engine's workspaces may take on a GPU: 134 to 217 MiB on an H200."""
LEAST = 2**20
"""Bytes of memory below which a deviation is no alarm."""
SMALL = 1024
"""Bytes per call below which a collective is of counts and norms, which the plan does not include."""
PADDED_TO = 64
"""Elements to whose multiple Megatron pads a parameter; other backends pad to fewer, or to the number of ranks."""

Finding = tuple[str, str]
"""Kind (`alarm`, `straggler`) and text."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's steps since the last report. least_data, data, least_compute, compute: minimum and median seconds of a
    step spent waiting for micro-batches (nan on ranks that receive theirs from another) and in forwards. step: median
    seconds. moved, calls: maximum bytes that a step received from other data-parallel ranks, and in how many
    collectives; nan if no step was as planned. parameters to activations: maximum bytes held. tensors, largest, frozen:
    number of its parameters, elements of the largest, whether some are not trained."""

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
class _Window:
    """This rank's steps since the last report."""

    data: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    moved: float = math.nan
    calls: float = math.nan
    memory: dict[str, int] = field(default_factory=dict)


class Ranks:
    """Compares the ranks of a run by run.rank_report_interval, first after the second step. stages: the plan's
    prediction, by pipeline rank."""

    def __init__(self, plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module], stages: Sequence[Expected]):
        run = plan.config.run
        self._interval, self._threshold = run.rank_report_interval, run.straggler_threshold
        self._plan, self._stages, self._pp_rank = plan, stages, groups.pp.rank()
        sizes = [getattr(p, "ds_numel", p.numel()) for chunk in chunks for p in chunk.parameters()]
        frozen = any(not param.requires_grad for chunk in chunks for param in chunk.parameters())
        self._parameters = {"tensors": len(sizes), "largest": max(sizes, default=0), "frozen": float(frozen)}
        self._window, self._num_steps = _Window(), 0
        self._named: set[str] = set()

    def after(self, result: StepResult, *, data: float, whole_batch: bool = True) -> list[Finding]:
        """Count a step; every `rank_report_interval` steps return what stands out, the same on every rank
        (collective over the world). data: seconds that this rank waited for its own reading; nan if it receives its
        micro-batches. whole_batch: the step had the configured batch, for which bytes are predicted, not a smaller
        one of a warm-up."""
        if not self._interval:
            return []
        self._note(result, data, counts=whole_batch or self._plan.config.sharding.sync != "streaming")
        self._num_steps += 1
        is_whole = self._num_steps % self._interval == 0
        if self._num_steps != 2 and not is_whole:
            return []
        reports, late = _gathered(self._report()), {}
        if is_whole:
            self._window, late = _Window(), self.stragglers(reports)
        found = late | self.alarms(reports)
        new = [("straggler" if key in late else "alarm", text) for key, text in found.items() if key not in self._named]
        # A straggler is reported again only after it was none; an alarm is reported once per start.
        self._named = {key for key in self._named if key in found or not key.startswith("late")} | found.keys()
        return new

    def _note(self, result: StepResult, data: float, *, counts: bool) -> None:
        window = self._window
        window.data.append(data)
        window.compute.append(result.forward_seconds)
        window.step.append(by_phase(result.seconds)["seconds_per_step"])
        for kind, size in result.memory.items():
            window.memory[kind] = max(size, window.memory.get(kind, 0))
        # The first step sets up, and a bad step may run its micro-batches again: both move more bytes.
        if self._num_steps and counts and not result.note:
            moved, calls = _moved(result.traffic, with_experts=self._plan.layout.ep == 1)
            # nan in second place gives way
            window.moved, window.calls = max(moved, window.moved), max(calls, window.calls)

    def _report(self) -> RankReport:
        window = self._window
        return RankReport(
            pp_rank=self._pp_rank,
            least_data=min(window.data),
            data=statistics.median(window.data),
            least_compute=min(window.compute),
            compute=statistics.median(window.compute),
            step=statistics.median(window.step),
            moved=window.moved,
            calls=window.calls,
            **{kind: window.memory.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "activations")},
            **self._parameters,
        )

    # --- stragglers ---

    def stragglers(self, reports: Sequence[RankReport]) -> dict[str, str]:
        """Describe each rank whose fastest step was slower than its peers' median, {key: text}. Peers are, for data,
        the ranks that read, and for computing the ranks of the same stage."""
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
                    f"rank {rank} {words} at least {least:.3g} s in each of the last {self._interval} steps, but its"
                    f" peers {usual:.3g} s, of a step of {report.step:.3g} s (straggler_threshold"
                    f" {self._threshold:g})",
                )

    # --- alarms ---

    def alarms(self, reports: Sequence[RankReport]) -> dict[str, str]:
        """Describe each deviation from the plan, {key: text}, with the first rank that has it."""
        found: dict[str, str] = {}
        for rank, report in enumerate(reports):
            if self._stages:
                for key, text in self._deviations(report, self._stages[int(report.pp_rank)]):
                    found.setdefault(key, f"rank {rank} {text}")
        return found

    def _deviations(self, report: RankReport, planned: Expected) -> Iterator[tuple[str, str]]:
        yield from self._traffic_deviations(report, planned)
        kinds = dict(planned.memory)
        if self._plan.config.model.num_experts is None:  # an expert's number of tokens varies
            kinds["activations"] += kinds["loss"] + kinds["workspace"] + WORKSPACES * cpu.has_accelerator()
        else:
            del kinds["activations"]
        slack = LEAST + 16 * report.largest  # ZeRO-1 and -2 keep a gradient whole that two ranks share
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            held, tolerance = getattr(report, kind), ACTIVATIONS_TOLERANCE if kind == "activations" else TOLERANCE
            if kind in kinds and held > kinds[kind] * (1 + tolerance) + slack:
                yield (f"memory {kind}", f"holds {amount(held)} of {kind}, but the plan says {amount(kinds[kind])}")

    def _traffic_deviations(self, report: RankReport, planned: Expected) -> Iterator[tuple[str, str]]:
        """Compare traffic with the plan. Reducing or gathering for each micro-batch moves a multiple of it; the lower
        bound is the gradients alone, because an evaluation may have left the parameters gathered."""
        expected = planned.gathered + planned.reduced
        ranks = self._plan.layout.dp * self._plan.layout.cp
        padding = planned.per_element * (report.tensors * max(PADDED_TO, ranks) + 256 * ranks)
        whole = self._plan.layout.ep == 1 and not report.frozen
        too_much = report.moved > (expected + padding) * (1 + TOLERANCE)
        if too_much or (whole and report.moved < planned.reduced * planned.least_share * (1 - TOLERANCE)):
            yield (
                "bytes",
                f"received {amount(report.moved)} from data-parallel ranks in a step, but the plan says"
                f" {amount(expected)}: a reduction that is made for every micro-batch, or none, is the usual cause",
            )
        most = report.tensors * self._passes()
        if report.calls > most:
            yield (
                "calls",
                f"made {report.calls:.0f} collectives with data-parallel ranks in a step, but the plan has at most"
                f" {most:.0f}: {report.tensors:.0f} parameters, {self._passes()} times",
            )

    def _passes(self) -> int:
        """How often a step may gather or reduce a parameter, each in its own call: once each and once more over
        replicas; if layers are streamed also for every micro-batch, with a third gather for recomputation."""
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
    """Every rank's report, in rank order: one all-gather of numbers."""
    numbers = torch.tensor(astuple(mine), dtype=torch.float64, device=cpu.device())
    everyone = numbers.new_empty(torch.distributed.get_world_size(), len(numbers))
    torch.distributed.all_gather_into_tensor(everyone.view(-1), numbers)
    return [RankReport(*row) for row in everyone.tolist()]
