"""The validation loss of a run."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from megaaccum.data.loader import MicrobatchLoader
from megaaccum.errors import MegaaccumError

if TYPE_CHECKING:
    from megaaccum.data.dataset import Datasets
    from megaaccum.engine import Engine
    from megaaccum.metrics.log import RunLog


def evaluate(engine: Engine, data: Datasets, log: RunLog) -> None:
    """Log the mean loss per token over the validation samples, the same ones each time."""
    assert data.valid is not None
    total, weight = 0.0, 0.0
    with closing(loader_of(engine, data.valid, data, consumed_samples=0)) as loader:
        for _ in range(data.valid_batches):
            microbatches, problem = loader.try_next_step(engine.plan.batch.num_microbatches)
            loss, count = engine.evaluate(microbatches, problem)
            loader.commit(engine.plan.batch.global_batch_size)
            total, weight = total + loss * count, weight + count
    with suppress(MegaaccumError):  # log.problem ends the run before the next step, on every rank
        log.evaluation(
            {"step": engine.step, "loss": total / max(weight, 1), "consumed_samples": engine.consumed_samples}
        )


def loader_of(engine: Engine, dataset: Any, data: Datasets, *, consumed_samples: int) -> MicrobatchLoader:
    """This data-parallel rank's micro-batches of `dataset`, after the samples that were consumed."""
    plan, groups = engine.plan, engine.groups
    return MicrobatchLoader(
        dataset,
        micro_batch_size=plan.batch.micro_batch_size,
        dp_rank=groups.dp.rank(),
        dp_size=groups.dp.size(),
        global_batch_size=plan.batch.global_batch_size,
        consumed_samples=consumed_samples,
        num_workers=plan.config.data.num_workers,
        vocab_size=data.vocabulary.size,
        in_runs=plan.in_runs,
    )
