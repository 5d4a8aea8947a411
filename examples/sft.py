"""Supervised fine-tuning on packed documents, on four ranks: two pipeline stages, two data-parallel ranks, ZB-V.

torchrun --nproc-per-node 4 examples/sft.py
"""

import torch
from megaaccum import Plan, initialize
from megaaccum.pretrain.data import pack

from tiny_gpt import VOCABULARY, WIDTH, build_stages

MAX_TOKENS = 72  # of a micro-batch


def forward_step(data_iterator, chunk):
    """The negative log-likelihood of the unmasked tokens: its sum, and how many there are."""
    batch = next(data_iterator)

    def loss_func(logp):
        return -(logp * batch["loss_mask"]).sum(), batch["loss_mask"].sum(), {}

    return chunk(batch), loss_func


def read_documents(step):
    """Token ids of the 32 documents of a step. Here they count upwards; read your tokenized conversations instead."""
    return [torch.arange(step + length, step + 2 * length) % VOCABULARY for length in range(5, 37)]


plan = Plan.of(
    layout=dict(pp=2, schedule="zbv"),
    batch=dict(micro_batch_size=1, seq_length=MAX_TOKENS, variable_seq_lengths=True, global_batch_size=16),
    sharding=dict(zero_stage=3),
    hidden_size=WIDTH,
)
engine = initialize(plan, build_stages(plan), forward_step_func=forward_step, optimizer=torch.optim.AdamW)
dp = engine.groups.dp
for step in range(5):
    microbatches = pack(
        read_documents(step),
        MAX_TOKENS,
        dp_rank=dp.rank(),
        dp_size=dp.size(),
        num_microbatches=plan.batch.num_microbatches,
    )
    result = engine.train_step(microbatches)
    engine.print(f"step {result.step}: loss {result.loss:.4f} over {result.weight:.0f} tokens")
