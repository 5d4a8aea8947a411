"""Opening the log of a run with the receipt's content."""

from __future__ import annotations

import os
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import gathered, raise_on_all_ranks
from megaaccum.platform import cpu
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.metrics import flops, receipts
from megaaccum.pretrain.metrics.run_log import RunLog
from megaaccum.pretrain.training.advisor import Advisor


def open_log(plan: Plan, data: Datasets, advisor: Advisor, *, start_step: int) -> RunLog:
    """The log of a run of `plan` that continues after `start_step`; rank 0 writes. Collective over the world. Raises on
    every rank what `RunLog` raises."""
    ranks = gathered(receipts.this_rank(_device_name(), _device_bytes()))
    return raise_on_all_ranks(_open, plan, data, advisor, start_step, ranks)


def _open(plan: Plan, data: Datasets, advisor: Advisor, start_step: int, ranks: list[Any]) -> RunLog:
    vocab, opening, config, sequences = data.vocabulary.size, None, plan.config, plan.batch.global_batch_size
    if is_writer := int(os.environ["RANK"]) == 0:
        predicted = advisor.predicted(plan, vocab, device=_device_name(), device_bytes=_device_bytes())
        opening = receipts.opening(
            plan, data_digest=data.digest, vocab_size=vocab, ranks=ranks, predicted=predicted, start_step=start_step
        )
    return RunLog(
        plan,
        is_writer=is_writer,
        flops_per_step=None if flops.uncounted(config) else flops.step_flops(config, sequences, vocab_size=vocab),
        peak_flops=flops.peak_flops(_device_name(), config.sharding.params_dtype or "fp32"),
        start_step=start_step,
        opening=opening,
    )


def _device_name() -> str | None:
    return torch.cuda.get_device_name() if cpu.has_accelerator() else None


def _device_bytes() -> float | None:
    return torch.cuda.get_device_properties(cpu.device()).total_memory if cpu.has_accelerator() else None
