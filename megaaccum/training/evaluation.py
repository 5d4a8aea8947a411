"""The validation loss of a run."""

from __future__ import annotations

from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from megaaccum.data.loader import MicrobatchLoader
from megaaccum.data.shared import SharedLoader
from megaaccum.distributed import cpu
from megaaccum.errors import MegaaccumError
from megaaccum.model.gpt_forward import read_by

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


def loader_of(engine: Engine, dataset: Any, data: Datasets, *, consumed_samples: int) -> SharedLoader:
    """This rank's micro-batches of `dataset`, after the samples that were consumed. Collective over its model-parallel
    group."""
    plan, groups = engine.plan, engine.groups
    in_documents = plan.config.data.reset_attention_mask
    open_loader = partial(
        MicrobatchLoader,
        dataset,
        micro_batch_size=plan.batch.micro_batch_size,
        dp_rank=groups.dp.rank(),
        dp_size=groups.dp.size(),
        global_batch_size=plan.batch.global_batch_size,
        consumed_samples=consumed_samples,
        num_workers=plan.config.data.num_workers,
        vocab_size=data.vocabulary.size,
        in_runs=plan.in_runs,
        document_end=data.vocabulary.eod if in_documents else None,
        pin_for=cpu.device() if cpu.has_accelerator() else None,
    )
    return SharedLoader(
        open_loader,
        groups,
        read_by(engine.chunks),
        shape=(plan.batch.micro_batch_size, plan.batch.seq_length),
        has_documents=in_documents,
        clock=engine.observer.stopwatch.clock,
    )
