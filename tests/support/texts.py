"""Bodies that tests of the core metric and of samples run on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaaccum.pretrain.training.sampling import sample
from megaaccum.pretrain.training.text_comparisons import Row, mean_log_likelihoods
from tests.support.engines import engine_of
from tests.support.parity import VOCAB, Case, microbatches

ROWS = [Row([(7 * n + k * k) % VOCAB for k in range(3 + n)], 1 + n % 3) for n in range(13)]
PROMPT = [3, 1, 4, 1, 5]


def looks(cases: Sequence[Case]) -> list[tuple[list[float], list[int], bool]]:
    """For each case: scores of ROWS, a sample after PROMPT, and whether the next step equals that without them."""
    return [look(case) for case in cases]


def look(case: Case) -> tuple[list[float], list[int], bool]:
    engine = engine_of(case)
    rank = engine.groups.dp.rank()
    state = torch.get_rng_state()
    scores = mean_log_likelihoods(engine, ROWS)
    text = sample(engine, PROMPT, vocab_size=VOCAB, num_tokens=6)
    kept = torch.equal(state, torch.get_rng_state())
    loss = engine.train_step(microbatches(engine.plan, rank)).loss
    without = engine_of(case)
    return scores, text, kept and without.train_step(microbatches(without.plan, rank)).loss == loss
