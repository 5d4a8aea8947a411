"""Optimizers as users write them, that a look at one step of the first group would take for AdamW."""

from __future__ import annotations

import torch


class Lamb(torch.optim.Optimizer):
    """Signs of the gradient, times the norm of the parameter in groups with weight decay, as timm's Lamb."""

    def __init__(self, params, lr=1e-5, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    scale = param.norm().item() if group["weight_decay"] else 1.0
                    param.add_(param.grad.sign(), alpha=-group["lr"] * scale)


class Clipped(torch.optim.Optimizer):
    """RMSprop whose update has an RMS of at most 1 over a parameter, which the first step does not exceed, as
    StableAdamW."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    squares = self.state[param].setdefault("squares", param.grad.square())
                    squares.lerp_(param.grad.square(), 0.1)
                    update = param.grad / squares.sqrt().add_(1e-8)
                    rms = update.square().mean().sqrt().item()
                    param.add_(update, alpha=-group["lr"] / max(1.0, rms))


class Counts(torch.optim.Optimizer):
    """Momentum whose bias correction has a count in the group, as Prodigy's, or in the optimizer itself."""

    def __init__(self, params, lr=1e-2, *, own=False):
        super().__init__(params, dict(lr=lr) | ({} if own else {"k": 0}))
        self.own, self.calls, self.log = own, 0, []

    @torch.no_grad()
    def step(self, closure=None):
        if self.own:
            self.calls += 1
        for group in self.param_groups:
            if not self.own:
                group["k"] += 1
            num_steps = self.calls if self.own else group["k"]
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 0.1)
                    param.add_(average, alpha=-group["lr"] / (1 - 0.9**num_steps))


class OwnList(torch.optim.Optimizer):
    """Steps the parameters that it was made with, whatever its groups have."""

    def __init__(self, params, lr=1e-2):
        self.mine = list(params)
        super().__init__(self.mine, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.mine:
            if param.grad is not None:
                param.add_(param.grad, alpha=-self.param_groups[0]["lr"])


def in_groups(params, first: dict, second: dict) -> list[dict]:
    """Vectors and matrices as two groups with these options."""
    params = list(params)
    vectors, matrices = ([each for each in params if (each.dim() > 1) is high] for high in (False, True))
    return [{"params": vectors, **first}, {"params": matrices, **second}]
