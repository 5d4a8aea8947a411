"""Weights to a rollout engine after each step: torchrun --nproc-per-node 2 examples/rollout_weights.py

A transformers model under ZeRO-3. After each optim_step its weights go to a receiver on rank 0, one tensor at a time,
under the names that vLLM's `load_weights` takes; after the first time, only the elements that changed.
"""

from functools import partial

import torch
from megaaccum import Plan, initialize
from transformers import GPT2Config, GPT2LMHeadModel


def forward_step(data_iterator, model):
    ids = next(data_iterator)

    def loss_func(logits):
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="sum")
        return losses, ids[:, 1:].numel(), {}

    return model(ids).logits, loss_func


class Receiver:
    """In the place of a rollout engine: a model that takes tensors, or changed elements of them."""

    def __init__(self, model):
        self.model, self.weights, self.elements = model, model.state_dict(), 0

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weights[name].copy_(tensor)
            self.elements += tensor.numel()

    def load_changes(self, changes):
        for name, indices, values in changes:
            self.weights[name].view(-1)[indices] = values
            self.elements += values.numel()

    @torch.no_grad()
    def loss(self):
        losses = [forward_step(iter([sample(index)]), self.model) for index in range(16)]
        sums = [loss_func(output) for output, loss_func in losses]
        return float(sum(total.float() for total, _, _ in sums) / sum(weight for _, weight, _ in sums))


def changes(weights, sent):
    """(name, indices, values) of the elements that differ from `sent`, which is brought up to date."""
    for name, tensor in weights:
        indices = (tensor != sent[name]).view(-1).nonzero().view(-1)
        if len(indices):
            yield name, indices, tensor.view(-1)[indices]
            sent[name] = tensor


def build():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).train()


def sample(index):
    return torch.arange(index, index + 24)[None] % 97


batch = dict(micro_batch_size=1, seq_length=24, global_batch_size=16)
plan = Plan.of(batch=batch, sharding=dict(zero_stage=3, bf16=True))
optimizer = partial(torch.optim.AdamW, lr=3e-5)
engine = initialize(plan, build().bfloat16(), forward_step_func=forward_step, optimizer=optimizer)
dp = engine.groups.dp
receiver, sent = Receiver(build().bfloat16().eval()), {}
for step in range(4):
    ids = [sample(index) for index in range(dp.rank(), 16, dp.size())]
    engine.forward_backward(ids)
    engine.optim_step()
    receiver.elements = 0
    weights = engine.whole_weights(rank=0)  # on every rank; rank 0 alone is given tensors
    if sent:
        receiver.load_changes(changes(weights, sent))
    else:
        sent = dict(weights)
        receiver.load_weights(sent.items())
    loss, _ = engine.evaluate(ids)
    engine.print(f"step {step + 1}: loss {loss:.4f}, of the rollout engine {receiver.loss():.4f}")
    engine.print(f"  {receiver.elements} elements handed over")
