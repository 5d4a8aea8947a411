"""Cases of one GPU. Each runs on every rank of an existing process group, and returns figures and `ok`."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaaccum import upstream
from megaaccum.errors import ConfigError
from megaaccum.platform import cpu
from megaaccum.upstream import fsdp2
from tests.support import fused_adam, toy
from tests.support.distance import total_error
from tests.support.host_syncs import BUDGET, counted
from tests.support.parity import Case, Rig, reference

Found = dict[str, Any]
ROOT = Path(__file__).parents[2]
PLAIN = "--num_layers 4 --untie_embeddings_and_output_weights "
FARTHEST = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Relative error of a gradient against one process in FP32."""
SIZES = {"0.3B": (24, 1024), "1.2B": (24, 2048), "3B": (32, 2560)}
"""Layers and width."""


def environment(*, dry: bool) -> Found:
    """Versions of what is underneath, and names of libraries that megaaccum leans on (without those of torch's
    fully_shard its backend is refused)."""
    from megaaccum.platform import gpu

    missing, other = upstream.check(), fsdp2.check()
    found: Found = {"ok": missing == other, "missing": missing, "cuda": torch.version.cuda, "nccl": gpu.describe()}
    if not dry:
        found |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    return found | _allocated()


def gradient(*, layout: str = "", model: str = "", lane: str = "fp32", dry: bool) -> Found:
    """A layout's gradient against that of one process in FP32, then three steps of it."""
    model = PLAIN + model
    accumulated = "" if "--pp " in layout else "--grad_accum_steps 2 "
    case = Case(dist.get_world_size(), f"--pp_microbatches 8 {accumulated}{layout}", model, lane)
    if "fsdp2" in layout and fsdp2.check():
        return _refused(case)
    rig = Rig.of(case)
    got, _ = rig.watched()
    losses = [rig.train(step).loss for step in range(3)]
    error = total_error([got], reference(model, rig.plan.batch.global_batch_size, "fp32"))
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return {"ok": error < FARTHEST[lane] and falls, "error": error, "losses": losses}


def _refused(case: Case) -> Found:
    """The error of a torch without the fully_shard that backend fsdp2 drives."""
    try:
        Rig.of(case)
    except ConfigError as error:
        return {"ok": "needs the fully_shard of torch" in str(error), "refused": str(error)}
    return {"ok": False}


def three_steps(*, model: str, dry: bool) -> Found:
    """Losses that fall, where the whole batch in one process would not fit."""
    model = model.replace("2048", "64") if dry else model
    length = 64 if dry else 2048
    rig = Rig.of(Case(1, "--pp_microbatches 2", PLAIN + model, "bf16"))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 61, (2, 1, length + 1), generator=generator)
    batch = [
        {"tokens": each[:, :-1].contiguous(), "labels": each[:, 1:].contiguous(), "loss_mask": torch.ones(1, length),
         "position_ids": torch.arange(length)[None]}
        for each in tokens
    ]  # fmt: skip
    losses = [rig.train_step.train(batch, step=step).loss for step in range(3)]
    return {"ok": losses[-1] < losses[0], "losses": losses}


def saved_in_background(*, dry: bool) -> Found:
    """Step 2 is saved while step 3 runs; the run that resumes from it repeats step 3 to the bit."""
    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave

    case, folder = Case(1, "--pp_microbatches 8", PLAIN, "bf16"), tempfile.mkdtemp()
    rig = Rig.of(case)
    for step in (1, 2):
        rig.train(step)
    progress = save_load.Progress(step=2, consumed_samples=16, lr_schedule={}, data={}, shape={})
    group = groups.for_background(5)
    writing = BackgroundSave(folder, rig.backend, rig.groups, progress, keep_last=1, group=group)
    whole = rig.train(3)
    path = writing.finish()
    other = Rig.of(case)
    save_load.load(path, other.backend, other.groups, shape={})
    again = other.train(3)
    return {"ok": (whole.loss, whole.grad_norm) == (again.loss, again.grad_norm), "loss": whole.loss}


