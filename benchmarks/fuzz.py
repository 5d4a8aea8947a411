"""Random legal layouts against one process: three steps of each, whose loss, norm and weights have to agree.

    python -m benchmarks fuzz --cells N --seed S [--first I] [--of KEY] [--cell JSON] [--json F]

Cell I of a seed is the same on every machine. Axes: tp, sequence parallel, cp, pp, schedule, chunks and uneven stages,
dp, ep; backend, ZeRO stage, sync mode, replicas, order of sums, blocks of matrices and sequences; accumulation,
flushes, and calls per step with N known or not; stages of one's own, also in a V; precision; architecture, latent
attention, experts, multi-token prediction, recompute, frozen parts, dropout, Muon, SOAP, Lion, learning rates that
move or belong to parts; loss scales that move, sums in BF16; masks of unequal length, documents
in a row, micro-batches of unequal length, batch warm-up, speculative steps,
ranks without a token, ranks with too few micro-batches, parameters that some micro-batches do not use, micro-batches
that are not finite (skipped, left out, or set to 0), evaluations between steps and calls, steps that a load drops, and
a resume at another layout.

What fails is made smaller, as long as it still fails, and printed as the `--cell` that repeats it. In 16 bits every
token goes to all experts, since rounding would change which it goes to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import fuzz_cell, fuzz_reference
from benchmarks.fuzz_cell import Cell, Trained
from benchmarks.fuzz_draws import draw, is_legal
from megaaccum.lab.verification.compare import cut
from megaaccum.lab.verification.records import Piece
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.lab.verification.testing.ranks import RanksFailed

PER_START = 8
"""Cells in one start of ranks, which takes longer than a cell."""
SECONDS_PER_CELL = 40
FACTOR = 4.0
"""How much farther from float64 a layout may be than one process of the same precision."""
SCALAR = {"fp64": 1e-11, "fp32": 2e-6, "bf16": 2.0**-7, "fp16": 2.0**-9}
"""Relative error of loss and norm, beyond FACTOR times that of one process in the same precision."""
CHANGE = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Error of the weights' change, relative to that change, beyond FACTOR times that of one process."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--cells", type=int, default=20, help="cells to run")
    parser.add_argument("--seed", type=int, default=0, help="cells of another seed are others")
    parser.add_argument("--first", type=int, default=0, help="index of the first cell")
    parser.add_argument("--of", default="", help="only cells that have this key (num_experts, optimizer=soap)")
    parser.add_argument("--cell", help="run this one cell, given as JSON, in place of drawn ones")
    parser.add_argument("--no-minimise", action="store_true", help="leave what fails as it was drawn")
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    args = parser.parse_args(argv)
    if args.cell:
        cells = [Cell(**json.loads(args.cell))]
    else:
        every = (draw(args.seed, index) for index in itertools.count(args.first))
        cells = list(itertools.islice((each for each in every if _has(each, args.of)), args.cells))
    failed: dict[str, list[str]] = {}
    refused = 0
    for number, (cell, problems) in enumerate(outcomes(cells), start=1):
        if problems is None:
            refused += 1
        elif problems:
            print(f"FAILED  {cell}\n  " + "\n  ".join(problems[:12]), flush=True)
            small, why = (cell, problems) if args.no_minimise else minimised(cell)
            print(f"smallest that fails: --cell '{small}'\n  " + "\n  ".join(why[:4]), flush=True)
            failed[str(small)] = why
        if number % PER_START == 0 or number == len(cells):
            print(f"{number} of {len(cells)} cells, {len(failed)} not clean, {refused} refused", flush=True)
    if args.json:
        found = {"seed": args.seed, "first": args.first, "cells": len(cells), "refused": refused, "failed": failed}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if failed else 0


# --- running ---------------------------------------------------------------------------------------------------------


def _has(cell: Cell, asked: str) -> bool:
    """Whether a cell has the key, or the key with the value, that is asked for."""
    keys = cell.model | cell.layout | cell.policies
    name, _, value = asked.partition("=")
    return not asked or (name in keys and value in ("", str(keys[name])))


def outcomes(cells: Sequence[Cell]) -> Iterator[tuple[Cell, list[str] | None]]:
    """(cell, what was wrong with it; None if the ranks refused it) of each, in an order of their own."""
    for size in sorted({cell.world_size for cell in cells}):
        mine = [cell for cell in cells if cell.world_size == size]
        for at in range(0, len(mine), PER_START):
            yield from _together(mine[at : at + PER_START])


def _together(cells: list[Cell]) -> Iterator[tuple[Cell, list[str] | None]]:
    """Check cells of one world size in one start of ranks; each alone if one ends the ranks."""
    try:
        problems = check(cells)
    except RanksFailed:
        problems = [_alone(cell) for cell in cells]
    yield from zip(cells, problems, strict=True)


def _alone(cell: Cell) -> list[str] | None:
    try:
        return check([cell])[0]
    except RanksFailed as error:
        kinds = [outcome.error for outcome in error.outcomes if outcome.error is not None]
        if kinds and all(kind.kind == "ConfigError" for kind in kinds) and len(kinds) == cell.world_size:
            print(f"refused {cell}\n  {kinds[0].text[:300]}", flush=True)
            return None
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[:1] + [f"{kind.kind}: {kind.text}"[:300] for kind in kinds] + lines[-12:]


def check(cells: list[Cell]) -> list[list[str]]:
    """The problems of each of `cells`, all of one world size. Raises RanksFailed."""
    limit = SECONDS_PER_CELL * len(cells) + 60.0
    exact, near = zip(*run_ranks(fuzz_reference.references, 1, cells, timeout=limit)[0], strict=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        by_rank = run_ranks(fuzz_cell.train_each, cells[0].world_size, cells, folder, timeout=limit)
    return [
        problems(cell, list(ranks), true, like)
        for cell, ranks, true, like in zip(cells, zip(*by_rank, strict=True), exact, near, strict=True)
    ]


def problems(cell: Cell, ranks: list[Trained], exact: Trained, near: Trained) -> list[str]:
    """How `ranks` differ from `exact`, one process in float64, by more than `near`, one in the cell's precision."""
    found = []
    for rank, got in enumerate(ranks):
        for step, (mine, true, like) in enumerate(zip(got.steps, exact.steps, near.steps, strict=True), start=1):
            where = f"rank {rank}, step {step}"
            got_it, due = ((each.skipped, each.num_tokens, each.loss_scale) for each in (mine, like))
            if got_it != due:
                found.append(f"{where}: (skipped, tokens, loss scale) {got_it}, not {due}")
            for name in () if true.skipped else ("loss", "norm"):
                found += _scalar(f"{where}: {name}", cell, *(getattr(each, name) for each in (mine, true, like)))
        for number, values in enumerate(zip(got.evaluations, exact.evaluations, near.evaluations, strict=True)):
            found += _scalar(f"rank {rank}: evaluation {number}", cell, *values)
    return found + _weights(cell, ranks, exact, near)


