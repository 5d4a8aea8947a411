"""Runs that are saved in one layout and go on in another, and what their next step comes to.

Functions here run inside ranks and return plain data, but for `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import FACTOR, total_error
from tests.support.layouts import Outcome, outcome_of
from tests.support.parity import VOCAB, Case, Cut, Gradient, Reference, Rig, named, sample

SAMPLES = 1000
KINDS = ("param", "exp_avg", "exp_avg_sq")
Change = Callable[[list[torch.nn.Module]], None]
"""A change of a rank's chunks, applied right after they are built."""


@dataclass(frozen=True)
class Next:
    """A step. gradient: that the optimizer received. weights: masters after it, and buffers, by name. outcome: what
    else it reports."""

    gradient: Gradient
    weights: dict[str, torch.Tensor]
    outcome: dict[str, float]


class Samples:
    """The made-up data set of `parity.sample`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


Mistake = Callable[["Run"], Any]
"""A context in which a checkpoint is read wrongly."""


def unchanged(chunks: list[torch.nn.Module]) -> None:
    """The model as it is."""


@dataclass
class Run(Rig):
    """One rank of a run over an Engine; its samples follow from the engine's count."""

    engine: Any = None

    @classmethod
    def of(cls, case: Case, change: Change = unchanged) -> Self:
        """Collective. change: what is done to the chunks when they are built."""
        from megaaccum import initialize
        from megaaccum.distributed import groups
        from megaaccum.pretrain.model import gpt
        from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep

        plan = case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        change(chunks)
        forward_step = GptForwardStep(built, plan.batch.loss_norm)
        engine = initialize(plan, chunks, groups=built, forward_step_func=forward_step, reports=REPORTS)
        return cls(case, plan, built, chunks, engine.backend, engine.train_steps, engine)

    def step(self, *, update: bool = True) -> Next:
        """The next step. update: whether the weights follow; if not, only its gradient counts."""
        from megaaccum.pretrain.data.loader import MicrobatchLoader

        batch, optimizer_step = self.plan.batch, self.backend.step
        loader = MicrobatchLoader(
            Samples(),
            batch,
            dp_rank=self.groups.dp.rank(),
            consumed_samples=self.engine.consumed_samples,
            num_workers=0,
            in_runs=self.plan.in_runs,
        )
        seen: dict[str, torch.Tensor] = {}

        def looked_at() -> None:
            seen.update(self.assemble())
            if update:
                optimizer_step()

        with patch.object(self.backend, "step", looked_at):
            result = self.engine.train_step(loader.next_step())
        gradient = Gradient(seen, result.grad_norm, result.loss, result.num_tokens, self.groups.tp.rank())
        outcome = {"step": result.step, "lr": result.lr, "loss_scale": result.loss_scale, "skipped": result.skipped}
        return Next(gradient, self.weights() if update else {}, outcome)

    def outcome(self) -> Outcome:
        """The parts of the next step, and of the weights and moments after it, that all layouts share (tp 1)."""
        gradient = self.step().gradient
        return outcome_of([gradient.loss], [gradient.norm], gradient, self.backend)

    def cuts(self) -> dict[str, Cut]:
        """How tensor parallelism cuts each parameter of one process."""
        (chunk,) = self.chunks
        return {
            name: Cut(getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1) == 2)
            for name, param in named(chunk)
        }

    def state(self) -> Gradient:
        """{parameter/kind: this tp rank's part} of masters and moments, in the place of a gradient, and their norm."""
        parts = {}
        for kind in KINDS:
            whole = self.whole((at.name, at.param, at.start, at.tensors[kind]) for at in self.backend.state())
            parts |= {f"{name}/{kind}": part for name, part in whole.items()}
        norm = float(torch.stack([part.norm() for part in parts.values()]).norm())
        return Gradient(parts, norm, 0.0, 0, self.groups.tp.rank())

    def weights(self) -> dict[str, torch.Tensor]:
        """Masters and buffers, by name."""
        states = [(each.name, each.param, each.start, each.tensors["param"]) for each in self.backend.state()]
        return self.whole(states) | {name: buffer.detach().clone() for name, buffer in self.engine.buffers.items()}