def host_syncs(*, layout: str = "", dry: bool) -> Found:
    """The host waits for the device in the same lines of the second step, and equally often, with 8 and with 16
    micro-batches: as often as docs/concepts/gpu.md says."""
    layout += " --reduce_bucket_size 500000000"  # one bucket
    found = {m: _waits(Case(1, f"--pp_microbatches {m} {layout}", PLAIN + "--clip_grad 0.01")) for m in (8, 16)}
    few = sum(found[8][0].values()) <= BUDGET
    return {"ok": found[8] == found[16] and few, "by place": found[8][0], "torch says": {m: found[m][1] for m in found}}


def _waits(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """By place, and by the line of the operations that torch warns of (none without a GPU)."""
    rig = Rig.of(case)
    rig.train(0)
    batch = rig.microbatches()
    with counted() as places, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if cpu.has_accelerator():
            torch.cuda.set_sync_debug_mode("warn")
        rig.train_step.train(batch, step=1)
        if cpu.has_accelerator():
            torch.cuda.set_sync_debug_mode("default")
    lines = [f"{each.filename}:{each.lineno}" for each in said if "called a synchronizing" in str(each.message)]
    return dict(places), dict(Counter(lines))


def adam(*, dry: bool) -> Found:
    """A fused optimizer that counts its calls, under ZeRO-3, against torch's AdamW over 20 steps and a resume."""
    case = Case(1, "--global_batch_size 4 --pp_microbatches 4", "--num_layers 2 --adam_beta2 0.95 --no_add_bias_linear")
    torchs, fused = fused_adam.both(case, 20, 10)
    apart = max(float((fused[name] - torchs[name]).abs().max()) for name in torchs)
    return {"ok": apart < 2e-6, "apart": apart}


# --- several ranks ---------------------------------------------------------------------------------------------------


def probe(*, dry: bool) -> Found:
    """Whether ranks reach each other at all: a sum, and a message each way."""
    rank, device = dist.get_rank(), cpu.device()
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    came = torch.zeros(1, device=device)
    mine = torch.full((1,), float(rank + 1), device=device)
    both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return {"ok": float(total[0]) == 2.0 and float(came) == 2.0 - rank}


def lanes(*, dry: bool) -> Found:
    """The executor's lanes between the groups of training find each other."""
    received = toy.lanes_of_a_layout(2, 1)
    return {"ok": received == [10.0 * (1 - dist.get_rank()) + lane for lane in (0, 1)], "received": received}


def queues(*, count: int, dry: bool) -> Found:
    """Three stages with this many hardware queues: trained, or refused over NCCL where they are too few."""
    from megaaccum.executor.p2p import queues_needed
    from megaaccum.schedule import build

    case = Case(3, "--pp 3 --schedule zb-h1 --pp_microbatches 6", PLAIN.replace("4", "6"))
    needed = queues_needed(build("zb-h1", pp=3, num_microbatches=6))
    refusal, loss = "", math.nan
    try:
        loss = Rig.of(case).train().loss
    except ConfigError as error:
        refusal = str(error)
    due = cpu.has_accelerator() and count < needed
    return {"ok": bool(refusal) == due, "needed": needed, "refused": refusal, "loss": loss}


def waiting_receives(*, dry: bool) -> Found:
    """Seconds of a BF16 product on rank 0 beside 0, 1, 2 and 4 receives that wait, on groups as the executor's lanes:
    what their thread blocks cost. Rank 1 leaves the GPU idle until the product is timed, then sends."""
    from megaaccum.executor.p2p import _lane_group

    on_host = dist.new_group(backend="gloo")
    lanes = [_lane_group([0, 1], cpu.has_accelerator(), None) for _ in range(4)]
    rank, device, size = dist.get_rank(), cpu.device(), 64 if dry else 4096
    element = torch.zeros(1, device=device)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for lane in lanes:  # NCCL connects two ranks at their first message, and both wait for it
        (dist.isend(element, 1, group=lane) if rank == 0 else dist.irecv(element, 0, group=lane)).wait()
    seconds = {}
    for count in (0, 1, 2, 4):
        posted = [dist.irecv(element.clone(), 1, group=lane) for lane in lanes[:count] if rank == 0]
        time.sleep(0.2)
        seconds[count] = _products(a, b, 100) if rank == 0 else 0.0
        dist.all_reduce(torch.zeros(1), group=on_host)
        posted += [dist.isend(element, 0, group=lane) for lane in lanes[:count] if rank == 1]
        for work in posted:
            work.wait()
        _wait()
    return {"ok": True, "seconds beside waiting receives": seconds}


def _products(a: torch.Tensor, b: torch.Tensor, count: int) -> float:
    """Median seconds of a product of nine rounds; waits for this stream alone, since another has a receive."""
    rounds = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(count):
            a @ b
        if cpu.has_accelerator():
            torch.cuda.current_stream().synchronize()
        rounds.append((time.perf_counter() - start) / count)
    return statistics.median(rounds)


def sent_tensors(*, dry: bool) -> Found:
    """A sent tensor is released when it has left, except for the flush's last, and not when the step ends; gloo's small
    ones are kept until the flush ends (executor/p2p.py)."""
    from megaaccum.executor import p2p

    sent: list[weakref.ref] = []
    put = p2p._Outbox.put
    most = 0

    def noting(outbox: Any, work: Any, tensor: torch.Tensor) -> None:
        nonlocal most
        time.sleep(0.0 if dry else 0.1)  # the host is far ahead of the device, where nothing has left yet
        sent.append(weakref.ref(tensor))
        put(outbox, work, tensor)
        most = max(most, sum(each() is not None for each in sent))

    rig = Rig.of(Case(2, "--pp 2 --schedule gpipe --pp_microbatches 16", PLAIN))
    rig.train()  # messages of a first flush go through host memory
    with patch.object(p2p._Outbox, "put", noting):
        rig.train()
    gc.collect()
    left = sum(each() is not None for each in sent)
    return {"ok": left <= 1 and (dry or most < len(sent)), "sent": len(sent), "most at once": most, "left": left}


# --- speed -----------------------------------------------------------------------------------------------------------


def _model(size: str, *, dry: bool) -> tuple[str, int]:
    """(flags of a LLaMA-like model, sequence length)."""
    layers, width = (2, 64) if dry else SIZES[size]
    length = 64 if dry else 4096
    return (
        f"--num_layers {layers} --hidden_size {width} --num_attention_heads {width // 32 if dry else width // 128}"
        f" --seq_length {length} --max_position_embeddings {length} --micro_batch_size {1 if dry else 2} --swiglu"
        " --normalization RMSNorm --position_embedding_type rope --no_add_bias_linear"
        " --untie_embeddings_and_output_weights --clip_grad 1 --init_method_std 0.02",
        length,
    )


def _large(layout: str, size: str, *, dry: bool) -> tuple[Rig, list[dict[str, torch.Tensor]]]:
    """A model of a real size, and a step of random tokens."""
    flags, length = _model(size, dry=dry)
    # Rig's own buckets are for tiny models; the other backends have their own, or none.
    layout = layout if "_bucket_" in layout or "--backend" in layout else f"--reduce_bucket_size 50000000 {layout}"
    rig = Rig.of(Case(1, f"--pp_microbatches {2 if dry else 8} {layout}", flags, "bf16"))
    batch = rig.plan.batch
    tokens = torch.randint(0, 61, (batch.num_microbatches, batch.micro_batch_size, length + 1))
    positions = torch.arange(length).expand(batch.micro_batch_size, length).contiguous()
    return rig, [
        {"tokens": each[:, :-1].contiguous(), "labels": each[:, 1:].contiguous(), "position_ids": positions,
         "loss_mask": torch.ones(batch.micro_batch_size, length)}
        for each in tokens
    ]  # fmt: skip


def _timed(step: Any, repeat: int, warm: int = 2) -> list[float]:
    """Seconds of each call after those that warm up, the device idle at both ends."""
    times = []
    for _ in range(repeat + warm):
        _wait()
        start = time.perf_counter()
        step()
        _wait()
        times.append(time.perf_counter() - start)
    return times[warm:]


def _wait() -> None:
    if cpu.has_accelerator():
        torch.cuda.synchronize()


def speed(*, layout: str = "", bare: bool = False, dry: bool) -> Found:
    """Tokens per second and the share of the GPU's peak; bare: Megatron's schedule over DeepSpeed by hand."""
    from megaaccum.pretrain.metrics import flops

    if "fsdp2" in layout and fsdp2.check():
        return _refused(Case(1, f"--pp_microbatches 2 {layout}", PLAIN))
    rig, batch = _large(layout, "1.2B", dry=dry)
    step: Callable[[], Any] = partial(rig.train_step.train, batch, step=1)
    if bare:
        moved = [{name: each.to(cpu.device()) for name, each in one.items()} for one in batch]
        step = partial(_bare(rig).step, moved)
    seconds = statistics.median(_timed(step, 2 if dry else 5))
    tokens = rig.plan.batch.global_batch_size * rig.plan.batch.seq_length
    rates = {"seconds per step": seconds, "tokens per second": tokens / seconds}
    rate = flops.step_flops(rig.plan.config, rig.plan.batch.global_batch_size, vocab_size=61) / seconds
    rates["TFLOP/s"] = rate / 1e12
    peak = None if dry else flops.peak_flops(torch.cuda.get_device_name(), "bf16")
    if peak:
        rates["mfu"] = rate / peak
    return {"ok": True} | rates | _allocated()


def _bare(rig: Rig) -> Any:
    """The same model, built again, under a hand-written loop."""
    from benchmarks.bare import BareLoop
    from megaaccum.config.deepspeed_config import deepspeed_config
    from megaaccum.optim import adamw
    from megaaccum.pretrain.model import gpt

    chunks = gpt.build_chunks(rig.plan, rig.groups, vocab_size=61)
    tokens = rig.plan.batch.global_batch_size * rig.plan.batch.seq_length
    made = adamw.build(rig.plan, chunks)
    return BareLoop(chunks, rig.groups, deepspeed_config(rig.plan), made, num_tokens=tokens, clip_grad=1.0)


def idle_gaps(*, dry: bool) -> Found:
    """Share of a step in which no kernel runs, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    rig, batch = _large("", "1.2B", dry=dry)
    _timed(lambda: rig.train_step.train(batch, step=1), 1)
    kinds = [ProfilerActivity.CPU] if dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as seen:
        start = time.perf_counter()
        rig.train_step.train(batch, step=1)
        _wait()
        wall = time.perf_counter() - start
    of = torch.autograd.DeviceType.CPU if dry else torch.autograd.DeviceType.CUDA
    ranges = sorted((each.time_range.start, each.time_range.end) for each in seen.events() if each.device_type == of)
    busy, until = 0.0, 0.0
    for begin, end in ranges:  # kernels of several streams overlap
        busy, until = busy + max(0.0, end - max(begin, until)) * 1e-6, max(end, until)
    return {"ok": busy > 0, "seconds": wall, "busy": busy, "idle share": max(0.0, 1 - busy / wall)}


def layer(*, dry: bool) -> Found:
    """Seconds of F, B, I and W of a layer in BF16, and of the ways in which a weight gradient gets into an FP32 sum."""
    from benchmarks.layer import _layer
    from megaaccum.executor.wgrad import WeightGrads, install, put_aside

    hidden, tokens, device = (64, 64, cpu.device()) if dry else (4096, 8192, cpu.device())
    module = _layer(hidden, tokens, "bf16").train()
    x = torch.randn(tokens, 1, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        return module(x, None, rotary_pos_emb=None)

    whole = statistics.median(_timed(lambda: forward().sum().backward(), 5))
    install(module)
    owed: list[WeightGrads] = []

    def input_grad() -> None:
        owed.append(WeightGrads())
        with put_aside(owed[-1]):
            forward().sum().backward()

    apart = statistics.median(_timed(input_grad, 5))
    late = statistics.median(_timed(lambda: owed.pop().compute(), 5))
    products = _weight_gradients(hidden, tokens, dry=dry)
    seconds = {"F": statistics.median(_timed(forward, 5)), "F + B": whole, "F + I": apart, "W": late}
    return {"ok": all(each > 0 for each in seconds.values())} | seconds | products


def _weight_gradients(hidden: int, tokens: int, *, dry: bool) -> Found:
    """Seconds of a BF16 product that ends in an FP32 sum: cast, then added; added as it is; made in FP32 (on a CPU,
    which has no such product, not measured)."""
    a, b = (torch.randn(tokens, hidden, device=cpu.device(), dtype=torch.bfloat16) for _ in range(2))
    total = torch.zeros(hidden, hidden, device=cpu.device())
    arms: dict[str, Callable[[], Any]] = {
        "product, cast, added": lambda: total.add_((a.t() @ b).float()),
        "product, added": lambda: total.add_(a.t() @ b),
    }
    if not dry:
        arms["product in FP32, added"] = lambda: total.add_(torch.mm(a.t(), b, out_dtype=torch.float32))
        arms["product into the sum"] = lambda: torch.addmm(total, a.t(), b, out_dtype=torch.float32)
    return {name: statistics.median(_timed(arm, 5)) for name, arm in arms.items()}


# --- memory ----------------------------------------------------------------------------------------------------------


def _allocated() -> Found:
    if not cpu.has_accelerator():
        return {}
    free, whole = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "used": whole - free}  # fmt: skip


def memory(*, size: str, sync: str, dry: bool) -> Found:
    """The planner's prediction is within 15 % of the allocated memory on a GPU."""
    from megaaccum.lab.planner.sync_mode import Forecast
    from megaaccum.pretrain.model import machine

    rig, batch = _large(f"--sync {sync}", size, dry=dry)
    for _ in range(2):
        result = rig.train_step.train(batch, step=1)
    predicted = Forecast(rig.plan, 61, layers=machine.layer_kind(rig.plan)).predict(rig.plan.config.sharding)
    seen = _allocated()
    near = dry or abs(seen["allocated"] / predicted.held - 1) < 0.15
    return {"ok": near, "predicted": predicted.held, "by kind": predicted.memory, "measured": result.memory} | seen


def communicator(*, dry: bool) -> Found:
    """Bytes of device memory that one more communicator takes, and one with a lane's thread blocks."""
    from megaaccum.executor.p2p import _lane_group

    def used_after(group: Any) -> int:
        dist.all_reduce(torch.ones(1 << 20, device=cpu.device()), group=group)
        _wait()
        return int(_allocated().get("used", 0))

    plain = [used_after(dist.new_group([0])) for _ in range(3)]
    lanes = [used_after(_lane_group([0], cpu.has_accelerator(), None)) for _ in range(3)]
    return {"ok": True, "used after each": plain, "used after each lane": lanes}


def auto_at_the_edge(*, dry: bool) -> Found:
    """A limit just above what a step is predicted to need is accepted, and kept on a GPU; one just below is refused.
    (One rank shares its parameters with no other, so that streaming needs as much as resident.)"""
    from megaaccum.lab.planner import sync_mode
    from megaaccum.pretrain.model import machine

    flags, _ = _model("1.2B", dry=dry)
    plan = Case(1, "--pp_microbatches 8", flags, "bf16").plan()
    made_of = machine.layer_kind(plan)
    rows = sync_mode.Forecast(plan, 61, layers=made_of).every()
    held = min(row.held for row in rows if (row.mode.backend, row.mode.zero_stage) == ("deepspeed", 3))

    def settled(limit: float) -> bool:
        keys = f"--pp_microbatches 8 --sync auto --memory_gib {limit / 2**30:.9f} --vocab_size 61"
        try:
            sync_mode.choose_sync_mode(Case(1, keys, flags, "bf16").plan(), layers=made_of)
        except ConfigError:
            return False
        return True

    found = {"held": held, "above": settled(held * 1.01), "below": settled(held * 0.99)}
    rig, batch = _large("", "1.2B", dry=dry)
    rig.train_step.train(batch, step=1)
    seen = _allocated()
    return {"ok": found["above"] and not found["below"] and seen.get("allocated", 0) <= held * 1.15} | found | seen


def executor_alone(*, schedule: str, dry: bool) -> Found:
    """megaaccum's executor on one rank: gradients, and passes in flight."""
    ran = toy.executed(schedule, 8, 1, "loop")
    return {"ok": ran.error < 1e-12, "error": ran.error, "in flight": ran.peak}


# --- Transformer Engine ----------------------------------------------------------------------------------------------


def transformer_engine(*, only: str = "", dry: bool) -> Found:
    """The checks of tests.gpu.fp8, or one of them, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "fp8.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "-m", "tests.gpu.fp8"]
        command += ["--out", str(out)] + (["--dry-run"] if dry else []) + (["--only", only] if only else [])
        ended = subprocess.run(command, env=_plain_environment(), cwd=ROOT, capture_output=True, text=True)
        return json.loads(out.read_text()) if out.exists() else {"ok": False, "output": ended.stderr[-1500:]}


def _plain_environment() -> dict[str, str]:
    """The environment without a launcher's variables."""
    own = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT MEET_AT".split()
    return {name: value for name, value in os.environ.items() if name not in own}
