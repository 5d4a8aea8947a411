"""A small GPT of one's own, cut into pipeline stages. The other programs train it; put your own model in its place."""

import os

import torch
from megaaccum.pretrain.data import document_mask
from torch.nn import functional

VOCABULARY = 61
WIDTH = 32
HEADS = 4
LAYERS = 4


class Layer(torch.nn.Module):
    """Attention and MLP. `layer_number` counts from 1 over all stages; parameters are named by it in checkpoints."""

    def __init__(self, layer_number):
        super().__init__()
        torch.manual_seed(layer_number)  # the same weights on every rank and under every cut into stages
        self.layer_number = layer_number
        self.attention_norm = torch.nn.RMSNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = torch.nn.RMSNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        """x: [tokens, 1, WIDTH]. mask: bool [tokens, tokens], True where a token attends."""
        heads = self.qkv(self.attention_norm(x)).view(len(x), HEADS, -1).transpose(0, 1)
        q, k, v = heads.chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(attended.transpose(0, 1).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Stage(torch.nn.Module):
    """One pipeline stage. The first has the embedding; the last has the head and returns log-probabilities of the
    labels, [1, tokens]."""

    def __init__(self, stage, stages):
        super().__init__()
        self.pre_process = stage == 0
        self.post_process = stage == stages - 1
        self.received = None
        if self.pre_process:
            torch.manual_seed(1000)
            self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        first, end = stage * LAYERS // stages, (stage + 1) * LAYERS // stages
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(first + 1, end + 1))
        if self.post_process:
            torch.manual_seed(2000)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def set_input_tensor(self, tensor):
        """Megatron's schedules hand over the activation of the stage before, alone or in a list."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, batch):
        x = self.embedding(batch["tokens"]).transpose(0, 1) if self.pre_process else self.received
        mask = document_mask(batch["lengths"])
        for layer in self.layers:
            x = layer(x, mask)
        if not self.post_process:
            return x
        logp = self.head(x).transpose(0, 1).log_softmax(-1)
        return logp.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)


def build_stages(plan):
    """This rank's chunks, in the order of the plan's schedule."""
    rank = int(os.environ.get("RANK", "0"))
    return [Stage(stage, plan.layout.num_stages) for stage in plan.layout.stages(rank)]
