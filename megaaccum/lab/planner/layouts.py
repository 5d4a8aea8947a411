"""Layouts as columns: one array per property, one row per candidate, so that a whole search space is one expression."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megaaccum.config.batch import BatchPlan
from megaaccum.config.layout import RankLayout
from megaaccum.config.schema import Config
from megaaccum.schedule.registry import BUILT_IN

Column = np.ndarray
"""One value per layout."""

RECOMPUTE = ("none", "selective", "full")
"""Codes of `Layouts.recompute`: nothing, core attention (Megatron's selective default), every layer."""
SCHEDULES = ["none", *BUILT_IN]
"""Codes of `Layouts.schedule`; pipeline.add_formulas appends those that are priced but cannot be built."""
SYNC_MODES = ("resident", "streaming")
"""Codes of `Layouts.sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Candidates of one model and one number of ranks. Every field is an array of one entry per candidate."""

    tp: Column
    """Ranks that share each matrix; the sequence is split over them too where `sequence_parallel`."""
    cp: Column
    """Ranks that share each sequence."""
    pp: Column
    """Pipeline ranks."""
    vpp: Column
    """Model chunks per pipeline rank."""
    ep: Column
    """Ranks over which experts are spread."""
    etp: Column
    """Ranks that share each expert's matrices."""
    dp: Column
    """Ranks that see different sequences."""
    micro_batch_size: Column
    """Sequences in a micro-batch."""
    pp_microbatches: Column
    """Micro-batches of a device batch."""
    grad_accum_steps: Column
    """Device batches of a step."""
    recompute: Column
    """Index into RECOMPUTE."""
    schedule: Column
    """Index into SCHEDULES."""
    sync: Column
    """Index into SYNC_MODES."""
    zero_stage: Column
    """DeepSpeed ZeRO stage: 1, 2 or 3; 0 where nothing is sharded."""
    sequence_parallel: Column
    """Whether norms and dropout are split over tp."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_microbatches(self) -> Column:
        """Micro-batches per step on one data-parallel rank."""
        return self.pp_microbatches * self.grad_accum_steps

    @property
    def device_batch_size(self) -> Column:
        """Sequences that a data-parallel rank takes in per accumulation step."""
        return self.micro_batch_size * self.pp_microbatches

    @property
    def world_size(self) -> Column:
        """tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> Column:
        """Ranks that hold the same experts: world / (etp * ep * pp)."""
        return np.maximum(1, self.world_size // (self.etp * self.ep * self.pp))

    def select(self, rows: Any) -> Layouts:
        """The layouts at these indices, or where this mask is True."""
        return Layouts(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def row(self, index: int) -> dict[str, int]:
        """One layout as a dictionary, codes not translated."""
        return {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}

    def axes(self, index: int) -> dict[str, Any]:
        """One layout in the user's names."""
        row = self.row(index)
        return {
            **{axis: row[axis] for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")},
            "mbs": row["micro_batch_size"],
            "dbs": int(self.device_batch_size[index]),
            "ga": row["grad_accum_steps"],
            "recompute": RECOMPUTE[row["recompute"]],
            "schedule": SCHEDULES[row["schedule"]],
            "sync": SYNC_MODES[row["sync"]],
            "zero": row["zero_stage"],
        }

    def by_pipeline(self) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """(schedule code, pp, vpp, indices of its layouts) of every pipeline that occurs."""
        key = (self.schedule * 65536 + self.pp) * 65536 + self.vpp
        order = np.argsort(key, kind="stable")
        edges = np.flatnonzero(np.diff(key[order])) + 1
        for rows in np.split(order, edges):
            if len(rows):
                first = rows[0]
                yield int(self.schedule[first]), int(self.pp[first]), int(self.vpp[first]), rows


def short_name(axes: Mapping[str, Any]) -> str:
    """The ranks of a layout (`Layouts.axes`) in one word, axes of 1 left out: tp8cp2pp16x8dp64ep64, with model chunks
    after the pipeline ranks. A star is for parameters that stream."""
    sizes = {axis: axes[axis] for axis in ("tp", "cp", "pp", "dp", "ep") if axes[axis] > 1}
    words = [f"{axis}{size}" + f"x{axes['vpp']}" * (axis == "pp" and axes["vpp"] > 1) for axis, size in sizes.items()]
    return ("".join(words) or "dp1") + "*" * (axes["sync"] == "streaming")


_DEFAULTS = dict.fromkeys(
    ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "micro_batch_size", "pp_microbatches"), 1
) | dict(grad_accum_steps=1, recompute=0, schedule=0, sync=0, zero_stage=3, sequence_parallel=0)


def from_rows(rows: Iterable[dict[str, int]]) -> Layouts:
    """Columns of these rows; what a row leaves out is 1, no recompute, no pipeline, resident, ZeRO-3.

    Raises:
        KeyError: a row has a name that is no column.
    """
    table = [_DEFAULTS | row for row in rows]
    if unknown := {name for row in table for name in row} - _DEFAULTS.keys():
        raise KeyError(f"not columns of Layouts: {sorted(unknown)}")
    return Layouts(**{name: np.array([row[name] for row in table], dtype=np.int64) for name in _DEFAULTS})


def row_of(at: RankLayout, batch: BatchPlan, config: Config) -> dict[str, int]:
    """The row of a plan's layout, batch and configuration; accumulation steps are those of one flush. The schedule has
    to be one of SCHEDULES, not a table of the user's."""
    model, sharding = config.model, config.sharding
    return dict(
        **{axis: getattr(at, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")},
        micro_batch_size=batch.micro_batch_size,
        pp_microbatches=batch.pp_microbatches,
        grad_accum_steps=batch.microbatches_per_flush // batch.pp_microbatches,
        recompute=RECOMPUTE.index(model.recompute_granularity or "none"),
        schedule=SCHEDULES.index(at.schedule),
        sync=SYNC_MODES.index(sharding.sync),
        zero_stage=sharding.zero_stage,
        sequence_parallel=int(config.parallel.sequence_parallel),
    )
