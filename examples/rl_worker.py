"""An actor in the manner of verl or slime: log-probabilities, then updates by a schedule and `optimizer.step()`."""

import sys

import torch

from examples.megatron_loop import SIZE, wrapped
from examples.tiny_gpt import sample


def clipped(logp, batch):
    ratio, mask, advantage = (logp - batch["old"]).exp(), batch["loss_mask"], batch["tokens"][0, 0].cos()
    return -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum(), mask.sum().int()


def run(actor, batches, loss, forward_only=False):
    def forward_step(data_iterator, chunk):
        return chunk(batch := next(data_iterator)), lambda logp: (*loss(logp, batch), {"logp": logp.detach()})

    chunks, _, forward_backward = actor
    flush = dict(data_iterator=[iter(batches) for _ in chunks], model=chunks, num_microbatches=len(batches))
    return forward_backward(forward_step_func=forward_step, forward_only=forward_only, **flush, **SIZE)


def train(schedule="none", dtype=torch.float32, steps=3, **keys):
    actor = chunks, optimizer, _ = wrapped(schedule, dtype, **keys)
    dp = chunks[0].dp_group
    mine = [sample(i) for i in range(dp.rank(), 16, dp.size())]
    with torch.no_grad():
        reports = run(actor, mine, lambda logp, batch: (logp.sum(), batch["loss_mask"].sum().int()), forward_only=True)
    for batch, report in zip(mine, reports, strict=False):
        batch["old"] = report["logp"]  # on the ranks of the last stage, where the loss is
    for step in range(steps):
        run(actor, mine[len(mine) // 2 :] if step % 2 else mine[: len(mine) // 2], clipped)
        yield optimizer, optimizer.step()


if __name__ == "__main__":
    for _, result in train(*sys.argv[1:2]):
        print(f"gradient norm {result[1]:.6f}")