def saved(folder: str, case: Case, steps: int = 2, *, change: Change = unchanged) -> Next:
    """The uninterrupted next step of a run of `case` that was saved after `steps` steps."""
    return written(folder, case, steps, change).step()


def written(folder: str, case: Case, steps: int = 2, change: Change = unchanged) -> Run:
    """A run of `case` that was saved after `steps` steps."""
    run = Run.of(case, change)
    for _ in range(steps):
        run.step()
    run.engine.save(folder)
    return run


def loaded(run: Run, folder: str, mistake: AbstractContextManager[None] | None = None) -> Run:
    """Resume `run` from the checkpoint; mistake: one that the loader makes."""
    with mistake or nullcontext():
        assert run.engine.load(folder)
    return run


def reference(folder: str, model: str, lane: str) -> Reference:
    """The next step of one process that holds the whole model of the checkpoint in the precision of `lane`. model:
    with global_batch_size."""
    run = loaded(Run.of(Case(1, "", model, lane)), folder)
    return Reference(run.step(update=False).gradient, run.cuts())


def states(folder: str, source: Case, targets: list[Case], mistake: Mistake | None = None) -> list[Gradient]:
    """Weights and moments of a run that was saved after two steps, and those of each run that takes them up. mistake:
    one that is made while the checkpoint is read."""
    found = [written(folder, source).state()]
    for target in targets:
        after = Run.of(target)
        found.append(loaded(after, folder, mistake and mistake(after)).state())
    return found


def state_reference(folder: str, model: str) -> Reference:
    """Weights and moments of one process that loads the checkpoint."""
    run = loaded(Run.of(Case(1, "", model)), folder)
    return Reference(run.state(), {f"{name}/{kind}": cut for name, cut in run.cuts().items() for kind in KINDS})


# --- from layout to layout -------------------------------------------------------------------------------------------


DENSE = "--num_layers 8 --swiglu --ffn_hidden_size 52 --normalization RMSNorm --global_batch_size 16"
FROM = (
    "--tp 2 --pp_microbatches 8",
    "--pp 2 --pp_microbatches 8 --zero_stage 1",
    "--pp 2 --vpp 2 --pp_microbatches 8 --backend megatron",
    "--pp 2 --schedule dualpipev --pp_microbatches 8 --sync streaming",
)
TO = (
    "--pp_microbatches 4 --backend fsdp2",
    "--tp 2 --pp 2 --pp_microbatches 16 --sync streaming",
    "--pp 4 --schedule zb-h1 --pp_microbatches 16 --zero_stage 2",
    "--pp 2 --schedule zbv --pp_microbatches 8",
    "--tp 4 --pp_microbatches 16 --backend ddp",
    "--pp 2 --vpp 2 --grad_accum_steps 2 --pp_microbatches 4 --flush per_round --backend megatron",
)
"""Layouts of four ranks. Between them they change tp, pp, vpp, dp, schedule, flush, ZeRO stage, sync mode, backend."""
EXPERTS = (
    "--num_layers 4 --num_experts 4 --no_add_bias_linear --swiglu --moe_router_topk 2 --moe_ffn_hidden_size 32 "
    "--moe_router_score_function sigmoid --moe_router_enable_expert_bias --global_batch_size 16"
)
CUT = "--tp 2 --sequence_parallel --pp_microbatches 8"
SPREAD = "--ep 2 --pp 2 --pp_microbatches 8"
Move = tuple[Case, Case]
MOVES: tuple[Move, ...] = (
    *((Case(4, start, DENSE), Case(4, end, DENSE)) for start in FROM for end in TO),
    (Case(4, CUT, EXPERTS), Case(4, SPREAD, EXPERTS)),
    (Case(4, SPREAD, EXPERTS), Case(4, CUT, EXPERTS)),
)
"""From each of the four layouts to each of the six others, and with experts that are cut, or spread over ranks."""


