"""Restarts on another shape: the next step's gradient, and a bank of mistakes that are each seen by a number.

Each mistake of the bank is made while a checkpoint is read. What the run's next step then comes to is compared with the
run that was not interrupted, or, on another layout, with one process in float64 that resumes from the same checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import restarts
from tests.support.distance import FACTOR, total_error
from tests.support.layouts import Outcome
from tests.support.parity import Case, Gradient, Reference
from tests.support.restarts import Change, Mistake, Next, Run, unchanged

DENSE = "--global_batch_size 8 --num_layers 2 --swiglu --ffn_hidden_size 50 --normalization RMSNorm "
TP2 = "--tensor_model_parallel_size 2 --pp_microbatches 4"
PP2 = "--pipeline_model_parallel_size 2 --pp_microbatches 4"
DP2 = "--pp_microbatches 4"
DP4 = "--pp_microbatches 2"
DROPOUT = DENSE + "--attention_dropout 0.1 --hidden_dropout 0.1 --rng megatron --lr_warmup_iters 10 "
MOE = (
    "--num_layers 2 --num_experts 4 --no_add_bias_linear --moe_router_topk 2 --moe_ffn_hidden_size 32 "
    "--moe_router_score_function sigmoid --moe_router_enable_expert_bias --global_batch_size 8 "
)
EP2 = "--expert_model_parallel_size 2 --pp_microbatches 4"


# --- mistakes --------------------------------------------------------------------------------------------------------


@contextmanager
def pieces_as(run: Run, change: Callable[[Any], Any]) -> Iterator[None]:
    """The backend gives its state out as `change` makes of each StatePiece; None leaves one out."""
    state = run.backend.state

    def changed() -> Iterator[Any]:
        yield from filter(None, map(change, state()))

    with patch.object(run.backend, "state", changed):
        yield


@contextmanager
def resumed_as(run: Run, **change: Callable[[Any], Any]) -> Iterator[None]:
    """The engine resumes after a record in which some fields are changed."""
    resume = run.engine.resume

    def changed(progress: Any, **keys: Any) -> None:
        resume(replace(progress, **{name: make(progress) for name, make in change.items()}), **keys)

    with patch.object(run.engine, "resume", changed):
        yield


@contextmanager
def unchecked() -> Iterator[None]:
    """Nothing is compared between checkpoint and model; what the checkpoint lacks is passed over."""
    from megaaccum.checkpoint import pieces, save_load

    covering = pieces.StoredPieces.overlapping

    def what_is_there(self: Any, wanted: Any) -> Any:
        if (wanted.name, wanted.kind) not in self._pieces:
            return []
        try:
            return covering(self, wanted)
        except save_load.DamagedCheckpoint:
            by_cut = self._pieces[wanted.name, wanted.kind]
            return [(piece, piece.start, piece.stop) for pieces in by_cut.values() for piece in pieces]

    with (
        patch.object(pieces, "check_fit", lambda *args, **keys: None),
        patch.object(save_load, "_check_size", lambda *args: None),
        patch.object(pieces.StoredPieces, "overlapping", what_is_there),
    ):
        yield


def a_shard_in_the_wrong_place(run: Run) -> Any:
    """Each rank reads the first shard."""
    return pieces_as(run, lambda piece: piece._replace(start=0))


def transposed_tp_axis(run: Run) -> Any:
    """Matrices that are cut by rows are read as if by columns, and the other way round."""
    from megaaccum.checkpoint import pieces

    of = pieces.Cut.from_param

    def transposed(param: Any, groups: Any) -> Any:
        cut = of(param, groups)
        if cut.runs == 1 or len(getattr(param, "ds_shape", param.shape)) < 2:
            return cut
        return replace(cut, rows=1 if cut.rows > 2 else math.gcd(cut.numel // cut.runs, 32))

    return patch.object(pieces.Cut, "from_param", transposed)


def padding_kept(run: Run) -> Any:
    """The vocabulary keeps the padding of the layout that it was built for, with what was in it."""
    return unchecked()


def a_tied_copy_diverged(run: Run) -> Any:
    """The head's copy of the embedding is not read."""
    from megaaccum.model.names import is_tied_copy

    return pieces_as(run, lambda piece: None if is_tied_copy(piece.param) else piece)


def expert_order(run: Run) -> Any:
    """Experts are read in reverse."""

    def reversed_experts(piece: Any) -> Any:
        head, found, tail = piece.name.partition("local_experts.")
        number, _, rest = tail.partition(".")
        return piece._replace(name=f"{head}{found}{3 - int(number)}.{rest}") if found else piece

    return pieces_as(run, reversed_experts)


def the_step_count_lost(run: Run) -> Any:
    adopt = run.backend.adopt_state
    return patch.object(run.backend, "adopt_state", lambda num_steps: adopt(0))


