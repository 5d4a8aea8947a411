"""Steps of Muon, SOAP or Lion in a layout and in one process, for tests that run on ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from tests.support.parity import Case, Cut, Gradient, Reference, Rig, named, one_process, plain_loop, stack

STEPS = 3
"""Steps of a cell, in the last two of which the first one's momentum is; the whole table (tests/long) takes ten."""
KINDS = ("param", "momentum_buffer", "exp_avg", "exp_avg_sq")
FLAGS = (
    "--optimizer muon --muon_fp32_matmul_prec highest --muon_extra_scale_factor 0.2 --lr 2e-3 --weight_decay 0.1"
    " --adam_eps 1e-4 --normalization RMSNorm --no_add_bias_linear --swiglu --num_layers 4 --lr_decay_style constant"
    " --num_query_groups 2"
)
"""A large adam_eps: a gradient that is zero but for rounding would else be as large as others after Adam."""


@dataclass(frozen=True)
class Trained:
    """{name/kind: this tp rank's part} of weights and the optimizer's tensors after some steps, and what was counted
    on this rank."""

    tensors: dict[str, torch.Tensor]
    num_calls: int
    tp_rank: int = 0
    summary: str = ""


@contextmanager
def frozen(pattern: str) -> Iterator[None]:
    """Context in which models are built with the parameters frozen whose names have `pattern`."""
    from megaaccum.model import names
    from megaaccum.pretrain.model import gpt

    build = gpt.build_chunks

    def built(*args, **kwargs):
        chunks = build(*args, **kwargs)
        for name, param in names.named_parameters(chunks):
            if pattern and re.search(pattern, name):
                param.requires_grad_(False)
        return chunks

    with patch.object(gpt, "build_chunks", built):
        yield


def train(cells: list[tuple[Case, str]], steps: int = STEPS) -> list[Trained]:
    """Steps of each (case, frozen parameters) on this rank."""
    return [train_one(case, freeze, steps) for case, freeze in cells]


def train_one(case: Case, freeze: str = "", steps: int = STEPS) -> Trained:
    with frozen(freeze):
        rig = Rig.of(case)
    size = rig.plan.batch.global_batch_size
    for step in range(steps):
        rig.train(step=step, first=step * size)
    return trained(rig)


def trained(rig: Rig) -> Trained:
    """The tensors that `rig` holds now."""
    tensors: dict[str, torch.Tensor] = {}
    pieces = list(rig.backend.state())
    for kind in KINDS:
        parts = [(p.name, p.param, p.start, p.tensors[kind]) for p in pieces if kind in p.tensors]
        whole = rig.whole(parts)
        tensors |= {f"{name}/{kind}": each for name, each in whole.items() if not each.isnan().any()}
    updates = rig.backend.matrices
    if updates is None:
        return Trained(tensors, 0, rig.groups.tp.rank())
    return Trained(tensors, updates.num_calls, rig.groups.tp.rank(), updates.summary)


def train_in_one_process(model: str, global_batch: int, dtype: str, freeze: str, steps: int) -> tuple[Reference, int]:
    """The same steps by emerging-optimizers on whole matrices, on the full batch, and the number of these matrices."""
    from megaaccum.lab.verification.reference import add, clip_factor, norm_of
    from megaaccum.lab.verification.subject import optimizer_of
    from megaaccum.lab.verification.whole_matrices import is_matrix
    from megaaccum.optim.owners import COSTS
    from tests.support.parity import microbatches_of

    with frozen(freeze):
        chunk, plan = one_process(model, dtype)
    loop = plain_loop(chunk, plan, optimizer=lambda named: optimizer_of(named, plan))
    for step in range(steps):
        batch = stack(range(step * global_batch, (step + 1) * global_batch))
        parts, grads = microbatches_of(plan, batch), {}
        for part in parts:
            add(grads, loop.backward(part, float(batch["loss_mask"].sum()), len(parts))[1])
        factor = clip_factor(norm_of(grads), plan.config.optimizer.clip_grad)
        loop.update({name: grad * factor for name, grad in grads.items()})
    tensors = {f"{name}/param": master.detach().double() for name, master in loop.masters.items()}
    for name, _ in loop.trained:
        state = loop.adam.state.get(loop.masters[name], {})
        tensors |= {f"{name}/{kind}": each.double() for kind, each in state.items() if kind in KINDS}
    gated = bool(chunk.config.gated_linear_unit)
    cuts = {n: Cut(getattr(p, "partition_dim", -1), gated and "linear_fc1" in n) for n, p in named(chunk)}
    every = {f"{n}/{k}": cut for n, cut in cuts.items() for k in KINDS}
    is_whole = plan.config.optimizer.optimizer in COSTS
    names = [name for name, _ in loop.trained if is_whole and is_matrix(name, loop.masters[name])]
    qkv = 3 if plan.config.optimizer.muon_split_qkv else 1
    number = sum(qkv if "linear_qkv" in name else 2 if gated and "linear_fc1" in name else 1 for name in names)
    return Reference(Gradient(tensors, 0.0, 0.0, 0), every), number