SAME = (
    "--num_layers 4 --attention_dropout 0.1 --hidden_dropout 0.1 --clip_grad 0.5 --lr 1e-2 --global_batch_size 16"
    " --reproducible layout"
)
FROM_THE_SAME = (
    "--pp_microbatches 4",
    "--pp 2 --pp_microbatches 8 --zero_stage 1",
    "--pp 2 --vpp 2 --pp_microbatches 8 --backend megatron",
    "--pp 2 --schedule dualpipev --pp_microbatches 8 --sync streaming",
)
TO_THE_SAME = (
    "--pp_microbatches 4 --backend fsdp2",
    "--pp_microbatches 2 --grad_accum_steps 2 --sync streaming",
    "--pp 4 --schedule zb-h1 --pp_microbatches 16 --zero_stage 2",
    "--pp 2 --schedule zbv --pp_microbatches 8",
    "--pp 2 --pp_microbatches 8 --backend ddp",
    "--pp 2 --vpp 2 --grad_accum_steps 2 --pp_microbatches 4 --flush per_round --backend megatron",
)
SAME_MOVES: tuple[Move, ...] = tuple(
    (Case(4, start, SAME), Case(4, end, SAME)) for start in FROM_THE_SAME for end in TO_THE_SAME
)
"""The same with dropout and clipping, where all of them have one sum. Without a pipeline a rank has two copies of the
tied embedding, with one each stage at an end has one."""


def same_bits(folder: str, moves: list[Move], mistake: Mistake | None = None) -> list[tuple[Outcome, Outcome]]:
    """(next step of the run that saved, next step of the run that loads) of each move. mistake: one that is made while
    a checkpoint is read."""
    uninterrupted: dict[Case, tuple[str, Outcome]] = {}
    found = []
    for start, end in moves:
        if start not in uninterrupted:
            path = f"{folder}/{len(uninterrupted)}"
            uninterrupted[start] = path, written(path, start).outcome()
        path, expected = uninterrupted[start]
        run = Run.of(end)
        found.append((expected, loaded(run, path, mistake and mistake(run)).outcome()))
    return found


def moved(folder: str, cases: list[tuple[Case, list[Case]]]) -> list[list[Gradient]]:
    """The next step's gradient in each layout that loads, for each layout that saves."""
    found = []
    for number, (source, targets) in enumerate(cases):
        path = f"{folder}/{number}"
        written(path, source)
        found.append([loaded(Run.of(target), path).step(update=False).gradient for target in targets])
    return found


def references(folder: str, models: list[str]) -> list[tuple[Reference, Reference]]:
    """One process in float64 and one in FP32, after each of the checkpoints of `moved`."""
    paths = [f"{folder}/{number}" for number in range(len(models))]
    return [
        (reference(path, model, "fp64"), reference(path, model, "fp32"))
        for path, model in zip(paths, models, strict=True)
    ]


def errors(moves: Iterable[Move], folder: str) -> dict[Move, tuple[float, float]]:
    """(error, limit) of the next step's gradient after each move; run in the test process. The limit is FACTOR times
    the error of one process in FP32; both are relative to one in float64."""
    ends: dict[Case, list[Case]] = {}
    for start, end in moves:
        ends.setdefault(start, []).append(end)
    ranks = run_ranks(moved, 4, folder, list(ends.items()), timeout=600)
    (exact,) = run_ranks(references, 1, folder, [start.model for start in ends], timeout=300)
    found = {}
    for number, (start, targets) in enumerate(ends.items()):
        whole, near = exact[number]
        for place, end in enumerate(targets):
            gradients = [rank[number][place] for rank in ranks]
            found[start, end] = total_error(gradients, whole), FACTOR * total_error([near.gradient], whole)
    return found
