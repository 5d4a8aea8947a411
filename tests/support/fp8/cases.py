"""Cases of FP8, run inside two ranks that see Transformer Engine (te_on_cpu.py); one function per case.

Each returns plain data, which tests/multiproc/test_fp8.py looks at. The model has four layers; histories are longer
than a run, so that they hold the largest values of every micro-batch in order, and two runs with equal histories had
equal scales throughout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch

from tests.support.faults import Fault, differences, injected, state_of
from tests.support.parity import Case, Rig, stack

ROWS, MICROBATCHES = 30, 4
MODEL = "--num_layers 4 --transformer_impl transformer_engine --clip_grad 1"
FP8 = f"--fp8_format hybrid --fp8_amax_history_len {ROWS} --fp8_amax_compute_algo max"
SERIAL = f"--pp_microbatches {MICROBATCHES}"
PP2 = SERIAL + " --pp 2 --nonfinite skip"
NAN = Fault(rank=1, microbatch=2, within="linear_fc2", value=float("nan"))
INFINITE = Fault(rank=1, microbatch=2, within="linear_fc2")
Tensors = dict[str, torch.Tensor]


def case(layout: str, model: str = FP8) -> Case:
    return Case(2, layout, f"{MODEL} {model}", "bf16")


@dataclass
class Run(Rig):
    """A model in training. `gradients`: of each step that was taken, by name, whole."""

    gradients: list[Tensors] = field(default_factory=list)

    def __post_init__(self):
        self.fp8 = self.train_step.fp8
        optimizer_step = self.backend.step

        def step() -> None:
            self.gradients.append(self.assemble())
            optimizer_step()

        self.backend.step = step

    def train(self, *numbers: int, **keys):
        """Steps, each on the same sequences whatever the layout: ranks of dp see the same ones."""
        count = self.plan.batch.num_microbatches
        for number in numbers:
            batch = [stack([10 + number * count + index]) for index in range(count)]
            result = self.train_step.train(batch, step=number, **keys)
        return result

    def evaluate(self) -> None:
        from megaaccum.step import evaluation

        batch = [stack([100 + index]) for index in range(self.plan.batch.num_microbatches)]
        evaluation.evaluate(self.train_step, batch)

    def state(self) -> Tensors:
        """Copies of scales and histories."""
        return {name: tensor.clone() for name, tensor in self.fp8.tensors.items()}

    def rows(self) -> dict[str, int]:
        """{history: of its newest rows, one per micro-batch of a step, how many hold a largest value (of the layer's
        input forward, of its output's gradient backward)}."""
        histories = {name: tensor for name, tensor in self.fp8.tensors.items() if "amax" in name}
        return {name: int((tensor[-MICROBATCHES:, 0] > 0).sum()) for name, tensor in histories.items()}


def trained(of: Case, *steps: int) -> Run:
    run = Run.of(of)
    run.train(*(steps or (0, 1)))
    return run


def equal(run: Run, reference: Run) -> dict:
    """How far a rank's scales, histories and gradients are from those of the reference, by name."""
    own, all_of_it = run.state(), reference.state()
    wrong = [name for name in own if not torch.equal(own[name], all_of_it[name])]
    grads = [
        float((mine[name] - whole[name]).norm() / whole[name].norm())
        for mine, whole in zip(run.gradients, reference.gradients, strict=True)
        for name in mine
    ]
    return {"tensors": len(own), "wrong": wrong, "worst_gradient": max(grads), "rows": sorted(set(run.rows().values()))}


_serial: dict[str, Run] = {}


def serial(model: str = FP8) -> Run:
    """Accumulation without a pipeline, two steps: each rank has the whole model and the same micro-batches."""
    if model not in _serial:
        _serial[model] = trained(case(SERIAL, model))
    return _serial[model]


@contextmanager
def without_us() -> Iterator[None]:
    """Histories as Transformer Engine moves them alone."""
    from megaaccum.model import fp8
    from megaaccum.upstream import te

    manager = te.state_manager()
    if hasattr(manager, "_megaaccum_update"):
        manager.reduce_and_update_fp8_tensors = manager._megaaccum_update
        del manager._megaaccum_update
    with (
        patch.object(fp8.Fp8, "_update", lambda self, forward: None, create=True),
        patch.object(te, "stop_updates", lambda: lambda forward: None),
        patch.object(te.Histories, "use", lambda self: None),
        patch.object(te, "begin_recompute", lambda like: None),
        patch.object(te, "use_recompute", lambda queues: None),
    ):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        yield
    FP8GlobalStateManager.reset()


# --- cases -----------------------------------------------------------------------------------------------------------


def one_chunk_per_rank() -> dict:
    return equal(trained(case(PP2)), serial())


def two_chunks_per_rank() -> dict:
    """Megatron's interleaved schedule, and DualPipeV on megaaccum's executor, whose chunks split their backward too."""
    return {
        "interleaved": equal(trained(case(PP2 + " --vpp 2")), serial()),
        "dualpipev": equal(trained(case(PP2 + " --schedule dualpipev")), serial()),
    }


def two_chunks_per_rank_left_alone() -> dict:
    """The same without megaaccum's part: how many rows histories have."""
    with without_us():
        return {"rows": sorted(set(trained(case(PP2 + " --vpp 2")).rows().values()))}


def recomputed_layers() -> dict:
    return {
        "1f1b": equal(trained(case(PP2, FP8 + " --recompute_granularity full")), serial()),
        "interleaved": equal(trained(case(PP2 + " --vpp 2", FP8 + " --recompute_granularity full")), serial()),
    }


def recomputed_layers_left_alone() -> dict:
    with without_us():
        run = trained(case(SERIAL, FP8 + " --recompute_granularity full"))
        return {"rows": sorted(set(run.rows().values()))}


def backwards_in_reverse_order() -> dict:
    """Forwards of two micro-batches, then backwards from the last to the first, with layers computed again and without:
    gradients of the chunk's parameters."""
    again = FP8 + " --recompute_granularity full"
    found = {
        name: _in_reverse(trained(case(SERIAL, model), 0)) for name, model in (("plain", FP8), ("recompute", again))
    }
    with without_us():
        alone = _in_reverse(trained(case(SERIAL, again), 0))
    return {
        "plain": _furthest(found["recompute"], found["plain"]),
        "left alone": _furthest(alone, found["recompute"]),
        "norm": float(torch.stack([grad.norm() for grad in found["plain"].values()]).norm()),
    }


def _in_reverse(run: Run) -> Tensors:
    from megaaccum.model import names

    (chunk,), fp8 = run.chunks, run.fp8
    run.backend.begin_step()
    fp8.begin_attempt()
    chunk.set_is_first_microbatch()
    losses = []
    for index in (0, 1):
        batch = stack([50 + index])
        fp8.begin_forward(0, index)
        out = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        fp8.end_forward(0, index, out)
        out.register_hook(lambda grad, index=index: fp8.begin_backward(0, index))
        losses.append((out.float() * batch["loss_mask"]).sum() * 10.0 ** (3 * index))  # scales that differ
    run.backend.set_last_flush(False)
    with run.backend.no_sync_func():
        for loss in reversed(losses):
            loss.backward()
    fp8.end_backward()
    return {name: param.grad.clone() for name, param in names.named_parameters(run.chunks) if param.grad is not None}


def _furthest(one: Tensors, other: Tensors) -> float:
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def a_skipped_step() -> dict:
    """A gradient that is no number, in micro-batch 2 on stage 1, in the second of three steps."""
    run = trained(case(PP2), 0)
    before, weights = run.state(), state_of(run.backend)
    with injected([NAN], run.chunks):
        skipped = run.train(1).skipped
    after = differences(run.state(), before) + differences(state_of(run.backend), weights)
    run.train(2)
    never = trained(case(PP2), 0, 2)
    with patch.object(type(run.fp8), "restore", lambda self, snapshot: None):
        broken = trained(case(PP2), 0)
        kept = broken.state()
        with injected([NAN], broken.chunks):
            broken.train(1)
    return {
        "skipped": skipped,
        "changed": after,
        "changed by the next step": len(differences(run.state(), before)),
        "unlike a run that never saw it": differences(run.state(), never.state())
        + differences(state_of(run.backend), state_of(never.backend)),
        "changed where nothing is put back": len(differences(broken.state(), kept)),
    }


def other_ends_of_a_step() -> dict:
    """`drop_microbatch` runs the step again on the rest: its histories are those of that run alone."""
    run = trained(case(PP2 + " --nonfinite drop_microbatch"), 0)
    with injected([NAN], run.chunks):
        result = run.train(1)
    return {"skipped": result.skipped, "dropped": result.sanitized, "rows": sorted(set(run.rows().values()))}


def an_infinity_that_fp8_hides() -> dict:
    """An infinite gradient becomes the largest FP8 number, and the gradients after it are finite."""
    run = trained(case(PP2), 0)
    before = run.state()
    with injected([INFINITE], run.chunks):
        result = run.train(1)
    unnoticed = trained(case(PP2), 0)
    with patch.object(type(run.fp8), "overflow", lambda self: None), injected([INFINITE], unnoticed.chunks):
        passed = unnoticed.train(1)
    changed = differences(run.state(), before)
    return {"skipped": result.skipped, "note": result.note, "changed": changed, "left alone": passed.skipped}


def an_evaluation() -> dict:
    run = trained(case(PP2), 0)
    before = run.state()
    run.evaluate()
    changed = differences(run.state(), before)
    run.train(1)
    never = trained(case(PP2), 0, 1)
    unlike = differences(run.state(), never.state()) + differences(state_of(run.backend), state_of(never.backend))
    with patch.object(type(run.fp8), "restore", lambda self, snapshot: None):
        run.evaluate()
        kept = len(differences(run.state(), never.state()))
    return {"changed": changed, "unlike a run without it": unlike, "changed where nothing is put back": kept}


def quantized_weights() -> dict:
    """How often each weight was quantized: in a step of one flush, of two flushes, in a skipped step (which looks at
    its micro-batches once more), in an evaluation."""
    told = {}
    run = Run.of(case(PP2 + " --vpp 2"))
    told["weights"] = sum(name.endswith("scale_fwd") for name in run.fp8.tensors)
    with _counted(run) as count:
        run.train(0)
        told["step"] = count()
        run.train(1)
        told["second step"] = count()
        with injected([NAN], run.chunks):
            run.train(2)
        told["skipped step"] = count()
        run.train(3)
        told["step after it"] = count()
        run.evaluate()
        told["evaluation"] = count()
    rounds = Run.of(case(PP2 + " --grad_accum_steps 2 --flush per_round"))
    with _counted(rounds) as count:
        rounds.train(0)
        told["two flushes"] = count()
    with patch.object(type(rounds.fp8), "_quantize_when_due", lambda self, number, chunk: None):
        alone = Run.of(case(PP2 + " --grad_accum_steps 2 --flush per_round"))
    with _counted(alone) as count:
        alone.train(0)
        told["two flushes, left alone"] = count()
    return told


@contextmanager
def _counted(run: Run):
    """count() is how many of this rank's weights were quantized since it was asked last."""
    from transformer_engine.pytorch.module import layernorm_linear, linear

    weights, seen = {id(param) for chunk in run.chunks for param in chunk.parameters()}, [0]
    plain = linear.quantize_weight

    def noted(*, tensor, update_workspace, workspace, **keys):
        seen[0] += id(tensor) in weights and (update_workspace or workspace is None)
        return plain(tensor=tensor, update_workspace=update_workspace, workspace=workspace, **keys)

    def count() -> int:
        number, seen[0] = seen[0], 0
        return number

    with patch.object(linear, "quantize_weight", noted), patch.object(layernorm_linear, "quantize_weight", noted):
        yield count


def checkpoints() -> dict:
    """Saved at pp 2 after two steps, read at pp 1 x dp 2 and at pp 2 x vpp 2; with histories of another length; and a
    checkpoint of a BF16 run."""
    from megaaccum.errors import CheckpointError

    saved = trained(case(PP2))
    path = _save(saved, saved.fp8.tensors)
    told: dict = {"plain tensors": _only_tensors(path), "saved": len(saved.fp8.tensors)}
    layouts = [case(SERIAL), case(PP2 + " --vpp 2"), case(PP2, FP8.replace(str(ROWS), "4"))]
    whole, chunks, short = (Run.of(each) for each in layouts)
    for run in (whole, chunks):
        _load(path, run)
    told["read"] = len(whole.fp8.tensors), len(chunks.fp8.tensors)
    told["unlike"] = [n for n, tensor in saved.state().items() if not torch.equal(tensor, whole.fp8.tensors[n])]
    told["unlike"] += [n for n, tensor in chunks.state().items() if not torch.equal(tensor, whole.fp8.tensors[n])]
    for run in (saved, whole, chunks):
        run.gradients.clear()
        run.train(2)
    told["next"] = equal(saved, whole), equal(chunks, whole)
    try:
        _load(path, short)
    except CheckpointError as error:
        told["another length"] = str(error)
    plain, fresh = trained(case(PP2, "")), Run.of(case(PP2))
    _load(_save(plain, {}), fresh)
    told["from BF16"] = sorted(set(fresh.rows().values()))
    return told


def other_layers() -> dict:
    """One model on Transformer Engine's layers under ZB-H1 and on local ones under 1F1B: names, first weights and first
    gradients; and a checkpoint of each read by the other."""
    local = MODEL + " --transformer_impl local"
    ours, theirs = (Run.of(Case(2, f"{PP2} --schedule {s}", m, "bf16")) for s, m in (("zb-h1", MODEL), ("1f1b", local)))
    fused, parts = _masters(ours), _masters(theirs)
    told: dict = {"names": sorted(fused.keys() ^ parts.keys()), "weights": _unlike(fused, parts)}
    for run in (ours, theirs):
        run.train(0)
    told["gradients"] = worst(ours.gradients[0], theirs.gradients[0])
    for saved, read in ((ours, theirs), (theirs, ours)):
        path, before = _save(saved, {}), _masters(saved)
        read.train(1)
        _load(path, read)
        told.setdefault("read", []).append(_unlike(before, _masters(read)))
    return told


def _masters(run: Run) -> Tensors:
    return {f"{each.name}/{kind}": t.clone() for each in run.backend.state() for kind, t in each.tensors.items()}


def _unlike(one: Tensors, other: Tensors) -> list[str]:
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def worst(one: Tensors, other: Tensors) -> float:
    """Largest relative distance of a gradient, of those that are not rounding alone."""
    large = [name for name in one if float(other[name].norm()) > 1e-6]
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in large)


def _save(run: Run, buffers: Tensors) -> Path:
    from megaaccum.checkpoint import save_load
    from tests.multiproc.test_checkpoint import progress

    folder: list = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    return save_load.save(folder[0], run.backend, run.groups, progress(2), keep_last=2, buffers=buffers)


def _load(path: Path, run: Run) -> None:
    from megaaccum.checkpoint import save_load
    from tests.multiproc.test_checkpoint import SHAPE

    save_load.load(path, run.backend, run.groups, shape=SHAPE, buffers=run.fp8.tensors)


def _only_tensors(path) -> bool:
    from megaaccum.checkpoint.folders import read_progress
    from megaaccum.checkpoint.untrusted_reader import CheckpointReader

    reader = CheckpointReader(path, read_progress(path).metadata_sha256)
    fp8 = {key for key in reader.stored if "amax_history" in key or "/scale_" in key}
    return len(fp8) > 0 and reader.read(fp8).keys() == fp8


def tensor_parallel() -> dict:
    """tp 2: both ranks have the largest values of both."""
    run = trained(case(SERIAL + " --tp 2"))
    everyone: list = [None, None]
    torch.distributed.all_gather_object(everyone, run.state())
    return {"unlike": differences(*everyone), "rows": sorted(set(run.rows().values()))}


def scales_are_transformer_engines() -> dict:
    """With TE's own rule for scales taken out, no scale ever moves, while histories go on."""
    from transformer_engine.pytorch import quantization

    with patch.object(quantization, "_compute_scaling_factor", lambda amax, scale, fp8_max, recipe: scale):
        run = trained(case(PP2 + " --vpp 2"))
    scales = [tensor for name, tensor in run.fp8.tensors.items() if "/scale_" in name]
    return {"scales": len(scales), "moved": sum(bool((scale != 1).any()) for scale in scales), "rows": run.rows()}


def other_recipes() -> dict:
    """Current scaling keeps nothing, and trains."""
    run = trained(case(PP2 + " --vpp 2", "--fp8_format hybrid --fp8_recipe tensorwise"))
    reference = trained(case(SERIAL, "--fp8_format hybrid --fp8_recipe tensorwise"))
    return {"tensors": len(run.fp8.tensors), "worst_gradient": equal(run, reference)["worst_gradient"]}


def split_backward() -> dict:
    """ZB-H1 on Transformer Engine's layers in BF16 and FP8: W by backward_dw. Products counted per layer and
    micro-batch; gradients against the same layers without a pipeline."""
    import transformer_engine_torch as extension

    told = {}
    for name, model in (("fp8", FP8), ("bf16", "")):
        run = Run.of(case(PP2 + " --schedule zb-h1", model))
        products, product = [0], extension.generic_gemm

        def counted(*args, products=products, product=product, **keys):
            products[0] += 1
            return product(*args, **keys)

        with patch("transformer_engine.pytorch.cpp_extensions.gemm.tex.generic_gemm", counted):
            run.train(0)
        run.train(1)
        linears = 4 * 2  # of each of two layers
        told[name] = equal(run, serial(model)) | {
            "products": products[0] / (linears * MICROBATCHES),
            "deferred": run.train_step.schedule.record.peak_deferred,
        }
    return told


class Kernel:
    """The kernel of Megatron's own linear layer, the head's."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x, grad, main_grad):
        main_grad.add_(grad.float().t() @ x.float())


def fused_weight_gradients() -> dict:
    """gradient_accumulation_fusion: how far a gradient is from that without it, and products that add to a sum, by
    backend and precision."""
    import transformer_engine_torch as extension
    from megatron.core.tensor_parallel import layers

    told = {}
    fused = patch.multiple(layers, _grad_accum_fusion_available=True)
    with fused, patch.object(layers, "fused_weight_gradient_mlp_cuda", Kernel, create=True):
        layouts = ("--zero_stage 1", "--zero_stage 3", "--backend megatron")
        for layout, model in [*((each, "") for each in layouts), ("--zero_stage 3", FP8)]:
            added, product = [0], extension.generic_gemm

            def counted(*args, added=added, product=product, **keys):
                added[0] += bool(args[14])  # accumulate
                return product(*args, **keys)

            of = case(f"{SERIAL} {layout}", f"--gradient_accumulation_fusion {model}")
            with patch("transformer_engine.pytorch.cpp_extensions.gemm.tex.generic_gemm", counted):
                run = trained(of, 0)
            (mine,), whole = run.gradients, serial(model).gradients[0]
            far = max(float((mine[name] - whole[name]).norm() / whole[name].norm()) for name in mine)
            told[f"{layout} {model[:5]}"] = {"worst": far, "added": added[0]}
    return told


def private_names() -> dict:
    from megaaccum import upstream
    from megaaccum.upstream import te

    broken = []
    with patch("transformer_engine.pytorch.quantization.FP8GlobalStateManager.quantization_state", object()):
        broken = te.check()
    return {"missing": upstream.check(), "noticed": broken}
