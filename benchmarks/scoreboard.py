"""The page of the planner's errors: every source, its fitted and its unseen half, and published errors beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Protocol

import numpy as np

from benchmarks.published import Row
from benchmarks.timing import in_fit_half


class Compared(Protocol):
    """One row: what was measured and what is predicted."""

    row: Row
    quantity: str
    measured: float
    predicted: float
    reason: str
    contradicts: str

    @property
    def error(self) -> float: ...


HEAD = """\
# How far the planner is off

<!-- Written by `python -m benchmarks planner_accuracy --tables DIR --page` and this path. -->

Every published measurement that the planner is compared with, by source. Constants are fitted per kind of GPU and
software, never per row or source, on a random half of each source's rows (`benchmarks/fit.py`; which half a row belongs
to follows from its name alone). The **unseen** half is the test. Error is the mean of |predicted / measured - 1|, bias
its signed mean. The terms of the model were chosen with all rows in view, their constants were not; and the unseen rows
of eight B200s differ from the fitted ones by the number of micro-batches alone. The tables are transcriptions from the
sources named in `benchmarks/published.py` and `benchmarks/cards.py`, and are not in this repository.
"""

MEMORY = """\
No term explains the rest of BigScience's rows, which are nvidia-smi's in whole GB: one model at dp 1, 2 and 4 (005,
006, 024) took 14, 17 and 11 GB beside its states, and at dp 4 a second sequence per micro-batch took 8 GB, the third to
eighth 5.5 GB each (024, 025, 027). Of Megatron-Bridge's fine-tuning rows, the one that recomputes norms too took 0.8 GB
more (001, 008), and tp 8 as much beside its states as tp 4 (001, 003). All these are fitted rows.
"""

OTHERS = (
    (
        "arXiv 2205.05198, table 5, step time",
        "korthikanti",
        "Calculon",
        "3.65 % mean, 8.87 % worst (its validation)",
    ),
    ("vTrain, one node, step time", "vtrain-single", "vTrain", "8.37 % mean, on profiled kernels (arXiv 2312.12391)"),
    ("vTrain, many nodes, step time", "vtrain-multi", "vTrain", "14.73 % mean, on profiled kernels (arXiv 2312.12391)"),
    ("eight B200, step time", "simumax time", "SimuMax", "0.46 % mean, on its own measured kernels of every shape"),
    ("eight B200, memory", "simumax memory", "SimuMax", "5.6 % mean"),
)
"""(rows, source, program, what it published on the same rows)."""

_NOT_KNOWN = "not known"
_REASONS: tuple[tuple[Callable[[Row], bool], str], ...] = (
    (
        lambda row: row.source == "narayanan2021_table2" and "ZeRO-3" in row.text("framework"),
        "DeepSpeed's ZeRO-3 of 2021; why is not known",
    ),
    (
        lambda row: "rowwi" in row.text("precision"),
        "float8 with scales per row, which the model of a cast does not have",
    ),
    (
        lambda row: row.source == "vtrain-single" and (row.text("tp"), row.text("hidden")) == ("4", "2048"),
        "not known: a layer took 2.8 ms, where one of hidden size 1024 took 3.3 ms at the same tp",
    ),
    (lambda row: row.source.startswith("mcore_h100"), "micro-batch and chunks are not published"),
    (lambda row: row.source.startswith("bigscience"), "not known"),
    (lambda row: row.text("task") in ("SFT", "fine-tuning"), "fine-tuning, whose sequences' lengths are not published"),
    (
        lambda row: "GPT OSS" in row.text("model"),
        "sliding windows and attention sinks, whose kernels the model of a layer does not have",
    ),
    (lambda row: row.text("routing") == "natural", "routing is not even, and how uneven is not published"),
)
"""Known reasons why a row is off, first match first."""


def reason(one: Compared, others: Sequence[Compared]) -> str:
    """Why a row is off, as far as its source tells."""
    if one.reason:
        return one.reason
    for holds, why in _REASONS:
        if holds(one.row):
            return why
    same = ("model", "tp", "pp", "cp", "ep", "dp", "num_gpus", "gbs", "layers", "seq_len", "quantity")
    for other in others:
        alike = all(other.row.text(key) == one.row.text(key) for key in same) and other is not one
        if alike and abs(np.log(other.measured / one.measured)) > 0.4 and _far(one) and not _far(other):
            return f"the same run took {other.measured / one.measured:.2f} of it in {_difference(one.row, other.row)}"
    return _NOT_KNOWN


def _far(one: Compared) -> bool:
    return abs(one.error) > 0.2


def _difference(row: Row, other: Row) -> str:
    changed = [key for key in ("gpu", "mbs", "precision", "vpp", "framework") if row.text(key) != other.text(key)]
    return " and ".join(f"{key} {other.text(key) or 'none'}" for key in changed) or "another row"


def page(results: dict[str, Sequence[Compared]]) -> str:
    """The whole page, in Markdown."""
    sources: dict[str, list[Compared]] = {}
    for name, rows in results.items():
        kind = "memory" if name.endswith("memory") else "time"
        for one in rows:
            sources.setdefault(f"{one.row.source} {kind}", []).append(one)
    lines = [HEAD]
    for kind, title in (("memory", "## Memory"), ("time", "## Step time")):
        lines += [title, "", "| source | fitted | error | bias | unseen | error | bias | worst row | its reason |",
                  "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        lines += [_line(name, rows) for name, rows in sorted(sources.items()) if name.endswith(kind)]
        lines += ["", MEMORY, *_contradicted(results.get("memory", ()))] if kind == "memory" else [""]
    lines += ["## Beside other programs", "", "| rows | all | unseen | published |", "| --- | --- | --- | --- |"]
    for title, source, program, told in OTHERS:
        rows = sources.get(source) or sources.get(f"{source} time")
        if rows:
            lines.append(f"| {title} | {_cells(rows)[1]} | {_cells(_unseen(rows))[1]} | {program}: {told} |")
    lines += ["", _order(sources)]
    return "\n".join(lines) + "\n"


def _unseen(rows: Sequence[Compared]) -> list[Compared]:
    return [one for one in rows if not in_fit_half(one.row)]


def _cells(rows: Sequence[Compared]) -> tuple[str, str, str]:
    if not rows:
        return "0", "", ""
    errors = np.array([one.error for one in rows])
    return str(len(rows)), f"{np.abs(errors).mean():.1%}", f"{errors.mean():+.1%}"


def _line(name: str, rows: list[Compared]) -> str:
    unseen = _unseen(rows)
    fitted = [one for one in rows if one not in unseen]
    worst = max(rows, key=lambda one: abs(one.error))
    told = f"{worst.row.name} {worst.error:+.0%} | {reason(worst, rows)}"
    return f"| {name.rsplit(' ', 1)[0]} | {' | '.join(_cells(fitted))} | {' | '.join(_cells(unseen))} | {told} |"


def _contradicted(rows: Sequence[Compared]) -> list[str]:
    """The rows that cannot both be right, and the means with and without them."""
    pairs = sorted({tuple(sorted((one.row.name, one.contradicts))) for one in rows if one.contradicts})
    if not pairs:
        return []
    named = "; ".join(" and ".join(pair) for pair in pairs)
    some = [[one for one in _unseen(rows) if not (one.contradicts and without)] for without in (False, True)]
    every, rest = (np.abs([one.error for one in each]).mean() for each in some)
    return [
        f"Rows that cannot both be right, since one took a tenth less than the other in the same layout, or less with a"
        f" larger micro-batch: {named}. The mean over dense rows that were not fitted is {every:.2%} with them and"
        f" **{rest:.2%} without** ({len(some[1])} rows).",
        "",
    ]


def _order(sources: dict[str, list[Compared]]) -> str:
    """How often the faster of two layouts of one model, batch and hardware is predicted to be the faster."""
    right = every = 0
    for name, rows in sources.items():
        if name.endswith("memory"):
            continue
        for one, other in combinations(rows, 2):
            if not _same_run(one.row, other.row) or abs(one.measured / other.measured - 1) < 0.02:
                continue
            if in_fit_half(one.row) and in_fit_half(other.row):
                continue
            every += 1
            right += (one.measured < other.measured) == (one.predicted < other.predicted)
    if not every:
        return "No two rows are layouts of one model, batch and hardware."
    return (
        f"Of {every:,} pairs of layouts of one model, batch and hardware, at least one of them unseen and more than 2 %"
        f" apart, the faster is predicted to be the faster in {right / every:.1%}."
    )


def _same_run(row: Row, other: Row) -> bool:
    same = ("model", "layers", "hidden", "gpu", "num_gpus", "gbs", "seq_len", "precision", "framework", "recompute")
    return all(row.text(key) == other.text(key) for key in same)
