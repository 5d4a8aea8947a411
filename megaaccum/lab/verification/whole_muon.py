"""Muon of one process, by emerging-optimizers on whole matrices: what the sharded one is compared with."""

from __future__ import annotations

import re
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer, get_muon_scale_factor

from megaaccum.config import Plan
from megaaccum.upstream import emerging


class WholeMuon:
    """The library's Muon over weight matrices of layers, torch's AdamW over all other masters.

    others: makes the AdamW of (name, master) pairs. Fused weights are split by the shapes of the configured GPT; the
    keys' patterns are not read.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], plan: Plan, others: Any):
        keys = plan.config.optimizer
        matrices = [(name, each) for name, each in named if is_matrix(name, each)]
        rest = [(name, each) for name, each in named if not is_matrix(name, each)]
        self.muon = _SplitMuon(matrices, plan)
        self.adam = others(rest, plan)
        for group in self.adam.param_groups:
            if keys.muon_scalar_lr is not None:
                group |= {"lr": keys.muon_scalar_lr, "max_lr": keys.muon_scalar_lr}
                group["min_lr"] = keys.min_lr * keys.muon_scalar_lr / keys.lr
        self.param_groups = [*self.muon.param_groups, *self.adam.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each master."""
        return {**self.muon.state, **self.adam.state}

    def step(self) -> None:
        """Step both."""
        self.muon.step()
        self.adam.step()


def is_matrix(name: str, param: torch.Tensor) -> bool:
    """Whether Muon steps a parameter of the configured GPT."""
    return param.dim() == 2 and ".layers." in name and re.search("router|gate_weight|norm", name) is None


class _SplitMuon(OrthogonalizedOptimizer):
    def __init__(self, matrices: list[tuple[str, torch.Tensor]], plan: Plan):
        keys, model = plan.config.optimizer, plan.config.model
        self._names, self._keys, self._gated = {id(each): name for name, each in matrices}, keys, model.swiglu
        heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
        width = model.kv_channels or model.hidden_size // heads
        self._qkv = [heads // groups * width, width, width]
        super().__init__(
            [{"params": [each for _, each in matrices], "wd_mult": 1.0}],
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
        name, shape = self._names[id(p)], grad.shape
        if "linear_qkv" in name and self._keys.muon_split_qkv:
            parts = grad.view(-1, sum(self._qkv), shape[1]).split(self._qkv, dim=1)
            found = [self._scaled(part.reshape(-1, shape[1])).view(part.shape) for part in parts]
            return torch.cat(found, dim=1).view(shape)
        if "linear_fc1" in name and self._gated and self._keys.muon_split_gated:
            return torch.cat([self._scaled(part.contiguous()) for part in grad.chunk(2)])
        return self._scaled(grad)
