"""The page: sections of tables and pictures, of one run or of two beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from megaaccum.pretrain.metrics.report import charts
from megaaccum.pretrain.metrics.report.run import Run, differing
from megaaccum.units import amount, duration

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 1rem 1.5rem; max-width: 1500px; }
h1 { font-size: 1.5rem; margin: 0.4rem 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 0.4rem; }
table { border-collapse: collapse; font-size: 13px; } caption { text-align: left; }
td, th { border-bottom: 1px solid #ddd; padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.grid { display: grid; gap: 0 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); }
.two { display: grid; gap: 0 2rem; grid-template-columns: 1fr 1fr; } .two > * { min-width: 0; }
svg { width: 100%; height: auto; } .note { color: #666; font-size: 13px; }
.alarm, .straggler { color: #b3261e; } .off { color: #b3261e; font-weight: 600; } code { font-size: 12px; }
"""
_SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser loads nothing, from anywhere."""
OFF = 0.1
"""Share by which a measured figure may differ from the plan's before it stands out."""


def of_one(run: Run) -> str:
    """The page of a run."""
    return _page(f"Run {run.folder.name}", _heading(run) + "".join(_sections(run, "a")) + _keys(run))


def of_two(left: Run, right: Run) -> str:
    """Two runs, section by section beside each other, after what differs between them."""
    rows = [(name, _value(one), _value(two)) for name, one, two in differing(left, right)]
    names = left.folder.name, right.folder.name
    if names[0] == names[1]:
        names = str(left.folder), str(right.folder)
    body = f"<h1>{escape(names[0])} and {escape(names[1])}</h1>{_together(left, right, names)}"
    body += _other_bits(left, right)
    body += f"<h2>What differs</h2>{_table(('key', *names), rows)}" if rows else "<h2>No key differs</h2>"
    pairs = zip(_sections(left, "a"), _sections(right, "b"), strict=True)
    body += _two(_heading(left), _heading(right))
    body += "".join(_two(one, two) for one, two in pairs)
    return _page(" and ".join(names), body)


def _other_bits(left: Run, right: Run) -> str:
    """Why two runs under `reproducible: layout` do not have the same numbers, where their micro-batches differ."""
    if not all(run.facts().get("sharding.reproducible") == "layout" for run in (left, right)):
        return ""
    sizes = [run.last["plan"]["batch"]["micro_batch_size"] for run in (left, right)]
    if sizes[0] == sizes[1]:
        return ""
    return (
        f'<p class="off">micro_batch_size is {sizes[0]} and {sizes[1]}: reproducible layout has the same bits with the'
        " same one alone.</p>"
    )


def _page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _two(left: str, right: str) -> str:
    return f'<div class="two"><section>{left}</section><section>{right}</section></div>'


# --- sections --------------------------------------------------------------------------------------------------------


def _heading(run: Run) -> str:
    last = run.last
    outcome = (last["outcome"] or {}).get("text", "not ended: it runs, or was killed")
    hosts = len({each["host"] for each in last["ranks"]})
    devices = ", ".join(sorted({str(each["device"]) for each in last["ranks"]}))
    code = last["code"]
    commit = f", commit {code['commit'][:12]}{' and changes' if code['dirty'] else ''}" if code["commit"] else ""
    command = " ".join(last["command"])
    facts = [
        outcome,
        f"{len(last['ranks'])} ranks on {hosts} host{'s' * (hosts > 1)} ({devices})",
        f"megaaccum {code['version']}{commit}",
        f"torch {last['versions'].get('torch', 'unknown')}",
    ]
    return (
        f"<h1>{escape(run.folder.name)}</h1><p>{escape(' · '.join(facts))}</p><p><code>{escape(command)}</code></p>"
        f"{_table(('', ''), _figures(run), numbers=(1,))}"
    )


