"""Restarts on another shape: the next step after a move from each of 4 layouts to each of 6 others.

    python -m benchmarks restarts [--json F]

And with experts, cut over tensor-parallel ranks or spread. Four ranks, FP32, two AdamW steps before the save. The error
is that of the whole gradient, relative to one process in float64 that resumes from the same checkpoint; the limit is
twice that of one process in FP32. Then as many moves under `reproducible: layout`, with dropout and clipping: loss,
norm, gradient, and the weights and moments after the step have to be those of the uninterrupted run to the bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from megaaccum.lab.verification.testing import run_ranks
from tests.support import restarts


def main(argv: list[str] | None = None) -> int:
    """Returns an exit code: 1 where a move is farther off than twice the yardstick, or has other bits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks restarts", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        found = restarts.errors(restarts.MOVES, folder)
        bits = run_ranks(restarts.same_bits, 4, folder, list(restarts.SAME_MOVES), timeout=600)[0]
    print(f"{'error':>9} {'limit':>9}  move")
    for (start, end), (error, limit) in found.items():
        print(f"{error:9.2e} {limit:9.2e}  {start.layout}  >  {end.layout}")
    same = {move: there == here for move, (there, here) in zip(restarts.SAME_MOVES, bits, strict=True)}
    for (start, end), is_same in same.items():
        print(f"{'same bits' if is_same else 'other bits':>19}  {start.layout}  >  {end.layout}")
    print(f"reproducible layout: {sum(same.values())} of {len(same)} moves have the bits of the uninterrupted run")
    if args.json:
        rows = [
            {"from": start.layout, "to": end.layout, "error": error, "limit": limit}
            for (start, end), (error, limit) in found.items()
        ]
        rows += [{"from": start.layout, "to": end.layout, "same_bits": each} for (start, end), each in same.items()]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(not all(error <= limit for error, limit in found.values()) or not all(same.values()))
