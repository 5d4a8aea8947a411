"""A stand-in for Transformer Engine's FusedAdam, which needs a GPU: its arithmetic and, above all, its count of steps.
What runs on ranks is below."""

from __future__ import annotations

from unittest.mock import patch

import torch

from tests.support.parity import Case, Rig


class CountsCalls(torch.optim.Optimizer):
    """AdamW that keeps its count per group and raises it in each call, in every group, empty ones too (as
    transformer-engine 2.20 and apex)."""

    def __init__(self, params, lr, betas, eps, weight_decay=0.0, **options):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1 ** group["step"]))


def build(plan, chunks) -> CountsCalls:
    """In the place of optim.adamw.build."""
    from megaaccum.model import names
    from megaaccum.optim import lr_schedule

    keys = plan.config.optimizer
    groups = lr_schedule.param_groups(list(names.named_parameters(chunks)), keys.weight_decay)
    return CountsCalls(groups, lr=keys.lr, betas=(keys.adam_beta1, keys.adam_beta2), eps=keys.adam_eps)


def trained(case: Case, stands_in: bool, steps: int, resume_at: int) -> dict[str, torch.Tensor]:
    """Masters of this rank after `steps` steps, built again from the state before step `resume_at`."""

    from megaaccum.optim import adamw

    with patch.object(adamw, "build", build if stands_in else adamw.build):
        rig = Rig.of(case)
        for step in range(steps):
            if step == resume_at:
                held = {piece.name: {k: t.clone() for k, t in piece.tensors.items()} for piece in rig.backend.state()}
                rig = Rig.of(case)
                for piece in rig.backend.state():
                    for kind, tensor in piece.tensors.items():
                        tensor.copy_(held[piece.name][kind])
                rig.backend.adopt_state(step)
            rig.train(step, first=step * rig.plan.batch.global_batch_size)
    return {piece.name: piece.tensors["param"].clone() for piece in rig.backend.state()}


def both(case: Case, steps: int, resume_at: int) -> list[dict[str, torch.Tensor]]:
    """`trained` with torch's AdamW and with the stand-in."""
    return [trained(case, stands_in, steps, resume_at) for stands_in in (False, True)]
