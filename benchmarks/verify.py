"""Sensitivity of a verification: each mistake of the bank made on purpose, and healthy layouts that must not alarm.

    python -m benchmarks verify [--mistakes NAME ...] [--peers] [--healthy N] [--first I] [--seed S] [--json F]
        [--page F]

Healthy layouts are those that the fuzz draws (`python -m benchmarks fuzz`), without the faults in their steps. F of
--json keeps the outcomes of other mistakes and of healthy layouts, so that slices add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

from benchmarks import fuzz_cell
from benchmarks.fuzz_draws import draw
from benchmarks.schedules import conditions
from megaaccum.distributed import preload
from megaaccum.errors import did_you_mean
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.verdict import Verifier

preload.libraries()  # a mistake of the bank names what it replaces

from tests.bank import outcomes  # noqa: E402
from tests.bank.entries import BANK  # noqa: E402

PEERS = {
    "Megatron-FSDP v2": "experts over the wrong group",
    "Megatron DDP": "experts doubled where nothing is reduced",
    "transformers": "scores of others experts without gradient",
    "NeMo Automodel": "norm of each expert group",
    "DeepSpeed AutoEP": "norms of other experts averaged",
}
"""Wrong gradients and norms of experts that were reported in other programs, by program."""

PAGE = """\
# The bank of mistakes

<!-- Written by `python -m benchmarks verify --json docs/benchmarks/verify.json --page` and this path. -->

