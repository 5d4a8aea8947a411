"""Training scripts of whole repositories, recorded and planned with the files that they write, such as a DeepSpeed
JSON: how many, and in which time.

    python -m benchmarks megatron_scripts --folders DIR... [--with SCRIPT=ARGUMENTS ...] [--cases FILE] [--show]

Every *.sh that names pretrain_gpt.py is recorded as `megaaccum check --record -- bash SCRIPT` would, in its own folder
or, where it starts no training from there, at the repository's root (DIR). --with: the arguments that a script asks
for, by the end of its path; NAME=VALUE before them are variables that it expects. --cases: labels of scripts, in the
format of benchmarks/megatron_cases.py; of those labelled run or note, the share that gives a plan is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from megaaccum.cli.arguments import fewest_ranks, ranks_told
from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.launch_script import Launch, recorded
from megaaccum.pretrain.interop.load import read


@dataclass(frozen=True)
class Recorded:
    """text: the launch's program and number of words, or why there is none. problems: why there is no plan of it."""

    script: Path
    found: bool
    seconds: float
    text: str
    problems: tuple[str, ...] = ()


def problems_of(launch: Launch) -> tuple[str, ...]:
    """Why a recorded launch gives no plan; an underfilled pipeline alone is tried again with the key."""
    for extra in ([], ["--allow-underfilled-pipeline", "true"]):
        try:
            config, problems = read(launch=launch, overrides=extra)
            if not problems:
                resolve(config, world_size=launch.world_size or fewest_ranks(config) * ranks_told(config))
        except ConfigError as error:
            problems = error.problems
        if not problems or not all("allow_underfilled_pipeline" in text for text in problems):
            break
    return tuple(problems)


def record(script: Path, root: Path, words: list[str]) -> Recorded:
    variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    arguments = [word for word in words if word.split("=", 1)[0] not in variables]
    result = Recorded(script, False, 0.0, "")
    for folder in (script.parent, root):
        start = time.perf_counter()
        try:
            command = ["bash", str(script.relative_to(folder)), *arguments]
            with chdir(folder), patch.dict(os.environ, variables), recorded(command) as launch:
                text, seconds = f"{launch.program} with {len(launch.argv)} words", time.perf_counter() - start
                return Recorded(script, True, seconds, text, problems_of(launch))
        except ConfigError as error:
            result = Recorded(script, False, time.perf_counter() - start, str(error))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, required=True)
    parser.add_argument("--with", action="append", default=[], dest="arguments", metavar="SCRIPT=ARGUMENTS")
    parser.add_argument("--cases", type=Path, help="labels of scripts, by the end of their path")
    parser.add_argument("--show", action="store_true", help="print why a script is not recorded or gives no plan")
    args = parser.parse_args(argv)
    given = dict(each.split("=", 1) for each in args.arguments)
    results = []
    for root in args.folders:
        for script in sorted(root.resolve().rglob("*.sh")):
            if "pretrain_gpt" in script.read_text(encoding="utf-8", errors="replace"):
                words = next((shlex.split(text) for end, text in given.items() if str(script).endswith(end)), [])
                results.append(record(script, root.resolve(), words))
    found = [each for each in results if each.found]
    print(f"{len(found)} of {len(results)} scripts recorded, the slowest in {max(r.seconds for r in found):.2f} s")
    planned = [each for each in found if not each.problems]
    print(f"{len(planned)} of them give a plan, {len(found) - len(planned)} an error with what would change training")
    if args.cases:
        _print_labelled(found, json.loads(args.cases.read_text(encoding="utf-8")))
    for each in results:
        if args.show and (each.problems or not each.found):
            print(f"  {each.script}: {each.text}")
            for text in each.problems:
                print(f"    - {text}")
    return 0


def _print_labelled(found: list[Recorded], cases: list[dict]) -> None:
    labels = {Path(case["file"]).parts[1:]: case["expected"] for case in cases}
    named = [(each, label) for each in found for end, label in labels.items() if each.script.parts[-len(end) :] == end]
    accepted = [not each.problems for each, label in named if label != "refuse"]
    refused = [bool(each.problems) for each, label in named if label == "refuse"]
    print(f"labelled run or note: {sum(accepted)} of {len(accepted)} give a plan", end="; ")
    print(f"labelled refuse: {sum(refused)} of {len(refused)} are refused")


if __name__ == "__main__":
    raise SystemExit(main())
