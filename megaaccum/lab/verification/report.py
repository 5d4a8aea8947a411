"""A verdict as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaaccum.lab.verification.compare import Comparison, Row
from megaaccum.lab.verification.verdict import Verdict

_NAMES = {"fp64": "float64", "fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}
_KINDS = {
    "one process": "one process",
    "loss": "loss", "norm": "gradient norm", "gradient": "gradients", "exp_avg": "first moments",
    "exp_avg_sq": "second moments", "momentum_buffer": "momenta", "param": "change of weights",
    "router": "router biases",
}  # fmt: skip
_MOST = 12
"""Lines of what failed."""


def text(verdict: Verdict) -> str:
    """The report that `megaaccum verify` prints."""
    notes = [f"{'' if number else 'Note':<12}{note}" for number, note in enumerate(verdict.notes)]
    lines = [f"Layout      {verdict.layout}", *notes]
    for comparison in verdict.comparisons:
        lines += ["", *_table(comparison)]
    for comparison in verdict.comparisons:
        lines += _failures(comparison)
    if verdict.diagnosis is not None:
        lines += ["", *verdict.diagnosis.lines()]
    return "\n".join([*lines, "", verdict.conclusion])


def _table(comparison: Comparison) -> Iterator[str]:
    name = _NAMES[comparison.lane]
    yield f"{name:<8}    max |w_acc - w_big| {comparison.largest:.2e} over {comparison.num_weights:,} weights"
    yield f"{'':<12}{'':<20}{'error':>10}{'rounding':>12}   farthest"
    for kind, words in _KINDS.items():
        if (row := comparison.worst(kind)) is not None:
            where = row.name or (f"{row.got:.12g}, one process {row.true:.12g}" if row.got is not None else "")
            mark = "" if row.ok else "  <-- FAIL"
            yield f"{'':<12}{words:<20}{row.error:>10.1e}{row.bound:>12.1e}   {where}{mark}"


def _failures(comparison: Comparison) -> list[str]:
    failed = comparison.failed
    if not failed:
        return []
    shown = [f"  {row}" for row in failed[:_MOST]]
    more = [f"  and {len(failed) - _MOST} more"] if len(failed) > _MOST else []
    return ["", f"{_NAMES[comparison.lane]}: farther than rounding explains:", *shown, *more]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain data: everything that the text has, and all rows."""
    return {
        "verdict": "cannot be verified" if verdict.problem else "pass" if verdict.ok else "fail",
        "exit_code": verdict.exit_code,
        "problem": verdict.problem,
        "failure": verdict.failure,
        "layout": verdict.layout,
        "world_size": verdict.case.world_size,
        "keys": verdict.case.keys,
        "steps": verdict.steps,
        "notes": verdict.notes,
        "seconds": round(verdict.seconds, 2),
        "lanes": [
            {
                "lane": each.lane,
                "largest_weight_difference": each.largest,
                "num_weights": each.num_weights,
                "ok": each.ok,
                "rows": [_row(row) for row in each.rows],
            }
            for each in verdict.comparisons
        ],
        "diagnosis": None if verdict.diagnosis is None else asdict(verdict.diagnosis),
    }


def _row(row: Row) -> dict[str, Any]:
    kept = {name: each for name, each in asdict(row).items() if each not in (None, "")}
    return {
        name: str(each) if isinstance(each, float) and not math.isfinite(each) else each for name, each in kept.items()
    }


def write(verdict: Verdict, path: Path) -> None:
    """Write JSON, or with the suffix .png a picture, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        picture(verdict, path)
    else:
        path.write_text(json.dumps(as_json(verdict), indent=1, default=str) + "\n", encoding="utf-8")


def picture(verdict: Verdict, path: Path) -> None:
    """Draw the error of each parameter's gradient beside what rounding explains, in the order of the model."""
    from matplotlib.figure import Figure

    lanes = verdict.comparisons
    figure = Figure(figsize=(12, 1.5 + 3 * len(lanes)))
    axes = figure.subplots(len(lanes), 1, squeeze=False, sharex=True)
    for axis, comparison in zip(axes[:, 0], lanes, strict=True):
        rows: dict[str, Row] = {}
        for row in comparison.rows:
            if row.kind == "gradient" and (row.name not in rows or row.error > rows[row.name].error):
                rows[row.name] = row
        names = list(rows)
        for ok, colour in ((True, "tab:blue"), (False, "tab:red")):
            at = [i for i, name in enumerate(names) if rows[name].ok == ok]
            heights = [min(max(rows[names[i]].error, 1e-18), 1e6) for i in at]
            axis.plot(at, heights, "o", color=colour, markersize=3, label="within rounding" if ok else "beyond it")
        axis.step(
            range(len(names)), [max(rows[n].bound, 1e-18) for n in names], color="grey", where="mid", label="rounding"
        )
        axis.set_yscale("log")
        axis.set_ylabel(f"relative error, {_NAMES[comparison.lane]}")
        axis.legend(loc="upper right", fontsize=7)
    axes[-1, 0].set_xticks(range(len(names)), names, rotation=90, fontsize=5)
    figure.suptitle(verdict.layout, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