def distance(ranks: list[Trained], exact: Reference) -> dict[str, float]:
    """By kind of tensor: the relative L2 distance to one process, of the rank that is farthest off."""
    from tests.support.distance import own_part

    found: dict[str, float] = {}
    for rank in ranks:
        squares: dict[str, list[float]] = {}
        for key, part in rank.tensors.items():
            true = own_part(key, part, Gradient({}, 0.0, 0.0, 0, rank.tp_rank), exact)
            off = squares.setdefault(key.rpartition("/")[2], [0.0, 0.0])
            off[0] += float((part - true).square().sum())
            off[1] += float(true.square().sum())
        for kind, (error, size) in squares.items():
            value = (error / size) ** 0.5
            found[kind] = value if not value <= found.setdefault(kind, 0.0) else found[kind]
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------


def engine_of(case: Case, model: str = "", override: str = ""):
    """An engine of this layout, for checkpoints. model: flags in place of the case's."""
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
    from tests.support.parity import VOCAB

    plan = replace(case, model=f"{model or case.model} {override}").plan()
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    forward = GptForwardStep(built, plan.batch.loss_norm)
    return initialize(plan, chunks, groups=built, forward_step_func=forward, reports=REPORTS)


def held_by(engine, case: Case) -> dict[str, torch.Tensor]:
    """This tp rank's whole tensors, over all data-parallel ranks."""
    rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    return trained(rig).tensors


def take_steps(engine, count: int) -> None:
    from tests.support.parity import microbatches

    for _ in range(count):
        first = engine.step * engine.plan.batch.global_batch_size
        engine.train_step(microbatches(engine.plan, engine.groups.dp.rank(), first))


def moved(folder: str, layouts: list[Case]) -> list[dict[str, torch.Tensor]]:
    """The state after two steps in the first layout, then as each layout loads it."""
    engine = engine_of(layouts[0])
    take_steps(engine, 2)
    engine.save(folder)
    found = [held_by(engine, layouts[0])]
    for case in layouts:
        other = engine_of(case)
        assert other.load(folder)
        found.append(held_by(other, case))
        take_steps(other, 1)
    return found


# --- the same gradients -----------------------------------------------------------------------------------------------


def updates(cases: list[Case], steps: int, build: Callable[[Case], Rig] = Rig.of) -> list[dict[str, float]]:
    """By kind of tensor, how far each case is after `steps` steps from the library's optimizer on whole parameters,
    which is given the gradients that the steps had: the largest relative distance of a parameter. tp 1, or an optimizer
    whose update of an element needs no other."""
    return [_update(build(case), steps) for case in cases]


def _update(rig: Rig, steps: int) -> dict[str, float]:
    from megaaccum.lab.verification.subject import optimizer_of

    seen: list[dict[str, torch.Tensor]] = []
    begun = {name: each.float() for name, each in _of_kind(trained(rig).tensors, "param").items()}
    rig.train_step.before_update = lambda: seen.append(rig.assemble())
    for step in range(steps):
        rig.train(step=step, first=step * rig.plan.batch.global_batch_size)
    reference = optimizer_of(list(begun.items()), rig.plan)
    for grads in seen:
        for name, whole in begun.items():
            whole.grad = grads[name].float()
        reference.step()
    ended = trained(rig).tensors
    found = {"param": _farthest(_of_kind(ended, "param"), begun)}
    for kind in KINDS[1:]:
        if mine := _of_kind(ended, kind):
            found[kind] = _farthest(mine, {name: reference.state[begun[name]][kind] for name in mine})
    return found


