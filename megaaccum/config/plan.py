"""What `resolve` makes of a configuration: every key settled, the ranks laid out, the batch cut."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from megaaccum.config.batch import BatchPlan
from megaaccum.config.keys import names_where, value
from megaaccum.config.schema import Config

MONITORS = frozenset({"tensorboard", "wandb", "csv_monitor"})
"""Blocks of a DeepSpeed JSON that only say where one host writes its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks are cut: world_size = tp * cp * pp * dp. The same on every rank."""

    world_size: int
    """Ranks of the run."""
    tp: int
    """Ranks that share each matrix."""
    pp: int
    """Pipeline ranks."""
    vpp: int
    """Model chunks per pipeline rank."""
    cp: int
    """Ranks that share each sequence."""
    ep: int
    """Ranks over which experts are spread."""
    etp: int
    """Ranks that share each expert's matrices."""
    dp: int
    """Ranks that see different sequences."""
    schedule: str
    """Pipeline schedule: none, a name that megaaccum.schedule.build knows, or the path of a .csv table."""
    placement: Literal["loop", "v"] = "loop"
    """Which stages a rank's chunks are: dealt out in rounds, or (v) rank and 2 * pp - 1 - rank."""

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts: world_size / (etp * ep * pp)."""
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration settled for a number of ranks. Build one with `resolve`; it is the same on every rank."""

    config: Config
    """A copy of what was read with every key that can be derived filled in. Not to be changed any more."""
    batch: BatchPlan
    """How the optimizer step's batch is cut."""
    layout: Layout
    """How the ranks are cut."""
    notes: list[str] = field(default_factory=list)
    """What was derived or set aside in a way that a reader may want to know, one sentence each."""
    written: Config | None = None
    """What it was made of, before anything was derived: `fit.settle` makes it again with another sync mode."""

    def digest(self) -> str:
        """A hash of all that decides the numbers of this run, 16 hexadecimal digits, stable between hosts.

        Keys that may differ between hosts (`Facts.per_host`) do not enter.
        """
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, object]:
        """What the digest is made of: every key that decides numbers, the DeepSpeed block, batch and layout."""
        settled = {name: value(self.config, name) for name in names_where(lambda facts: not facts.per_host)}
        layout = {f"layout.{name}": value for name, value in dataclasses.asdict(self.layout).items()}
        theirs = {f"deepspeed.{key}": value for key, value in self.config.deepspeed.items() if key not in MONITORS}
        batch = {f"batch.{name}": value for name, value in dataclasses.asdict(self.batch).items()}
        return settled | layout | batch | theirs
