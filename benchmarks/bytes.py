"""Bytes that one optimizer step moves between data-parallel ranks: every policy, and the stock loops of the libraries.

    python -m benchmarks bytes [--microbatches M] [--json F]

Counted on 4 ranks without a pipeline, in the second step. The lower bound of a step whose parameters and gradients are
sharded: each rank has to receive the others' parameters once, and give away what it added to their gradients once. The
stock loops accumulate as their documentation says; `naive` ones as people write them first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaaccum import config as configuration
from megaaccum import policies
from megaaccum.testing import run_ranks

RANKS = 4
MODEL = (
    "--num_layers 4 --hidden_size 64 --num_attention_heads 4 --seq_length 32 --vocab_size 512 --micro_batch_size 1 "
    "--attention_dropout 0 --hidden_dropout 0 --train_iters 10 --lr 1e-3 --untie_embeddings_and_output_weights"
).split()
OURS = {
    "deepspeed resident": [],
    "deepspeed streaming": ["--sync", "streaming"],
    "fsdp2 resident": ["--boundary", "fsdp2"],
    "fsdp2 streaming": ["--boundary", "fsdp2", "--sync", "streaming"],
    "megatron resident": ["--boundary", "megatron"],
    "ddp resident": ["--boundary", "ddp"],
}
STOCK = ("stock DeepSpeed ZeRO-3", "stock FSDP2, naive", "stock DDP, naive")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks bytes", description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step on each rank")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    figures = measure(args.microbatches)
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(microbatches: int) -> dict:
    """{"lower_bound": bytes, "rows": [{"policy", "counted", "calls", "predicted" or None}]}; bytes of rank 0."""
    plan = _plan([], microbatches)
    rows = []
    for name, flags in OURS.items():
        counted, calls, elements = run_ranks(ours, RANKS, flags, microbatches, timeout=240)[0]
        (row,) = (row for row in policies.predictions(plan, elements, 0) if row.policy == name)
        rows.append({"policy": name, "counted": counted, "calls": calls, "predicted": row.total})
        bound = (RANKS - 1) / RANKS * elements * 4 * 2
    for name in STOCK:
        counted, calls, _ = run_ranks(stock, RANKS, name, microbatches, timeout=240)[0]
        rows.append({"policy": name, "counted": counted, "calls": calls, "predicted": None})
    return {"ranks": RANKS, "microbatches": microbatches, "lower_bound": bound, "rows": rows}


def report(figures: dict) -> str:
    lines = [
        f"{figures['ranks']} ranks, {figures['microbatches']} micro-batches, FP32; lower bound "
        f"{figures['lower_bound']:,.0f} bytes per rank and step",
        f"{'policy':<26}{'counted':>14}{'predicted':>14}{'calls':>8}{'of the bound':>14}",
    ]
    for row in figures["rows"]:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:,.0f}"
        ratio = row["counted"] / figures["lower_bound"]
        lines.append(f"{row['policy']:<26}{row['counted']:>14,.0f}{predicted:>14}{row['calls']:>8}{ratio:>13.2f}x")
    return "\n".join(lines)


# --- on the ranks ----------------------------------------------------------------------------------------------------


def ours(flags: list[str], microbatches: int) -> tuple[float, int, int]:
    """(bytes, calls, elements of the model) of the second step of megaaccum."""
    from megaaccum import boundary, optimizer
    from megaaccum.step import Stepper

    plan, groups, chunks = _build(flags, microbatches)
    elements = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    bound = boundary.build(plan, groups, chunks, optimizer.build(plan, chunks))
    stepper = Stepper(plan, groups, chunks, bound)
    batches = [_batch(index) for index in range(microbatches)]
    stepper.train(batches, step=0)
    traffic = stepper.train(batches, step=1).traffic
    return *_large(traffic), elements


def stock(name: str, microbatches: int) -> tuple[float, int, int]:
    """The same for a loop without megaaccum."""
    from megaaccum.traffic import Meter

    _, groups, (chunk,) = _build([], microbatches)
    elements = sum(param.numel() for param in chunk.parameters())
    step = {STOCK[0]: _deepspeed, STOCK[1]: _fsdp2, STOCK[2]: _ddp}[name](chunk, microbatches)
    step()
    with Meter(groups).counting() as traffic:
        step()
    return *_large(traffic), elements


def _deepspeed(chunk, microbatches: int):
    """The engine's own accumulation: forward, backward and step for every micro-batch."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        # By default parameters under these sizes stay gathered, which is all of a model as small as this.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
    }
    adam = torch.optim.AdamW(chunk.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=chunk, optimizer=adam, config=settings, dist_init_required=False)

    def step() -> None:
        for index in range(microbatches):
            engine.backward(_loss(engine, _batch(index)))
            engine.step()

    return step


def _fsdp2(chunk, microbatches: int):
    """fully_shard on every layer and the whole; backward of each micro-batch as it comes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in chunk.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(chunk, mesh=mesh)
    return _plain(chunk, torch.optim.AdamW(chunk.parameters(), lr=1e-3), microbatches)


def _ddp(chunk, microbatches: int):
    """DistributedDataParallel; backward of each micro-batch as it comes."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(chunk)
    wrapped.register_comm_hook(None, allreduce_hook)  # what DDP does anyway, where it can be counted
    return _plain(wrapped, torch.optim.AdamW(chunk.parameters(), lr=1e-3), microbatches)


def _plain(model, adam, microbatches: int):
    def step() -> None:
        for index in range(microbatches):
            (_loss(model, _batch(index)) / microbatches).backward()
        adam.step()
        adam.zero_grad()

    return step


def _loss(model, batch):
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses.float().mean()


def _large(traffic) -> tuple[float, int]:
    """(bytes, calls) of collectives over the data-parallel ranks, which are the world here; those that move less than
    a norm's parameters (loss, norm, agreement) are left out."""
    large = [count for lane, count in traffic.items() if count.num_bytes > 256 * count.calls and "send" not in lane]
    return sum(count.num_bytes for count in large), sum(count.calls for count in large)


def _plan(flags: list[str], microbatches: int):
    keys = [*MODEL, "--num_chunks", str(microbatches), "--data_path", "none", *flags]
    return configuration.resolve(configuration.load(None, keys), world_size=RANKS)


def _build(flags: list[str], microbatches: int):
    from megaaccum import groups, model

    plan = _plan(flags, microbatches)
    built = groups.build(plan.layout, timeout_minutes=2)
    return plan, built, model.build_chunks(plan, built, vocab_size=512)


def _batch(index: int):
    import torch

    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 512, (1, 33), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, 32),
        "position_ids": torch.arange(32).unsqueeze(0),
    }
