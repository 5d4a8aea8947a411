"""`megaaccum tune` against an exhaustive run: how much slower the layout is that it takes than the best of all.

    python -m benchmarks tune [--ranks 4] [--all 8] [--top 3] [--again 5] [--json FILE]

A small model on ranks of this machine. The first `--all` layouts of the planner's ranking are measured; then the ladder
runs over what was measured, with the first one made to run out of memory and the second one's gradient made to be not
finite. The fastest of the layouts that are left was picked for a short time, which is partly luck, so the winner and it
are measured `--again` times in turns and their medians compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from megaaccum.cli.tune import candidates_of
from megaaccum.interop.load import load
from megaaccum.planner.hardware import load_hardware
from megaaccum.planner.ladder import MEASURED, NOT_FINITE, OUT_OF_MEMORY, Candidate, Ladder, Outcome
from megaaccum.planner.search import search
from megaaccum.planner.trial import Trials
from megaaccum.planner.workload import make_workload

MODEL = (
    "--num_layers 8 --hidden_size 128 --num_attention_heads 4 --seq_length 128 --global_batch_size 32 --lr 1e-3"
    " --train_iters 100 --attention_dropout 0 --hidden_dropout 0 --num_threads 1"
)


def main(argv: list[str] | None = None) -> int:
    """Measure as `argv` asks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--all", type=int, default=8, help="layouts of the exhaustive run")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--again", type=int, default=5, help="further runs of the winner and of the fastest")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    workload = make_workload(load(None, MODEL.split()), world_size=args.ranks, hardware=load_hardware("h100"))
    candidates = candidates_of(search(workload))[: args.all]
    with tempfile.TemporaryDirectory(prefix="megaaccum-tune-") as folder:
        command = [sys.executable, "-m", "megaaccum", "train"]
        trials = Trials(workload=workload, folder=Path(folder), command=command, time_limit=300.0)
        every = {}
        for candidate in candidates:
            every[candidate.name] = outcome = trials.run(candidate)
            print(f"row {candidate.row}: {outcome.verdict} {outcome.seconds or 0:.4g} s  {candidate.name}", flush=True)
        report = _compared(candidates, every, trials, args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _compared(
    candidates: list[Candidate], every: dict[str, Outcome], trials: Trials, args: argparse.Namespace
) -> dict[str, object]:
    """What the ladder takes beside the fastest: seconds of all, and by how much the winner is slower."""
    dropped = {candidates[0].name: OUT_OF_MEMORY, candidates[1].name: NOT_FINITE}

    def measure(candidate: Candidate) -> Outcome:
        verdict = dropped.get(candidate.name)
        return every[candidate.name] if verdict is None else Outcome(verdict=verdict)

    ladder = Ladder(candidates, top=args.top)
    best = ladder.run(measure, ["tp", "pp", "sync"])
    left = [each for each in candidates if every[each.name].verdict == MEASURED and each.name not in dropped]
    fastest = min(left, key=lambda each: every[each.name].seconds or math.inf)
    assert best is not None
    again: dict[str, list[float]] = {best.name: [], fastest.name: []}
    for _ in range(args.again if best is not fastest else 0):
        for each in (best, fastest):
            again[each.name].append(trials.run(each).seconds or math.inf)
    medians = [statistics.median(seconds or [1.0]) for seconds in (again[best.name], again[fastest.name])]
    share = medians[0] / medians[1] - 1
    print(
        f"tune took row {best.row} after {len(ladder.tried)} layouts; the fastest of {len(left)} was row {fastest.row}:"
        f" measured again in turns, {share:+.1%}"
    )
    return {name: each.seconds for name, each in every.items()} | {"tuned": best.name, "again": again, "slower": share}
