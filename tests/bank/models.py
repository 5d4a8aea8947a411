"""Models of a user's own in which mistakes are made that Megatron's layers do not show on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

SEQ, VOCAB, WIDTH, LAYERS, MICROBATCHES = 16, 61, 32, 4, 32
HISTORY, LARGEST = 3, 448.0
"""Rows of a history of largest values; the largest number of FP8 (E4M3)."""


class Rounded(nn.Linear):
    """A linear layer whose input is rounded to FP8. It stands in for Transformer Engine's, which needs a GPU, and has
    the update rule of its delayed scaling: the scale comes from the largest values of past forwards, each forward notes
    its own in row 0 of the history, and `roll` makes a new row and a new scale."""

    amax_history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, width: int):
        super().__init__(width, width, bias=False)
        self.register_buffer("amax_history", torch.zeros(HISTORY))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.amax_history[0] = torch.maximum(self.amax_history[0], x.detach().abs().max())
        scaled = (x.detach() * self.scale).clamp(-LARGEST, LARGEST)
        rounded = scaled.to(torch.float8_e4m3fn).to(x.dtype) / self.scale
        return super().forward(x + (rounded - x).detach())

    def roll(self) -> None:
        """After a forward that is trained on."""
        largest = self.amax_history.max()
        self.scale.copy_(torch.where(largest > 0, LARGEST / largest, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1))
        self.amax_history[0] = 0.0


class Layer(nn.Module):
    def __init__(self, number: int, kind: Any):
        super().__init__()
        self.layer_number = number
        torch.manual_seed(number)
        self.norm, self.linear = nn.LayerNorm(WIDTH), kind(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x.cumsum(0) / (1 + torch.arange(len(x))[:, None, None])
        return x + functional.silu(self.linear(self.norm(mixed)))


class Stage(nn.Module):
    """A stage of a network of residual layers over sequences of tokens."""

    def __init__(self, stage: int, stages: int, kind: Any = Rounded):
        super().__init__()
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        torch.manual_seed(1000)
        self.embedding = nn.Embedding(VOCAB, WIDTH) if self.pre_process else None
        each = LAYERS // stages
        self.layers = nn.ModuleList(Layer(number, kind) for number in range(1 + stage * each, 1 + (stage + 1) * each))
        torch.manual_seed(2000)
        self.head = nn.Linear(WIDTH, VOCAB) if self.post_process else None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.received if self.embedding is None else self.embedding(tokens).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        self.end_forward()
        return x if self.head is None else self.head(x).transpose(0, 1)

    def end_forward(self) -> None:
        """Roll the histories; those of a forward that is not trained on are forgotten."""
        for layer in (each for each in self.modules() if isinstance(each, Rounded)):
            if torch.is_grad_enabled():
                layer.roll()
            else:
                layer.amax_history[0] = 0.0


def quantized(stage: int, stages: int) -> nn.Module:
    """A stage in FP8."""
    return Stage(stage, stages)


def frozen(stage: int, stages: int) -> nn.Module:
    """A stage whose embedding does not train."""
    built = Stage(stage, stages, lambda width: nn.Linear(width, width))
    if built.embedding is not None:
        built.embedding.requires_grad_(False)
    return built


def forward_step(data_iterator: Any, chunk: nn.Module) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data_iterator)

    def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses, torch.tensor(labels.numel()), {}

    return chunk(tokens), loss_func


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one sequence. As tuples: what is rounded depends on the forwards of before, so that nothing of
    it goes through the model as one batch."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator) for _ in range(MICROBATCHES)]
    return [(each[:, :-1], each[:, 1:]) for each in made]
