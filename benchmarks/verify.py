"""What a verification sees: each documented mistake made on purpose, and healthy layouts that must not alarm.

    python -m benchmarks verify [--mistakes NAME ...] [--healthy N] [--seed S] [--json F]

Healthy layouts are those that the fuzz draws (`python -m benchmarks fuzz`), without what happens to their steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import fuzz, fuzz_cell
from megaaccum.distributed import preload
from megaaccum.verification import report
from megaaccum.verification.case import Case
from megaaccum.verification.verdict import Verifier

preload.libraries()  # a mistake of the bank names what it replaces

from megaaccum.verification import self_test  # noqa: E402
from megaaccum.verification.bank import BANK  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks verify", description=__doc__)
    parser.add_argument("--mistakes", nargs="*", default=None, help="by name; default: all, with none given no mistake")
    parser.add_argument("--healthy", type=int, default=0, help="healthy layouts to draw")
    parser.add_argument("--seed", type=int, default=0, help="layouts of another seed are others")
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    args = parser.parse_args(argv)
    begun, found = time.monotonic(), []
    names = list(BANK) if args.mistakes is None else args.mistakes
    for outcome in self_test.outcomes(Verifier(), names) if names else ():
        print(outcome.line(), flush=True)
        found.append(outcome)
    if names:
        print(self_test.summary(found), flush=True)
    alarms = healthy(args.seed, args.healthy)
    if args.json:
        rows = [
            {"name": each.mistake.name, "source": each.mistake.source, "outcome": each.word, "axes": each.axes,
             "parameter": each.parameter, "how": each.how, "seconds": round(each.seconds, 1)}
            for each in found
        ]  # fmt: skip
        written = {"mistakes": rows, "healthy": args.healthy, "alarms": alarms, "seconds": time.monotonic() - begun}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if alarms or not all(each.caught for each in found) else 0


def healthy(seed: int, count: int) -> list[str]:
    """Verify layouts that are right; returns those that raised an alarm all the same."""
    alarms, refused = [], 0
    for done, index in enumerate(range(count), start=1):
        case = case_of(seed, index)
        verdict = Verifier().verify(case, [case.lane])
        if verdict.problem:
            refused += 1
        elif not verdict.ok:
            alarms.append(f"{index}: {report.layout_of(verdict)}: {report.conclusion(verdict)}")
            print(f"ALARM {alarms[-1]}", flush=True)
            for row in verdict.comparisons[0].failed[:4] if verdict.comparisons else ():
                print(f"      {row}", flush=True)
        if done % 10 == 0 or done == count:
            print(f"{done} of {count} healthy layouts, {len(alarms)} alarms, {refused} not verified", flush=True)
    return alarms


def case_of(seed: int, index: int) -> Case:
    """A healthy case of the fuzz's cell."""
    cell = fuzz.draw(seed, index)
    keys: dict[str, Any] = fuzz_cell.BASE | fuzz_cell.LANE[cell.lane] | cell.model | cell.layout
    settled = {
        "data_path": ["none"],
        "lr_decay_style": "linear",
        "lr_decay_iters": 10,
        "min_lr": 1e-3,
        "vocab_size": 61,
    }
    masks = "full" if cell.masks == "full" else "unequal"
    return Case(keys=keys | settled, world_size=cell.world_size, masks=masks)


if __name__ == "__main__":
    sys.exit(main())
