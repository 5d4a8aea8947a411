"""Models, losses and data of a user's own, as `megaaccum.verify` takes them: found by name in the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from examples import tiny_gpt

SEQ, VOCAB, ROWS = 12, 61, 2


class SquaredAttention(nn.Module):
    """Attention whose weights are squares of scores within a window, not a softmax of them."""

    def __init__(self, width: int, heads: int, window: int = 5):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # [sequence, batch, width]
        s, b, width = x.shape
        q, k, v = self.qkv(x).view(s, b, self.heads, -1).permute(1, 2, 0, 3).chunk(3, dim=-1)
        at = torch.arange(s)
        near = ((at[:, None] >= at) & (at[:, None] - at < self.window)).to(x.dtype)
        weights = (q @ k.transpose(-1, -2)).square() * near
        mixed = weights / (weights.sum(-1, keepdim=True) + 1e-3) @ v
        return self.out(mixed.permute(2, 0, 1, 3).reshape(s, b, width))


class Layer(nn.Module):
    def __init__(self, number: int, width: int):
        super().__init__()
        torch.manual_seed(number)
        self.layer_number = number
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = SquaredAttention(width, heads=4)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.down(functional.silu(self.up(self.norms[1](x))))


class Stage(nn.Module):
    """One stage of a GPT with another attention."""

    def __init__(self, stage: int, stages: int, layers: int = 4, width: int = 32):
        super().__init__()
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        torch.manual_seed(1000)
        self.embedding = nn.Embedding(VOCAB, width) if self.pre_process else None
        mine = range(1 + stage * layers // stages, 1 + (stage + 1) * layers // stages)
        self.layers = nn.ModuleList(Layer(number, width) for number in mine)
        torch.manual_seed(2000)
        self.head = nn.Linear(width, VOCAB) if self.post_process else None

    def set_input_tensor(self, tensor):
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(0, 1).contiguous() if self.pre_process else self.received
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(0, 1) if self.post_process else x


def quiet_stage(stage: int, stages: int) -> nn.Module:
    return Stage(stage, stages).eval()  # without dropout


def forward_step(data_iterator, chunk):
    batch = next(data_iterator)

    def loss_func(logits):
        losses = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        mask = batch["loss_mask"]
        return (losses * mask).sum(), mask.sum(), {}

    return chunk(batch["tokens"]), loss_func


def step_of_means(data_iterator, chunk):
    """A loss weighed by what else is in its micro-batch: each token by the mean loss of all of them."""
    batch = next(data_iterator)

    def loss_func(logits):
        losses = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * losses / losses.mean()).sum(), torch.tensor(losses.numel()), {}

    return chunk(batch["tokens"]), loss_func


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """16 micro-batches, of sequences with different numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(16):
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        lengths = torch.randint(1, SEQ + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(SEQ) < lengths).float()
        made.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask})
    return made


class Plain(nn.Module):
    """One torch module, without a pipeline; tokens enter a bag."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, 16), nn.RMSNorm(16), nn.Linear(16, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).cumsum(1)))


def plain(stage: int, stages: int) -> nn.Module:
    return Plain()


class Noisy(Plain):
    def __init__(self):
        super().__init__()
        self.noise = Noise()

    def forward(self, tokens):
        return self.noise(super().forward(tokens))


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def noisy(stage: int, stages: int) -> nn.Module:
    return Noisy()


class WithBatchNorm(Plain):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(VOCAB)

    def forward(self, tokens):
        return self.batch_norm(super().forward(tokens).transpose(1, 2)).transpose(1, 2)


def with_batch_norm(stage: int, stages: int) -> nn.Module:
    return WithBatchNorm()


def too_large(stage: int, stages: int) -> nn.Module:
    """More than any machine holds: its parameters take no memory."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(1).expand(1 << 20, 1 << 20))
    return model


# --- packed documents and a loss as that of GRPO, over the examples' stages -------------------------------------------


def packed_stage(stage: int, stages: int) -> nn.Module:
    return tiny_gpt.Stage(stage, stages)


def packed(step: int) -> list[dict[str, torch.Tensor]]:
    """16 micro-batches of two documents each, with log-probabilities of an older policy."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(16):
        first = int(torch.randint(3, SEQ - 3, (1,), generator=generator))
        tokens = torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator)
        mask = torch.ones(1, SEQ)
        mask[0, [first - 1, SEQ - 1]] = 0.0
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
        old = -4.0 + 0.1 * torch.randn(1, SEQ, generator=generator)
        made.append(batch | {"lengths": torch.tensor([first, SEQ - first]), "old": old})
    return made


def clipped(data_iterator, chunk):
    """The clipped ratio of GRPO, weighed by an advantage per document."""
    batch = next(data_iterator)

    def loss_func(logp):
        ratio, mask = (logp - batch["old"]).exp(), batch["loss_mask"]
        advantage = batch["lengths"].cos().repeat_interleave(batch["lengths"]).to(logp.dtype)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * mask).sum(), mask.sum(), {"ratio": torch.stack([(ratio * mask).sum(), mask.sum()])}

    return chunk(batch), loss_func
