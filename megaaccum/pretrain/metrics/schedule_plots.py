"""Pictures of a schedule: ranks over time, as papers draw it, and what each rank holds below it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import NAMES, Action, Schedule, passes_of
from megaaccum.schedule.exchange import Layer, Span, together
from megaaccum.schedule.simulate import Costs, Simulation, held

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": "#4f83cc", "I": "#e0a030", "W": "#5fa55a", "B": "#d9804a"}
"""Colours of chunk 0 by kind; later chunks are drawn lighter."""
EXCHANGES = {"D": "#7a3b8f", "C": "#c04f7f"}
"""Colours of dispatch and combine, in the lane below a rank."""
FORMATS = (".png", ".svg", ".pdf")
MAX_LABELS = 1500
"""Above this many actions micro-batch numbers would only blacken the picture."""


class Exchange(NamedTuple):
    """The dispatch (D) or combine (C) of a layer of a chunk in a pass; prints as `D2 of 0F3`."""

    kind: Literal["D", "C"]
    layer: int
    action: Action

    def __str__(self) -> str:
        return f"{self.kind}{self.layer} of {self.action}"


def exchanges(schedule: Schedule, simulation: Simulation, costs: Costs, rank: int) -> Iterator[tuple[Exchange, Span]]:
    """The rank's lane: every dispatch and combine of a simulated schedule, with its span. Nothing without experts."""
    if costs.layers is None:
        return
    spans = iter(simulation.spans[rank])
    for item in schedule.items[rank]:
        passes = [*passes_of([item])]
        (start, _), *_ = [next(spans) for _ in passes]
        of: list[tuple[Layer, ...]] = [(), ()]
        for each in passes:
            if each.kind != "W":
                of[each.kind != "F"] = costs.layers[schedule.stage(rank, each)]
        for kind, of_forward, layer, (first, last) in together(*of).exchanges:
            yield Exchange(kind, layer, passes[0 if of_forward else -1]), (start + first, start + last)


# --- terminal -------------------------------------------------------------------------------------------------------


def text(schedule: Schedule, simulation: Simulation, *, width: int = 120, costs: Costs | None = None) -> str:
    """A row per rank, `width` characters wide: each action as kind and micro-batch where that fits, then as its kind,
    with small letters for odd chunks and dots for waiting. costs: with exchanges of tokens, a row more for their lane,
    D and C."""
    label = max(len(f"rank {schedule.pp - 1}"), 6)
    scale = max(width - label - 1, 10) / simulation.makespan
    rows = []
    for rank in range(schedule.pp):
        rows.append(f"rank {rank}".ljust(label) + " " + _row(schedule, simulation, rank, scale))
        if costs is not None and costs.layers is not None:
            cells = ["."] * round(simulation.makespan * scale)
            for each, (start, end) in exchanges(schedule, simulation, costs, rank):
                first, stop = round(start * scale), round(end * scale)
                cells[first:stop] = each.kind * (stop - first)
            rows.append(" " * (label + 1) + "".join(cells))
    return "\n".join(rows)


def _row(schedule: Schedule, simulation: Simulation, rank: int, scale: float) -> str:
    cells = ["."] * round(simulation.makespan * scale)
    for action, (start, end) in _spans(schedule, simulation, rank):
        first, stop = round(start * scale), round(end * scale)
        cells[first:stop] = _cell(action, stop - first)
    return "".join(cells)


def _cell(action: Action, width: int) -> str:
    kind = action.kind.lower() if action.chunk % 2 else action.kind
    named = f"{kind}{action.microbatch}"
    # One free column keeps neighbours apart.
    return (named if len(named) < width else kind).ljust(width, "-" if width > 1 else kind)[:width]


def _spans(schedule: Schedule, simulation: Simulation, rank: int) -> Iterator[tuple[Action, tuple[float, float]]]:
    return zip(schedule.actions(rank), simulation.spans[rank], strict=True)


# --- picture --------------------------------------------------------------------------------------------------------


