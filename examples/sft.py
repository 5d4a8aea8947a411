"""Supervised fine-tuning on packed documents. Also `torchrun --nproc-per-node 4 -m examples.sft dualpipev`."""

import sys

import torch

from examples.tiny_gpt import WIDTH, stages_of
from megaaccum import Plan, initialize
from megaaccum.pretrain import data

MOST = 72  # tokens of a micro-batch
BATCH = dict(micro_batch_size=1, seq_length=MOST, variable_seq_lengths=True, global_batch_size=16)


def forward_step(data_iterator, chunk):
    batch = next(data_iterator)
    return chunk(batch), lambda logp: (-(logp * batch["loss_mask"]).sum(), batch["loss_mask"].sum(), {})


def documents(step):
    made = torch.Generator().manual_seed(step)
    return [torch.randint(0, 61, (length,), generator=made) for length in range(5, 37)]


def engine_of(schedule, dtype, **keys):
    layout = {} if schedule == "none" else dict(pp=2, schedule=schedule)
    plan = Plan.of(layout=layout, batch=BATCH, hidden_size=WIDTH, **keys)
    engine = initialize(plan, stages_of(plan, dtype), forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    return engine, engine.groups.dp, plan.batch.num_microbatches


def train(schedule="none", dtype=torch.float32, steps=3, **keys):
    engine, dp, count = engine_of(schedule, dtype, **keys)
    for step in range(steps):
        packed = data.pack(documents(step), MOST, dp_rank=dp.rank(), dp_size=dp.size(), num_microbatches=count)
        yield engine, engine.train_step(packed)


if __name__ == "__main__":
    for engine, result in train(*sys.argv[1:2]):
        engine.print(f"step {result.step}: loss {result.loss:.4f} over {result.weight:.0f} tokens")
