"""How far the planner's predictions are from published measurements.

    python benchmarks/planner_accuracy.py --tables DIR [--json F] [--csv F]

DIR holds measured_memory.csv, measured_vtrain.csv and measured_training.csv, or some of them (benchmarks/published.py
names the columns). Nothing is fitted here: constants come from megaaccum/lab/planner/hardware.yaml, which
benchmarks/fit.py made from half of the rows; the other half, and whatever DIR holds that the fit has not seen, is the
test. Per source: rows used, rows left out and why, median, mean (MAPE), 90th percentile and worst absolute error, and
the signed bias.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the file runs without being installed

from benchmarks import frameworks, scoreboard
from benchmarks.cards import korthikanti, read_cards, read_simumax
from benchmarks.published import LeftOut, Row, read
from benchmarks.timing import Predictor, cases_of, in_fit_half
from megaaccum.lab.planner.hardware import load_hardware

TABLES: dict[str, tuple[str, Callable[[Path], list[Row]]]] = {
    "memory": ("measured_memory.csv", read),
    "vtrain": ("measured_vtrain.csv", read),
    "training": ("measured_training.csv", read),
    "cards": ("cards.csv", read_cards),
    "simumax": ("simumax_b200.csv", read_simumax),
    "simumax memory": ("simumax_b200.csv", read_simumax),
}
SPREAD = 0.14
"""By how much the readings of BigScience's rows 093 and 094, which are the same run, differ: 44 and 38 GB."""
UNDER = -0.10
"""A memory prediction that is lower than this, relative to the measurement, needs a reason."""


