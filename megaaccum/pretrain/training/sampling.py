"""Sampling a short text from the model in training, under any layout: one forward of the pipeline per token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.engine import Engine
from megaaccum.errors import StepError
from megaaccum.platform import cpu
from megaaccum.pretrain.model.gpt_forward import GptForwardStep
from megaaccum.pretrain.training.text_comparisons import Row, microbatch_of
from megaaccum.step.loss import Reports

NUM_TOKENS, NUM_PROMPT = 24, 8
"""Tokens of a sample, and of the training text that is its prompt."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token is drawn. temperature: 0 takes the likeliest; top_k: among that many likeliest ones, 0 is all; top_p:
    among the likeliest ones that have this probability together."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def token(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token of `logits` [vocabulary]. Raises StepError if they are not numbers."""
        if logits.isnan().any():
            raise StepError("the model gives logits that are not numbers, of which no token can be drawn")
        if self.temperature == 0:
            return int(logits.argmax())
        ranked, tokens = logits.double().cpu().sort(descending=True, stable=True)
        likely = torch.softmax(ranked / self.temperature, dim=0)
        likely[(likely.cumsum(0) - likely) >= self.top_p] = 0.0  # the first always stays
        if self.top_k:
            likely[self.top_k :] = 0.0
        return int(tokens[torch.multinomial(likely, 1, generator=generator)])


def sample(
    engine: Engine,
    prompt: list[int],
    *,
    vocab_size: int,
    num_tokens: int = NUM_TOKENS,
    draw: Draw | None = None,
    stops: Collection[int] = (),
) -> list[int]:
    """The tokens that continue `prompt`, drawn by the run's seed and step; fewer if the sequence is full, or up to one
    of `stops`. Collective over the world, the same on every rank. Leaves the training's random states and data
    unchanged."""
    way, plan, tokens = draw or Draw(), engine.plan, list(prompt)
    seed, generator = plan.config.run.seed * 1_000_003 + engine.step, torch.Generator()
    forward = _LastLogits(engine.groups, "token")

    def next_token(reports: list[Reports]) -> int:
        """On the rank that draws it; -1 on the others."""
        logits = reports[0]["logits"] if reports and engine.groups.dp.rank() == 0 else torch.empty(0)  # last stage
        # Seeded for each token: under context parallelism it is another rank that draws the next.
        generator.manual_seed((seed * 1_000_003 + len(tokens)) % 2**63)
        return way.token(logits[0, :vocab_size], generator) if len(logits) else -1

    for _ in range(min(num_tokens, plan.batch.seq_length - len(prompt))):
        # A row is scored at its last token, of which nothing is known here; without labels the model gives logits.
        given = microbatch_of([Row([*tokens, 0], 1)], plan.batch.micro_batch_size, plan.batch.seq_length)
        del given["labels"]
        reports = engine.forward([given] * _fewest(plan), forward_step_func=forward)
        drawn = torch.tensor(raise_on_all_ranks(next_token, reports), device=cpu.device())
        dist.all_reduce(drawn, op=dist.ReduceOp.MAX)
        tokens.append(int(drawn))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def _fewest(plan: Plan) -> int:
    """Micro-batches of the shortest flush that the schedule can run forward."""
    if plan.layout.schedule == "interleaved":
        return plan.config.parallel.microbatch_group_size_per_vp_stage or plan.layout.pp
    return plan.batch.microbatches_per_flush if plan.layout.schedule.endswith(".csv") else 1


class _LastLogits(GptForwardStep):
    """Reports the logits at the masked position: [1, vocabulary] on the context-parallel rank that has it, [0,
    vocabulary] on others."""

    adds_blocks = False

    def loss(self, mask: torch.Tensor, tokens: float, output: torch.Tensor):
        mine = output[mask.bool()].contiguous()
        parts = [torch.empty_like(mine) for _ in range(self._tp.size())]
        dist.all_gather(parts, mine, group=self._tp)
        return mine.sum(), mask.count_nonzero(), {"logits": torch.cat(parts, dim=-1)}
