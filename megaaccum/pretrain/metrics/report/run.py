"""A run, read from its folder: receipts, journal, and what follows from them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaaccum.pretrain.metrics import journal, receipts
from megaaccum.pretrain.metrics.goodput import Goodput
from megaaccum.pretrain.metrics.journal import Record

MEASURED_AS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "loss", "workspace"),
}
"""The planner's kinds of memory in each measured kind."""


MEDIANS = {
    "seconds_per_step": ("seconds per step", "{:,.4g}"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "tflops_per_second_per_rank": ("TFLOP/s per rank", "{:,.4g}"),
    "mfu": ("MFU", "{:.1%}"),
    "expert_imbalance": ("tokens of the fullest expert over the mean", "{:.2f}"),
    "expert_rank_imbalance": ("tokens of the fullest expert rank over the mean", "{:.2f}"),
    "expert_dropped_share": ("dropped tokens", "{:.1%}"),
}
"""Name and format of each number of a step whose median is shown."""
MOST_SHOWN = 4000
"""Steps of a long run that are drawn, besides its ends and those that were skipped."""


@dataclass(frozen=True)
class Run:
    """A run. folder: its output_dir. starts: its receipts, in order, at least one. train: the steps that it kept and
    that are drawn; valid: the evaluations that it kept. numbers: of all kept steps but the first of each start, which
    sets up. goodput: over all starts."""

    folder: Path
    starts: list[Record]
    train: list[Record]
    valid: list[Record]
    numbers: dict[str, array[float]]
    goodput: Goodput

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the run in `folder`. Raises MegaaccumError if there are no receipts, one is of a later version, or the
        journal is damaged."""
        starts, path = receipts.read_all(folder), folder / "log.jsonl"
        last = starts[-1]["first_step"] + starts[-1]["measured"].get("num_steps", 0)
        train: list[Record] = []
        valid: list[Record] = []
        numbers = {name: array("d") for name in MEDIANS}

        def collected() -> Iterator[Record]:
            sets_up = set()
            for record, is_kept in journal.kept(path) if path.exists() else ():
                if record["kind"] == "start":
                    sets_up.add(record["step"] + 1)
                elif is_kept and record["kind"] == "valid":
                    valid.append(record)
                elif is_kept and record["kind"] == "train":
                    if len(train) > 1 and train[-1]["step"] % (1 + last // MOST_SHOWN) and not train[-1].get("skipped"):
                        train.pop()
                    train.append(record)
                    for name, each in numbers.items():
                        if record["step"] not in sets_up and record.get(name) is not None:
                            each.append(record[name])
                yield record

        return cls(folder, starts, train, valid, numbers, Goodput(collected()))

    @property
    def last(self) -> Record:
        """The receipt of the last start."""
        return self.starts[-1]

    @property
    def keys(self) -> dict[str, Record]:
        """The keys of the configuration of the last start, each with its value and where it is from."""
        sections = self.last.get("configuration", {})
        return {f"{section}.{key}": each for section, keys in sections.items() for key, each in keys.items()}

    @property
    def events(self) -> list[Record]:
        """The events of all receipts, each with the number of its start."""
        return [{"start": each["number"], **event} for each in self.starts for event in each["events"]]

    def against_plan(self) -> Iterator[tuple[str, float | None, float | None]]:
        """Yields (name with its unit, planned, measured) of rank 0, of the last start."""
        planned, measured = self.last.get("predicted") or {}, self.last["measured"]
        yield "seconds per step", planned.get("seconds_per_step"), measured.get("seconds_per_step")
        if not (stages := planned.get("stages")):
            return
        here, held = stages[0], measured["memory"]
        between = sum(measured["bytes"].get(f"{name}_dp_cp") or 0 for name in _BETWEEN_RANKS)
        yield "bytes from data-parallel ranks, a step", here["gathered"] + here["reduced"], between or None
        for kind, parts in MEASURED_AS.items():
            yield f"bytes of {kind}", sum(here["memory"][part] for part in parts), held.get(kind)

    def facts(self) -> dict[str, Any]:
        """Everything that may differ between two runs, by name: keys, layout, code, machines, environment."""
        found = {name: each["value"] for name, each in self.keys.items()}
        for part in ("megatron", "deepspeed", "data", "versions", "environment"):
            found |= {f"{part}: {name}": each for name, each in (self.last.get(part) or {}).items()}
        found |= {f"layout: {name}": each for name, each in self.last.get("plan", {}).get("layout", {}).items()}
        found |= {f"code: {name}": each for name, each in (self.last.get("code") or {}).items()}
        ranks = self.last.get("ranks") or []
        return found | {"devices": sorted({str(each["device"]) for each in ranks}), "num ranks": len(ranks)}


_BETWEEN_RANKS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Collectives of data-parallel ranks; all_to_all is used if sums are made in one order."""
PASSING = ("environment: MEGAACCUM_LAUNCHED", "environment: MASTER_PORT")
"""Facts that differ between any two starts."""


def differing(left: Run, right: Run) -> list[tuple[str, Any, Any]]:
    """(name, value of the left run, value of the right) of each fact that differs; None if a run does not have it."""
    first, second = left.facts(), right.facts()
    names = [name for name in dict.fromkeys([*first, *second]) if name not in PASSING]
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
