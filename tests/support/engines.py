"""Bodies that tests of the engine run on ranks: a user's chunks, losses and calls, and the resulting gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tests.support.parity import VOCAB, Case, Gradient, Rig, microbatches, on_device


def forward_step(data_iterator, chunk, unit=1.0):
    """A forward step function of a Megatron user: per-token losses, summed, weighed by unmasked tokens."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch, cp = on_device(next(data_iterator)), parallel_state.get_context_parallel_group(check_initialized=False)
    if cp is not None and cp.size() > 1:
        batch = get_batch_on_this_cp_rank(dict(batch), is_hybrid_cp=False, cp_group=cp)
    mask = batch["loss_mask"]
    output = chunk(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"], loss_mask=mask
    )

    def loss_func(losses):
        losses = losses if losses.dtype is torch.float64 else losses.float()
        total, tokens = (losses * mask.to(losses.dtype)).sum() * unit, mask.sum().double() * unit
        return total, tokens, {"lm loss": torch.stack([total.detach().double(), tokens]), "tokens": tokens / unit}

    return output, loss_func


@dataclass(frozen=True)
class Calls:
    """How a step's micro-batches are cut over calls, and what is known of N: in each call's `weights`, in advance for
    the whole step (`total`), or nothing before the last forward."""

    sizes: tuple[int, ...] = (3, 4, 1)
    known: str = ""
    unit: float = 1.0
    """Factor of every weight and every loss."""
    iterators: bool = False


def engine_of(case: Case, **more):
    """An engine over chunks that the test built, with the keys of the case."""
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt

    plan = case.plan()
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    for chunk in chunks:
        chunk.config.calculate_per_token_loss = False  # what a user forgets; the engine sets it
    return initialize(plan, chunks, groups=built.collection, forward_step_func=forward_step, **more)


def in_calls(case: Case, calls: Calls) -> Gradient:
    """The gradient of one step of several calls, at the moment when the optimizer reads it."""
    engine = engine_of(case, reports={"tokens": "sum"})
    rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    batches = rig.microbatches()
    if sum(calls.sizes) > len(batches):  # a step of more than are planned
        batches += rig.microbatches(engine.plan.batch.global_batch_size)
    known = float(sum(batch["loss_mask"].sum() for batch in stacked(engine)))
    expected = known * calls.unit / len(stacked(engine)) if calls.known.startswith("expected") else None
    if calls.known == "expected by rank":
        expected *= 64.0 ** engine.groups.dp.rank()
    seen: dict[str, torch.Tensor] = {}
    engine.backend.step = lambda: seen.update(rig.assemble())
    start = 0
    for size in calls.sizes:
        part = batches[start : start + size]
        start += size
        weights = [float(batch["loss_mask"].sum()) for batch in part] if calls.known == "weights" else None
        data = [iter(part) for _ in engine.chunks] if calls.iterators else part
        engine.forward_backward(
            data,
            size if calls.iterators else None,
            forward_step_func=partial(forward_step, unit=calls.unit),
            weights=weights,
            total_weight=known if calls.known == "total" else None,
            expected_tokens=expected,
        )
    result = engine.optim_step()
    assert result.reports["lm loss"] == result.loss or abs(result.reports["lm loss"] - result.loss) < 1e-9
    assert math.isclose(result.reports["tokens"], result.weight / calls.unit, rel_tol=1e-12)
    tokens = round(result.reports["tokens"])
    return Gradient(seen, result.grad_norm, result.loss, tokens, engine.groups.tp.rank())


def stacked(engine) -> list[dict[str, torch.Tensor]]:
    """Every micro-batch of the step, of all data-parallel ranks."""
    plan = engine.plan
    return [batch for rank in range(plan.layout.dp) for batch in microbatches(plan, rank)]


def all_in_calls(cells: Sequence[tuple[Case, Calls]]) -> list[Gradient]:
    return [in_calls(case, calls) for case, calls in cells]
