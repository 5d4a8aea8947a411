"""A loop around Megatron-core as it is, its chunks and optimizer from `wrap`: `-m examples.megatron_loop zbv`."""

import sys

import torch

from examples.tiny_gpt import LENGTH, WIDTH, sample, stages_of
from megaaccum import Plan
from megaaccum.loop import get_forward_backward_func, wrap

SIZE = dict(micro_batch_size=1, seq_length=LENGTH)


def forward_step(data_iterator, chunk):
    def loss_func(logp):
        return -(logp * batch["loss_mask"]).sum(), batch["loss_mask"].sum().int(), {"logp": logp.detach()}

    return chunk(batch := next(data_iterator)), loss_func


def wrapped(schedule, dtype, **keys):
    layout = {} if schedule == "none" else dict(pp=2, schedule=schedule)
    plan = Plan.of(layout=layout, batch=SIZE | dict(global_batch_size=16), hidden_size=WIDTH, **keys)
    return *wrap(stages_of(plan, dtype), None, plan, optimizer=torch.optim.AdamW), get_forward_backward_func(plan)


def train(schedule="none", dtype=torch.float32, steps=3, **keys):
    chunks, optimizer, forward_backward = wrapped(schedule, dtype, **keys)
    dp = chunks[0].dp_group
    for step in range(steps):
        optimizer.zero_grad()
        mine = [sample(100 * step + i) for i in range(dp.rank(), 16, dp.size())]
        flush = dict(data_iterator=[iter(mine) for _ in chunks], model=chunks, num_microbatches=len(mine))
        forward_backward(forward_step_func=forward_step, **flush, **SIZE)
        yield optimizer, optimizer.step()


if __name__ == "__main__":
    for _, (success, norm, _) in train(*sys.argv[1:2]):
        print(f"gradient norm {norm:.6f}, " + ("updated" if success else "skipped"))
