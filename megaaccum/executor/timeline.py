"""Timelines in Chrome's trace format (chrome://tracing, ui.perfetto.dev): the plan, a run, or both side by side."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megaaccum.schedule.actions import NAMES, Schedule
from megaaccum.schedule.simulate import Costs
from megaaccum.texts import write_text

Spans = Sequence[Sequence[tuple[float, float]]]
"""Per rank, (start, end) of each action in seconds, in the order of `schedule.actions(rank)`."""
_COLOURS = {"F": "thread_state_running", "I": "thread_state_iowait", "W": "good", "B": "thread_state_runnable"}


def write_trace(path: str | Path, schedule: Schedule, *, planned: Spans | None, measured: Spans | None) -> None:
    """Write the two timelines as two groups of rows, one row per rank, which begin at the same time.

    measured: seconds on one clock (any start). Raises OSError where `path` cannot be written.
    """
    events: list[dict[str, Any]] = []
    for group, (name, spans) in enumerate((("planned", planned), ("measured", measured))):
        if spans is not None:
            events += _group(schedule, spans, group, name)
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def measured_costs(schedule: Schedule, spans: Spans) -> Costs:
    """Durations of a run as the simulator takes them: per stage the median of each kind of pass. A stage whose
    backwards are all full has half of one as I and half as W."""
    seen: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in range(schedule.pp):
        for action, (start, end) in zip(schedule.actions(rank), spans[rank], strict=True):
            seen[action.kind, schedule.stage(rank, action)].append(end - start)

    def typical(kind: str, stage: int) -> float:
        found = seen.get((kind, stage))
        return median(found) if found else median(seen["B", stage]) / 2

    stages = range(schedule.num_stages)
    forward, input_grad, weight_grad = ([typical(kind, stage) for stage in stages] for kind in "FIW")
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


def _group(schedule: Schedule, spans: Spans, group: int, name: str) -> Iterable[dict[str, Any]]:
    begin = min(each[0][0] for each in spans)
    yield {"ph": "M", "name": "process_name", "pid": group, "args": {"name": f"{name}: {schedule.name}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": group, "args": {"sort_index": group}}
    for rank in range(schedule.pp):
        yield {"ph": "M", "name": "thread_name", "pid": group, "tid": rank, "args": {"name": f"rank {rank}"}}
        for action, (start, end) in zip(schedule.actions(rank), spans[rank], strict=True):
            yield {
                "ph": "X", "name": str(action), "cat": NAMES[action.kind], "cname": _COLOURS[action.kind],
                "pid": group, "tid": rank, "ts": (start - begin) * 1e6, "dur": (end - start) * 1e6,
                "args": {"stage": schedule.stage(rank, action), "microbatch": action.microbatch},
            }  # fmt: skip
