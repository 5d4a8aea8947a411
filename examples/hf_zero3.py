"""A Hugging Face model under ZeRO-3, without a pipeline: `torchrun --nproc-per-node 4 -m examples.hf_zero3`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megaaccum import Plan, initialize


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    labels = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)

    def loss_func(logits):
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
        return losses, (labels != -100).sum(), {}

    return model(**batch).logits, loss_func


def sample(index, length=24):
    ids = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < 4 + index % 20).long()[None]}


def train(dtype=torch.float32, steps=3, **keys):
    plan = Plan.of(batch=dict(micro_batch_size=1, seq_length=24, global_batch_size=16), **keys)
    torch.manual_seed(0)
    size = dict(vocab_size=97, n_positions=24, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(dtype)
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    dp = engine.groups.dp
    for step in range(steps):
        yield engine, engine.train_step([sample(100 * step + i) for i in range(dp.rank(), 16, dp.size())])


if __name__ == "__main__":
    for engine, result in train():
        engine.print(f"step {result.step}: loss {result.loss:.4f} over {result.weight:.0f} tokens")
