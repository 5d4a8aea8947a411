"""Bytes that one optimizer step moves between data-parallel ranks: every sync mode, and the libraries' stock loops.

    python -m benchmarks bytes [--microbatches M] [--json F]

Counted on 4 ranks without a pipeline, in the second step; predicted by planner/sync_mode.py. The lower bound of a step
whose parameters and gradients are sharded: each rank has to receive the others' parameters once, and give away what it
added to their gradients once. The stock loops accumulate as their documentation says; `naive` ones as people write them
first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from megaaccum import config as configuration
from megaaccum.lab.planner import footprint, sync_mode
from megaaccum.lab.planner.stages import Stage
from megaaccum.lab.planner.weights import stage_parameters
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.interop.load import load

RANKS = 4
VOCABULARY = 512
MODEL = (
    "--num_layers 4 --hidden_size 64 --num_attention_heads 4 --seq_length 32 --vocab_size 512 --micro_batch_size 1 "
    "--attention_dropout 0 --hidden_dropout 0 --train_iters 10 --lr 1e-3 --untie_embeddings_and_output_weights"
).split()
OURS = (
    "",
    "--sync streaming",
    "--sync streaming --max_live_parameters 120000",
    "--zero_stage 2",
    "--zero_stage 1",
    "--backend fsdp2",
    "--backend fsdp2 --sync streaming",
    "--backend fsdp2 --data_parallel_replicas 2",
    "--backend fsdp2 --data_parallel_replicas 2 --sync streaming",
    "--backend megatron",
    "--backend ddp",
)
"""Every backend and sync mode, as the keys that name it."""
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
    """{"lower_bound": bytes, "rows": [{"sync", "keys", "counted", "calls", "predicted" or None}]}; bytes of rank 0,
    the most that any rank predicts."""
    rows = []
    for keys in OURS:
        plan = plan_of(keys.split(), microbatches)
        counted, calls, elements = run_ranks(ours, RANKS, keys.split(), microbatches, timeout=240)[0]
        mode = plan.config.sharding
        predicted = sync_mode.Forecast(plan, VOCABULARY).predict(mode).moved.total
        live = f", {mode.max_live_parameters:,} live" if mode.max_live_parameters else ""
        name = f"{footprint.mode_name(mode)}{live}"
        rows.append({"sync": name, "keys": keys, "counted": counted, "calls": calls, "predicted": predicted})
        bound = (RANKS - 1) / RANKS * elements * 4 * 2
    plan = plan_of([], microbatches)
    for name in STOCK:
        counted, calls, _ = run_ranks(stock, RANKS, name, microbatches, timeout=240)[0]
        rows.append(
            {"sync": name, "keys": "", "counted": counted, "calls": calls, "predicted": stock_prediction(name, plan)}
        )
    return {"ranks": RANKS, "microbatches": microbatches, "lower_bound": bound, "rows": rows}


def report(figures: dict) -> str:
    lines = [
        f"{figures['ranks']} ranks, {figures['microbatches']} micro-batches, FP32; lower bound "
        f"{figures['lower_bound']:,.0f} bytes per rank and step",
        f"{'mode':<42}{'counted':>14}{'predicted':>14}{'calls':>8}{'of the bound':>14}",
    ]
    for row in figures["rows"]:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:,.0f}"
        ratio = row["counted"] / figures["lower_bound"]
        lines.append(f"{row['sync']:<42}{row['counted']:>14,.0f}{predicted:>14}{row['calls']:>8}{ratio:>13.2f}x")
    return "\n".join(lines)


# --- on the ranks ----------------------------------------------------------------------------------------------------


def ours(flags: list[str], microbatches: int) -> tuple[float, int, int]:
    """(bytes, calls, elements of the model) of the second step of megaaccum."""
    plan, groups, chunks = build(flags, microbatches)
    elements = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    train_step = stepper_of(plan, groups, chunks)
    batches = [batch(index) for index in range(microbatches)]
    train_step.train(batches, step=0)
    traffic = train_step.train(batches, step=1).traffic
    return *_large(traffic), elements


def stepper_of(plan, groups, chunks):
    """megaaccum's train_step over the backend of `plan`."""
    from megaaccum import sharding
    from megaaccum.optim import adamw
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep
    from megaaccum.step.train_step import TrainStep

    bound = sharding.build(plan, groups, chunks, adamw.build(plan, chunks))
    return TrainStep(plan, groups, chunks, bound, GptForwardStep(groups, plan.batch.loss_norm))


