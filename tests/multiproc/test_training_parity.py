"""Twenty AdamW steps with clipping active stay as close to the float64 run as one FP32 process does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import FACTOR, own_part
from tests.support.parity import (
    Case,
    Cut,
    Gradient,
    Reference,
    Rig,
    named,
    one_process,
    plain_loop,
    stack,
)

STEPS = 20
CLIP = 0.5
# No biases: the gradient of a key's bias is zero but for rounding, and Adam divides the rounding by its own size.
MODEL = f"--num_layers 4 --clip_grad {CLIP} --no_add_bias_linear --normalization RMSNorm --swiglu"
LAYOUTS = [
    Case(4, "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4", MODEL),
    Case(
        4,
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel "
        "--grad_accum_steps 4 --pp_microbatches 4",
        MODEL,
    ),
]


@dataclass(frozen=True)
class Training:
    """Loss and norm before clipping of each step, the weights at the end and at the start (this tp rank's parts)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    tp_rank: int = 0


def train(cases: list[Case]) -> list[Training]:
    """STEPS steps of each case on this rank."""
    results = []
    for case in cases:
        rig = Rig.of(case)
        size = rig.plan.batch.global_batch_size
        steps = [rig.train(step=n, first=n * size) for n in range(STEPS)]
        rig.backend.gather()
        weights = {name: p.detach().double().clone() for chunk in rig.chunks for name, p in named(chunk)}
        results.append(Training([s.loss for s in steps], [s.grad_norm for s in steps], weights, rig.groups.tp.rank()))
    return results


def train_in_one_process(model: str, global_batch: int, dtype: str) -> tuple[Training, dict[str, Cut]]:
    """The same steps of the reference's loop on the full batch, and how tp would cut each parameter."""
    from megaaccum.lab.verification.reference import clip_factor, norm_of
    from megaaccum.lab.verification.subject import adamw

    chunk, plan = one_process(model, dtype)
    loop = plain_loop(chunk, plan, optimizer=lambda named: adamw(named, plan))
    losses, norms = [], []
    for step in range(STEPS):
        batch = stack(range(step * global_batch, (step + 1) * global_batch))
        loss, grads = loop.backward(batch, float(batch["loss_mask"].sum()), 1)
        norms.append(norm_of(grads))
        loop.update({name: grad * clip_factor(norms[-1], CLIP) for name, grad in grads.items()})
        losses.append(loss)
    weights = {name: master.detach().double() for name, master in loop.masters.items()}
    cuts = {n: Cut(getattr(p, "partition_dim", -1), "linear_fc1" in n) for n, p in named(chunk)}
    return Training(losses, norms, weights), cuts


def distances(ranks: list[Training], exact: Training, cuts: dict[str, Cut]) -> tuple[float, float]:
    """L2 distance to `exact` of the losses over the steps, and of the weights: of the rank that is farthest off, each
    rank relative to the exact weights of its own parts."""
    whole = Reference(Gradient(exact.weights, 0.0, 0.0, 0), cuts)
    weights = []
    for rank in ranks:
        at = Gradient({}, 0.0, 0.0, 0, rank.tp_rank)
        pairs = [(part, own_part(name, part, at, whole)) for name, part in rank.weights.items()]
        off = sum(float((part - true).square().sum()) for part, true in pairs)
        weights.append((off / sum(float(true.square().sum()) for _, true in pairs)) ** 0.5)
    losses = [float(_vector(r.losses).sub(_vector(exact.losses)).norm()) for r in ranks]
    return max(losses), max(weights)


def _vector(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_twenty_clipped_adamw_steps():
    (batch,) = {case.plan().batch.global_batch_size for case in LAYOUTS}
    exact, cuts = run_ranks(train_in_one_process, 1, MODEL, batch, "fp64")[0]
    single, _ = run_ranks(train_in_one_process, 1, MODEL, batch, "fp32")[0]
    assert min(exact.norms) > CLIP, "clipping has to be active in every step"
    assert exact.losses[-1] < exact.losses[0]
    losses_of_one, weights_of_one = distances([single], exact, cuts)
    for ranks in zip(*run_ranks(train, 4, LAYOUTS, timeout=200), strict=True):
        assert {name for rank in ranks for name in rank.weights} == exact.weights.keys()
        losses, weights = distances(list(ranks), exact, cuts)
        assert losses <= FACTOR * losses_of_one
        assert weights <= FACTOR * weights_of_one
