"""The picture of a plan: memory bars of the first layouts, and memory against time of all that fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megaaccum.lab.planner.memory import KINDS
from megaaccum.lab.planner.search import Ranked
from megaaccum.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2f5d8a", "#6a9bc3", "#a9c7de", "#d98032", "#eab676", "#f4dcb8", "#8a8a8a", "#b8b8b8", "#dddddd")


def pareto_front(memory: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Indices of the layouts that no other beats in both memory and time, by rising memory."""
    order = np.lexsort((seconds, memory))
    best = np.minimum.accumulate(seconds[order])
    first = np.r_[True, best[1:] < best[:-1]]
    return order[first]


def draw(ranked: Ranked, path: Path, *, rows: int = 10) -> None:
    """Write the picture as PNG. Needs no display. OSError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_bars(left, ranked, min(rows, len(ranked)))
    _draw_front(right, ranked)
    figure.suptitle(f"{ranked.workload.world_size} x {ranked.workload.hardware.name}: {len(ranked):,} layouts fit")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def _draw_bars(axes: Axes, ranked: Ranked, rows: int) -> None:
    """One bar per layout, stacked by kind, against the device's memory."""
    names, base = [_label(ranked, index) for index in range(rows)], np.zeros(rows)
    places = np.arange(rows)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        size = ranked.memory.by_kind[kind][:rows] / GIB
        axes.barh(places, size, left=base, color=colour, label=kind)
        base += size
    axes.axvline(ranked.workload.hardware.hbm_bytes / GIB, color="black", linestyle="--", linewidth=1, label="HBM")
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on the most loaded rank")
    axes.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _label(ranked: Ranked, index: int) -> str:
    at = ranked.name_of(index)
    cut = f"tp{at['tp']} cp{at['cp']} pp{at['pp']}x{at['vpp']} dp{at['dp']}"
    return f"{index + 1}: {cut} mbs{at['mbs']} {at['recompute']}"


def _draw_front(axes: Axes, ranked: Ranked) -> None:
    memory, seconds = ranked.memory.total / GIB, ranked.time.total
    front = pareto_front(memory, seconds)
    axes.scatter(memory, seconds, s=5, color="#b8b8b8", label="fits")
    axes.plot(memory[front], seconds[front], color="#d98032", marker="o", markersize=3, label="Pareto front")
    axes.set_yscale("log")
    axes.set_xlabel("GiB on the most loaded rank")
    axes.set_ylabel("seconds per step")
    axes.legend(fontsize=8)
