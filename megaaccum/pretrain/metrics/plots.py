"""The picture of a run: training and validation loss, and the learning rate, over steps and tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaaccum.texts import open_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]

INK, TRAIN, VALID, RATE, SKIPPED = "#333333", "#2a6fbb", "#d1495b", "#6a994e", "#bc4749"
TOKEN_UNITS = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1, ""))
MOST_POINTS = 20_000
"""Steps that are drawn of a longer run, besides its ends and those that were skipped."""
DRAWN = ("kind", "step", "loss", "lr", "skipped")
"""Fields of a record that are drawn or summed up."""
SMOOTHING_SHARE = 0.03
"""Steps that one point of the smoothed loss averages, as a share of the steps shown."""


def draw(records: Iterable[Record], path: Path, *, tokens_after: Callable[[int], int], title: str) -> None:
    """Write a PNG to `path`, which is replaced as a whole. tokens_after: tokens of the run after a number of steps.

    `records` are those of a journal: `kind` "train" with `step`, `loss` (nats per token), `lr`, `skipped`, or `kind`
    "valid" with `step` and `loss`; at least one of kind "train". A loss of None is left out. Needs no display and
    leaves matplotlib's global state alone. Raises OSError where `path` cannot be written.
    """
    records = list(records)
    train = [record for record in records if record["kind"] == "train"]
    assert train, "a picture of no steps"
    aside = path.with_name(path.name + ".new")
    with quiet():
        figure = _figure(train, [record for record in records if record["kind"] == "valid"], tokens_after, title)
        with open_new(aside) as file:
            figure.savefig(file, format="png", dpi=150)
    os.replace(aside, path)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which matplotlib does not report that it builds its font cache, or puts it into a temporary folder: a
    user cannot act on either."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _figure(train: list[Record], valid: list[Record], tokens_after: Callable[[int], int], title: str) -> Figure:
    # Figure directly, not pyplot, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    draw_loss(upper, train, valid)
    _draw_rate(lower, train)
    _add_token_axis(upper, tokens_after, train[-1]["step"])
    figure.suptitle(title, color=INK)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines["right"].set_visible(False)
        axes.margins(x=0.01)
    return figure


def draw_loss(axes: Axes, train: list[Record], valid: list[Record]) -> None:
    """Training loss of each step and smoothed, validation loss, and where steps were skipped."""
    steps, losses = _points(train, "loss")
    smooth = smoothed(losses, span=max(1, round(len(losses) * SMOOTHING_SHARE)))
    axes.plot(steps, losses, color=TRAIN, alpha=0.35, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth, color=TRAIN, linewidth=1.8, label="training, smoothed")
    valid_steps, valid_losses = _points(valid, "loss")
    if valid_steps:
        axes.plot(valid_steps, valid_losses, color=VALID, marker="o", markersize=4, linewidth=1.2, label="validation")
        axes.annotate(
            f"{valid_losses[-1]:.3f}", (valid_steps[-1], valid_losses[-1]), color=VALID,
            xytext=(0, 8), textcoords="offset points", ha="right",
        )  # fmt: skip
    if skipped := [record["step"] for record in train if record.get("skipped")]:
        axes.plot(
            skipped, [0.02] * len(skipped), "x", color=SKIPPED, markersize=5, transform=axes.get_xaxis_transform(),
            label=f"skipped ({len(skipped)})",
        )  # fmt: skip
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.legend(frameon=False)


def _draw_rate(axes: Axes, train: list[Record]) -> None:
    axes.plot(*_points(train, "lr"), color=RATE, linewidth=1.5)
    axes.set_ylabel("learning rate", color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _add_token_axis(axes: Axes, tokens_after: Callable[[int], int], last_step: int) -> None:
    """Add an axis of tokens, which are not proportional to steps during batch warm-up. Beyond the ends its slope is
    that at the ends."""
    import numpy as np

    unit, name = token_unit(tokens_after(last_step))
    inside = np.unique(np.linspace(0, last_step, min(last_step, 1000) + 1).astype(int))
    tokens = np.array([tokens_after(int(step)) for step in inside]) / unit
    first, last = tokens[1] / inside[1], (tokens_after(last_step + 1) - tokens_after(last_step)) / unit
    beyond = last_step + 1
    xs = np.array([-beyond, *inside, last_step + beyond])
    ys = np.array([-beyond * first, *tokens, tokens[-1] + beyond * last])
    to_tokens, to_steps = partial(np.interp, xp=xs, fp=ys), partial(np.interp, xp=ys, fp=xs)
    top = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
    top.set_xlabel(f"tokens ({name})" if name else "tokens", color=INK)


def token_unit(tokens: float) -> tuple[float, str]:
    """The largest unit of which there is at least one, and its name: (1e6, "millions")."""
    return next((unit for unit in TOKEN_UNITS if tokens >= unit[0]), TOKEN_UNITS[-1])


def smoothed(values: list[float], *, span: int) -> list[float]:
    """The mean of `span` values around each value (one more if `span` is even), of fewer near the ends; as long as
    `values`. Unlike a running average it does not lag a falling loss."""
    half = span // 2
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def _points(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a finite value."""
    pairs = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