def _of_kind(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {key.rpartition("/")[0]: each for key, each in tensors.items() if key.endswith(f"/{kind}")}


def _farthest(mine: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == true.keys()
    return max(float((mine[name] - each).norm() / each.norm()) for name, each in true.items())


# --- the table --------------------------------------------------------------------------------------------------------

BACKENDS = {
    "ZeRO-1": "--zero_stage 1",
    "ZeRO-2": "--zero_stage 2",
    "ZeRO-3 resident": "--zero_stage 3 --sync resident",
    "ZeRO-3 streaming": "--zero_stage 3 --sync streaming",
    "fsdp2": "--backend fsdp2 --sync resident",
    "HSDP": "--backend fsdp2 --data_parallel_replicas 2",
    "megatron": "--backend megatron",
    "ddp": "--backend ddp",
}
PIPELINE = "--pipeline_model_parallel_size 2 --pp_microbatches 4"
MOE = "--num_experts 4 --moe_router_topk 2 --moe_aux_loss_coeff 0"
VARIANTS = {
    # name: (layout, model, frozen). A small bucket makes several rounds of exchanges.
    "dp 4": ("--grad_accum_steps 2", "--muon_bucket_size 2000", ""),
    "tp 2": ("--tensor_model_parallel_size 2 --sequence_parallel --grad_accum_steps 2", "--muon_nesterov", ""),
    "pp 2 V": (f"{PIPELINE} --schedule dualpipev", "--untie_embeddings_and_output_weights", ""),
    "ga 4": (f"{PIPELINE} --grad_accum_steps 4", "--muon_weight_decay_method l2", ""),
    "clip": ("--grad_accum_steps 2", "--clip_grad 0.1 --muon_coefficient_type polar_express", ""),
    "tied": (f"{PIPELINE} --tensor_model_parallel_size 2", "--muon_scale_mode unit_rms_norm", ""),
    "frozen": ("--grad_accum_steps 2", "", r"layers\.(0\.self_attention\.linear_qkv|2\.)"),
    "ep 2": ("--expert_model_parallel_size 2 --grad_accum_steps 2", MOE, ""),
    "ep 2, tp 2, etp 1": (
        "--tensor_model_parallel_size 2 --sequence_parallel --expert_model_parallel_size 2"
        " --expert_tensor_parallel_size 1 --grad_accum_steps 2",
        MOE,
        "",
    ),
}


@dataclass(frozen=True)
class Cell:
    """A cell of the table: a layout, the parameters frozen in it, and how close it has to come."""

    name: str
    case: Case
    frozen: str
    tolerance: float

    def __str__(self) -> str:
        return self.name


def cell(backend: str, variant: str, lane: str = "fp32") -> Cell:
    layout, model, freeze = VARIANTS[variant]
    in_lane = "--params_dtype fp64" if lane == "fp64" else ""
    case = Case(4, f"{layout} {BACKENDS[backend]} {in_lane}", f"{FLAGS} {model}")
    return Cell(f"{backend}, {variant}, {lane}", case, freeze, 1e-11 if lane == "fp64" else 1e-6)


def cells() -> list[Cell]:
    """The whole table. HSDP has no second replica at one data-parallel rank; float64 is what two backends take."""
    found = [
        cell(backend, variant)
        for backend in BACKENDS
        for variant in VARIANTS
        if backend != "HSDP" or variant not in ("tied", "ep 2, tp 2, etp 1")
    ]
    exact = itertools.product(("fsdp2", "ddp"), VARIANTS)
    return found + [cell(backend, variant, "fp64") for backend, variant in exact if MOE not in VARIANTS[variant]]


def problems(chosen: list[Cell], steps: int = STEPS) -> list[str]:
    """Differences of these cells from one process after `steps` steps, as sentences."""
    from megaaccum.lab.verification.testing import run_ranks

    by_rank = run_ranks(train, 4, [(each.case, each.frozen) for each in chosen], steps, timeout=400)
    keys = {each: reference_of(each) for each in chosen}
    wanted = list(dict.fromkeys(keys.values()))
    exact = dict(zip(wanted, run_ranks(references, 1, wanted, steps, timeout=200)[0], strict=True))
    found = []
    for each, ranks in zip(chosen, zip(*by_rank, strict=True), strict=True):
        reference, number = exact[keys[each]]
        names = {name for rank in ranks for name in rank.tensors}
        if missing := reference.gradient.parts.keys() - names:
            found.append(f"{each}: nothing of {sorted(missing)[:3]}")
        for kind, error in distance(list(ranks), reference).items():
            if not error <= each.tolerance:
                found.append(f"{each}: {kind} is {error:.1e} from one process")
        calls = sum(rank.num_calls for rank in ranks)
        if calls != number * steps:
            found.append(f"{each}: {calls} iterations of {number} matrices in {steps} steps")
    return found


def reference_of(each: Cell) -> tuple[str, int, str, str]:
    """Model, global batch, precision and frozen parameters of a cell's one process."""
    dtype = "fp64" if "fp64" in each.case.layout else "fp32"
    return each.case.model, each.case.plan().batch.global_batch_size, dtype, each.frozen


def references(wanted: list[tuple[str, int, str, str]], steps: int) -> list[tuple[Reference, int]]:
    return [train_in_one_process(*each, steps) for each in wanted]


# --- bytes, memory and bits -------------------------------------------------------------------------------------------

HELD = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Counted:
    """A rank's bytes of a step: received in exchanges of matrices, and in all; foretold of the former; held at most.
    Its updates of matrices, and its matrices; what the start says of them."""

    exchanged: float
    moved: float
    foretold: int
    held: float
    calls: int
    owned: int
    summary: str = ""


def counted(cases: list[Case]) -> list[Counted]:
    """A step of each case, on this rank."""
    return [count_one(case) for case in cases]


def count_one(case: Case) -> Counted:
    rig = Rig.of(case)
    size = rig.plan.batch.global_batch_size
    result = [rig.train(step=step, first=step * size) for step in range(2)][-1]
    lanes = {lane: count.num_bytes for lane, count in result.traffic.items()}
    exchanged = sum(size for lane, size in lanes.items() if lane.startswith("all_to_all/tp_dp_cp/"))
    moved = sum(size for lane, size in lanes.items() if lane.split("/")[1] != "world")  # all of data parallelism
    held = sum(size for kind, size in result.memory.items() if kind in HELD)
    updates = rig.backend.matrices
    if updates is None:
        return Counted(0.0, moved, 0, held, 0, 0)
    return Counted(
        exchanged,
        moved,
        updates.to_owners + updates.back,
        held,
        updates.num_calls,
        len(updates.owned[rig.groups.dp.rank()]),
        updates.summary,
    )


def check_held(model: str, layouts: Iterable[str] = (), *, in_the_mean: str = "") -> list[str]:
    """Check that a model's steps in layouts, default under every backend, hold what is predicted, within 2 %: the rank
    with the most, or, in layouts with `in_the_mean`, ranks in the mean. Returns what each start says."""
    import pytest

    from megaaccum.lab.planner.sync_mode import Forecast
    from megaaccum.lab.verification.testing import run_ranks
    from tests.support.parity import VOCAB

    cases = [Case(4, f"{flags} --grad_accum_steps 2", model) for flags in layouts or BACKENDS.values()]
    by_rank = run_ranks(counted, 4, cases, timeout=200)
    for number, case in enumerate(cases):
        plan, mine = case.plan(), [rank[number].held for rank in by_rank]
        memory = Forecast(plan, VOCAB).predict(plan.config.sharding).memory
        unequal = in_the_mean and in_the_mean in case.layout
        most = sum(mine) / len(mine) if unequal else max(mine)
        assert most == pytest.approx(sum(memory[kind] for kind in HELD), rel=0.02), case
    return [each.summary for each in by_rank[0]]


def check_one_digest(cases: list[Case]) -> None:
    """Check that STEPS steps of every case, of four ranks, end with the same bits."""
    from megaaccum.lab.verification.testing import run_ranks
    from tests.support.faults import differences

    by_case = list(zip(*run_ranks(train, 4, [(case, "") for case in cases], timeout=200), strict=True))
    whole = [{name: each for rank in ranks for name, each in rank.tensors.items()} for ranks in by_case]
    for case, found in zip(cases[1:], whole[1:], strict=True):
        assert not differences(whole[0], found), case
