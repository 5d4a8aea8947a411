"""python -m benchmarks [NAME [flags]]: one benchmark with its flags (`NAME --help`), or all of them as they stand."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("loop", "observing", "bytes", "schedules", "layer")
NEED_FILES = ("planner_accuracy", "decisions", "search", "megatron_cases", "megatron_scripts", "megatron_train")
"""Tables, command lines, or repositories."""
BY_NAME = (
    *BENCHMARKS,
    "steps",
    "sync_modes",
    "layouts",
    "fuzz",
    "experts",
    "expert_reduction",
    "exchanges",
    "hostile",
    "restarts",
    "kills",
    "tune",
    "tune_faults",
    "verify",
    "libraries",
    "muon",
    "weights",
    "scale",
    *NEED_FILES,
)
"""layouts and sync_modes take minutes, and sync_modes' limited link root; fuzz, experts, expert_reduction, hostile,
restarts, kills, tune_faults, verify, libraries and megatron_train measure no speed."""


def main(argv: list[str]) -> int:
    if argv and argv[0] not in BY_NAME:
        print(f"no benchmark named {argv[0]}; there are: {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    modules = [importlib.import_module(f"benchmarks.{name}") for name in argv[:1] or BENCHMARKS]
    return max(module.main(argv[1:]) or 0 for module in modules)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
