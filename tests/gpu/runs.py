"""Cases of one GPU that go in by a user's doors: `megaaccum train`, an Engine, Megatron's loops.

Like those of tests.gpu.cases, each runs on every rank of an existing process group, and returns figures and `ok`.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.checkpoint import folders
from megaaccum.platform import cpu
from megaaccum.pretrain.metrics import journal
from tests.gpu.cases import FARTHEST, PLAIN, ROOT, Found, _allocated, _large, _plain_environment, _timed
from tests.support import engines, megatron_loop
from tests.support.data_samples import counting_pair
from tests.support.distance import total_error
from tests.support.megatron_pretrain import Run, numbers, pretrained
from tests.support.parity import Case, Rig, reference

TRAINED = (
    "--num_layers 4 --hidden_size 64 --num_attention_heads 4 --seq_length 64 --train_iters 8 --lr 1e-2 "
    "--vocab_size 2000 --micro_batch_size 1 --pp_microbatches 8 --attention_dropout 0.1 --hidden_dropout 0.1 "
    "--save_interval 4 --eval_interval 4 --eval_iters 1 --log_interval 1 --split 90,10,0 --num_threads 1"
)


def trained(*, keys: str = "", lane: str = "--bf16", dry: bool) -> Found:
    """`megaaccum train`: losses that fall, and checkpoints; the second half again, from the checkpoint in the middle,
    with the same losses. On one rank by its own launcher, on several as torchrun starts them."""
    everyone: list[Any] = [None]
    if dist.get_rank() == 0:
        everyone = [Path(tempfile.mkdtemp(prefix="one-gpu-run-"))]
        counting_pair(everyone[0] / "corpus", num_documents=50)
    dist.broadcast_object_list(everyone)
    folder: Path = everyone[0]
    texts, losses = list[str](), list[list[float]]()
    for _ in range(2):
        ended = _ended(folder, f"{TRAINED} {lane} {keys}")
        texts.append(ended.stdout + ended.stderr)
        if ended.returncode:
            return {"ok": False, "printed": texts[-1][-3000:]}
        dist.barrier()
        log = journal.read(folder / "run" / "log.jsonl")
        losses.append([record["loss"] for record in log if record["kind"] == "train"])
        last = folders.latest(folder / "run" / "checkpoints")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(last or folder)
    first, second = losses
    near = len(first) == len(second) == 8 and all(abs(a - b) < 1e-3 for a, b in zip(first, second, strict=True))
    told = "step 4" in texts[1] and ("parameters, at most" in texts[0] or "--verify_at_start" not in keys)
    ok = near and first[-1] < first[0] and (told or dist.get_rank() > 0)
    return {"ok": ok, "losses": first, "resumed": second} | (
        {} if ok else {"printed": [each[-3000:] for each in texts]}
    )


def _ended(folder: Path, flags: str) -> subprocess.CompletedProcess[str]:
    """The command, as this rank of a launcher if there are several ranks."""
    env, count = _plain_environment(), dist.get_world_size()
    port: list[Any] = [None]
    if count > 1:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = [found.getsockname()[1]]
        dist.broadcast_object_list(port)
        env |= dict(RANK=str(dist.get_rank()), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE=str(count))
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    command = [sys.executable, "-m", "megaaccum", "train", *flags.split(), "--data_path", str(folder / "corpus")]
    command += ["--output_dir", str(folder / "run"), "--data_cache_path", str(folder / "cache")]
    command += ["--nproc_per_node", "1"] if count == 1 else []
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)


def verified(*, dry: bool) -> Found:
    """`megaaccum verify --device gpu` of a LLaMA-like model on one rank: exit code 0."""
    keys = (
        "--num_layers 2 --hidden_size 64 --num_attention_heads 4 --seq_length 64 --normalization RMSNorm --swiglu "
        "--no_add_bias_linear --vocab_size 128 --micro_batch_size 1 --pp_microbatches 4 --lr 1e-3 --train_iters 2"
    )
    command = [
        sys.executable,
        "-m",
        "megaaccum",
        "verify",
        "--device",
        "gpu",
        "--world-size",
        "1",
        "--bf16",
        *keys.split(),
    ]
    command += ["--dry-run"] if dry else []
    ended = subprocess.run(command, env=_plain_environment(), cwd=ROOT, capture_output=True, text=True)
    return {"ok": ended.returncode == 0, "printed": (ended.stdout + ended.stderr)[-3000:]}


def engine(*, layout: str = "", dry: bool) -> Found:
    """A step of an Engine in three calls, of 3, 4 and 1 micro-batches: its gradient against one process'."""
    got = engines.in_calls(Case(dist.get_world_size(), f"--pp_microbatches 8 {layout}", PLAIN), engines.Calls())
    return _against_one_process(got)


def wrapped(*, layout: str = "", dry: bool) -> Found:
    """Megatron's unmodified train_step over the objects of `wrap`: its gradient against one process'."""
    case = Case(dist.get_world_size(), f"--pp_microbatches 8 {layout}", PLAIN)
    return _against_one_process(megatron_loop.loop_gradient(megatron_loop.Loop(case)))


