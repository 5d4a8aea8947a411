"""A Hugging Face model under ZeRO-3, without a pipeline: torchrun --nproc-per-node 4 examples/hf_zero3.py"""

import torch
from megaaccum import Plan, initialize
from transformers import GPT2Config, GPT2LMHeadModel


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    targets = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)

    def loss_func(logits):
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="sum")
        return losses, (targets != -100).sum(), {}

    return model(**batch).logits, loss_func


def read_sample(index, length=24):
    """Sample `index` of 16: token ids that count upwards, 4 to 23 of them unmasked. Read your data instead."""
    ids = torch.arange(index, index + length)[None] % 97
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < 4 + index % 20).long()[None]}


plan = Plan.of(
    batch=dict(micro_batch_size=1, seq_length=24, global_batch_size=16),
    sharding=dict(zero_stage=3),
    optimizer=dict(clip_grad=1.0),
)
torch.manual_seed(0)  # the same initial weights on every rank
config = GPT2Config(vocab_size=97, n_positions=24, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config).train()
engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
dp = engine.groups.dp
for _ in range(5):
    microbatches = [read_sample(index) for index in range(dp.rank(), 16, dp.size())]
    result = engine.train_step(microbatches)
    engine.print(f"step {result.step}: loss {result.loss:.4f} over {result.weight:.0f} tokens")