def moments_swapped(run: Run) -> Any:
    def swapped(piece: Any) -> Any:
        moments = {"exp_avg": piece.tensors["exp_avg_sq"], "exp_avg_sq": piece.tensors["exp_avg"]}
        return piece._replace(tensors=piece.tensors | moments)

    return pieces_as(run, swapped)


def masters_rounded(run: Run) -> Any:
    """Master weights go through the 16 bits of the model's."""
    from megaaccum.checkpoint import pieces

    copy = pieces.copy

    def rounded(source: torch.Tensor, stored: Any, *args: Any) -> None:
        copy(source.bfloat16().float() if stored.kind == "param" else source, stored, *args)

    return patch.object(pieces, "copy", rounded)


def random_states_lost(run: Run) -> Any:
    from megaaccum.distributed import rng

    return patch.object(rng, "restore", lambda states: None)


def the_sampler_off_by_one(run: Run) -> Any:
    return resumed_as(run, consumed_samples=lambda progress: progress.consumed_samples + 1)


def the_lr_schedule_in_steps(run: Run) -> Any:
    return resumed_as(run, lr_schedule=lambda progress: progress.lr_schedule | {"num_steps": progress.step})


def the_loss_scale_reset(run: Run) -> Any:
    return resumed_as(run, transaction=lambda progress: progress.transaction | {"train_step": {}})


def histories_lost(run: Run) -> Any:
    return patch.object(type(run.engine), "buffers", {})


def a_frozen_parameter_thawed(run: Run) -> Any:
    return unchecked()


def buffers_lost(run: Run) -> Any:
    return patch.object(type(run.engine), "buffers", {})


def names_of_another_pp(run: Run) -> Any:
    """Layers are read by their numbers in the stage, of which each has one."""

    def by_place(piece: Any) -> Any:
        head, found, tail = piece.name.partition("layers.")
        return piece._replace(name=f"{head}{found}0.{tail.partition('.')[2]}") if found else piece

    return pieces_as(run, by_place)


# --- what changes a model --------------------------------------------------------------------------------------------


