"""Norm layers for Megatron's local layer spec.

Megatron's own wrapper of the torch norms (`WrappedTorchNorm`, megatron-core 0.19) refuses sequence parallelism. A torch
norm works there as it is, but its parameters lack the mark that each tp rank sees only its part of the sequence, so
that their gradients have to be summed over tp.

Megatron's specs and configurations have no types: `Any`.
"""

from __future__ import annotations

from typing import Any

import torch


class _LayerNorm1p(torch.nn.LayerNorm):
    """A layer norm whose factor is 1 plus its weight (layernorm_zero_centered_gamma)."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(hidden, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class _RMSNorm1p(torch.nn.RMSNorm):
    """An RMS norm whose factor is 1 plus its weight."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, self.normalized_shape, self.weight + 1, self.eps)


_KINDS = {
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): _LayerNorm1p,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("RMSNorm", True): _RMSNorm1p,
}


class Norm:
    """Builder of the torch norm that `config.normalization` names, with parameters marked `sequence_parallel`.

    Called with Megatron's arguments of a norm: config, hidden_size (features), eps.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        norm = _KINDS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
        for param in norm.parameters():
            vars(param)["sequence_parallel"] = config.sequence_parallel
        return norm
