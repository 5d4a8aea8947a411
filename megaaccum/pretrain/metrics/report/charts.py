"""The report's pictures, as SVG elements."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING

from megaaccum.errors import MegaaccumError
from megaaccum.pretrain.metrics import plots, schedule_plots
from megaaccum.pretrain.metrics.goodput import CAUSES
from megaaccum.pretrain.metrics.journal import Record
from megaaccum.pretrain.metrics.report.run import Run
from megaaccum.pretrain.metrics.step_record import BETWEEN_STEPS, OF_A_STEP
from megaaccum.schedule import Costs, build, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#2a6fbb", "#e0a030", "#6a994e", "#d1495b", "#7d5ba6", "#4fa8a0", "#b8703a", "#8a8a8a", "#c9b458", "#5b6c8f",
    "#d98fb0", "#3d3d3d",
)  # fmt: skip
POINTS = 400
"""Maximum points of a curve; longer runs are averaged over bins of steps."""
MAX_ACTIONS = 1200
"""Maximum actions of a timeline; a longer schedule is drawn with fewer micro-batches."""
MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "p2p", "host")
"""The kinds of memory that are shown; other kinds are parts of these."""
WIDTH, HEIGHT = 7.2, 2.9
"""Inches."""


def svg(
    draw: Callable[[Axes], None], name: str, *, y: str | None = None, x: str = "step", height: float = HEIGHT
) -> str:
    """A picture of one pair of axes, labelled `x` and `y` (None: as `draw` leaves it). name: `inline`'s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    draw(axes)
    axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)
    return inline(figure, name)


def inline(figure: Figure, name: str) -> str:
    """The SVG element of a figure, without a file's head. name: unique on the page, so that pictures do not share ids
    of marks."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}), plots.quiet():
        figure.savefig(file, format="svg")
    text = file.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


# --- curves ----------------------------------------------------------------------------------------------------------


def loss(run: Run, name: str) -> str:
    """Training and validation loss over steps."""
    return svg(lambda axes: plots.draw_loss(axes, run.train, run.valid), name, height=3.4)


def grad_norm(run: Run, name: str) -> str:
    """Gradient norm before clipping; skipped steps are marked."""

    def draw(axes: Axes) -> None:
        steps, values = binned(run.train, "grad_norm")
        axes.plot(steps, values, color=COLOURS[0], linewidth=1.2)
        if skipped := [each["step"] for each in run.train if each.get("skipped")]:
            axes.plot(skipped, [0.02] * len(skipped), "x", color=COLOURS[3], transform=axes.get_xaxis_transform())
        if values and min(values) > 0:
            axes.set_yscale("log")

    return svg(draw, name, y="grad norm")


def seconds(run: Run, name: str) -> str:
    """Seconds of a step by phase, stacked."""
    return _stacked(run, name, "seconds", [f"seconds_{phase}" for phase in OF_A_STEP + BETWEEN_STEPS], 1.0)


def memory(run: Run, name: str) -> str:
    """Maximum memory of rank 0 by kind. Not stacked, because the maxima are at different moments."""

    def draw(axes: Axes) -> None:
        for kind, colour in zip(MEMORY, COLOURS, strict=False):
            steps, values = binned(run.train, f"memory_{kind}_bytes", 2.0**20)
            if any(values):
                axes.plot(steps, values, color=colour, label=kind, linewidth=1.6)
                axes.set_yscale("log")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)

    return svg(draw, name, y="MiB on rank 0")


def traffic(run: Run, name: str) -> str:
    """Bytes of a step by collective and group."""
    names = sorted({key for each in run.train for key in each if key.startswith("bytes_")})
    return _stacked(run, name, "MiB a step, rank 0", names, 2.0**20)


def _stacked(run: Run, name: str, label: str, names: Sequence[str], unit: float) -> str:
    def draw(axes: Axes) -> None:
        steps, _ = binned(run.train, "step")
        rows = {
            key.partition("_")[2].replace("_", " "): (values, colour)
            for key, colour in zip(names, cycle(COLOURS), strict=False)
            if any(values := binned(run.train, key, unit)[1])
        }
        if rows:
            heights, colours = zip(*rows.values(), strict=True)
            axes.stackplot(steps, heights, labels=list(rows), colors=colours, step="mid" if len(steps) > 1 else None)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, reverse=True)
        axes.margins(x=0)

    return svg(draw, name, y=label)


def binned(records: Sequence[Record], key: str, unit: float = 1.0) -> tuple[list[float], list[float]]:
    """Steps, and the values of `key` in `unit`; beyond POINTS steps each is the mean of a bin. Values that are not
    finite are left out; a step without the key counts as 0."""
    found = [each for each in records if each.get(key, 0.0) is not None]
    steps, values = [each["step"] for each in found], [each.get(key, 0.0) / unit for each in found]
    size = max(1, -(-len(found) // POINTS))
    bins = [slice(at, at + size) for at in range(0, len(found), size)]
    return [fmean(steps[each]) for each in bins], [fmean(values[each]) for each in bins]


# --- others ----------------------------------------------------------------------------------------------------------


def goodput(run: Run, name: str) -> str:
    """One bar of the seconds of the run, by cause."""

    def draw(axes: Axes) -> None:
        left = 0.0
        for cause, colour in zip(CAUSES, COLOURS, strict=False):
            share = 100 * run.goodput.seconds[cause] / max(run.goodput.total, 1e-9)
            if share > 0:
                axes.barh(0, share, left=left, color=colour, label=f"{cause.replace('_', '-')} {share:.1f} %")
                left += share
        axes.set_yticks([])
        axes.set_xlim(0, 100)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.1), frameon=False, fontsize=8)

    return svg(draw, name, x="% of the wall time", height=1.9)


def timeline(run: Run, name: str) -> tuple[str, str]:
    """(the pipeline's schedule over time, with equal stages and F = I = W; a note on it). The picture is empty without
    a pipeline, or if the schedule's file is missing."""
    plan = run.last.get("plan") or {}
    at, batch = plan.get("layout") or {}, plan.get("batch") or {}
    if at.get("pp", 1) == 1:
        return "", "No pipeline: one stage."
    pp, chunks = at["pp"], at["vpp"]
    count = batch["num_microbatches"]
    if batch["flush"] != "merged":
        count //= batch["grad_accum_steps"]
    shown = min(count, max(2 * pp, MAX_ACTIONS // (3 * pp * chunks) // pp * pp))
    group = run.last["configuration"]["parallel"]["microbatch_group_size_per_vp_stage"]["value"]
    try:
        schedule = build(at["schedule"], pp=pp, num_microbatches=shown, chunks=chunks, group_size=group, short=True)
    except (MegaaccumError, OSError) as error:
        return "", f"The schedule {at['schedule']} cannot be drawn: {error}"
    simulation = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1))
    drawn = inline(schedule_plots.figure(schedule, simulation), name)
    few = f", drawn for {shown} of the {count} micro-batches of a flush" if shown < count else ""
    return drawn, f"{at['schedule']} with equal stages and F = I = W{few}."
