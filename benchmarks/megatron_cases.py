"""Real command lines through `megaaccum check`: how many are accepted, noted, refused, and which are wrong.

    python -m benchmarks megatron_cases --cases FILE [--show] [--only TEXT]

FILE is a JSON list; of each case are read: file, program, flags, megatron (ok: what Megatron's own parser says; world)
and expected (run, note or refuse). Files that the flags name need not exist: --deepspeed_config is left out. A world
that the experts' layout does not divide is rounded up to one that it does.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.launch_script import Launch
from megaaccum.pretrain.interop.load import read


def words_of(flags: list[str]) -> list[str]:
    """The flags without the DeepSpeed JSON, which is not part of a case."""
    kept, skip = [], False
    for word in flags:
        name = word.split("=")[0].replace("-", "_")
        if name in ("__deepspeed_config", "__data_args_path", "__per_split_data_args_path"):
            skip = "=" not in word
        elif skip:
            skip = False
        else:
            kept.append(word)
    return kept


def world_of(case: dict) -> int:
    """The case's ranks, as a multiple of what its experts take."""
    flags, unit = case["flags"], 1
    for name in ("expert-model", "expert-tensor", "pipeline-model"):
        flag = f"--{name}-parallel-size"
        unit *= int(flags[flags.index(flag) + 1]) if flag in flags and "--num-experts" in flags else 1
    return math.lcm(case["megatron"]["world"], unit)


def check(case: dict) -> tuple[list[str], list[str]]:
    """(problems, notes) of a case; one that fails only for an underfilled pipeline is tried again with the key."""
    for extra in ([], ["--allow-underfilled-pipeline", "true"]):
        world = world_of(case)
        launch = Launch(case["program"], [*words_of(case["flags"]), *extra], case["file"], Path("."), world)
        config, problems = read(launch=launch)
        notes = config.notes
        try:
            notes = resolve(config, world_size=world).notes
        except ConfigError as error:
            problems = problems + error.problems
        if not problems or not all("allow_underfilled_pipeline" in text for text in problems):
            break
    return problems, notes


@dataclass
class Score:
    """How many cases came out how, by label, and those that came out otherwise than their label says, each with the
    problems that were found."""

    table: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    wrong: list[tuple[dict, list[str]]] = field(default_factory=list)

    @property
    def accepted(self) -> tuple[int, int]:
        """(accepted, all) of those labelled run or note."""
        runs = [(outcome, n) for (expected, outcome), n in self.table.items() if "refuse (" not in expected]
        return sum(n for outcome, n in runs if outcome != "refused"), sum(n for _, n in runs)


def score(cases: list[dict]) -> Score:
    """The score of cases in the format of FILE."""
    found = Score()
    for case in cases:
        problems, notes = check(case)
        outcome = "refused" if problems else "noted" if notes else "accepted"
        expected = f"{case['expected']} (Megatron {'accepts' if case['megatron']['ok'] else 'refuses'})"
        found.table[expected, outcome] += 1
        if (case["expected"] == "refuse") != bool(problems):
            found.wrong.append((case, problems))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--show", action="store_true", help="print the problems of each case that is wrong")
    parser.add_argument("--only", default="", help="cases whose file holds this text")
    args = parser.parse_args(argv)
    cases = json.loads(Path(args.cases).read_text(encoding="utf-8"))
    found = score([case for case in cases if args.only in case["file"]])
    for (expected, outcome), count in sorted(found.table.items()):
        print(f"expected {expected:<28} {outcome:<9} {count:4}")
    accepted, total = found.accepted
    print(f"accepted {accepted} of {total} ({accepted / max(total, 1):.1%}), wrong {len(found.wrong)}")
    for case, problems in found.wrong if args.show else []:
        print(f"\n{case['file']} (expected {case['expected']})")
        for text in problems:
            print(f"  - {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
