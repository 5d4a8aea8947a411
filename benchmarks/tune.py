"""`megaaccum tune` against an exhaustive run: how much slower the layout is that it takes than the best of all.

    python -m benchmarks tune [--ranks 4] [--all 8] [--top 3] [--json FILE]

A small model on ranks of this machine. The first `--all` layouts of the planner's ranking are measured; then the ladder
runs over what was measured, with the first one made to run out of memory and the second one's gradient made to be not
finite. The winner is compared with the fastest of the layouts that are left.
"""

from __future__ import annotations

import argparse
import json
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
    dropped = {candidates[0].name: OUT_OF_MEMORY, candidates[1].name: NOT_FINITE}

    def measure(candidate: Candidate) -> Outcome:
        verdict = dropped.get(candidate.name)
        return every[candidate.name] if verdict is None else Outcome(verdict=verdict)

    ladder = Ladder(candidates, top=args.top)
    best = ladder.run(measure, ["tp", "pp", "sync"])
    left = [each.seconds for name, each in every.items() if each.verdict == MEASURED and name not in dropped]
    fastest = min(seconds for seconds in left if seconds is not None)
    assert best is not None
    share, tried = ladder.seconds_of(best) / fastest - 1, len(ladder.tried)
    print(f"tune took row {best.row} after {tried} layouts, {share:.1%} slower than the fastest of {len(left)}")
    if args.json is not None:
        report = {name: each.seconds for name, each in every.items()} | {"tuned": best.name, "slower": share}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0