def _figures(run: Run) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    losses = [each["loss"] for each in run.train if each.get("loss") is not None]
    valid = [each["loss"] for each in run.valid if each.get("loss") is not None]
    rows = [
        ("steps", f"{run.train[-1]['step']:,}" if run.train else "none"),
        ("training loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "unknown"),
        ("validation loss", f"{valid[0]:.4f} → {valid[-1]:.4f}" if valid else "not evaluated"),
    ]
    for name, key, form in (
        ("seconds per step, median", "seconds_per_step", "{:,.4g}"),
        ("tokens per second, median", "tokens_per_second", "{:,.0f}"),
        ("TFLOP/s per rank, median", "tflops_per_second_per_rank", "{:,.4g}"),
        ("MFU, median", "mfu", "{:.1%}"),
    ):
        value = run.median(key)
        rows += [] if value is None else [(name, form.format(value))]
    return [*rows, ("goodput", f"{run.goodput.share:.1%} of {duration(run.goodput.total)}")]


def _together(left: Run, right: Run, names: tuple[str, str]) -> str:
    """The numbers of both."""
    first, second = dict(_figures(left)), dict(_figures(right))
    rows = [(name, first.get(name, ""), second.get(name, "")) for name in dict.fromkeys([*first, *second])]
    return _table(("", *names), rows, numbers=(1, 2))


def _sections(run: Run, key: str) -> list[str]:
    """key: of this run on the page."""
    starts, events = _starts(run), _events(run)
    plan = f"<h2>Plan against measured</h2>{_against_plan(run)}"
    if not run.train:
        return [f"<p>No step was recorded in {escape(str(run.folder / 'log.jsonl'))}.</p>", plan, starts, events]
    drawn, words = charts.timeline(run, f"{key}-timeline")
    named = {
        "Loss": charts.loss, "Gradient norm": charts.grad_norm, "Seconds by phase": charts.seconds,
        "Memory by kind": charts.memory, "Bytes by collective": charts.traffic,
    }  # fmt: skip
    pictures = [f"<div><h2>{name}</h2>{draw(run, f'{key}-{name}')}</div>" for name, draw in named.items()]
    wall = f"<div><h2>Goodput</h2>{charts.goodput(run, f'{key}-goodput')}{_causes(run)}</div>"
    return [
        f'<div class="grid">{"".join([*pictures, wall])}</div>',
        plan,
        f'<h2>Schedule</h2>{drawn}<p class="note">{escape(words)}</p>',
        starts + events,
    ]


def _causes(run: Run) -> str:
    total = run.goodput.total or 1.0
    rows = [
        (cause.replace("_", "-"), f"{seconds:,.1f} s", f"{seconds / total:.1%}")
        for cause, seconds in sorted(run.goodput.seconds.items(), key=lambda item: -item[1])
        if round(seconds, 1)
    ]
    return _table(("cause", "seconds", "share"), rows, numbers=(1, 2))


def _against_plan(run: Run) -> str:
    rows = []
    for name, planned, measured in run.against_plan():
        words = amount if name.startswith("bytes") else "{:.4g} s".format
        ratio = measured / planned if planned and measured is not None else None
        marked = "" if ratio is None else f"{ratio:.3f}"
        rows.append(
            (
                name,
                "unknown" if planned is None else words(planned),
                "not seen" if measured is None else words(measured),
                _Html(f'<span class="off">{marked}</span>') if ratio and abs(ratio - 1) > OFF else marked,
            )
        )
    note = '<p class="note">Of rank 0, in the last start. Memory is the most by kind, each at a moment of its own.</p>'
    return _table(("", "plan", "measured", "ratio"), rows, numbers=(1, 2, 3)) + note


def _starts(run: Run) -> str:
    rows = [
        (
            each["number"],
            _date(each["launched"]),
            each["first_step"],
            each["measured"].get("num_steps", 0),
            (each["outcome"] or {}).get("text", "no end was recorded"),
        )
        for each in run.starts
    ]
    return f"<h2>Starts</h2>{_table(('start', 'launched', 'first step', 'steps', 'outcome'), rows, numbers=(0, 2, 3))}"


def _events(run: Run) -> str:
    rows = [
        (each["start"], each["step"], _Html(f'<span class="{escape(each["kind"])}">{escape(each["kind"])}</span>'),
         each["text"])
        for each in run.events
    ]  # fmt: skip
    shown = _table(("start", "step", "event", ""), rows, numbers=(0, 1)) if rows else "<p>None.</p>"
    return f"<h2>Events</h2>{shown}"


def _keys(run: Run) -> str:
    """The configuration: what was given or derived, and, folded, all of it; the batch's arithmetic."""
    every = [
        (f"{section}.{key}", _value(each["value"]), each["from"])
        for section, keys in run.last["configuration"].items()
        for key, each in keys.items()
    ]
    given = [row for row in every if row[2] != "default"]
    arithmetic = "".join(f"<li>{escape(line)}</li>" for line in run.last["plan"]["arithmetic"])
    columns = ("key", "value", "from")
    return (
        f"<h2>Batch</h2><ul>{arithmetic}</ul><h2>Configuration</h2>{_table(columns, given)}"
        f"<details><summary>All {len(every)} keys</summary>{_table(columns, every)}</details>"
    )


# --- pieces ----------------------------------------------------------------------------------------------------------


class _Html(str):
    """Text that is HTML already."""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = ()) -> str:
    """numbers: the columns that are aligned to the right."""

    def cell(tag: str, column: int, content: Any) -> str:
        text = content if isinstance(content, _Html) else escape(str(content))
        return f"<{tag}{' class=n' if column in numbers else ''}>{text}</{tag}>"

    top = "".join(cell("th", column, name) for column, name in enumerate(head)) if any(head) else ""
    body = "".join(f"<tr>{''.join(cell('td', column, each) for column, each in enumerate(row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
