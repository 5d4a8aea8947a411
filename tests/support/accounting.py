"""Bytes that a real step keeps, counted on a rank: what planner tests compare predictions with."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.parity import Case, Rig


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank: whole parameters and gradients of its stage, and the peak of what autograd kept."""

    pp_rank: int
    parameters: int
    gradients: int
    activations: int


def count(cases: list[Case]) -> list[Counted]:
    """A gradient of every case by the project's own train_step, on this rank. Collective."""
    return [_count(case) for case in cases]


def _count(case: Case) -> Counted:
    rig = Rig.of(case)
    batches = rig.microbatches()
    rig.backend.begin_step()
    params = [param for chunk in rig.chunks for param in chunk.parameters()]
    gradients: dict[int, int] = {}
    hooks = [p.register_post_accumulate_grad_hook(lambda p: gradients.update({id(p): p.grad.nbytes})) for p in params]
    whole = sum(param.nbytes for param in params)
    rig.train_step.gradient(batches)
    for hook in hooks:
        hook.remove()
    return Counted(rig.groups.pp.rank(), whole, sum(gradients.values()), rig.backend.memory.pop()["activations"])
