"""The experts' gradients that are on their way before a step's last weight gradients are computed. Runs on ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from megaaccum.executor import wgrad
from megaaccum.executor.hooks import Hooks
from megaaccum.model.torch_chunk import layers_of
from megaaccum.upstream import pytorch
from tests.support.parity import Case, Rig

REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce", "all_to_all")


@dataclass
class Sent:
    """The reductions over the experts' ranks in one step, on one rank: bytes, and whether it began before the rank's
    last W was computed (before the end of its last backward, where Megatron-core runs the schedule). seconds: by which
    it was ahead of that."""

    calls: list[tuple[int, bool]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of the bytes that is on its way before."""
        total = sum(size for size, _ in self.calls)
        return sum(size for size, before in self.calls if before) / total


def sent(case: Case, delay: float = 0.0) -> Sent:
    """The second step of a case. delay: seconds that each layer waits in F, in I, and in W for each of its products."""
    rig = Rig.of(case)
    for layer in (layer for chunk in rig.chunks for layer in layers_of(chunk)) if delay else ():
        layer.register_forward_hook(partial(_wait, delay))
    compute = wgrad.WeightGrads.compute

    def slowly(self, add) -> None:
        compute(self, lambda weight, grad: (time.sleep(delay / 6), add(weight, grad))[1])

    with patch.object(wgrad.WeightGrads, "compute", slowly if delay else compute):
        return _second_step(rig)


def _wait(delay: float, layer: torch.nn.Module, args: object, output: Any) -> None:
    """A forward hook: wait, and again when the output's gradient has come."""
    time.sleep(delay)
    tensor = output[0] if isinstance(output, tuple) else output
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: time.sleep(delay))


def _second_step(rig: Rig) -> Sent:
    rig.train()
    experts = rig.groups.expert_dp.group_name
    calls: list[tuple[int, float]] = []
    ends: list[float] = []
    computed, finalize = Hooks.after_weight_grad, rig.backend.finalize_model_grads_func

    def note(collective, group, dtype, num_bytes, seconds, count) -> None:
        if count and collective in REDUCTIONS and group.group_name == experts:
            calls.append((num_bytes, time.perf_counter()))

    def after_weight_grad(self, action) -> None:
        ends.append(time.perf_counter())
        computed(self, action)

    def end(*args, **keys) -> None:
        if not ends:
            ends.append(time.perf_counter())
        finalize(*args, **keys)

    with (
        pytorch.watched_collectives(note),
        patch.object(Hooks, "after_weight_grad", after_weight_grad),
        patch.object(rig.backend, "finalize_model_grads_func", end),
    ):
        rig.train(step=1)
    return Sent([(size, at < ends[-1]) for size, at in calls], [ends[-1] - at for _, at in calls])


def sent_of_each(cases: Sequence[Case], delay: float = 0.0) -> list[Sent]:
    return [sent(case, delay) for case in cases]
