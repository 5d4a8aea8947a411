"""SOAP (arXiv 2409.11321): AdamW in the eigenbases of a matrix' second moments over its rows and over its columns.

The step is emerging-optimizers', on a whole matrix (sharding/ownership). The library takes FP32 alone, and in
directions in which a matrix has no gradient rounding decides: runs are equal where their gradients are, to the bit.
"""

from __future__ import annotations

import torch

from megaaccum.config.schema import OptimizerConfig
from megaaccum.platform import cpu
from megaaccum.upstream import emerging


class Soap:
    """The state of one matrix on its owner, and its updates.

    tensors: the library's `exp_avg`, `exp_avg_sq` [rows, columns], `L`, `Q_L` [rows, rows], `R`, `Q_R` [columns,
    columns], FP32, and `step` [1], in host memory.
    """

    def __init__(self, keys: OptimizerConfig, rows: int, columns: int):
        self._param = torch.nn.Parameter(torch.empty(rows, columns, dtype=torch.float32, device=cpu.device()))
        self._library = emerging.soap(self._param, keys)
        self.tensors: dict[str, torch.Tensor] = self._library.state[self._param] | {"step": torch.zeros(1)}
        self._param.data = self._param.data.new_empty(0, 0)

    @torch.no_grad()
    def update(self, grad: torch.Tensor) -> torch.Tensor:
        """Move the state on. Returns what a step subtracts from the matrix over the learning rate, FP32."""
        param, state = self._param, self._library.state[self._param]
        state["step"] = int(self.tensors["step"])
        param.data, param.grad = torch.zeros_like(grad, dtype=torch.float32), grad.float()
        self._library.step()
        update = param.data.neg()
        param.data, param.grad = param.data.new_empty(0, 0), None
        self.tensors["step"] += 1
        for kind in self.tensors.keys() - {"step"}:  # the library puts new tensors in the place of some
            state[kind] = self.tensors[kind].copy_(state[kind])
        return update
