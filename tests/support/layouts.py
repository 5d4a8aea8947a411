"""Ten steps of one model under many layouts, and what has to be the same to the bit in all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tests.support.parity import Case, Rig

MODEL = (
    "--num_layers 8 --attention_dropout 0.1 --hidden_dropout 0.1 --clip_grad 0.5 --lr 1e-2 --global_batch_size 16 "
)


@dataclass(frozen=True)
class Outcome:
    """Losses and norms of the steps, and digests of the last gradient and of weights and moments."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradient: str
    state: str


def outcome(case: Case, steps: int = 10) -> Outcome:
    """Of `steps` steps of `case`; the same on every rank."""
    rig = Rig.of(case)
    results = [rig.train(step, first=step * rig.plan.batch.global_batch_size) for step in range(1, steps)]
    gradient, last = rig.watched(rig.microbatches(steps * rig.plan.batch.global_batch_size), step=steps)
    return Outcome(
        losses=tuple(each.loss for each in (*results, last)),
        norms=tuple(each.grad_norm for each in (*results, last)),
        gradient=digest(gather({name: [(0, part.view(-1))] for name, part in gradient.parts.items()})),
        state=digest(state(rig)),
    )


def state(rig: Rig):
    """{name/kind: whole tensor} of weights and moments."""
    pieces: dict[str, list] = {}
    for piece in rig.backend.state():
        for kind, tensor in piece.tensors.items():
            pieces.setdefault(f"{piece.name}/{kind}", []).append((piece.start, tensor.detach().clone()))
    return gather(pieces)


def gather(mine: dict[str, list]):
    """{name: whole flat tensor}, of all ranks' pieces [(start, values)]; pieces that several ranks hold are equal."""
    import torch

    everyone: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for name in sorted({name for pieces in everyone for name in pieces}):
        found = [each for pieces in everyone for each in pieces.get(name, ())]
        size = max(start + values.numel() for start, values in found)
        flat = torch.full((size,), float("nan"), dtype=found[0][1].dtype)
        for start, values in found:
            part = flat[start : start + values.numel()]
            assert part.isnan().logical_or_(part == values).all(), f"{name} differs between ranks"
            part.copy_(values)
        whole[name] = flat
    return whole


def digest(tensors) -> str:
    """16 hexadecimal digits of names and bits; of zeros without their sign."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode() + (tensor + 0.0).view(-1).numpy().tobytes())
    return hashed.hexdigest()[:16]


def outcomes(cases: list[Case], steps: int = 10) -> list[Outcome]:
    return [outcome(case, steps) for case in cases]
