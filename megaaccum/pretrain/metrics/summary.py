"""The summary at the end of a run."""

from __future__ import annotations

from pathlib import Path

from megaaccum.pretrain.metrics.journal import Record
from megaaccum.units import duration


def summarize(
    records: list[Record], *, outcome: str, seconds: float, goodput: str, files: dict[str, Path | str]
) -> str:
    """The summary under the heading `outcome`. records: of the journal, from which losses of all starts come; seconds:
    of this start; files: by what they are."""
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return f"{outcome}: no step was taken."
    num_skipped = sum(bool(record.get("skipped")) for record in train)
    rows = {"steps": f"{train[-1]['step']}" + (f", {num_skipped} of them skipped" if num_skipped else "")}
    rows["training loss"] = from_to(train)
    if valid := [record for record in records if record["kind"] == "valid"]:
        rows["validation loss"] = from_to(valid) + _share(valid)
    rows |= {"time": f"{duration(seconds)} in this start", "goodput": goodput}
    rows |= {name: str(path) for name, path in files.items()}
    width = max(map(len, rows))
    return "\n".join([f"{outcome}:", *(f"  {name:{width}}  {text}" for name, text in rows.items())])


def _losses(records: list[Record]) -> list[float]:
    return [record["loss"] for record in records if record.get("loss") is not None]


def from_to(records: list[Record]) -> str:
    """The first and the last finite loss of `records`."""
    losses = _losses(records)
    return f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "never a finite number"


def _share(records: list[Record]) -> str:
    losses = _losses(records)
    return f" ({losses[-1] / losses[0]:.1%} of its start)" if len(losses) > 1 and losses[0] > 0 else ""
