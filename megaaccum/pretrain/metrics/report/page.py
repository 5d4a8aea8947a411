"""The page of a run, or of two runs beside each other: `page.html`, filled."""

from __future__ import annotations

import statistics
import time
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megaaccum.pretrain.metrics.report import charts
from megaaccum.pretrain.metrics.report.run import MEDIANS, Run, differing
from megaaccum.pretrain.metrics.summary import from_to
from megaaccum.units import amount, duration

OFF = 0.1
"""A measured figure that differs from the plan's by more than this share is highlighted."""


def render_run(run: Run) -> str:
    """The page of a run."""
    return _render(title=f"Run {run.folder.name}", runs=[_view(run, "a")])


def render_comparison(left: Run, right: Run) -> str:
    """The page of two runs: their differences, then each section side by side."""
    names = left.folder.name, right.folder.name
    if names[0] == names[1]:
        names = str(left.folder), str(right.folder)
    first, second = dict(_figures(left)), dict(_figures(right))
    return _render(
        title=" and ".join(names),
        names=names,
        runs=[_view(left, "a"), _view(right, "b")],
        figures=[(name, first.get(name, ""), second.get(name, "")) for name in dict.fromkeys([*first, *second])],
        warning=_other_bits(left, right),
        differing=[(name, _value(one), _value(two)) for name, one, two in differing(left, right)],
    )


def _render(**values: Any) -> str:
    loader = PackageLoader("megaaccum.pretrain.metrics.report", "")
    return (
        Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html").render(values)
    )


def _other_bits(left: Run, right: Run) -> str:
    """Why two runs under `reproducible: layout` differ in their bits, if their micro-batches do."""
    if not all(run.facts().get("sharding.reproducible") == "layout" for run in (left, right)):
        return ""
    sizes = [run.last["plan"]["batch"]["micro_batch_size"] for run in (left, right)]
    if sizes[0] == sizes[1]:
        return ""
    return (
        f"micro_batch_size is {sizes[0]} and {sizes[1]}: reproducible layout has the same bits only with the same"
        " micro_batch_size."
    )


def _view(run: Run, key: str) -> dict[str, Any]:
    """The values that `page.html` shows of a run. key: distinguishes its pictures from another run's."""
    keys = [(name, _value(each["value"]), each["from"]) for name, each in run.keys.items()]
    draws = {
        "Loss": charts.loss, "Gradient norm": charts.grad_norm, "Seconds by phase": charts.seconds,
        "Memory by kind": charts.memory, "Bytes by collective": charts.traffic, "Goodput": charts.goodput,
    }  # fmt: skip
    timeline, timeline_note = charts.timeline(run, f"{key}-timeline") if run.train else ("", "")
    return {
        "name": run.folder.name,
        "facts": _facts(run),
        "command": " ".join(run.last["command"]),
        "figures": _figures(run),
        "log": run.folder / "log.jsonl",
        "pictures": [(name, Markup(draw(run, f"{key}-{name}"))) for name, draw in draws.items()] if run.train else [],
        "causes": [
            (cause.replace("_", "-"), f"{seconds:,.1f} s", f"{seconds / (run.goodput.total or 1.0):.1%}")
            for cause, seconds in sorted(run.goodput.seconds.items(), key=lambda item: -item[1])
            if round(seconds, 1)
        ],
        "against_plan": [_compared(*row) for row in run.against_plan()],
        "timeline": Markup(timeline),
        "timeline_note": timeline_note,
        "starts": [
            (
                each["number"],
                time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each["launched"])),
                each["first_step"],
                each["measured"].get("num_steps", 0),
                (each["outcome"] or {}).get("text", "no end was recorded"),
            )
            for each in run.starts
        ],
        "events": [
            (each["start"], each["step"], {"mark": each["kind"], "text": each["kind"]}, each["text"])
            for each in run.events
        ],
        "arithmetic": run.last["plan"]["arithmetic"],
        "configuration": keys,
        "given": [row for row in keys if row[2] != "default"],
    }


def _facts(run: Run) -> list[str]:
    """Outcome, ranks, versions."""
    last, code = run.last, run.last["code"]
    hosts = len({each["host"] for each in last["ranks"]})
    devices = ", ".join(sorted({str(each["device"]) for each in last["ranks"]}))
    commit = f", commit {code['commit'][:12]}{' and changes' if code['dirty'] else ''}" if code["commit"] else ""
    return [
        (last["outcome"] or {}).get("text", "not ended: it runs, or was killed"),
        f"{len(last['ranks'])} ranks on {hosts} host{'s' * (hosts > 1)} ({devices})",
        f"megaaccum {code['version']}{commit}",
        f"torch {last['versions'].get('torch', 'unknown')}",
    ]


def _figures(run: Run) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    rows = [
        ("steps", f"{run.train[-1]['step']:,}" if run.train else "none"),
        ("training loss", from_to(run.train) if run.train else "unknown"),
        ("validation loss", from_to(run.valid) if run.valid else "not evaluated"),
    ]
    medians = [(*MEDIANS[key], statistics.median(each)) for key, each in run.numbers.items() if each]
    rows += [(f"{name}, median", form.format(value)) for name, form, value in medians]
    return [*rows, ("goodput", f"{run.goodput.share:.1%} of {duration(run.goodput.total)}")]


def _compared(name: str, planned: float | None, measured: float | None) -> tuple[Any, ...]:
    """A row of the table of the plan: name, planned, measured, their ratio."""
    words = amount if name.startswith("bytes") else "{:.4g} s".format
    ratio = measured / planned if planned and measured is not None else None
    shown: Any = "" if ratio is None else f"{ratio:.3f}"
    if ratio and abs(ratio - 1) > OFF:
        shown = {"mark": "off", "text": shown}
    said = "unknown" if planned is None else words(planned)
    return name, said, "not seen" if measured is None else words(measured), shown


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)
