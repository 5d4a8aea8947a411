"""`megaaccum tune` against an exhaustive run: how much slower the layout is that it takes than the best of all.

    python -m benchmarks tune [--ranks 4] [--all 8] [--top 3] [--rounds 3] [--again 5] [--json FILE]

A small model on ranks of this machine, and the first `--all` layouts of the planner's ranking. `Fallbacks` measure as
`megaaccum tune` does, with the first layout made to run out of memory and the second one's gradient made to be not
finite. Then all that are left are measured `--again` times in turns, so that each meets the same machine; the medians
are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from megaaccum.lab.planner.fallbacks import NOT_FINITE, OUT_OF_MEMORY, Candidate, Fallbacks, Outcome
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.trial import Trials, candidates_of
from megaaccum.lab.planner.workload import make_workload
from megaaccum.pretrain.interop.load import load

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
    parser.add_argument("--rounds", type=int, default=3, help="as that of `megaaccum tune`")
    parser.add_argument("--again", type=int, default=5, help="rounds of the exhaustive run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.all < 3:
        parser.error(f"--all {args.all}: two layouts fail on purpose, so that it has to be at least 3")
    workload = make_workload(load(None, MODEL.split()), world_size=args.ranks, hardware=load_hardware("h100"))
    candidates = candidates_of(search(workload))[: args.all]
    with tempfile.TemporaryDirectory(prefix="megaaccum-tune-") as folder:
        command = [sys.executable, "-m", "megaaccum", "train"]
        trials = Trials(workload=workload, folder=Path(folder), command=command, time_limit=300.0)
        tuned, tried = _tuned(candidates, trials, top=args.top, rounds=args.rounds)
        report = _compared(tuned, tried, _in_turns(candidates[2:], trials, args.again))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _tuned(candidates: list[Candidate], trials: Trials, *, top: int, rounds: int) -> tuple[Candidate, int]:
    """The layout that tuning takes, and how many it tried."""
    dropped = {candidates[0].name: OUT_OF_MEMORY, candidates[1].name: NOT_FINITE}

    def measure(candidate: Candidate) -> Outcome:
        verdict = dropped.get(candidate.name)
        outcome = trials.run(candidate) if verdict is None else Outcome(verdict=verdict)
        print(f"tune: row {candidate.row}: {outcome.verdict} {outcome.seconds or 0:.4g} s", flush=True)
        return outcome

    fallbacks = Fallbacks(candidates, top=top)
    fallbacks.run(measure, ["tp", "pp", "sync"])
    best = fallbacks.run_again(lambda each, _: fallbacks.outcomes[each.name].then(measure(each)), rounds)
    assert best is not None
    return best, len(fallbacks.tried)


def _in_turns(candidates: list[Candidate], trials: Trials, again: int) -> dict[str, list[float]]:
    """{row and name of a layout: seconds of a step in each of `again` rounds over all}; every second round goes
    backwards."""
    seconds: dict[str, list[float]] = {_label(each): [] for each in candidates}
    for turn in range(again):
        for each in candidates[:: -1 if turn % 2 else 1]:
            seconds[_label(each)].append(trials.run(each).seconds or math.inf)
        print(f"round {turn + 1}:", *(f"{each[-1]:.4g}" for each in seconds.values()), flush=True)
    return seconds


def _compared(tuned: Candidate, tried: int, seconds: dict[str, list[float]]) -> dict[str, object]:
    """The seconds of all, and by how much the tuned layout's median is longer than the shortest."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(f"{medians[name]:.4g} s in turns, {min(times):.4g} to {max(times):.4g}: {name}")
    fastest = min(medians, key=medians.__getitem__)
    share = medians[_label(tuned)] / medians[fastest] - 1
    print(f"tune took row {tuned.row} after {tried} layouts: {share:+.1%} to the fastest of {len(medians)}, {fastest}")
    return {"tuned": _label(tuned), "fastest": fastest, "slower": share, "seconds": seconds}


def _label(candidate: Candidate) -> str:
    return f"row {candidate.row}  {candidate.name}"
