"""Evaluations between steps: validation loss, text comparisons, a sample."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

from megaaccum.config.batch import BatchPlan
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.engine import Engine
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.data.loader import MicrobatchLoader
from megaaccum.pretrain.data.shared import SharedLoader
from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.metrics.run_log import RunLog
from megaaccum.pretrain.model.gpt_forward import read_by
from megaaccum.pretrain.training.sampling import NUM_PROMPT, sample
from megaaccum.pretrain.training.text_comparisons import compare_texts

_Record = tuple[str, dict[str, Any], str]
"""The arguments of `RunLog.add_text`."""


def evaluate(engine: Engine, data: Datasets, log: RunLog) -> None:
    """Log the mean loss per token over the validation samples, the same samples each time."""
    assert data.valid is not None
    total, weight = 0.0, 0.0
    with closing(loader_of(engine, data.valid, data, consumed_samples=0)) as loader:
        for _ in range(data.valid_batches):
            microbatches, problem = loader.try_next_step(engine.plan.batch.num_microbatches)
            loss, count = engine.evaluate(microbatches, problem)
            loader.commit(engine.plan.batch.global_batch_size)
            total, weight = total + loss * count, weight + count
    log.evaluation({"step": engine.step, "loss": total / max(weight, 1), "consumed_samples": engine.consumed_samples})


class Texts:
    """Text comparisons and samples, each at its interval. On every rank.

    Raises DataError if the data have no tokenizer that encodes text.
    """

    def __init__(self, engine: Engine, data: Datasets, log: RunLog):
        run = engine.plan.config.run
        self._engine, self._data, self._log = engine, data, log
        self._every = {"text_comparisons_every": run.text_comparisons_every, "sample_every": run.sample_every}
        wanted = [key for key, interval in self._every.items() if interval]
        self._tokenizer = read_run_tokenizer(engine.plan.config, wanted[0]) if wanted else None

    def after(self, step: int, *, is_last: bool) -> None:
        """Run what is due after `step`. Collective over the world."""
        due = [key for key, interval in self._every.items() if interval and (is_last or step % interval == 0)]
        for key in due:
            assert self._tokenizer is not None
            record = (self._compare if key == "text_comparisons_every" else self._sample)(step, self._tokenizer)
            self._log.add_text(*record)

    def _compare(self, step: int, tokenizer: Any) -> _Record:
        found = compare_texts(self._engine, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        text = f"text comparisons: accuracy {found['accuracy']:.1%}, centered {found['centered_accuracy']:.3f}"
        return "text_comparisons", {"step": step, **found}, text

    def _sample(self, step: int, tokenizer: Any) -> _Record:
        train, most = self._data.train, min(NUM_PROMPT, self._engine.batch.seq_length - 1)
        first = raise_on_all_ranks(train.__getitem__, train.spans[0].start)  # a resumed run has none before its spans
        prompt = first["tokens"][:most].tolist()
        drawn = sample(self._engine, prompt, vocab_size=tokenizer.get_vocab_size())
        before, text = tokenizer.decode(prompt), tokenizer.decode(drawn)
        return "sample", {"step": step, "prompt": before, "text": text}, f"sample {before!r} -> {text!r}"


def loader_of(
    engine: Engine,
    dataset: Any,
    data: Datasets,
    *,
    consumed_samples: int,
    batch: BatchPlan | None = None,
    in_runs: bool | None = None,
) -> SharedLoader:
    """This rank's micro-batches of `dataset` after `consumed_samples`. batch, in_runs: another batch, or way of dealing
    samples to ranks, than the plan's. Collective over its model-parallel group."""
    plan, groups = engine.plan, engine.groups
    batch = batch or plan.batch
    there = {"document_starts": plan.config.data.reset_attention_mask, "padding_mask": plan.config.data.sft}
    open_loader = partial(
        MicrobatchLoader,
        dataset,
        batch,
        dp_rank=groups.dp.rank(),
        consumed_samples=consumed_samples,
        num_workers=plan.config.data.num_workers,
        vocab_size=data.vocabulary.size,
        in_runs=plan.in_runs if in_runs is None else in_runs,
        document_end=data.vocabulary.eod if there["document_starts"] else None,
    )
    return SharedLoader(
        open_loader,
        groups,
        [name for name in read_by(engine.chunks) if there.get(name, True)],
        shape=(batch.micro_batch_size, batch.seq_length),
        clock=engine.observer.stopwatch.clock,
    )
