"""The acceptance table of mixtures of experts, cell by cell: is the gradient that of one process?

    python -m benchmarks experts [--only TEXT] [--part I/N] [--json F]

The cells are in tests/support/expert_table.py. It measures no speed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaaccum.lab.verification.testing import RanksFailed
from tests.support.expert_table import Cell, measured, table

PER_START = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--part", default="1/1", help="the I-th of N parts of the table")
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    args = parser.parse_args(argv)
    part, parts = map(int, args.part.split("/"))
    cells = [cell for cell in table() if args.only in str(cell)][part - 1 :: parts]
    failed: dict[str, list[str]] = {}
    for size in sorted({cell.case.world_size for cell in cells}):
        mine = [cell for cell in cells if cell.case.world_size == size]
        for at in range(0, len(mine), PER_START):
            together = mine[at : at + PER_START]
            for cell, problems in _outcomes(together).items():
                if problems:
                    failed[str(cell)] = problems
                    print(f"FAILED  {cell}\n  " + "\n  ".join(problems[:6]), flush=True)
            done = at + len(together)
            print(f"{size} ranks: {done} of {len(mine)} cells; {len(failed)} of all have failed", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"cells": [str(cell) for cell in cells], "failed": failed}, indent=2) + "\n")
    return 1 if failed else 0


def _outcomes(cells: list[Cell]) -> dict[Cell, list[str]]:
    """The problems of each cell; each alone if one ends the ranks."""
    try:
        return measured(cells)
    except RanksFailed as error:
        if len(cells) == 1:
            return {cells[0]: str(error).splitlines()[-40:]}
        return {cell: problems for each in cells for cell, problems in _outcomes([each]).items()}
