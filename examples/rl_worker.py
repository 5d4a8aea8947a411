"""An actor in the manner of verl or slime: log-probabilities by a Megatron schedule, then clipped policy updates.

torchrun --nproc-per-node 4 examples/rl_worker.py
"""

import torch
from megaaccum import Plan, megatron_loop

from tiny_gpt import VOCABULARY, WIDTH, build_stages

LENGTH = 24  # tokens of a rollout


def log_probabilities(logp, batch):
    return logp.sum(), batch["loss_mask"].sum().int(), {"logp": logp.detach()}


def clipped(logp, batch):
    ratio = (logp - batch["old_logp"]).exp()
    gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    loss, tokens = -(gain * batch["loss_mask"]).sum(), batch["loss_mask"].sum().int()
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens])}


def run(microbatches, loss, forward_only):
    """One flush of the schedule. Returns the reports of the micro-batches, on the ranks that have the last stage."""

    def forward_step(data_iterator, chunk):
        batch = next(data_iterator)
        return chunk(batch), lambda logp: loss(logp, batch)

    return forward_backward_func(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def rollout(index):
    ids = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    mask = torch.arange(LENGTH)[None] < 4 + index % 20
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "lengths": torch.tensor([LENGTH])}
    return batch | {"advantage": torch.tensor(index).cos()}


plan = Plan.of(
    layout=dict(pp=2, schedule="zbv"),
    batch=dict(micro_batch_size=1, seq_length=LENGTH, global_batch_size=16),
    sharding=dict(zero_stage=3),
    hidden_size=WIDTH,
)
chunks, optimizer = megatron_loop.wrap(build_stages(plan), None, plan, optimizer=torch.optim.AdamW)
forward_backward_func = megatron_loop.get_forward_backward_func(plan)
dp = chunks[0].dp_group
microbatches = [rollout(index) for index in range(dp.rank(), 16, dp.size())]

with torch.no_grad():
    reports = run(microbatches, log_probabilities, forward_only=True)
for batch, report in zip(microbatches, reports, strict=False):
    batch["old_logp"] = report["logp"]

half = len(microbatches) // 2
for step in range(6):
    optimizer.zero_grad()
    reports = run(microbatches[half:] if step % 2 else microbatches[:half], clipped, forward_only=False)
    success, grad_norm, _ = optimizer.step()
    if reports:
        totals = sum(report["loss"] for report in reports)
        torch.distributed.all_reduce(totals, group=dp)
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: loss {totals[0] / totals[1]:.4f}, gradient norm {grad_norm:.4f}, {success=}")
