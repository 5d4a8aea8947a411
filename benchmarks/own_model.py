"""A model in bare torch, of what has once had other bits in some layout, in stages as a user cuts them.

Linear layers with biases, RMSNorm, dropout, a weight that nothing reads, and one that every other micro-batch reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HEADS = 4


class Layer(nn.Module):
    def __init__(self, number: int, width: int):
        super().__init__()
        torch.manual_seed(number)
        self.layer_number = number
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.unread = nn.Linear(3, 5)
        self.seldom = nn.Parameter(torch.randn(width))
        for bias in (self.qkv.bias, self.out.bias, self.up.bias, self.down.bias):
            nn.init.normal_(bias, std=0.1)

    def forward(self, x: torch.Tensor, is_odd: bool) -> torch.Tensor:
        """x: [sequence, micro-batch, width]."""
        length, rows, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(length, rows, HEADS, -1).permute(1, 2, 0, 3)
        query, key, value = heads.chunk(3, dim=-1)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (query @ key.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.dropout(self.out((weights @ value).permute(2, 0, 1, 3).reshape(x.shape)))
        x = x + self.down(functional.silu(self.up(self.norms[1](x))))
        return x * self.seldom if is_odd else x


class Stage(nn.Module):
    """Stage `stage` of `stages` of a model of `layers` layers."""

    def __init__(self, stage: int, stages: int, vocab_size: int, *, layers: int, width: int):
        super().__init__()
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        self.received: Any = None
        torch.manual_seed(1000)
        self.embedding = nn.Embedding(vocab_size, width) if self.pre_process else None
        numbers = range(1 + stage * layers // stages, 1 + (stage + 1) * layers // stages)
        self.layers = nn.ModuleList(Layer(number, width) for number in numbers)
        torch.manual_seed(2000)
        self.head = nn.Linear(width, vocab_size) if self.post_process else None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.received if self.embedding is None else self.embedding(tokens).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x, bool(tokens.sum() % 2))
        return x if self.head is None else self.head(x).transpose(0, 1)


def build_stages(plan: Any, vocab_size: int) -> list[nn.Module]:
    """This rank's stages, in the order of the plan's schedule and in its precision."""
    from megaaccum.model import names

    layout, model = plan.layout, plan.config.model
    dtype = names.DTYPES[plan.config.sharding.params_dtype or "fp32"]
    sizes = dict(layers=model.num_layers, width=model.hidden_size)
    mine = layout.stages(torch.distributed.get_rank())
    return [Stage(stage, layout.num_stages, vocab_size, **sizes).to(dtype) for stage in mine]


def forward_step(data_iterator: Iterator[Any], chunk: Stage) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)

    def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        losses = functional.cross_entropy(logits.float().transpose(1, 2), batch["labels"], reduction="none")
        mask = batch["loss_mask"]
        return (losses * mask).sum(), mask.sum(), {}

    return chunk(batch["tokens"]), loss_func