def check_format(path: Path) -> None:
    """Raise ScheduleError unless `path` ends in one of FORMATS."""
    if path.suffix not in FORMATS:
        raise ScheduleError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")


def save(drawn: Figure, path: Path) -> None:
    """Write a `figure` to `path`, as PNG, SVG or PDF by its ending. Raises ScheduleError for another ending, OSError
    where the file cannot be written."""
    check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    drawn.savefig(aside, format=path.suffix[1:], dpi=150)
    os.replace(aside, path)


def figure(
    schedule: Schedule,
    simulation: Simulation,
    *,
    beside: Sequence[tuple[Schedule, Simulation]] = (),
    bound: float | None = None,
    costs: Costs | None = None,
) -> Figure:
    """The timeline, and below it what each rank holds over time. Needs no display. beside: further timelines on the
    same axis, below the first. bound: a time that no order can end before, drawn as a line through all. costs: those of
    all timelines; with exchanges of tokens, whose lane is drawn below each rank."""
    from matplotlib.figure import Figure

    shown = [(schedule, simulation), *beside]
    heights = [0.42 * min(each.pp, 32) + 0.6 for each, _ in shown] + [2.2]
    drawn = Figure(figsize=(14, sum(heights) + 1.2), layout="constrained")
    axes = drawn.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for lanes, (each, its) in zip(axes, shown, strict=False):
        _draw_lanes(lanes, each, its, costs)
        if beside:
            lanes.set_title(f"{each.name}: {its.makespan:g}", loc="left", fontsize=9)
        if bound is not None:
            lanes.axvline(bound, color="black", linestyle="--", linewidth=1.2)
            lanes.annotate(f"bound {bound:g}", (bound, 1.0), xycoords=("data", "axes fraction"), fontsize=8, ha="right")
    _draw_memory(axes[-1], schedule, simulation)
    drawn.suptitle(
        f"{schedule.name}: pp {schedule.pp}, {schedule.num_microbatches} micro-batches,"
        f" makespan {simulation.makespan:g}, {1 - simulation.utilisation:.1%} idle"
    )
    return drawn


def _draw_lanes(axes: Axes, schedule: Schedule, simulation: Simulation, costs: Costs | None) -> None:
    from matplotlib.patches import Patch

    labelled = sum(map(len, simulation.spans)) <= MAX_LABELS
    fused = {id(each) for rank in schedule.items for item in rank if len(item) == 2 for each in item}
    for rank in range(schedule.pp):
        for action, (start, end) in _spans(schedule, simulation, rank):
            axes.barh(
                rank, end - start, left=start, height=0.86, color=COLOURS[action.kind],
                alpha=1.0 if action.chunk % 2 == 0 else 0.55, linewidth=0.9 if id(action) in fused else 0.3,
                edgecolor="black" if id(action) in fused else "white",
            )  # fmt: skip
            if labelled:
                axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
        for each, (start, end) in () if costs is None else exchanges(schedule, simulation, costs, rank):
            axes.barh(rank + 0.36, end - start, left=start, height=0.14, color=EXCHANGES[each.kind])
    axes.set_yticks(range(schedule.pp), [f"rank {rank}" for rank in range(schedule.pp)])
    axes.invert_yaxis()
    kinds = sorted({action.kind for rank in range(schedule.pp) for action in schedule.actions(rank)}, key="FIWB".index)
    lane = {} if costs is None or costs.layers is None else {"dispatch": "D", "combine": "C"}
    axes.legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
        + [Patch(color=EXCHANGES[kind], label=name) for name, kind in lane.items()],
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8,
    )  # fmt: skip
    axes.margins(x=0)


def _draw_memory(axes: Axes, schedule: Schedule, simulation: Simulation) -> None:
    for rank in range(schedule.pp):
        curve = held(schedule, simulation, rank)
        axes.step([time for time, _ in curve], [amount for _, amount in curve], where="post", label=f"rank {rank}")
    axes.set_ylabel("held passes")
    axes.set_xlabel("time")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if schedule.pp <= 8:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
