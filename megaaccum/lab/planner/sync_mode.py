"""Chooses the sync mode for `sync: auto`, and refuses one that does not fit, by the bytes that each would move and
hold. Numbers alone: no torch, no process group, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from megaaccum.config import resolve
from megaaccum.config.plan import Plan
from megaaccum.config.schema import ShardingConfig
from megaaccum.errors import ConfigError, problems_of
from megaaccum.lab.planner import footprint
from megaaccum.lab.planner.footprint import Moved, mode_name
from megaaccum.lab.planner.hardware import load_hardware, names, usual_usage
from megaaccum.lab.planner.layouts import SCHEDULES, SYNC_MODES, Layouts, from_rows, row_of
from megaaccum.lab.planner.matrices import most_owned, rank_matrices
from megaaccum.lab.planner.memory import Memory, MemoryModel, Usage
from megaaccum.lab.planner.stages import Stage, chunks_of_rank, rank_kinds, stages_of, with_head_apart
from megaaccum.lab.planner.weights import Elements, rank_parameters
from megaaccum.lab.planner.workload import memory_model
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.optim.owners import at_owners
from megaaccum.pretrain.data.sources import vocab_size
from megaaccum.pretrain.model.layers import Layers, on_a_gpu
from megaaccum.units import GIB, amount


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory that a rank can have, in bytes, and who says so."""

    num_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """The cost of a sync mode: bytes received per step by the rank with the most parameters, and bytes by kind
    (planner/memory.py) of the rank that holds the most."""

    mode: ShardingConfig
    moved: Moved
    memory: dict[str, float]

    @property
    def held(self) -> float:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    def kinds(self) -> str:
        """`parameters 1.0 GiB, gradients ...`, the largest first; kinds of nothing left out."""
        largest = sorted(self.memory.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {amount(size)}" for kind, size in largest if size)


@dataclass(frozen=True)
class Forecast:
    """The cost of sync modes on the layout of `plan`. vocab: entries of the vocabulary before padding. layers: those of
    the machine that trains; None is a GPU with Transformer Engine. usage: what its device keeps beside tensors."""

    plan: Plan
    vocab: int
    layers: Layers | None = None
    usage: Usage = field(default_factory=Usage)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the whole model, in its order."""
        return stages_of(self.plan.config)

    def every(self) -> list[Predicted]:
        """Every sync mode, the one that the plan names among them."""
        return [self.predict(mode) for mode in footprint.every(self.plan)]

    def predict(self, mode: ShardingConfig) -> Predicted:
        """The cost of `mode`."""
        at = self.plan.layout
        ranks = rank_kinds(self.stages, pp=at.pp, schedule=at.schedule)
        moved = max((self.moved(mode, rank) for rank in ranks), key=lambda each: each.total)
        peak = self.model(mode).peak(self.layout(mode))
        return Predicted(mode, moved, {kind: float(size[0]) for kind, size in peak.by_kind.items()})

    def moved(self, mode: ShardingConfig, pp_rank: int, dp_rank: int | None = None) -> Moved:
        """Bytes that a rank at `pp_rank` receives, at `dp_rank` or the one that receives the most. Experts are gathered
        and reduced over their own ranks."""
        at, held = self.plan.layout, self.elements(pp_rank)
        m, kept = self.plan.batch.num_microbatches, 0.0
        if mode.max_live_parameters:
            kept = float(np.max(self.model(mode).units(self.layout(mode), self.chunks(pp_rank)).kept))
        live = min(kept, float(held.total))  # all of it: a tied head too, which finds the table gathered
        plain = footprint.moved(mode, int(held.plain), at.dp * at.cp, microbatches=m, live=live, rank=dp_rank, cp=at.cp)
        if (mode.backend, mode.sync) == ("deepspeed", "streaming") and live == kept:
            again = int(self.elements(pp_rank, head_apart=True).plain - held.plain)  # a tied head gathers the table too
            plain += Moved(footprint.moved(mode, again, at.dp * at.cp, microbatches=m).gathered, 0.0)
        alike = dp_rank if at.edp == at.dp * at.cp else None
        if mode.sync == "resident":
            m *= max(1, at.dp * at.cp // at.edp)  # of the runs of all ranks that send tokens
        total = plain + footprint.moved(mode, int(held.expert), at.edp, microbatches=m, rank=alike)
        return total + self._straight_to_owners(mode, pp_rank) if self._at_owners(mode) else total

    def _straight_to_owners(self, mode: ShardingConfig, pp_rank: int) -> Moved:
        """By how much less the reductions move if matrices go to their owners: one sum over all ranks."""
        at, m = self.plan.layout, self.plan.batch.num_microbatches
        held = rank_matrices(self.plan.config.model, self.chunks(pp_rank), at)
        reductions = m if mode.sync == "streaming" else 1
        more = 0.0
        for elements, ranks in ((int(held.plain), at.dp * at.cp), (int(held.expert), at.edp)):
            once = (ranks - 1) / ranks * elements * footprint.reduce_bytes(mode)
            more += once * reductions - footprint.moved(mode, elements, ranks, microbatches=m).reduced
        return Moved(0.0, more)

    def elements(self, pp_rank: int, *, head_apart: bool = False) -> Elements:
        """Parameters of a rank of pipeline rank `pp_rank`. head_apart: a tied head counts beside the table."""
        at, config = self.plan.layout, self.plan.config
        chunks = self.chunks(pp_rank)
        if head_apart or config.sharding.reproducible == "layout":
            chunks = with_head_apart(chunks)
        return rank_parameters(config.model, chunks, padded_vocab_size(config, self.vocab), at)

    def chunks(self, pp_rank: int) -> list[Stage]:
        """The stages of pipeline rank `pp_rank`."""
        at = self.plan.layout
        return chunks_of_rank(self.stages, pp_rank, pp=at.pp, schedule=at.schedule)

    def model(self, mode: ShardingConfig) -> MemoryModel:
        """The planner's memory model of `mode`."""
        config, batch = self.plan.config, self.plan.batch
        made = memory_model(
            config, self.vocab, [mode], made_of=self.layers or on_a_gpu(config), usage=self.usage,
            stages=self.stages, flushes=batch.num_microbatches // batch.microbatches_per_flush,
        )  # fmt: skip
        return replace(made, at_owners=self._at_owners(mode), most_owned=partial(most_owned, self.plan))

    def _at_owners(self, mode: ShardingConfig) -> bool:
        return at_owners(replace(self.plan.config, sharding=mode), self.plan.batch.num_microbatches)

    def layout(self, mode: ShardingConfig) -> Layouts:
        """The layout of the plan as the planner's one row."""
        row = row_of(self.plan.layout, self.plan.batch, self.plan.config)
        return from_rows([row | dict(sync=SYNC_MODES.index(mode.sync), zero_stage=mode.zero_stage)])


# --- what fits -------------------------------------------------------------------------------------------------------


def limit_of(plan: Plan, device_bytes: float | None = None) -> Limit | None:
    """The memory that the step has to fit into: `memory_gib`, else what the device has, else no limit."""
    asked = plan.config.sharding.memory_gib
    if asked is not None:
        return Limit(asked * GIB, f"memory_gib {asked:g}")
    source = "free on the rank with the least; memory_gib outranks it"
    return None if device_bytes is None else Limit(device_bytes, source)


def choose_sync_mode(plan: Plan, device_bytes: float | None = None, *, layers: Layers | None = None) -> Plan:
    """`plan` with the sync mode that it asks for, or, for `sync: auto`, the one that fits with the fewest bytes; a note
    gives the numbers. The same on every rank that is given the same.

    device_bytes: memory that is free on the smallest device before training, None if it is not known; of it the
    libraries' buffers and the allocator's gaps still come off. layers: as Forecast's.

    Raises:
        ConfigError: nothing that was asked for fits. It lists what is needed by kind and what would fit.
        DataError: there is a limit, and the vocabulary is not known.
    """
    limit, is_auto = limit_of(plan, device_bytes), _is_auto(plan)
    if limit is None:
        why = "sync auto: resident, as no limit of memory is known; memory_gib sets one."
        return with_note(plan, why) if is_auto else plan
    if plan.layout.schedule not in SCHEDULES:
        why = f"whether the step fits into {amount(limit.num_bytes)} is not known for a schedule from a file."
        return with_note(plan, why)
    forecast = Forecast(plan, vocab_size_of(plan), layers, _usage(device_bytes))
    tried = [(each, replace(forecast, plan=each).predict(each.config.sharding)) for each in _options(forecast, limit)]
    for option, row in tried:
        if row.held <= limit.num_bytes:
            return with_note(option, _reason(tried, row, limit)) if is_auto else option
    raise ConfigError(_refusal(forecast, [row for _, row in tried], limit))


def peak(plan: Plan, device_bytes: float | None = None, layers: Layers | None = None) -> Memory:
    """Bytes of the most loaded rank under the plan's own sync mode. Arguments as `choose_sync_mode`'s."""
    mode = plan.config.sharding
    forecast = Forecast(plan, vocab_size_of(plan), layers, _usage(device_bytes))
    return forecast.model(mode).peak(forecast.layout(mode))


def _usage(device_bytes: float | None) -> Usage:
    return Usage() if device_bytes is None else usual_usage()


def vocab_size_of(plan: Plan) -> int:
    """Entries of the vocabulary before padding. Raises DataError if there is neither a key nor a dataset."""
    return plan.config.model.vocab_size or vocab_size(plan.config)


def _is_auto(plan: Plan) -> bool:
    return plan.written is not None and plan.written.sharding.sync == "auto"


def _options(forecast: Forecast, limit: Limit) -> Iterator[Plan]:
    """Modes to choose from, by bytes moved, least first: the plan itself, and for `sync: auto` streaming where no rule
    refuses it, with as many live parameters as fit."""
    plan = forecast.plan
    yield plan
    if not _is_auto(plan):
        return
    try:
        streaming = _with(plan, sync="streaming")
    except ConfigError:
        return
    left = limit.num_bytes - replace(forecast, plan=streaming).predict(streaming.config.sharding).held
    live = int(left / footprint.BYTES[plan.config.sharding.params_dtype or "fp32"])
    keeps_some = plan.config.sharding.backend == "deepspeed" and live > 0
    yield _with(plan, sync="streaming", max_live_parameters=live) if keeps_some else streaming


def _with(plan: Plan, **keys: object) -> Plan:
    """The plan of the same configuration with these keys of its sharding. Raises ConfigError if a rule refuses."""
    assert plan.written is not None
    written = replace(plan.written, sharding=replace(plan.written.sharding, **keys))  # type: ignore[arg-type]
    return replace(resolve(written, world_size=plan.layout.world_size), written=plan.written)


def with_note(plan: Plan, note: str) -> Plan:
    """`plan` with one note more."""
    return replace(plan, notes=[*plan.notes, note])


def _reason(tried: list[tuple[Plan, Predicted]], row: Predicted, limit: Limit) -> str:
    """Why `row` was chosen for `sync: auto`."""
    before = [
        f"{other.mode.sync} would hold {amount(other.held)}" for _, other in tried if other.held > limit.num_bytes
    ]
    live = f" with max_live_parameters {row.mode.max_live_parameters}" if row.mode.max_live_parameters else ""
    text = (
        f"sync auto: {row.mode.sync}{live} holds {amount(row.held)} of {amount(limit.num_bytes)} ({limit.source}) and"
        f" moves {amount(row.moved.total)} per step"
    )
    return "; ".join([text, *before]) + "."


def _refusal(forecast: Forecast, tried: list[Predicted], limit: Limit) -> str:
    """The sizes that do not fit, by kind, and what to change."""
    lines = [
        f"{mode_name(row.mode)} needs {amount(row.held)} on the most loaded rank, but there are"
        f" {amount(limit.num_bytes)} ({limit.source}): {row.kinds()}."
        for row in tried
    ]
    return " ".join([*lines, _remedy(forecast, limit)])


def _remedy(forecast: Forecast, limit: Limit) -> str:
    """The sync mode that fits with the least bytes; else what makes any of them smaller."""
    legal = [row for row in forecast.every() if not problems_of(_with, forecast.plan, **_values(row.mode))]
    if rows := [row for row in legal if row.held <= limit.num_bytes]:
        best = min(rows, key=lambda row: row.moved.total)
        return f"{mode_name(best.mode)} would hold {amount(best.held)}: set {', '.join(_keys(best.mode))}."
    smallest = min(legal, key=lambda row: row.held)
    gpus = gpus_with(smallest.held - forecast.usage.runtime_bytes)
    return (
        f"The smallest sync mode, {mode_name(smallest.mode)}, holds {amount(smallest.held)}: raise"
        " pipeline_model_parallel_size or tensor_model_parallel_size, lower micro_batch_size, set recompute_granularity"
        f" to full, or memory_gib to what there is, at least {1.006 * smallest.held / GIB:.3g}: {gpus}."
    )


def gpus_with(num_bytes: float) -> str:
    """The GPUs of the hardware table that have this much memory beside CUDA's and NCCL's, or that there is none."""
    known = [load_hardware(name) for name in names()]
    if enough := [each.name for each in known if each.hbm_bytes - each.usage.runtime_bytes >= num_bytes]:
        return f"of the known GPUs {', '.join(enough)} {'have' if len(enough) > 1 else 'has'} that"
    largest = max(known, key=lambda each: each.hbm_bytes)
    return f"no known GPU has that, the largest is {largest.name} with {largest.hbm_bytes / GIB:.0f} GiB"


def _values(mode: ShardingConfig) -> dict[str, object]:
    """The keys that name a sync mode."""
    stage = ["zero_stage"] if mode.backend == "deepspeed" else []
    names = ["backend", "sync", "max_live_parameters", *stage, "data_parallel_replicas"]
    return {name: getattr(mode, name) for name in names}


def _keys(mode: ShardingConfig) -> list[str]:
    plain = {"max_live_parameters": 0, "data_parallel_replicas": 1}
    return [f"{key} to {value}" for key, value in _values(mode).items() if plain.get(key) != value]
