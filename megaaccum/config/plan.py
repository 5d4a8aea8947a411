"""What `resolve` makes of a configuration: every key settled, the ranks laid out, the batch cut."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from megaaccum.config.batch import BatchPlan
from megaaccum.config.keys import SECTIONS
from megaaccum.config.schema import Config

RANK_LOCAL = frozenset(
    {
        "output_dir", "save", "load", "tensorboard_dir", "csv_dir", "wandb_project", "data_cache_path",
        "data_path", "train_data_path", "valid_data_path", "test_data_path", "tokenizer_model", "vocab_file",
        "merge_file",
        "num_threads", "nproc_per_node", "schedule_trace", "num_workers", "mmap_bin_files",
    }
)  # fmt: skip
"""Keys that may differ between hosts without changing what is computed: paths, and how a host does its part."""


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

        Paths and keys that only concern one host (`RANK_LOCAL`) do not enter.
        """
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, object]:
        """What the digest is made of: every key that decides numbers, the DeepSpeed block, batch and layout."""
        settled = {
            key: value
            for section in SECTIONS
            for key, value in dataclasses.asdict(getattr(self.config, section)).items()
            if key not in RANK_LOCAL
        }
        layout = {f"layout.{name}": value for name, value in dataclasses.asdict(self.layout).items()}
        settled |= {f"model.{key}": value for key, value in self.config.megatron.items()}
        theirs = {f"deepspeed.{key}": value for key, value in self.config.deepspeed.items() if key not in MONITORS}
        batch = {f"batch.{name}": value for name, value in dataclasses.asdict(self.batch).items()}
        return settled | layout | batch | theirs