def with_histories(chunks: list[torch.nn.Module]) -> None:
    """Each layer's input goes through eight bits by a scale from the largest values of the forwards before: delayed
    scaling, as Transformer Engine does it."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.mlp.register_buffer("amax_history", torch.full((6,), 40.0))
            layer.mlp.register_forward_pre_hook(_in_eight_bits)


def _in_eight_bits(mlp: torch.nn.Module, args: tuple) -> tuple:
    hidden, *rest = args
    history, largest = mlp.amax_history, hidden.detach().abs().max()
    scale = 448.0 / history.max()
    rounded = (hidden * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(hidden.dtype) / scale
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    history.copy_(history.roll(1))
    history[0] = largest
    return (hidden + (rounded - hidden).detach(), *rest)


def with_histories_and_frozen(chunks: list[torch.nn.Module]) -> None:
    """The same, and positions are not trained."""
    with_histories(chunks)
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            param.requires_grad_("position_embeddings" not in name)


@dataclass(frozen=True)
class Entry:
    """One class of mistakes. saved, read: layouts; the same layout resumes bit-equal. seen_in: the parts of the next
    step that the mistake changes. change, changed_to: the model's change when it is saved, and when the mistake is
    made."""

    mistake: Mistake
    saved: Case
    read: Case
    seen_in: str = "gradient"
    change: Change = unchanged
    changed_to: Change | None = None
    sound: Case | None = None
    """The layout that reads rightly, where that is another."""

    @property
    def source(self) -> tuple[Case, Change]:
        """The run that is saved."""
        return self.saved, self.change

    @property
    def moves(self) -> bool:
        """Whether the mistake is one of moving to another layout, or of reading one tensor parallelism as another."""
        return self.saved.world_size == 4 or self.saved != self.read


def same(mistake: Mistake, layout: str, model: str, seen_in: str, lane: str = "fp32", **keys: Any) -> Entry:
    case = Case(2, layout, model, lane)
    return Entry(mistake, case, case, seen_in, **keys)


SOURCE = Case(4, TP2, DENSE)
MOE_SOURCE = Case(2, EP2, MOE)
BANK = {
    "shard in the wrong place": Entry(a_shard_in_the_wrong_place, SOURCE, Case(4, DP4, DENSE)),
    "transposed tp axis": Entry(transposed_tp_axis, SOURCE, SOURCE),
    "padding kept": Entry(
        padding_kept, SOURCE, Case(4, PP2 + " --make_vocab_size_divisible_by 40", DENSE), sound=Case(4, PP2, DENSE)
    ),
    "tied copy diverged": Entry(a_tied_copy_diverged, SOURCE, Case(4, PP2, DENSE)),
    "expert order": Entry(expert_order, MOE_SOURCE, Case(2, "--pp_microbatches 4", MOE)),
    "optimizer step count lost": same(the_step_count_lost, DP2, DROPOUT, "weights", "bf16"),
    "moments swapped": same(moments_swapped, DP2, DROPOUT, "weights", "bf16"),
    "master weights rounded to 16 bits": same(masters_rounded, DP2, DROPOUT, "weights", "bf16"),
    "RNG lost": same(random_states_lost, DP2, DROPOUT, "gradient", "bf16"),
    "sampler position off by one": same(the_sampler_off_by_one, DP2, DROPOUT, "gradient", "bf16"),
    "LR schedule in steps": same(the_lr_schedule_in_steps, DP2, DROPOUT, "weights", "bf16"),
    "loss scale reset": same(the_loss_scale_reset, DP2 + " --loss_scale_window 1", DENSE, "loss_scale", "fp16"),
    "FP8 history lost": same(histories_lost, DP2, DENSE, "gradient", change=with_histories_and_frozen),
    "frozen parameter thawed": same(
        a_frozen_parameter_thawed, DP2, DENSE, "weights", change=with_histories_and_frozen, changed_to=with_histories
    ),
    "buffers lost": same(buffers_lost, EP2, MOE, "weights"),
    "names of another pp": Entry(names_of_another_pp, SOURCE, Case(4, PP2, DENSE)),
}
"""The 16 classes of mistakes that restarts on other shapes are known for."""


@dataclass(frozen=True)
class Seen:
    """The next step of one rank: uninterrupted, after a right restart, and after a wrong one."""

    uninterrupted: Next
    right: Next
    wrong: Next


def outcomes(folder: str, entries: list[tuple[str, Entry]]) -> dict[str, Seen]:
    """The result of each entry on this rank. Entries that save, or read, in the same way share one run."""
    found = {}
    sources: dict[Any, tuple[str, Next]] = {}
    readers: dict[Any, Run] = {}

    def reader(case: Case, change: Change) -> Run:
        if (case, change) not in readers:
            readers[case, change] = Run.of(case, change)
        return readers[case, change]

    for name, entry in entries:
        if (key := entry.source) not in sources:
            path = folder + "/" + checkpoint_of(entry)
            sources[key] = path, restarts.saved(path, entry.saved, change=entry.change)
        path, uninterrupted = sources[key]
        wrong = reader(entry.read, entry.changed_to or entry.change)
        mistaken = restarts.loaded(wrong, path, entry.mistake(wrong)).step()
        right = reader(entry.sound or entry.read, entry.change)
        found[name] = Seen(uninterrupted, restarts.loaded(right, path).step(), mistaken)
    return found


def checkpoint_of(entry: Entry) -> str:
    """The folder that entries with one source share."""
    return next(str(number) for number, each in enumerate(BANK.values()) if each.source == entry.source)


@dataclass(frozen=True)
class Bank:
    """Results of the selected entries: ranks by entry, and references by model."""

    seen: dict[str, list[Seen]]
    references: dict[str, tuple[Reference, Reference]]


@pytest.fixture(scope="module")
def bank(request, tmp_path_factory) -> Bank:
    ran = [item for item in request.session.items if item.function is test_each_mistake_is_seen]
    entries = [(item.callspec.params["name"], BANK[item.callspec.params["name"]]) for item in ran]
    folder = str(tmp_path_factory.mktemp("bank"))
    seen = {}
    for world_size in (2, 4):
        these = [(name, entry) for name, entry in entries if entry.read.world_size == world_size]
        ranks = run_ranks(outcomes, world_size, folder, these, timeout=200) if these else []
        seen |= {name: [rank[name] for rank in ranks] for name, _ in these}
    moved = {entry.saved.model: f"{folder}/{checkpoint_of(entry)}" for _, entry in entries if entry.moves}
    (references,) = run_ranks(both_references, 1, moved)
    return Bank(seen, references)


@pytest.mark.parametrize("name", BANK, ids=lambda name: name.replace(" ", "_"))
def test_each_mistake_is_seen(bank, name):
    ranks, entry = bank.seen[name], BANK[name]
    if entry.moves:
        exact, near = bank.references[entry.saved.model]
        limit = FACTOR * total_error([near.gradient], exact)
        assert total_error([seen.right.gradient for seen in ranks], exact) <= limit
        assert not total_error([without_padding(seen.wrong.gradient, exact) for seen in ranks], exact) <= 1000 * limit
    else:
        assert max(distance(seen.right, seen.uninterrupted, entry.seen_in) for seen in ranks) == 0.0
        assert not max(distance(seen.wrong, seen.uninterrupted, entry.seen_in) for seen in ranks) <= 1e-5


def without_padding(gradient: Gradient, exact: Reference) -> Gradient:
    """The gradient, cut to the rows of the reference."""
    sizes = {name: len(part) for name, part in exact.gradient.parts.items()}
    return replace(gradient, parts={name: part[: sizes[name]] for name, part in gradient.parts.items()})


def both_references(folders: dict[str, str]) -> dict[str, tuple[Reference, Reference]]:
    """One process in float64 and one in FP32, from the checkpoint of each model."""
    return {
        model: (restarts.reference(folder, model, "fp64"), restarts.reference(folder, model, "fp32"))
        for model, folder in folders.items()
    }


def distance(one: Next, other: Next, seen_in: str) -> float:
    """How far apart two steps are in one respect: relative, L2, over all parameters of a rank that have it."""
    if seen_in == "loss_scale":
        return abs(one.outcome[seen_in] / other.outcome[seen_in] - 1)
    parts = (one.gradient.parts, other.gradient.parts) if seen_in == "gradient" else (one.weights, other.weights)
    names = [name for name, part in parts[1].items() if not part.isnan().all()]  # a frozen one has no gradient
    flat, true = (torch.cat([part[name].double().flatten() for name in names]) for part in parts)
    return float((flat - true).norm() / true.norm())


# --- moves -----------------------------------------------------------------------------------------------------------


def of_four_layers(case: Case) -> Case:
    """The case with a layer in each chunk where a rank has two, and with several in the others'."""
    return replace(case, model=f"{case.model} --num_layers 4")


