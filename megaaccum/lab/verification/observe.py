"""The accumulated step of a layout, observed on each rank: the optimizer's inputs and its results."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megaaccum.distributed import groups as process_groups
from megaaccum.distributed import rng
from megaaccum.distributed.groups import Groups
from megaaccum.engine import initialize
from megaaccum.lab.verification import borders
from megaaccum.lab.verification import subject as subjects
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.records import GRADIENT, MODEL, Crossing, Observed, Piece, Step
from megaaccum.model import names


def observe(case: Case, steps: int, *, at_borders: bool = False) -> Observed:
    """Take `steps` steps of a case. at_borders: record what crosses borders of stages in the first. Collective over the
    world of the layout."""
    run = Run(case)
    seen = Observed(torch.distributed.get_rank(), place_in(run.groups), run.model())
    watching: AbstractContextManager[list[Crossing]] = run.watching() if at_borders else nullcontext([])
    with watching as seen.crossings:
        seen.steps.append(run.step(0))
    for number in range(1, steps):
        seen.steps.append(run.step(number))
    if case.user_model is None:
        states = b"".join(bytes(state.tolist()) for _, state in sorted(rng.snapshot().items()))
        seen.random = hashlib.sha256(states).hexdigest()
    return seen


class Run:
    """An engine over the model of a case, on this rank."""

    def __init__(self, case: Case):
        self.plan, self.subject = case.plan(), subjects.subject_of(case)
        process_groups.destroy()
        self.groups = process_groups.build(self.plan.layout, timeout_minutes=5)
        self.chunks = self.subject.chunks(self.plan, self.groups)
        self.engine = initialize(
            self.plan,
            self.chunks,
            groups=self.groups,
            forward_step_func=self.subject.forward_step(self.plan, self.groups),
            optimizer=None if case.user_model is None else case.user_model.optimizer,
            reports=self.subject.reports,
        )
        self.engine.train_steps.before_update = self._note_gradient
        self._gradient: list[Piece] = []

    def watching(self) -> AbstractContextManager[list[Crossing]]:
        """Record what crosses borders of stages."""

        def scale() -> float:
            return self.engine.train_steps.in_loss * self.engine.backend.loss_scale

        return borders.watching(self.plan, self.groups, self.chunks, scale)

    def step(self, number: int) -> Step:
        """Take a step and read everything that it changed."""
        self._gradient = []
        result = self.engine.train_step(self._microbatches(number))
        step = Step(
            result.loss, result.weight, result.grad_norm, result.lr, result.loss_scale, result.skipped,
            tensors=self._state() | {GRADIENT: self._gradient, MODEL: self.model()},
        )  # fmt: skip
        step.buffers = {name: each.double().cpu().clone() for name, each in names.named_buffers(self.chunks)}
        return step

    def _microbatches(self, number: int) -> list[Any]:
        dp, count = self.groups.dp, self.plan.batch.num_microbatches
        return self.subject.microbatches(number, count * dp.size())[dp.rank() :: dp.size()]

    def model(self) -> list[Piece]:
        """The weights that the next forward reads; of parameters that a backend holds whole between steps."""
        self.engine.backend.gather()
        named = names.named_parameters(self.chunks)
        return [self._piece(name, param, param, 0) for name, param in named if _is_whole(param)]

    def _state(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.engine.backend.state():
            for kind, values in piece.tensors.items() if piece.shape is None else ():
                found.setdefault(kind, []).append(self._piece(piece.name, piece.param, values, piece.start))
        return found

    def _note_gradient(self) -> None:
        self._gradient = [
            self._piece(shard.name, shard.param, shard.grad, shard.start) for shard in self.engine.backend.shards()
        ]

    def _piece(self, name: str, param: Any, values: torch.Tensor, start: int) -> Piece:
        return piece_of(self.chunks[0], self.groups, name, param, values, start)


def place_in(groups: Groups) -> dict[str, int]:
    """This rank's place in each group."""
    cp = groups.collection.cp
    return {"tp": groups.tp.rank(), "pp": groups.pp.rank(), "dp": groups.dp.rank(), "cp": cp.rank()}


def piece_of(chunk: Any, groups: Groups, name: str, param: Any, values: torch.Tensor, start: int) -> Piece:
    """The piece of `param` with these values, which begin at element `start` of the part that this tp rank holds."""
    cut, group = names.is_sharded_over_tp(param), names.tp_group(param, groups)
    gated = bool(getattr(getattr(chunk, "config", None), "gated_linear_unit", False)) and "linear_fc1" in name
    return Piece(
        name, values.detach().double().cpu().reshape(-1).clone(), start,
        tp_rank=group.rank() if cut else 0, tp_size=group.size() if cut else 1,
        axis=param.partition_dim if cut else -1, gated=cut and gated,
    )  # fmt: skip


def _is_whole(param: torch.nn.Parameter) -> bool:
    """Whether `param` is a plain tensor, not the remainder of one that ZeRO-3 has released."""
    return type(param.data) is torch.Tensor and param.numel() == getattr(param, "ds_numel", param.numel())