def _against_one_process(got: Any) -> Found:
    error = total_error([got], reference(PLAIN, 8, "fp32"))
    return {"ok": error < FARTHEST["fp32"], "error": error}


def pretrain_script(*, dry: bool) -> Found:
    """Megatron's `pretrain`, and this package's in its place: losses and norms as the last rank prints them."""
    flags = "" if dry else "--distributed-backend nccl "
    theirs, ours = (numbers(each) for each in pretrained([Run(flags, ours=False), Run(flags)]))
    apart = max((abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return {"ok": apart < 1e-3 and bool(theirs) == is_last, "apart": apart, "losses": ours}


def bits_in_layouts(*, dry: bool) -> Found:
    """`reproducible: layout`: two stages and two data-parallel ranks have the same losses and norms, to
    the bit; whether they have without it."""

    def digits(layout: str) -> list[tuple[float, float]]:
        rig = Rig.of(Case(2, layout, PLAIN + "--clip_grad 0.01"))
        return [(each.loss, each.grad_norm) for each in map(rig.train, range(3))]

    layouts = "--pp 2 --pp_microbatches 8", "--global_batch_size 8 --pp_microbatches 4"
    same = [digits(f"{each} --reproducible layout") for each in layouts]
    plain = [digits(each) for each in layouts]
    return {"ok": same[0] == same[1], "steps": same[0], "differ without it": plain[0] != plain[1]}


# --- beside bare Megatron --------------------------------------------------------------------------------------------


def beside_megatron(*, layout: str, dry: bool) -> Found:
    """Seconds of a step of ours and of Megatron's own (its schedule, DistributedDataParallel and distributed optimizer,
    nothing of this package in a step), in alternating blocks; first losses agree. Both add weight gradients in their
    product where the kernel is there."""
    fusion = " --gradient_accumulation_fusion" if _has_fusion() else ""
    rig, batch = _large(layout + fusion, "1.2B", dry=dry)
    held = _allocated().get("allocated", 0)
    on_device = [{name: each.to(cpu.device()) for name, each in one.items()} for one in batch]
    bare = _Megatron(rig, fusion)
    losses = rig.train_step.train(batch, step=0).loss, bare.step(on_device)
    ours, theirs = list[float](), list[float]()
    for block in range(2 if dry else 5):
        warm = 0 if block else 2
        ours += _timed(lambda: rig.train_step.train(batch, step=1), 1 if dry else 2, warm)
        theirs += _timed(lambda: bare.step(on_device), 1 if dry else 2, warm)
    medians = statistics.median(ours), statistics.median(theirs)
    found = {"ok": abs(losses[0] - losses[1]) < 1e-2 * losses[1], "losses": losses, "seconds": medians}
    return found | {"ratio": medians[0] / medians[1], "ours held": held, "fused": bool(fusion)} | _allocated()


def _has_fusion() -> bool:
    """Whether Megatron has its kernel for weight gradients, which apex brings."""
    from megatron.core.tensor_parallel import layers

    return bool(layers._grad_accum_fusion_available) and cpu.has_accelerator()


class _Megatron:
    """A model as that of `rig`, with Megatron's own parts around it. fusion: the flag of fused accumulation, or ''."""

    def __init__(self, rig: Rig, fusion: str):
        from megatron.core import distributed
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megaaccum.pretrain.model import gpt

        more = f"--backend megatron{fusion}"
        plan = replace(rig.case, layout=f"--pp_microbatches {rig.plan.batch.num_microbatches} {more}").plan()
        (chunk,) = gpt.build_chunks(plan, rig.groups, vocab_size=61)
        settings = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True,
            use_distributed_optimizer=True,
        )  # fmt: skip
        config = chunk.config
        self._model = distributed.DistributedDataParallel(config, settings, chunk, pg_collection=rig.groups.collection)
        optimizer = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, overlap_param_gather=True,
            clip_grad=1.0,
        )  # fmt: skip
        with cpu.cuda_type_names():
            self._optimizer = get_megatron_optimizer(
                optimizer, [self._model], use_gloo_process_groups=False, pg_collection=rig.groups.collection
            )
        config.no_sync_func, config.grad_sync_func = self._model.no_sync, self._model.start_grad_sync
        config.param_sync_func = self._model.start_param_sync
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.calculate_per_token_loss = True
        self._schedule, self._groups = get_forward_backward_func(pp_size=1, vp_size=None), rig.groups

    def step(self, microbatches: list[dict[str, torch.Tensor]]) -> float:
        """One optimizer step; returns its mean loss."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        size, length = microbatches[0]["tokens"].shape
        reports = self._schedule(
            forward_step_func=partial(megatron_loop.as_megatron_has_it, per_token=True), model=[self._model],
            data_iterator=iter(microbatches), num_microbatches=len(microbatches), forward_only=False,
            seq_length=length, micro_batch_size=size, pg_collection=self._groups.collection,
        )  # fmt: skip
        with cpu.cuda_type_names():
            self._optimizer.step()
        sums = torch.stack([each["lm loss"] for each in reports]).sum(0)
        return float(sums[0] / sums[1])
