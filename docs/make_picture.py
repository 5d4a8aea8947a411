"""Draws docs/img/flush.svg: one optimizer step of two pipeline stages over ZeRO-3.

    python docs/make_picture.py

The times come from the order in which 1F1B runs and the rule that a micro-batch's forward (backward) waits for the one
of the stage before (after) it. A backward takes two units where a forward takes one, as in a transformer layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

NUM_STAGES = 2
NUM_MICROBATCHES = 8
SECONDS = {"F": 1.0, "B": 2.0}
GATHER = 1.9
AFTER = 0.5  # from the last backward to the step, the same on all ranks
STEP = 3.6
COLOURS = {"F": "#9ecae1", "B": "#a1d99b", "gather": "#fdae6b", "reduce": "#e6550d", "step": "#bcbddc"}


@dataclass(frozen=True, slots=True)
class Block:
    """Pass `kind` (F or B) of micro-batch `index` (from 0) on a stage, from `start` to `end` in units of a forward."""

    kind: str
    index: int
    start: float
    end: float


def order(stage: int) -> list[tuple[str, int]]:
    """1F1B on one stage: forwards until the first gradient can be back, then one forward and one backward in turn."""
    warm_up = min(NUM_STAGES - stage - 1, NUM_MICROBATCHES)
    actions = [("F", m) for m in range(warm_up)]
    for m in range(NUM_MICROBATCHES - warm_up):
        actions += [("F", m + warm_up), ("B", m)]
    return actions + [("B", m) for m in range(NUM_MICROBATCHES - warm_up, NUM_MICROBATCHES)]


def simulate() -> list[list[Block]]:
    """Blocks of each stage in the order in which they run, each as early as what it waits for allows."""
    todo = [order(stage) for stage in range(NUM_STAGES)]
    done: dict[tuple[str, int, int], float] = {}
    blocks: list[list[Block]] = [[] for _ in todo]
    while any(todo):
        for stage, actions in enumerate(todo):
            if not actions or (ready := ready_at(*actions[0], stage, done)) is None:
                continue
            kind, index = actions.pop(0)
            start = max(ready, blocks[stage][-1].end if blocks[stage] else 0.0)
            done[kind, index, stage] = start + SECONDS[kind]
            blocks[stage].append(Block(kind, index, start, start + SECONDS[kind]))
    return blocks


def ready_at(kind: str, index: int, stage: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """When the input of a pass is there; None while the pass that makes it has not been placed."""
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < NUM_STAGES:
        return 0.0
    return done.get((kind, index, source))


def box(axes, start: float, width: float, y: float, height: float, colour: str, text: str = "", **style) -> None:
    """A rectangle with its text in the middle."""
    axes.add_patch(Rectangle((start, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8, **style))
    axes.text(start + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def draw_stage(axes, stage: int, blocks: list[Block], end: float) -> None:
    """One stage's row: its compute above, its traffic over the data-parallel ranks below."""
    y = 2.0 * (NUM_STAGES - 1 - stage)
    axes.text(-GATHER - 0.3, y + 0.6, f"stage {stage}", ha="right", va="center", fontsize=10)
    for block in blocks:
        colour = COLOURS[block.kind]
        box(axes, block.start, block.end - block.start, y + 0.45, 0.75, colour, f"{block.kind}{block.index + 1}")
    box(axes, -GATHER, GATHER, y, 0.4, COLOURS["gather"], "gather")
    last = blocks[-1]
    for bucket in range(4):  # a bucket leaves when the gradients in it are done, the last when the backward is
        share = (last.end - last.start) / 4
        box(axes, last.start + (bucket + 0.6) * share, share * 0.9, y, 0.4, COLOURS["reduce"])
    box(axes, end + AFTER, STEP, y, 1.2, COLOURS["step"], "norm, verdict,\nclip, AdamW")


def draw(path: Path) -> None:
    """Writes the picture to `path`."""
    blocks = simulate()
    end = max(block.end for row in blocks for block in row)
    figure = Figure(figsize=(12, 2.6))
    axes = figure.subplots()
    for stage, row in enumerate(blocks):
        draw_stage(axes, stage, row, end)
    legend = (
        ("F", "forward of a micro-batch"),
        ("B", "backward, gradients added up on the rank"),
        ("gather", "all-gather of the stage's parameters, once"),
        ("reduce", "reduce-scatter of the stage's gradients, once, by buckets"),
    )
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[key]) for key, _ in legend]
    axes.legend(
        handles, [text for _, text in legend], ncol=2, loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False
    )
    axes.set_xlim(-GATHER - 2.2, end + AFTER + STEP + 0.2)
    axes.set_ylim(-0.2, 2.0 * NUM_STAGES - 0.6)
    axes.axis("off")
    path.parent.mkdir(exist_ok=True)
    # The same bytes every time, and text that stays text.
    with matplotlib.rc_context({"svg.hashsalt": "flush", "svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).parent / "img" / "flush.svg")
