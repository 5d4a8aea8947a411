"""FP8, Transformer Engine's layers and NCCL on real GPUs: checks what no CPU can, and writes a report.

    torchrun --nproc_per_node 1 -m tests.gpu.fp8                 on one GPU
    torchrun --nproc_per_node 2 -m tests.gpu.fp8                 also stages on two GPUs
    torchrun --nproc_per_node 1 -m tests.gpu.fp8 --dry-run       the same checks without a GPU (kernels by torch)

Writes docs/benchmarks/fp8_gpu.json (--out FILE) with the machine, versions and commit; exits with 1 if a check failed.
Needs Transformer Engine, all three parts of one version (`megaaccum doctor`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.gpu import one

MICROBATCHES, STEPS = 8, 12
TINY = (
    "--num_layers 4 --hidden_size 64 --transformer_impl transformer_engine --clip_grad 1 "
    "--untie_embeddings_and_output_weights"  # one stage would hold both uses of a tied one, and see its gradient twice
)
TIMED = (
    "--num_layers 8 --hidden_size 2048 --num_attention_heads 16 --seq_length 2048 "
    "--transformer_impl transformer_engine --normalization RMSNorm --swiglu --no_add_bias_linear "
    "--position_embedding_type rope"
)
DELAYED = "--fp8_format hybrid --fp8_amax_history_len 16 --fp8_amax_compute_algo max"
RECIPES = {
    "delayed": DELAYED,
    "tensorwise": "--fp8_format hybrid --fp8_recipe tensorwise",
    "blockwise": "--fp8_format e4m3 --fp8_recipe blockwise",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.fp8", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=one.OUT.with_name("fp8_gpu.json"))
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; writes no report unless --out is given")
    parser.add_argument("--only", nargs="*", help="names of checks")
    arguments = parser.parse_args(argv)
    _start(dry=arguments.dry_run)
    if arguments.dry_run:
        RECIPES.pop("blockwise")  # which has no stand-in
        CHECKS.pop("seconds")
    import torch.distributed as dist

    checks = {name: check for name, check in CHECKS.items() if not arguments.only or name in arguments.only}
    report = one.conditions(dry=arguments.dry_run) | {"ranks": dist.get_world_size()}
    report["checks"] = {name: _outcome(check) for name, check in checks.items()}
    report["ok"] = all(check["ok"] for check in report["checks"].values())
    if dist.get_rank() == 0:
        text = json.dumps(report, indent=2)
        print(text)
        if not arguments.dry_run or arguments.out != parser.get_default("out"):
            arguments.out.write_text(text + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if report["ok"] else 1


def _start(*, dry: bool) -> None:
    """Join the other ranks."""
    if dry:
        from tests.support.fp8 import worker

        worker.prepare()
    import torch

    from megaaccum.distributed import preload
    from megaaccum.platform import cpu

    if not dry:
        preload.libraries()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group(cpu.backend())


def _outcome(check: Callable[[], dict]) -> dict:
    try:
        told = check()
    except Exception:  # whatever it is, the report shows it, and the checks after it run
        return {"ok": False, "error": traceback.format_exc()[-2000:]}
    return told


# --- what the checks are made of -------------------------------------------------------------------------------------


def _case(model: str = "", *, lane: str = "bf16", batch: str = f"--pp_microbatches {MICROBATCHES}", base: str = TINY):
    """A model over all ranks: two stages where there are two."""
    import torch

    from tests.support.parity import Case

    world = torch.distributed.get_world_size()
    layout = batch + (" --pp 2" if world % 2 == 0 and "micro_batch_size" not in batch else "")
    return Case(world, f"{layout} --nonfinite skip", f"{base} {model}", lane)


class Run:
    """A model in training; its gradients are noted before the optimizer reads them."""

    def __init__(self, case, *, split: str = ""):
        from megaaccum.config.plan import RankLayout
        from megaaccum.executor.entry import get_forward_backward_func
        from tests.support.parity import Rig

        with patch.object(RankLayout, "splits_backward", bool(split)):
            self.rig = Rig.of(case)
        if split:
            self.rig.train_step.schedule = get_forward_backward_func(split, own=True)
        self.gradient: dict = {}
        optimizer_step = self.rig.backend.step

        def step() -> None:
            self.gradient = self.rig.assemble()
            optimizer_step()

        self.rig.backend.step = step

    def train(self, step: int):
        from tests.support.parity import stack

        size, count = self.rig.plan.batch.micro_batch_size, self.rig.plan.batch.num_microbatches
        batch = [stack(range(at * size, (at + 1) * size)) for at in range(count)]
        return self.rig.train_step.train(batch, step=step)

    def state(self) -> dict:
        return {name: tensor.clone() for name, tensor in self.rig.train_step.fp8.tensors.items()}


def _distance(one: dict, other: dict) -> float:
    """Relative L2 distance of two gradients, over the parameters that both ranks hold."""
    import torch

    names = sorted(one.keys() & other.keys())
    assert names
    apart = torch.stack([(one[name] - other[name]).norm() for name in names]).norm()
    return float(apart / torch.stack([other[name].norm() for name in names]).norm())


# --- checks ----------------------------------------------------------------------------------------------------------


def parity() -> dict:
    """The accumulated gradient of Transformer Engine's layers against that of the whole batch at once, in FP32; in BF16
    at most twice as far from the FP32 one as the whole batch in BF16 is (docs/concepts/testing.md)."""
    whole = f"--micro_batch_size {MICROBATCHES} --pp_microbatches 1"
    exact = _gradient(_case(lane="fp32", batch=whole))
    fp32 = _distance(_gradient(_case(lane="fp32")), exact)
    bf16 = _distance(_gradient(_case()), exact)
    once = _distance(_gradient(_case(batch=whole)), exact)
    return {"ok": fp32 < 1e-5 and bf16 <= 2 * once, "fp32": fp32, "bf16": bf16, "bf16 in one batch": once}


def _gradient(case) -> dict:
    run = Run(case)
    run.train(0)
    return run.gradient


def documents() -> dict:
    """Documents of a packed row in Transformer Engine's attention against local layers, which take each for itself: in
    FP32, in BF16 (its fused kernels) at most twice as far from that as local layers in BF16, and under FP8. One
    document a row is farther."""
    keys = "--reset_attention_mask --position_embedding_type rope"
    local = f"{keys} --transformer_impl local"
    exact = _of_documents(_case(local, lane="fp32"))
    told = {
        "fp32": _distance(_of_documents(_case(keys, lane="fp32")), exact),
        "bf16": _distance(_of_documents(_case(keys)), exact),
        "bf16 in local layers": _distance(_of_documents(_case(local)), exact),
        "fp8": _distance(_of_documents(_case(f"{keys} {DELAYED}")), exact),
        "one document a row": _distance(_of_documents(_case(keys, lane="fp32"), every=0), exact),
    }
    near = told["fp32"] < 1e-5 and told["bf16"] <= 2 * told["bf16 in local layers"]
    return {"ok": near and told["fp8"] < 0.5 * told["one document a row"]} | told


def _of_documents(case, every: int = 5) -> dict:
    """The gradient where a document begins each `every` tokens; 0: with the row alone. Two rows a micro-batch."""
    from dataclasses import replace

    from megaaccum.pretrain.model.gpt_forward import whole_rows
    from tests.support.parity import stack

    run = Run(replace(case, layout=f"{case.layout} --micro_batch_size 2"))
    batch = [stack((at, at + MICROBATCHES)) for at in range(run.rig.plan.batch.num_microbatches)]
    for number, each in enumerate(batch):
        starts = whole_rows(each["tokens"].shape)
        if every:
            starts[0, number::every] = starts[1, number + 2 :: every] = True
        each["document_starts"] = starts
    run.rig.train_step.train(batch, step=0)
    return run.gradient


def recipes() -> dict:
    """Each recipe trains: the loss falls as in BF16, a skipped step and an evaluation leave all as it was, a checkpoint
    brings it back."""
    told: dict[str, Any] = {"bf16": {"losses": _losses(Run(_case()))}}
    for name, keys in RECIPES.items():
        run = Run(_case(keys))
        losses = _losses(run)
        fell = losses[-1] < losses[0] and abs(losses[-1] - told["bf16"]["losses"][-1]) < 0.05 * losses[0]
        faults = _skipped(run) | _evaluated(run) | _saved(run, keys)
        told[name] = {"losses": losses, "fell": fell, "histories": len(run.state())} | faults
    good = [t["fell"] and not t["skip changed"] and not t["evaluation changed"] and not t["lost"] for t in
            list(told.values())[1:]]  # fmt: skip
    return {"ok": all(good)} | told


def _losses(run: Run) -> list[float]:
    return [run.train(step).loss for step in range(STEPS)]


def _skipped(run: Run) -> dict:
    """A NaN in a gradient on the last stage."""
    import torch

    from tests.support.faults import Fault, differences, injected, state_of

    before, weights = run.state(), state_of(run.rig.backend)
    last = torch.distributed.get_world_size() - 1
    with injected([Fault(rank=last, microbatch=2, within="linear_fc2", value=float("nan"))], run.rig.chunks):
        skipped = run.train(STEPS).skipped
    changed = differences(run.state(), before) + differences(state_of(run.rig.backend), weights)
    return {"skipped": skipped, "skip changed": changed if skipped else ["the step was not skipped"]}


def _evaluated(run: Run) -> dict:
    from megaaccum.step import evaluation
    from tests.support.faults import differences
    from tests.support.parity import stack

    before = run.state()
    batch = [stack([100 + index]) for index in range(run.rig.plan.batch.num_microbatches)]
    evaluation.evaluate(run.rig.train_step, batch)
    return {"evaluation changed": differences(run.state(), before)}


def _saved(run: Run, keys: str) -> dict:
    """A checkpoint read into another model, and the next step of both."""
    import torch

    from megaaccum.checkpoint import save_load
    from tests.multiproc.test_checkpoint import SHAPE, progress
    from tests.support.faults import differences, state_of

    folder: list = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    rig = run.rig
    buffers = rig.train_step.fp8.tensors
    path = save_load.save(folder[0], rig.backend, rig.groups, progress(STEPS), keep_last=1, buffers=buffers)
    other = Run(_case(keys))
    save_load.load(path, other.rig.backend, other.rig.groups, shape=SHAPE, buffers=other.rig.train_step.fp8.tensors)
    lost = differences(other.state(), run.state()) + differences(state_of(other.rig.backend), state_of(run.rig.backend))
    run.train(STEPS + 1)
    other.train(STEPS + 1)
    return {"lost": lost, "next gradient apart": _distance(other.gradient, run.gradient)}


def blackwell_only() -> dict:
    """MXFP8 is refused off Blackwell, before a model is built."""
    import torch

    from megaaccum.errors import ConfigError
    from megaaccum.pretrain.model import machine

    plan = _case("--fp8_format hybrid --fp8_recipe mxfp8 --seq_length 32 --ffn_hidden_size 256").plan()
    capability = torch.cuda.get_device_capability()
    try:
        machine.check_machine(plan)
    except ConfigError as error:
        return {"ok": not (10, 0) <= capability < (12, 0), "told": str(error)}
    return {"ok": (10, 0) <= capability < (12, 0), "told": "accepted"}


def weight_gradients_apart() -> dict:
    """Transformer Engine's delay_wgrad_compute on megaaccum's executor (with two stages its messages over NCCL, too), W
    called for each micro-batch, against the same layers in one backward."""
    import torch

    split = "zb-h1" if torch.distributed.get_world_size() % 2 == 0 else "1f1b"
    told: dict[str, Any] = {}
    for name, keys in {"bf16": "", "fp8": DELAYED}.items():
        whole, apart = Run(_case(keys)), Run(_case(keys), split=split)
        whole.train(0)
        apart.train(0)
        told[name] = {
            "apart": _distance(apart.gradient, whole.gradient),
            "deferred": apart.rig.train_step.schedule.record.peak_deferred,
            "delayed layers": sum(1 for chunk in apart.rig.chunks for _ in _delayed(chunk)),
        }
    return {"ok": all(t["apart"] < 1e-5 and t["delayed layers"] > 0 for t in told.values())} | told


class _Fused:
    """The product that adds itself to a sum in FP32, by torch's own, where apex' kernel is not installed."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x, grad, total) -> None:
        import torch

        torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)


