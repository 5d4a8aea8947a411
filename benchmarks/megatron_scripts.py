"""Training scripts of whole repositories, recorded: how many, and in which time.

    python -m benchmarks megatron_scripts --folders DIR... [--with SCRIPT=ARGUMENTS ...] [--show]

Every *.sh that names pretrain_gpt.py is recorded as `megaaccum check --record -- bash SCRIPT` would, in its own folder
or, where it starts no training from there, at the repository's root (DIR). --with: the arguments that a script asks
for, by the end of its path; NAME=VALUE before them are variables that it expects.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.launch_script import recorded


@dataclass(frozen=True)
class Recorded:
    """text: the launch's program and number of words, or why there is none."""

    script: Path
    found: bool
    seconds: float
    text: str


def record(script: Path, root: Path, words: list[str]) -> Recorded:
    variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    arguments = [word for word in words if word.split("=", 1)[0] not in variables]
    result = Recorded(script, False, 0.0, "")
    for folder in (script.parent, root):
        start = time.perf_counter()
        try:
            command = ["bash", str(script.relative_to(folder)), *arguments]
            with chdir(folder), patch.dict(os.environ, variables), recorded(command) as launch:
                text = f"{launch.program} with {len(launch.argv)} words"
            return Recorded(script, True, time.perf_counter() - start, text)
        except ConfigError as error:
            result = Recorded(script, False, time.perf_counter() - start, str(error))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, required=True)
    parser.add_argument("--with", action="append", default=[], dest="arguments", metavar="SCRIPT=ARGUMENTS")
    parser.add_argument("--show", action="store_true", help="print why a script is not recorded")
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
    for each in results:
        if args.show and not each.found:
            print(f"  {each.script}: {each.text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
