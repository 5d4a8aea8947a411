"""Small torch models for DeepSpeed's engine: losses, micro-batches, an optimizer that shows the gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SEQ, VOCAB, WIDTH, ROWS, MICROBATCHES = 12, 61, 24, 2, 32
LR, GRADIENT = 0.1, "momentum_buffer"
"""Learning rate, and where the optimizer keeps the gradient that it has read."""


class Layer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(x).cumsum(1) / (1 + torch.arange(x.shape[1]))[:, None].to(x.dtype)
        return x + self.down(functional.silu(self.up(mixed)))


class Plain(nn.Module):
    """tied: the head is the embedding. frozen: the first layer and the embedding do not train. unused: a layer that no
    forward reads. skipped: the second layer is left out for micro-batches that begin with an even token."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, unused: bool = False, skipped: bool = False):
        super().__init__()
        torch.manual_seed(1000)
        self.embedding, self.skipped = nn.Embedding(VOCAB, WIDTH), skipped
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(number) for number in range(2))
        self.spare = Layer(9) if unused else None
        torch.manual_seed(2000)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if not (self.skipped and number and int(tokens[0, 0]) % 2 == 0):
                x = layer(x)
        return self.head(self.norm(x))


def plain(stage: int, stages: int) -> nn.Module:
    return Plain()


def tied(stage: int, stages: int) -> nn.Module:
    return Plain(tied=True)


def frozen(stage: int, stages: int) -> nn.Module:
    return Plain(frozen=True)


def unused(stage: int, stages: int) -> nn.Module:
    return Plain(unused=True)


def skipping(stage: int, stages: int) -> nn.Module:
    return Plain(skipped=True)


def of_tokens(data_iterator: Any, chunk: nn.Module) -> tuple[torch.Tensor, Any]:
    """A sum over tokens, weighed by their number."""
    batch = next(data_iterator)
    return chunk(batch["tokens"]), partial(_sum, batch)


def of_means(data_iterator: Any, chunk: nn.Module) -> tuple[torch.Tensor, Any]:
    """A mean over the tokens of each micro-batch, which weighs 1."""
    batch = next(data_iterator)
    return chunk(batch["tokens"]), partial(_mean, batch)


def _sum(batch: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logits = logits if logits.dtype is torch.float64 else logits.float()
    losses = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum(), {}


def _mean(batch: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, weight, reports = _sum(batch, logits)
    return total / weight, torch.ones(()), reports


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """Sequences with different numbers of tokens."""
    return _made(step, equal=False)


def equal_batches(step: int) -> list[dict[str, torch.Tensor]]:
    return _made(step, equal=True)


def numbered_batches(step: int) -> list[dict[str, torch.Tensor]]:
    """`batches`, each with its number, so that no two go through one forward: the micro-batch is what weighs."""
    return [each | {"number": torch.tensor(number)} for number, each in enumerate(batches(step))]


def _made(step: int, *, equal: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        lengths = torch.full((ROWS, 1), SEQ) if equal else torch.randint(1, SEQ + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(SEQ) < lengths).float()
        made.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask})
    return made


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    """With so little momentum that its buffer is the gradient."""
    return torch.optim.SGD(params, lr=LR, momentum=1e-12)
