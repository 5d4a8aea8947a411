"""Seconds of F, I and W of one Megatron GPT layer on this machine's processor, beside Megatron-core's own backward.

    python -m benchmarks.layer [--hidden 512] [--tokens 512] [--repeat 20] [--json FILE]

Processor time of one thread, so that what else runs on the machine counts little; the median of `--repeat`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.interop.load import load


def measure(hidden: int, tokens: int, repeat: int) -> dict[str, float]:
    """{F, B, I, W: seconds}; B is the layer's backward before its weight gradients wait. Runs on one rank."""
    import torch

    from megaaccum.executor.wgrad import WeightGrads, install, put_aside

    torch.set_num_threads(1)
    layer = _layer(hidden, tokens)
    x = torch.randn(tokens, 1, hidden, requires_grad=True)

    def forward():
        return layer(x, None, rotary_pos_emb=None)

    whole = [_timed(forward, lambda y: y.sum().backward()) for _ in range(repeat)]
    install(layer)
    apart = []
    for _ in range(repeat):
        owed = WeightGrads()

        def input_grad(y, owed=owed):
            with put_aside(owed):
                y.sum().backward()

        apart.append(_timed(forward, input_grad, lambda _, owed=owed: owed.compute()))
    forward_, backward = (statistics.median(each) for each in zip(*whole, strict=True))
    _, i, w = (statistics.median(each) for each in zip(*apart, strict=True))
    return {"F": forward_, "B": backward, "I": i, "W": w}


def _timed(forward: Callable, *passes: Callable) -> list[float]:
    """Processor seconds of the forward and of each pass over its output."""
    marks = [time.thread_time()]
    y = forward()
    marks.append(time.thread_time())
    for each in passes:
        each(y)
        marks.append(time.thread_time())
    return [after - before for before, after in itertools.pairwise(marks)]


def _layer(hidden: int, tokens: int, params_dtype: str = "fp32"):
    """A decoder of one layer, with its final norm."""
    from megaaccum import config
    from megaaccum.distributed import groups
    from megaaccum.pretrain.model import gpt

    flags = (
        f"--num_layers 1 --hidden_size {hidden} --num_attention_heads {hidden // 64} --seq_length {tokens} "
        "--attention_dropout 0 --hidden_dropout 0 --train_iters 1 --lr 1e-3 --pp_microbatches 1 --backend ddp "
        "--data_path none --swiglu --normalization RMSNorm --position_embedding_type rope "
        f"--params_dtype {params_dtype}"
    )
    plan = config.resolve(load(None, flags.split()), world_size=1)
    built = groups.build(plan.layout, timeout_minutes=1)
    return gpt.build_chunks(plan, built, vocab_size=64)[0].decoder


def main(argv: list[str] | None = None) -> int:
    """Measure as `argv` asks; returns the exit code."""
    from benchmarks.schedules import conditions

    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    (seconds,) = run_ranks(measure, 1, args.hidden, args.tokens, args.repeat, timeout=300)
    for name, value in seconds.items():
        print(f"{name}  {value * 1e3:8.2f} ms  {value / seconds['F']:5.2f} F")
    print(f"I + W is {(seconds['I'] + seconds['W']) / seconds['B']:.2f} of B")
    if args.json is not None:
        report = {"conditions": conditions(), "hidden": args.hidden, "tokens": args.tokens, "seconds": seconds}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    # By its own name: ranks look up what they run by it.
    from benchmarks.layer import main as main_by_name

    sys.exit(main_by_name())