@dataclass(frozen=True)
class Compared:
    """One row: what was measured and what is predicted, in bytes or seconds."""

    row: Row
    quantity: str
    measured: float
    predicted: float
    reason: str = ""
    contradicts: str = ""
    """The name of a row of the same source that both cannot be right with."""

    @property
    def error(self) -> float:
        """Relative: above 0 is predicted too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Result:
    """One table: the rows that were compared and those that were left out."""

    compared: list[Compared]
    left_out: list[tuple[Row, str]]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    tables = rows_of(args.tables)
    if not tables:
        files = ", ".join(dict.fromkeys(file for file, _ in TABLES.values()))
        print(f"{args.tables} holds none of {files}: give --tables DIR.", file=sys.stderr)
        return 2
    results = {name: compare(name, rows) for name, rows in tables.items()}
    for name, result in results.items():
        print_table(name, result)
    summary = summarise(results)
    print("measured / predicted peaks, not fitted, every 5 %: " + ", ".join(f"{q:.3f}" for q in quantiles(results)))
    print("\n".join(f"{line['name']:<46}{line['value']:>8.2%}   asked: {line['asked']:.1%}" for line in summary))
    if args.page:
        args.page.write_text(scoreboard.page({name: result.compared for name, result in results.items()}), "utf-8")
    if args.json:
        args.json.write_text(json.dumps(as_json(results, summary), indent=2), encoding="utf-8")
    if args.csv:
        write_csv(args.csv, results)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("tables"), help="folder of the tables (default: tables)")
    parser.add_argument("--json", type=Path, help="write the statistics here")
    parser.add_argument("--page", type=Path, help="write the page of all sources here (docs/benchmarks/planner.md)")
    parser.add_argument("--csv", type=Path, help="write every row with its prediction here")
    return parser.parse_args(argv)


def rows_of(folder: Path) -> dict[str, list[Row]]:
    """The rows of every table that the folder holds; with those, the published ones that are kept in this package."""
    found = {name: reader(folder / file) for name, (file, reader) in TABLES.items() if (folder / file).is_file()}
    return found | {"korthikanti": korthikanti()} if found else {}


def compare(name: str, rows: list[Row]) -> Result:
    """Predict every row of one table that can be."""
    return compare_memory(rows) if name.endswith("memory") else compare_time(rows)


def compare_time(rows: list[Row]) -> Result:
    cases, left = cases_of(rows)
    if not cases:
        return Result([], left)
    predicted = Predictor(cases).seconds(load_hardware)
    return Result(
        [Compared(c.row, "seconds", c.seconds, float(p)) for c, p in zip(cases, predicted, strict=True)], left
    )  # fmt: skip


def compare_memory(rows: list[Row]) -> Result:
    compared, left = [], []
    for row in rows:
        try:
            measured = frameworks.measured_bytes(row)
            hardware = load_hardware(frameworks.hardware_name(row))
            model, layout = frameworks.memory_model(row, hardware.usage)
            predicted = float(model.peak(layout).total[0])
        except LeftOut as reason:
            left.append((row, str(reason)))
        else:
            error = predicted / measured - 1
            reason = why_low(row, rows, error) if error < UNDER else ""
            compared.append(Compared(row, "bytes", measured, predicted, reason, contradicted_by(row, rows)))
    return Result(compared, left)


def why_low(row: Row, rows: list[Row], error: float) -> str:
    """Why a row takes more memory than is predicted, as far as that is known."""
    if "nvidia-smi" in row.text("mem_kind") and error >= -SPREAD:
        return "within what two readings by nvidia-smi of one layout differ (rows 093 and 094 of BigScience's)"
    if any(_is_larger_and_takes_less(other, row) for other in rows):
        return "the same run with a larger micro-batch was measured to take less"
    if row.text("framework").startswith("torchtitan") and row.whole("tp", 1) > 1:
        return "DTensor's tensor parallelism keeps gathered inputs, and float8 copies of them, that Megatron's does not"
    if row.text("task") == "SFT":
        return "fine-tuning on packed sequences, whose lengths are not published"
    return ""


def contradicted_by(row: Row, rows: list[Row]) -> str:
    """The name of another row that ran the same and took another tenth of its bytes at least, or ran the same with a
    larger micro-batch and took less, or the reverse; empty where there is none."""
    for other in (each for each in rows if _same_run(each, row)):
        (size, taken), (larger, its) = sorted((e.number("mbs", 0), e.number("mem_value", 0)) for e in (other, row))
        if min(taken, its) > 0 and (taken < 0.9 * its if size == larger else its < taken):
            return other.name
    return ""


def _is_larger_and_takes_less(other: Row, row: Row) -> bool:
    larger = _same_run(other, row) and other.number("mbs", 0) > row.number("mbs", 0)
    return larger and 0 < other.number("mem_value", 0) < row.number("mem_value", 0)


def _same_run(other: Row, row: Row) -> bool:
    """But for the micro-batch."""
    keys = ("source_set", "layers", "hidden", "heads", "seq_len", "gpu", "tp", "pp", "vpp", "dp", "dp_sharding", "gbs")
    return all(other.text(k) == row.text(k) for k in (*keys, "recompute", "schedule", "framework"))


# --- statistics ------------------------------------------------------------------------------------------------------


def statistics(errors: np.ndarray) -> dict[str, float]:
    """Statistics of relative errors: count; median, mean, 90th percentile and maximum of absolute values; mean."""
    size = np.abs(errors)
    return {
        "rows": len(errors),
        "median": float(np.median(size)),
        "mape": float(size.mean()),
        "p90": float(np.quantile(size, 0.9)),
        "worst": float(errors[np.argmax(size)]),
        "bias": float(errors.mean()),
    }


def groups(compared: list[Compared]) -> dict[str, list[Compared]]:
    """By source, then those of the half that no fit may see, then all."""
    out: dict[str, list[Compared]] = {}
    for one in sorted(compared, key=lambda c: c.row.source):
        out.setdefault(one.row.source, []).append(one)
    out["(not in the fitted half)"] = [c for c in compared if not in_fit_half(c.row)]
    out["(all)"] = compared
    return {name: rows for name, rows in out.items() if rows}


def print_table(name: str, result: Result) -> None:
    print(f"\n{name}")
    print(f"{'source':<28}{'rows':>6}{'left out':>10}{'median':>9}{'MAPE':>9}{'p90':>9}{'worst':>9}{'bias':>9}")
    left = Counter(row.source for row, _ in result.left_out)
    for group, rows in groups(result.compared).items():
        s = statistics(np.array([c.error for c in rows]))
        missing = left.get(group, len(result.left_out) if group == "(all)" else 0)
        print(
            f"{group:<28}{s['rows']:>6}{missing:>10}{s['median']:>9.1%}{s['mape']:>9.1%}{s['p90']:>9.1%}"
            f"{s['worst']:>+9.0%}{s['bias']:>+9.1%}"
        )
    for (source, why), count in sorted(Counter((row.source, why) for row, why in result.left_out).items()):
        print(f"  left out: {count} of {source}: {why}")
    for one in result.compared:
        if one.quantity == "bytes" and one.error < UNDER:
            print(f"  {one.row.name} is predicted {one.error:+.0%}: {one.reason or 'NO REASON KNOWN'}")


def summarise(results: dict[str, Result]) -> list[dict[str, Any]]:
    """The promises: each with its value, over all rows and over the half that no fit may see."""
    lines = []

    def add(name: str, rows: list[Compared], key: str, asked: float) -> None:
        for label, some in (("all rows", rows), ("not fitted", [c for c in rows if not in_fit_half(c.row)])):
            if some:
                value = statistics(np.array([c.error for c in some]))[key]
                lines.append({"name": f"{name}, {label}", "value": value, "asked": asked})

    if "memory" in results:
        rows = results["memory"].compared
        add("memory, median", rows, "median", 0.02)
        add("memory, mean", rows, "mape", 0.03)
        add("memory, mean, rows that none contradicts", [c for c in rows if not c.contradicts], "mape", 0.03)
        low = [c for c in rows if c.error < UNDER and not c.reason]
        lines.append({"name": "memory, low without a reason", "value": len(low) / max(1, len(rows)), "asked": 0.0})
    if "vtrain" in results:
        rows = results["vtrain"].compared
        add("step time, one node, mean", [c for c in rows if c.row.whole("num_gpus") <= 8], "mape", 0.05)
        add("step time, many nodes, mean", [c for c in rows if c.row.whole("num_gpus") > 8], "mape", 0.08)
    if "training" in results:
        rows = results["training"].compared
        add("published training, median", rows, "median", 0.06)
        add("experts, mean", [c for c in rows if c.row.number("ep", 1) > 1], "mape", 0.15)
    for name, asked in (("cards", 0.10), ("simumax", 0.06), ("simumax memory", 0.015), ("korthikanti", 0.0365)):
        if name in results:
            add(f"{name}, mean", results[name].compared, "mape", asked)
    return lines


def quantiles(results: dict[str, Result]) -> np.ndarray:
    """Measured over predicted memory of rows that no constant is fitted to: `search.MEASURED`."""
    rows = [c for name, result in results.items() if name.endswith("memory") for c in result.compared]
    ratios = [c.measured / c.predicted for c in rows if not in_fit_half(c.row)]
    return np.quantile(ratios or [1.0], np.linspace(0, 1, 21))


def as_json(results: dict[str, Result], summary: list[dict[str, Any]]) -> dict[str, Any]:
    tables = {
        name: {
            "groups": {g: statistics(np.array([c.error for c in rows])) for g, rows in groups(result.compared).items()},
            "left_out": [{"row_id": row.name, "reason": why} for row, why in result.left_out],
            "low": [
                {"row_id": c.row.name, "error": c.error, "reason": c.reason}
                for c in result.compared
                if c.quantity == "bytes" and c.error < UNDER
            ],
        }
        for name, result in results.items()
    }
    return {"tables": tables, "summary": summary}


def write_csv(path: Path, results: dict[str, Result]) -> None:
    """Every row with its table, its prediction in bytes or seconds, its error, and why it was left out."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["table", "row_id", "source", "quantity", "measured", "predicted", "error", "fit_half", "reason"])
        for name, result in results.items():
            for c in result.compared:
                half = "yes" if in_fit_half(c.row) else "no"
                out.writerow(
                    [
                        name,
                        c.row.name,
                        c.row.source,
                        c.quantity,
                        c.measured,
                        c.predicted,
                        f"{c.error:.4f}",
                        half,
                        c.reason,
                    ]
                )
            for row, why in result.left_out:
                out.writerow([name, row.name, row.source, "", "", "", "", "", f"left out: {why}"])


if __name__ == "__main__":
    sys.exit(main())