def fused_weight_gradients() -> dict:
    """Weight gradients added inside their products against the same ones added after them, which rounds each to BF16
    first."""
    from megatron.core.tensor_parallel import layers

    from megaaccum.platform import cpu
    from tests.support.fp8.cases import Kernel

    plain = _gradient(_case())
    by_torch = _Fused if cpu.has_accelerator() else Kernel  # on a CPU torch has no such product
    kernel = {} if layers._grad_accum_fusion_available else {"fused_weight_gradient_mlp_cuda": by_torch}
    with patch.multiple(layers, _grad_accum_fusion_available=True, create=True, **kernel):
        fused = _gradient(_case("--gradient_accumulation_fusion"))
    apart = _distance(fused, plain)
    return {"ok": 0 < apart < 5e-3, "apart": apart}


def _delayed(chunk) -> list:
    from megaaccum.upstream import te

    return te.delayed_modules(chunk)


def seconds() -> dict:
    """Seconds of a step (median of 8, GPU idle at both ends) and the largest memory, in BF16 and under each recipe."""
    import torch

    told = {}
    for name, keys in {"bf16": "", **RECIPES}.items():
        run = _timed_run(keys)
        batch = _random_batch(run)
        torch.cuda.reset_peak_memory_stats()
        times = []
        for step in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run.rig.train_step.train(batch, step=step)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        told[name] = {
            "seconds per step": sorted(times[2:])[4],
            "tokens per step": run.rig.plan.batch.global_batch_size * run.rig.plan.batch.seq_length,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        }
        del run
        torch.cuda.empty_cache()
    return {"ok": True} | told


def _timed_run(keys: str) -> Run:
    return Run(_case(keys, base=TIMED, batch=f"--pp_microbatches {MICROBATCHES}"))


def _random_batch(run: Run) -> list[dict]:
    import torch

    shape = (1, run.rig.plan.batch.seq_length)
    return [
        {
            "tokens": torch.randint(0, 60, shape), "labels": torch.randint(0, 60, shape),
            "position_ids": torch.arange(shape[1])[None], "loss_mask": torch.ones(shape),
        }
        for _ in range(run.rig.plan.batch.num_microbatches)
    ]  # fmt: skip


CHECKS: dict[str, Callable[[], dict]] = {
    "parity": parity,
    "documents": documents,
    "recipes": recipes,
    "blackwell_only": blackwell_only,
    "weight_gradients_apart": weight_gradients_apart,
    "fused_weight_gradients": fused_weight_gradients,
    "seconds": seconds,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
