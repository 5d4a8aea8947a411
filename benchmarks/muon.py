"""A step with Muon beside the same step with AdamW, and beside a bare loop with torch.optim.Muon on one rank.

    python -m benchmarks muon [--steps 8] [--hidden 128] [--picture FILE]

Every line is the median over steps, the first two left out, in seconds, of the same global batch. The bare loop has no
engine and no sharding: its model is whole, its matrices are the layers' weights as they are, and its products are BF16
on every machine, as torch has them. Bytes are those that all ranks receive for Muon, counted and predicted. --picture
draws the owners' load of Llama-3-8B's matrices on 64 ranks instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from megaaccum.lab.verification.testing import run_ranks

RANKS = 4
BACKENDS = ("--zero_stage 1", "--zero_stage 3", "--backend fsdp2", "--backend megatron", "--backend ddp")


def flags(hidden: int, rest: str) -> list[str]:
    model = (
        f"--num_layers 4 --hidden_size {hidden} --num_attention_heads 4 --seq_length 64 --vocab_size 61 --swiglu"
        " --no_add_bias_linear --normalization RMSNorm --attention_dropout 0 --hidden_dropout 0 --train_iters 100"
        " --lr 1e-3 --micro_batch_size 1 --data_path none --make_vocab_size_divisible_by 16"
    )
    return f"{model} {rest}".split()


def plan_of(hidden: int, rest: str, world_size: int) -> Any:
    from megaaccum import config
    from megaaccum.pretrain.interop.load import load

    return config.resolve(load(None, flags(hidden, rest)), world_size=world_size)


def batch_of(index: int) -> dict[str, Any]:
    import torch

    tokens = torch.randint(0, 61, (1, 65), generator=torch.Generator().manual_seed(index))
    return {
        "tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(1, 64),
        "position_ids": torch.arange(64)[None],
    }  # fmt: skip


def engine_steps(hidden: int, rest: str, steps: int) -> tuple[float, float]:
    """On a rank: (median seconds of a step, bytes that it received for Muon in the last)."""
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep

    plan = plan_of(hidden, rest, RANKS)
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=2)
    chunks = gpt.build_chunks(plan, built, vocab_size=61)
    forward = GptForwardStep(built, plan.batch.loss_norm)
    engine = initialize(plan, chunks, groups=built, forward_step_func=forward, reports=REPORTS)
    seconds, moved = [], 0.0
    for step in range(steps):
        batches = [batch_of(step * 8 + index) for index in range(plan.batch.num_microbatches)]
        start = time.perf_counter()
        result = engine.train_step(batches)
        seconds.append(time.perf_counter() - start)
        moved = sum(c.num_bytes for lane, c in result.traffic.items() if lane.startswith("all_to_all/tp_dp_cp/"))
    return statistics.median(seconds[2:]), moved


def bare_steps(hidden: int, steps: int) -> float:
    """On one rank: the median seconds of a step of a plain loop."""
    import torch

    from megaaccum.distributed import groups
    from megaaccum.lab.verification.subject import gpt_loss
    from megaaccum.lab.verification.whole_matrices import is_matrix
    from megaaccum.model import names
    from megaaccum.pretrain.model import gpt

    plan = plan_of(hidden, "", 1)
    groups.destroy()
    (model,) = gpt.build_chunks(plan, groups.build(plan.layout, timeout_minutes=2), vocab_size=61)
    named = list(names.named_parameters([model]))
    muon = torch.optim.Muon([param for name, param in named if is_matrix(name, param)], lr=1e-3)
    adam = torch.optim.AdamW([param for name, param in named if not is_matrix(name, param)], lr=1e-3, fused=True)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        for index in range(2 * RANKS):
            total, _ = gpt_loss(model, batch_of(step * 8 + index), means=False)
            (total / (64 * 2 * RANKS)).backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def of_llama(layers: int, hidden: int, keys: int, ffn: int) -> list[Any]:
    """The matrices of a Llama: queries, keys and values, and gate and up projection, are a parameter each."""
    from megaaccum.optim.owners import Matrix

    fused = [
        [(hidden, hidden), (keys, hidden), (keys, hidden)],
        [(hidden, hidden)],
        [(ffn, hidden)] * 2,
        [(hidden, ffn)],
    ]
    return [
        Matrix(f"{layer:03}.{param}", part, *shape)
        for layer in range(layers)
        for param, shapes in enumerate(fused)
        for part, shape in enumerate(shapes)
    ]


def draw(path: Path) -> None:
    """The owners' load of Llama-3-8B's matrices on 64 ranks: longest first, and in the order of the model."""
    from matplotlib.figure import Figure

    from megaaccum.optim.owners import assign, balance

    matrices = of_llama(32, 4096, 1024, 14336)
    ways = {
        "longest first": assign(matrices, 64),
        "in the order of the model": [matrices[rank::64] for rank in range(64)],
    }
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, owned) in zip(axes, ways.items(), strict=True):
        loads = [sum(matrix.flops(5) for matrix in each) / 1e12 for each in owned]
        axis.bar(range(64), loads, color="#9ecae1")
        axis.axhline(sum(loads) / 64, color="#e6550d", linewidth=1)
        axis.set(title=f"{title}: max / mean {balance(owned):.2f}", xlabel="owner", xlim=(-1, 64))
    axes[0].set_ylabel("TFLOP per step")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks muon", description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    if options.steps < 3:
        parser.error(f"--steps {options.steps}: the first two do not count, so that it has to be at least 3")
    if options.picture is not None:
        draw(options.picture)
        return 0
    from megaaccum.lab.planner.matrices import forecast
    from megaaccum.optim.owners import assign

    print(f"{'':<24}{'adam':>10}{'muon':>10}{'ratio':>8}{'counted':>14}{'predicted':>14}")
    for backend in BACKENDS:
        found = {}
        for optimizer in ("adam", "muon"):
            rest = f"{backend} --grad_accum_steps 2 --optimizer {optimizer}"
            ranks = run_ranks(engine_steps, RANKS, options.hidden, rest, options.steps, timeout=300)
            found[optimizer] = max(seconds for seconds, _ in ranks), sum(moved for _, moved in ranks)
        plan = plan_of(options.hidden, f"{backend} --grad_accum_steps 2 --optimizer muon", RANKS)
        expected = forecast(plan)
        predicted = RANKS * (expected.to_owners + expected.back)
        (adam, _), (muon, moved) = found["adam"], found["muon"]
        print(f"{backend:<24}{adam:>10.4f}{muon:>10.4f}{muon / adam:>8.2f}{moved:>14,.0f}{predicted:>14,.0f}")
    start = time.perf_counter()
    owners = sum(map(bool, assign(of_llama(126, 16384, 1024, 53248), 16384)))
    print(f"assignment of Llama-3.1-405B on 16,384 ranks: {time.perf_counter() - start:.3f} s, {owners} owners")
    (bare,) = run_ranks(bare_steps, 1, options.hidden, options.steps, timeout=300)
    print(f"{'bare loop, one rank':<24}{'':>10}{bare:>10.4f}")
    return 0
