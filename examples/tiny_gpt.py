"""A GPT of one's own, cut into pipeline stages: what the other examples train."""

import os

import torch
from torch.nn import functional

from megaaccum.pretrain.data import document_mask

WIDTH = 32


class Layer(torch.nn.Module):
    def __init__(self, number, width, heads):
        super().__init__()
        torch.manual_seed(number)  # the same weights however layers are cut into stages
        self.layer_number, self.heads = number, heads  # names of parameters count layers over all stages by it
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, mask):  # x [T, 1, width], mask [T, T]
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), self.heads, -1).transpose(0, 1).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Stage(torch.nn.Module):
    """One stage: embedding on the first, head on the last, which gives log-probabilities of the labels [1, T]."""

    def __init__(self, stage, stages, layers=4, width=WIDTH, heads=4, vocab=61, dtype=torch.float32):
        super().__init__()
        self.pre_process, self.post_process, self.received = stage == 0, stage == stages - 1, None
        torch.manual_seed(1000)
        self.embedding = torch.nn.Embedding(vocab, width) if self.pre_process else None
        numbers = range(1 + stage * layers // stages, 1 + (stage + 1) * layers // stages)
        self.layers = torch.nn.ModuleList(Layer(number, width, heads) for number in numbers)
        torch.manual_seed(2000)
        self.head = torch.nn.Linear(width, vocab) if self.post_process else None
        self.to(dtype)

    def set_input_tensor(self, tensor):
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, batch):
        x = self.embedding(batch["tokens"]).transpose(0, 1) if self.pre_process else self.received
        mask = document_mask(batch["lengths"])
        for layer in self.layers:
            x = layer(x, mask)
        if not self.post_process:
            return x
        logp = self.head(x).transpose(0, 1).log_softmax(-1)
        return logp.gather(-1, batch["labels"][..., None])[..., 0]


def stages_of(plan, dtype=torch.float32):
    """This rank's chunks."""
    rank = int(os.environ.get("RANK", "0"))
    return [Stage(stage, plan.layout.num_stages, dtype=dtype) for stage in plan.layout.stages(rank)]


LENGTH = 24


def sample(index):
    """Micro-batch number `index`: one document, of which the first 4 to 23 tokens count."""
    ids = torch.randint(0, 61, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    mask = torch.arange(LENGTH)[None] < 4 + index % 20
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "lengths": torch.tensor([LENGTH])}
