"""Reinforcement learning in the manner of GRPO: old log-probabilities from the engine's own forward, a clipped ratio
weighed by advantages, several steps of two calls per batch: `torchrun --nproc-per-node 4 -m examples.grpo zbv`."""

import sys

import torch

from examples.sft import MOST, documents, engine_of
from megaaccum.pretrain.data import pack


def old_logp(data_iterator, chunk):
    return chunk(batch := next(data_iterator)), lambda logp: (logp.sum(), batch["loss_mask"].sum(), {"logp": logp})


def clipped(data_iterator, chunk):
    def loss_func(logp):
        ratio, mask = (logp - batch["old"]).exp(), batch["loss_mask"]
        advantage = torch.repeat_interleave(batch["lengths"].cos(), batch["lengths"]).to(logp.dtype)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * mask).sum(), mask.sum(), {"ratio": torch.stack([(ratio * mask).sum(), mask.sum()])}

    return chunk(batch := next(data_iterator)), loss_func


def train(schedule="none", dtype=torch.float32, steps=3, **keys):
    engine, dp, count = engine_of(schedule, dtype, **keys)
    packed = pack(documents(0), MOST, dp_rank=dp.rank(), dp_size=dp.size(), num_microbatches=count)
    for each, reports in zip(packed, engine.forward(packed, forward_step_func=old_logp), strict=False):
        each["old"] = reports["logp"]  # on the ranks of the last stage, where the loss is
    for _ in range(steps):
        for half in (packed[: count // 2], packed[count // 2 :]):
            engine.forward_backward(half, forward_step_func=clipped)
        yield engine, engine.optim_step()


if __name__ == "__main__":
    for engine, result in train(*sys.argv[1:2]):
        engine.print(f"step {result.step}: loss {result.loss:.4f}, mean ratio {result.reports['ratio']:.6f}")
