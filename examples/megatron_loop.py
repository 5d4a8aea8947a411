"""A loop around Megatron-core's schedules that stays as it is: `megatron_loop.wrap` makes its chunks and its optimizer.

torchrun --nproc-per-node 4 examples/megatron_loop.py
"""

import torch
from megaaccum import Plan, megatron_loop

from tiny_gpt import VOCABULARY, WIDTH, build_stages

LENGTH = 24  # tokens of a sample


def forward_step(data_iterator, chunk):
    batch = next(data_iterator)

    def loss_func(logp):
        loss, tokens = -(logp * batch["loss_mask"]).sum(), batch["loss_mask"].sum().int()
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}

    return chunk(batch), loss_func


def read_sample(index):
    """Document `index` of 16: it counts upwards, and 4 to 23 tokens are unmasked. Read your dataset instead."""
    ids = torch.arange(index, index + LENGTH + 1)[None] % VOCABULARY
    mask = torch.arange(LENGTH)[None] < 4 + index % 20
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "lengths": torch.tensor([LENGTH])}


plan = Plan.of(
    layout=dict(pp=2, schedule="zbv"),
    batch=dict(micro_batch_size=1, seq_length=LENGTH, global_batch_size=16),
    sharding=dict(zero_stage=3),
    hidden_size=WIDTH,
)
chunks, optimizer = megatron_loop.wrap(build_stages(plan), None, plan, optimizer=torch.optim.AdamW)
forward_backward_func = megatron_loop.get_forward_backward_func(plan)
dp = chunks[0].dp_group
for step in range(5):
    optimizer.zero_grad()
    microbatches = [read_sample(index) for index in range(dp.rank(), 16, dp.size())]
    reports = forward_backward_func(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=LENGTH,
        micro_batch_size=1,
    )
    success, grad_norm, _ = optimizer.step()
    if reports:  # on the ranks that have the last stage; under ZB-V rank 0 is one
        totals = sum(report["lm loss"] for report in reports)
        torch.distributed.all_reduce(totals, group=dp)
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: loss {totals[0] / totals[1]:.4f}, gradient norm {grad_norm:.4f}, {success=}")
