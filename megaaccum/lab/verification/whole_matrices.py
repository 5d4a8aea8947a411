"""Muon and SOAP of one process, by emerging-optimizers on whole matrices: what the sharded ones are compared with."""

from __future__ import annotations

import re
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer, get_muon_scale_factor

from megaaccum.config import Plan
from megaaccum.lab.verification.param_groups import param_groups
from megaaccum.upstream import emerging


class WholeMatrices:
    """The library's Muon or SOAP over weight matrices of layers, torch's AdamW over all other masters.

    others: makes the AdamW of (name, master) pairs. Fused weights are split by the shapes of the configured GPT; the
    keys' patterns are not read.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], plan: Plan, others: Any):
        keys = plan.config.optimizer
        matrices = [(name, each) for name, each in named if is_matrix(name, each)]
        rest = [(name, each) for name, each in named if not is_matrix(name, each)]
        split = _Split(matrices, plan)
        self.inner: Any = _SplitSoap(split, plan) if keys.optimizer == "soap" else _SplitMuon(split, plan)
        self.adam = others(rest, plan)
        self.param_groups = [*self.inner.param_groups, *self.adam.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each master."""
        return {**self.inner.state, **self.adam.state}

    def step(self) -> None:
        """Step both."""
        self.inner.step()
        self.adam.step()


def is_matrix(name: str, param: torch.Tensor) -> bool:
    """Whether Muon or SOAP steps a parameter of the configured GPT."""
    return param.dim() == 2 and ".layers." in name and re.search("router|gate_weight|norm", name) is None


class _Split:
    """The matrices of each master, by its name. groups: of the library's optimizer, one for each master."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], plan: Plan):
        keys, model = plan.config.optimizer, plan.config.model
        self.masters, self._keys, self._gated = dict(named), keys, model.swiglu
        self._names = {id(master): name for name, master in named}
        heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
        width = model.kv_channels or model.hidden_size // heads
        self._qkv = [heads // groups * width, width, width]
        self.groups = list(param_groups(named, plan, matrices=True))

    def parts(self, master: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Views of the `values` of a master, [groups, rows, columns] of each matrix."""
        name = self._names[id(master)]
        if "linear_qkv" in name and self._keys.muon_split_qkv:
            return list(values.view(-1, sum(self._qkv), values.shape[1]).split(self._qkv, dim=1))
        is_pair = "linear_fc1" in name and self._gated and self._keys.muon_split_gated
        return list(values.view(1, *values.shape).chunk(2 if is_pair else 1, dim=1))


class _SplitMuon(OrthogonalizedOptimizer):
    def __init__(self, split: _Split, plan: Plan):
        self._split, self._keys = split, plan.config.optimizer
        keys = self._keys
        super().__init__(
            split.groups,
            keys.lr, keys.muon_momentum, keys.weight_decay,
            nesterov=keys.muon_nesterov, weight_decay_method=keys.muon_weight_decay_method,
            fp32_matmul_prec=keys.muon_fp32_matmul_prec, scaled_orthogonalize_fn=self._scaled,
        )  # fmt: skip

    def _scaled(self, matrix: torch.Tensor) -> torch.Tensor:
        keys = self._keys
        found = emerging.newton_schulz(
            matrix,
            steps=keys.muon_num_ns_steps,
            coefficients=keys.muon_coefficient_type,
            precision=keys.muon_fp32_matmul_prec,
        )
        return found * get_muon_scale_factor(*matrix.shape, mode=keys.muon_scale_mode) * keys.muon_extra_scale_factor

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Orthogonalise each matrix of a fused weight alone."""
        found = torch.empty_like(grad)
        for part, target in zip(self._split.parts(p, grad), self._split.parts(p, found), strict=True):
            target.copy_(self._scaled(part.reshape(-1, grad.shape[1])).view(part.shape))
        return found


class _SplitSoap:
    """The library's SOAP of each matrix, with its own decay and learning rate."""

    def __init__(self, split: _Split, plan: Plan):
        self._split = split
        self.param_groups = split.groups
        self.state: dict[Any, Any] = {}
        self._each = {
            name: [
                emerging.soap(torch.nn.Parameter(part.reshape(-1, part.shape[2]).clone()), plan.config.optimizer)
                for part in split.parts(master, master.detach())
            ]
            for name, master in split.masters.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Step the matrices of every master that has a gradient."""
        for group, (name, master) in zip(self.param_groups, self._split.masters.items(), strict=True):
            assert master.grad is not None, f"{name} has no gradient"
            weights, grads = (self._split.parts(master, each) for each in (master.detach(), master.grad))
            for soap, weight, grad in zip(self._each[name], weights, grads, strict=True):
                (own,) = soap.param_groups
                own["lr"], own["weight_decay"] = group["lr"], group["weight_decay"]
                (param,) = own["params"]
                param.copy_(weight.reshape(param.shape))
                param.grad = grad.reshape(param.shape)
                soap.step()
                weight.copy_(param.view(weight.shape))
