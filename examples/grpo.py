"""Reinforcement learning in the manner of GRPO: a clipped ratio weighed by advantages, five updates on one batch.

torchrun --nproc-per-node 4 examples/grpo.py
"""

import torch
from megaaccum import Plan, initialize
from megaaccum.pretrain.data import pack

from tiny_gpt import VOCABULARY, WIDTH, build_stages

MAX_TOKENS = 72  # of a micro-batch


def old_logp_step(data_iterator, chunk):
    """Reports the log-probabilities of the policy as it is before the first update."""
    batch = next(data_iterator)
    return chunk(batch), lambda logp: (logp.sum(), batch["loss_mask"].sum(), {"logp": logp})


def clipped_step(data_iterator, chunk):
    """The clipped objective, summed over unmasked tokens; every token of a document has the document's advantage."""
    batch = next(data_iterator)

    def loss_func(logp):
        mask = batch["loss_mask"]
        ratio = (logp - batch["old_logp"]).exp()
        advantage = batch["lengths"].cos().repeat_interleave(batch["lengths"]).to(logp.dtype)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * mask).sum(), mask.sum(), {"ratio": torch.stack([(ratio * mask).sum(), mask.sum()])}

    return chunk(batch), loss_func


plan = Plan.of(
    layout=dict(pp=2, schedule="zbv"),
    batch=dict(micro_batch_size=1, seq_length=MAX_TOKENS, variable_seq_lengths=True, global_batch_size=16),
    sharding=dict(zero_stage=3),
    hidden_size=WIDTH,
)
engine = initialize(plan, build_stages(plan), optimizer=torch.optim.AdamW)
dp, count = engine.groups.dp, plan.batch.num_microbatches
generator = torch.Generator().manual_seed(0)
rollouts = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in range(5, 37)]
microbatches = pack(rollouts, MAX_TOKENS, dp_rank=dp.rank(), dp_size=dp.size(), num_microbatches=count)

# Reports are on the ranks of the last stage, where the loss is; elsewhere the list is empty.
reports = engine.forward(microbatches, forward_step_func=old_logp_step)
for batch, report in zip(microbatches, reports, strict=False):
    batch["old_logp"] = report["logp"]

for _ in range(5):
    engine.forward_backward(microbatches[: count // 2], forward_step_func=clipped_step)
    engine.forward_backward(microbatches[count // 2 :], forward_step_func=clipped_step)
    result = engine.optim_step()
    engine.print(f"step {result.step}: loss {result.loss:.4f}, mean ratio {result.reports['ratio']:.6f}")