def stock(name: str, microbatches: int) -> tuple[float, int, int]:
    """The same for a loop without megaaccum."""
    from megaaccum.observe.traffic import Meter

    _, groups, (chunk,) = build([], microbatches)
    elements = sum(param.numel() for param in chunk.parameters())
    step = stock_step(name, chunk, microbatches)
    step()
    with Meter(groups).counting() as traffic:
        step()
    return *_large(traffic), elements


def stock_step(name: str, chunk, microbatches: int) -> Callable[[], float]:
    """A function that makes one optimizer step of a stock loop and returns its mean loss."""
    return {STOCK[0]: _deepspeed, STOCK[1]: _fsdp2, STOCK[2]: _ddp}[name](chunk, microbatches)


def stock_prediction(name: str, plan) -> float | None:
    """Bytes per rank of a stock loop. FSDP2 gathers each layer twice per micro-batch and what is in no layer (the root)
    once, and reduces in every backward; DDP reduces all in every backward. What DeepSpeed still holds when it needs it
    again is no formula's: it moves at most what streaming does."""
    if name == STOCK[0]:
        return None
    m, share = plan.batch.num_microbatches, (RANKS - 1) / RANKS
    whole = sync_mode.Forecast(plan, VOCABULARY).elements(0).total
    root = stage_parameters(plan.config.model, Stage(0, 0, True, True, True), VOCABULARY, plan.layout).total
    per = 3 * whole - root if name == STOCK[1] else 2 * whole
    return float(share * 4 * per * m)


def _deepspeed(chunk, microbatches: int) -> Callable[[], float]:
    """The engine's own accumulation: forward, backward and step for every micro-batch."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        # By default parameters under these sizes stay gathered, which is all of a model as small as this.
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1_000_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
    }
    adam = torch.optim.AdamW(chunk.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=chunk, optimizer=adam, config=settings, dist_init_required=False)

    def step() -> float:
        total = 0.0
        for index in range(microbatches):
            loss = _loss(engine, batch(index))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total / microbatches

    return step


def _fsdp2(chunk, microbatches: int) -> Callable[[], float]:
    """fully_shard on every layer and the whole; backward of each micro-batch as it comes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in chunk.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(chunk, mesh=mesh)
    return _plain(chunk, torch.optim.AdamW(chunk.parameters(), lr=1e-3), microbatches)


def _ddp(chunk, microbatches: int) -> Callable[[], float]:
    """DistributedDataParallel; backward of each micro-batch as it comes."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(chunk)
    wrapped.register_comm_hook(None, allreduce_hook)  # what DDP does anyway, where it can be counted
    return _plain(wrapped, torch.optim.AdamW(chunk.parameters(), lr=1e-3), microbatches)


def _plain(model, adam, microbatches: int) -> Callable[[], float]:
    def step() -> float:
        total = 0.0
        for index in range(microbatches):
            loss = _loss(model, batch(index)) / microbatches
            loss.backward()
            total += float(loss.detach())
        adam.step()
        adam.zero_grad()
        return total

    return step


def _loss(model, of):
    losses = model(of["tokens"], of["position_ids"], None, labels=of["labels"])
    return losses.float().mean()


def _large(traffic) -> tuple[float, int]:
    """(bytes, calls) of collectives over the data-parallel ranks, which are the world here; those that move less than
    a norm's parameters (loss, norm, agreement) are left out."""
    large = [count for lane, count in traffic.items() if count.num_bytes > 256 * count.calls and "send" not in lane]
    return sum(count.num_bytes for count in large), sum(count.calls for count in large)


def plan_of(flags: list[str], microbatches: int):
    keys = [*MODEL, "--pp_microbatches", str(microbatches), "--data_path", "none", *flags]
    return configuration.resolve(load(None, keys), world_size=RANKS)


def build(flags: list[str], microbatches: int):
    from megaaccum.distributed import groups
    from megaaccum.pretrain.model import gpt as model

    plan = plan_of(flags, microbatches)
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=2)
    return plan, built, model.build_chunks(plan, built, vocab_size=VOCABULARY)


def batch(index: int):
    import torch

    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCABULARY, (1, 33), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, 32),
        "position_ids": torch.arange(32).unsqueeze(0),
    }