Mistakes that were reported, that a library's code makes, or that break a definition of a paper or a manual. The tests
make each on purpose in a small model whose step is right without it ([testing](../concepts/testing.md#mistakes)). If a
mistake is made in another place than the report's, its text says "here". *Caught*: a compared number is wrong; a rank
that raises is no catch. *Localised*: the diagnosis of [verify](../guides/verify.md) names these axes and no others, and
the right parameter. [verify.json](../benchmarks/verify.json) has the parameters, and the relation of each wrong
gradient to the right one.

{summary}

| mistake | source | needs | outcome | first wrong number |
| --- | --- | --- | --- | --- |
{rows}
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks verify", description=__doc__)
    parser.add_argument("--mistakes", nargs="*", default=None, help="by name; default: all, with none given no mistake")
    parser.add_argument("--peers", action="store_true", help="the mistakes of other programs on experts")
    parser.add_argument("--healthy", type=int, default=0, help="healthy layouts to draw")
    parser.add_argument("--first", type=int, default=0, help="index of the first healthy layout")
    parser.add_argument("--seed", type=int, default=0, help="layouts of another seed are others")
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    parser.add_argument("--page", type=Path, help="write the table of what --json holds here")
    args = parser.parse_args(argv)
    found: list[outcomes.Outcome] = []
    chosen = list(PEERS.values()) if args.peers else args.mistakes
    names = list(BANK) if chosen is None else chosen
    for unknown in set(names) - set(BANK):
        parser.error(f"there is no mistake {unknown!r}{did_you_mean(unknown, BANK)}")
    figures = as_written(json.loads(args.json.read_text())) if args.json and args.json.exists() else {"mistakes": []}
    for outcome in outcomes.outcomes(Verifier(), names) if names else ():
        print(outcome.line(), flush=True)
        found.append(outcome)
        figures = with_outcome(figures, outcome)
        _write(args.json, figures)
    if names:
        print(outcomes.summary(found), flush=True)
    alarms: list[str] = []
    if args.healthy:
        alarms, refused = healthy(args.seed, args.first, args.healthy)
        of = {"seed": args.seed, "first": args.first, "layouts": args.healthy, "not verified": refused}
        figures |= {"healthy": of | {"alarms": alarms}}
        _write(args.json, figures)
    if args.page:
        args.page.write_text(page(figures))
        _write(args.json, figures)
    return 1 if alarms or not all(each.caught for each in found) else 0


def with_outcome(figures: dict[str, Any], outcome: outcomes.Outcome) -> dict[str, Any]:
    """The figures with the row of a mistake, in the order of the bank."""
    mistake = outcome.mistake
    row = {
        "name": mistake.name, "text": mistake.text, "source": mistake.source, "case": mistake.base,
        "outcome": outcome.word, "axes": outcome.axes, "parameter": outcome.parameter, "how": outcome.how,
        "seconds": round(outcome.seconds, 1), "commit": conditions()["commit"],
    }  # fmt: skip
    rows = {each["name"]: each for each in figures["mistakes"]} | {mistake.name: row}
    return figures | {"conditions": conditions(), "mistakes": [rows[name] for name in BANK if name in rows]}


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def as_written(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures, with the text and source that the bank has now for each mistake."""
    rows = [row for row in figures["mistakes"] if row["name"] in BANK]
    now = [row | {"text": BANK[row["name"]].text, "source": BANK[row["name"]].source} for row in rows]
    return figures | {"mistakes": now}


def page(figures: dict[str, Any]) -> str:
    """The table of the documentation."""
    rows = figures["mistakes"]
    layouts = figures["healthy"]
    localised = sum(row["outcome"] == "localised" for row in rows)
    caught = localised + sum(row["outcome"] == "caught" for row in rows)
    summary = (
        f"Of {len(rows)} mistakes that were made (the bank has {len(BANK)}) {caught} are caught and {localised}"
        f" localised. {layouts['layouts']} healthy layouts, drawn at random, raised {len(layouts['alarms'])} false"
        f" alarms ({layouts['not verified']} could not be verified)."
    )
    lines = [
        f"| {row['text']} | [{_short(row['source'])}]({row['source']}) | {', '.join(row['axes']) or 'nothing'} |"
        f" {row['outcome']} | {row['how'].split(';')[0].split(' (')[0]} |"
        for row in rows
    ]
    return PAGE.format(summary=summary, rows="\n".join(lines))


def _short(source: str) -> str:
    """name#number of a GitHub thread, the name of a file there, the number of a paper, else the host."""
    host, *parts = source.removeprefix("https://").split("/")
    if host == "github.com":
        return parts[-1] if parts[2] == "blob" else f"{parts[1]}#{parts[3]}"
    return parts[-1] if host == "arxiv.org" else host


def healthy(seed: int, first: int, count: int) -> tuple[list[str], int]:
    """Verify layouts that are right; returns (those that raised an alarm all the same, how many could not be)."""
    alarms, refused = [], 0
    for done, index in enumerate(range(first, first + count), start=1):
        case = case_of(seed, index)
        verdict = Verifier().verify(case, [case.lane])
        if verdict.problem:
            refused += 1
        elif not verdict.ok:
            alarms.append(f"{index}: {verdict.layout}: {verdict.conclusion}")
            print(f"ALARM {alarms[-1]}", flush=True)
            for row in verdict.comparisons[0].failed[:4] if verdict.comparisons else ():
                print(f"      {row}", flush=True)
        if done % 10 == 0 or done == count:
            print(f"{done} of {count} healthy layouts, {len(alarms)} alarms, {refused} not verified", flush=True)
    return alarms, refused


def case_of(seed: int, index: int) -> Case:
    """A healthy case of the fuzz's cell."""
    cell = draw(seed, index)
    keys: dict[str, Any] = fuzz_cell.BASE | fuzz_cell.LANE[cell.lane] | cell.model | cell.layout
    settled = {
        "data_path": ["none"],
        "lr_decay_style": "linear",
        "lr_decay_iters": 10,
        "min_lr": 1e-3,
        "vocab_size": 61,
    }
    masks: Literal["full", "unequal"] = "full" if cell.masks == "full" else "unequal"
    return Case(keys=keys | settled, world_size=cell.world_size, masks=masks)


if __name__ == "__main__":
    sys.exit(main())
