"""Fits the constants of one kind of GPU to half of the published rows that ran on it.

    python -m benchmarks.fit a100_80 a100_40 --tables DIR
    python -m benchmarks.fit a100_80 --memory --tables DIR

The first prints the `efficiency` of an entry of megaaccum/lab/planner/hardware.yaml, the second its `runtime_gib` and
`fragmentation`: of a grid, those with the smallest mean error on published peaks, where a peak that is predicted more
than a tenth too low counts once more. Step times: Levenberg-Marquardt on the logarithm of
predicted over measured seconds, reweighted so that outliers count by their distance and not its square; every
constant is pulled towards its default, so that what the rows do not tell stays there. Errors are printed of the half
that was fitted. The other half is the test, which is none any more if terms are chosen by it: --unseen prints it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from benchmarks import frameworks
from benchmarks.planner_accuracy import rows_of
from benchmarks.published import Row, read
from benchmarks.timing import Predictor, cases_of, in_fit_half
from megaaccum.lab.planner.compute import Efficiency
from megaaccum.lab.planner.hardware import Hardware, load_hardware
from megaaccum.lab.planner.memory import Usage
from megaaccum.units import GIB

CONSTANTS = [field.name for field in fields(Efficiency)]
PULL = 0.5
"""Standard deviations of a constant's logarithm that count as one of a row's error of EXPECTED."""
EXPECTED = 0.08
"""Typical relative error of a row."""
CEILINGS = {
    "gemm": 0.95,
    "gemm_fp8": 0.95,
    "gemm_fp4": 0.95,
    "attention": 0.9,
    "scores": 0.9,
    "memory": 0.95,
    "network": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", nargs="+", help="entries that share their constants")
    parser.add_argument(
        "--tables", type=Path, required=True, help="folder of measured_training.csv, measured_vtrain.csv"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--fixed", nargs="*", default=[], help="constants that stay as they are")
    parser.add_argument("--memory", action="store_true", help="fit what a device keeps beside tensors")
    parser.add_argument("--unseen", action="store_true", help="also print the errors of the half that is not fitted")
    args = parser.parse_args()
    if args.memory:
        fit_memory(read(args.tables / "measured_memory.csv"), args.hardware, unseen=args.unseen)
        return
    rows = [row for name, table in rows_of(args.tables).items() if not name.endswith("memory") for row in table]
    cases = [case for case in cases_of(rows)[0] if case.hardware in args.hardware]
    half = [case for case in cases if in_fit_half(case.row)]
    free = [name for name in CONSTANTS if name not in args.fixed]
    constants = fit(Predictor(half), args.hardware[0], free, args.rounds)
    print(", ".join(f"{name}: {value:.4g}" for name, value in constants.items()))
    report(Predictor(cases if args.unseen else half), constants)


def fit(predictor: Predictor, name: str, free: list[str], rounds: int) -> dict[str, float]:
    """The constants of the entry `name` that fit `predictor`'s rows."""
    base = load_hardware(name).device.efficiency
    start = {key: max(getattr(base, key), 1e-4) for key in CONSTANTS}
    measured = np.array([case.seconds for case in predictor.cases])
    counts = Counter(case.row.source for case in predictor.cases)
    share = np.array([counts[case.row.source] ** -0.25 for case in predictor.cases])

    def constants(x: np.ndarray) -> dict[str, float]:
        found = start | {key: start[key] * float(np.exp(value)) for key, value in zip(free, x, strict=True)}
        return {key: min(value, CEILINGS.get(key, np.inf)) for key, value in found.items()}

    def errors(x: np.ndarray) -> np.ndarray:
        at = constants(x)
        return np.log(predictor.seconds(lambda one: with_constants(load_hardware(one), at)) / measured)

    def residuals(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.r_[errors(x) * weights, x / PULL * EXPECTED]

    x, damping = np.zeros(len(free)), 1e-2
    for _ in range(rounds):
        now = errors(x)
        weights = share / np.sqrt(np.maximum(np.abs(now) / EXPECTED, 1.0))
        at = residuals(x, weights)
        slope = np.stack([(residuals(x + step, weights) - at) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        for _ in range(8):
            move = np.linalg.solve(slope.T @ slope + damping * np.eye(len(x)), -slope.T @ at)
            moved = residuals(x + move, weights)
            if moved @ moved < at @ at:
                x, damping = x + move, damping / 3
                break
            damping *= 4
    return constants(x)


def fit_memory(rows: list[Row], names: list[str], *, unseen: bool) -> None:
    """Print runtime and fragmentation that fit the fitting half of `rows` on this hardware best, and its error; with
    `unseen` the other half's too."""
    usable = [row for row in rows if row.text("mem_value") and frameworks.hardware_name(row) in names]
    halves = [[row for row in usable if in_fit_half(row)]]
    halves += [[row for row in usable if not in_fit_half(row)]] if unseen else []
    grid = [(gib / 4, share / 100) for gib in range(8, 25) for share in range(13)]
    runtime, share = min(grid, key=lambda one: _cost(memory_errors(halves[0], *one)))
    errors = [f"{np.median(np.abs(memory_errors(half, runtime, share))):.1%}" for half in halves if half]
    print(f"runtime_gib: {runtime}, fragmentation: {share} (median error by half, fitted first: {', '.join(errors)})")


def _cost(errors: np.ndarray) -> float:
    return float(np.abs(errors).mean() + (errors < -0.1).mean())


def memory_errors(rows: list[Row], runtime_gib: float, fragmentation: float) -> np.ndarray:
    """Relative errors of predicted peaks."""
    usage = Usage(runtime_bytes=runtime_gib * GIB, fragmentation=fragmentation)
    models = [frameworks.memory_model(row, usage) for row in rows]
    predicted = np.array([model.peak(layout).total[0] for model, layout in models])
    return predicted / np.array([frameworks.measured_bytes(row) for row in rows]) - 1


def with_constants(hardware: Hardware, constants: dict[str, float]) -> Hardware:
    """`hardware` with these constants, its network's share of the datasheet's bandwidth among them."""
    before = hardware.device.efficiency.network
    efficiency = Efficiency(**constants)
    links = replace(hardware.links, net_bandwidth=hardware.links.net_bandwidth / before * efficiency.network)
    return replace(hardware, device=replace(hardware.device, efficiency=efficiency), links=links)


def report(predictor: Predictor, constants: dict[str, float]) -> None:
    """Errors per source of `predictor`'s rows, by whether they were fitted."""
    predicted = predictor.seconds(lambda one: with_constants(load_hardware(one), constants))
    error = predicted / np.array([case.seconds for case in predictor.cases]) - 1
    source = np.array([case.row.source for case in predictor.cases])
    fitted = np.array([in_fit_half(case.row) for case in predictor.cases])
    for name in sorted(set(source)):
        for label, half in (("fitted", fitted), ("other", ~fitted)):
            here = error[(source == name) & half]
            if len(here):
                typical, mean = np.median(np.abs(here)), np.abs(here).mean()
                told = f"median {typical:.1%}  MAPE {mean:.1%}  bias {here.mean():+.1%}"
                print(f"{name:28} {label:6} {len(here):4} rows  {told}")


if __name__ == "__main__":
    main()