def _scalar(name: str, cell: Cell, mine: float, true: float, like: float) -> list[str]:
    relative = SCALAR["fp32"] if cell.model.get("optimizer") == "soap" else SCALAR[cell.lane]
    limit = FACTOR * abs(like - true) + relative * abs(true)
    return [] if abs(mine - true) <= limit else [f"{name} {mine!r}, not {true!r}"]


def _weights(cell: Cell, ranks: list[Trained], exact: Trained, near: Trained) -> list[str]:
    """Each parameter's change over the steps, on every tp rank, and that none is missing. Elements that rounding
    decides (nan of a reference) may be anything."""
    pieces: dict[tuple[str, int], list[Piece]] = {}
    for got in ranks:
        for part in got.parts:
            pieces.setdefault((part.name, part.tp_rank), []).append(part)
    names = {part.name for part in exact.parts}
    found = [f"{name} is on no rank" for name in sorted(names - {name for name, _ in pieces})]
    trues, likes, starts = ({part.name: part for part in of} for of in (exact.parts, near.parts, exact.before))
    total = sum(float((trues[n].values - starts[n].values).square().nansum()) for n in names) / len(names)
    for (name, tp_rank), parts in pieces.items():
        true, like, start = (cut(each[name].values, parts[0]) for each in (trues, likes, starts))
        mine = _whole(parts, true)
        sure = mine.isnan() | ~(true.isnan() | like.isnan())
        true, like, start, mine = (each[sure] for each in (true, like, start, mine))
        size = max(float((true - start).norm()), 0.03 * total**0.5, 1e-30)  # all steps may be skipped
        limit = FACTOR * float((like - true).norm()) / size + CHANGE[cell.lane]
        error = float((mine - true).norm()) / size
        if not error <= limit:
            found.append(f"{name} (tp rank {tp_rank}): its change is off by {error:.2e} > {limit:.1e}")
    return found


def _whole(parts: list[Piece], like: torch.Tensor) -> torch.Tensor:
    """Put `parts` together, in the size of `like`; nan where there is no part, and where two parts disagree."""
    flat = torch.full_like(like, float("nan"))
    for part in parts:
        here = flat[part.start : part.start + part.values.numel()]
        values = part.values.reshape(-1)
        agree = here.isnan() | ((here - values).abs() <= 1e-6 * values.abs() + 1e-9)
        here.copy_(torch.where(agree, values, torch.full_like(values, float("nan"))))
    return flat


# --- making smaller --------------------------------------------------------------------------------------------------


def minimised(cell: Cell, seconds: float = 300.0) -> tuple[Cell, list[str]]:
    """The smallest cell that still fails of those that leave out one thing after the other, and how it fails."""
    end = time.monotonic() + seconds
    why = _alone(cell)
    if not why:
        return cell, ["it does not fail alone: what a cell before it left matters"]
    kind, smaller = _kind(why), True
    while smaller and time.monotonic() < end:
        smaller = False
        for candidate in _smaller(cell):
            if time.monotonic() > end or not is_legal(candidate):
                continue
            problems = _alone(candidate)
            if problems and _kind(problems) == kind:
                cell, why, smaller = candidate, problems, True
                break
    return cell, why


def _kind(problems: list[str]) -> str:
    """The kind of a failure: the errors' classes, or other numbers."""
    classes = {line.split(":")[0] for line in problems if re.match(r"[A-Z]\w+(Error|Disagreement): ", line)}
    return " ".join(sorted(classes)) or ("ended" if "failed first" in problems[0] else "numbers")


def _smaller(cell: Cell) -> Iterator[Cell]:
    """`cell` with one thing less, the largest first."""
    change: Callable[..., Cell] = lambda **keys: dataclasses.replace(cell, **keys)  # noqa: E731
    for name, plain in (
        ("resume", None), ("bad", None), ("hollow", None), ("short", 0), ("frozen", ""), ("evaluate", False),
        ("calls", 1), ("told", True), ("masks", "full"), ("lane", "fp32"), ("microbatches", 8),
        ("lengths", False), ("dropped", False), ("gated", False), ("documents", False),
    ):  # fmt: skip
        if getattr(cell, name) != plain:
            yield change(**{name: plain})
    for size in (1, 2):
        if size < cell.world_size:
            yield change(world_size=size)
    for part in ("model", "layout", "resume", "policies"):
        keys = getattr(cell, part) or {}
        for key in keys:
            yield change(**{part: {name: value for name, value in keys.items() if name != key}})


if __name__ == "__main__":
    sys.exit(main())