SOME = [tuple(map(of_four_layers, restarts.MOVES[number])) for number in (0, 2, 4, 19, 23, 24, 25)]
"""`python -m benchmarks restarts` has all, of eight layers."""


@pytest.fixture(scope="module")
def moves(request, tmp_path_factory) -> dict[restarts.Move, tuple[float, float]]:
    """(error, limit) of the next step's gradient after each move that is to run."""
    function = test_the_next_gradient_on_another_layout
    wanted = [item.callspec.params["move"] for item in request.session.items if item.function is function]
    return restarts.errors(wanted, str(tmp_path_factory.mktemp("moves")))


@pytest.mark.parametrize("move", SOME, ids=lambda move: f"{move[0].layout} > {move[1].layout}")
def test_the_next_gradient_on_another_layout(moves, move):
    error, limit = moves[move]
    assert error <= limit


SAME = [restarts.SAME_MOVES[number] for number in (2, 6, 13, 21)]
"""From each of the four layouts once: without a pipeline to one, and back, and over backends and sync modes."""


@pytest.fixture(scope="module")
def bits(tmp_path_factory) -> dict[restarts.Move, tuple[Outcome, Outcome]]:
    """For each move, the next step of the uninterrupted run and the next step after the move."""
    return dict(zip(SAME, run_ranks(restarts.same_bits, 4, str(tmp_path_factory.mktemp("same")), SAME)[0], strict=True))


@pytest.mark.parametrize("move", SAME, ids=lambda move: f"{move[0].layout} > {move[1].layout}")
def test_sums_in_one_order_go_on_as_if_not_interrupted(bits, move):
    uninterrupted, after = bits[move]
    assert after == uninterrupted


def test_a_restart_with_other_bits_is_seen(tmp_path):
    ((uninterrupted, after),) = run_ranks(restarts.same_bits, 4, str(tmp_path), SAME[2:3], masters_rounded)[0]
    assert after.gradient != uninterrupted.gradient and after.losses != uninterrupted.losses


WIDER = DENSE + "--ffn_hidden_size 52 "
TP4 = "--tensor_model_parallel_size 4 --pp_microbatches 8"
COPIED = Case(4, DP4 + " --reproducible layout", DENSE)
"""Its only stage has a copy of the tied embedding in the head."""


def state_errors(folder: str, source: Case, targets: list[Case], mistake: Mistake | None = None) -> list[float]:
    """How far weights and moments of the run that saved, and of each that loads, are from those of one process."""
    ranks = run_ranks(restarts.states, 4, folder, source, targets, mistake, timeout=120)
    (exact,) = run_ranks(restarts.state_reference, 1, folder, source.model)
    return [total_error(list(each), exact) for each in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (Case(4, TP2, WIDER), [Case(4, TP4 + " --backend ddp", WIDER), Case(4, PP2 + " --zero_stage 1", WIDER)]),
        (COPIED, [Case(4, DP4 + " --backend fsdp2", DENSE), Case(4, PP2 + " --zero_stage 1", DENSE), SOURCE]),
    ],
    ids=["tp", "tied"],
)
def test_moments_are_those_of_the_run_that_saved(tmp_path, source, targets):
    assert state_errors(str(tmp_path), source, targets) == [0.0] * (1 + len(targets))


def test_other_moments_are_seen(tmp_path):
    right, wrong = state_errors(str(tmp_path), SOURCE, [SOURCE], moments_swapped)
    assert right == 0.0 and not wrong <= 1e-3
