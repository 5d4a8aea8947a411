"""The first samples of a configuration's data, as a case takes them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megaaccum.errors import MegaaccumError
from megaaccum.lab.verification.case import Samples
from megaaccum.lab.verification.shrink import Shrunk
from megaaccum.lab.verification.subject import vocab_size_of
from megaaccum.pretrain.data.dataset import build_datasets

if TYPE_CHECKING:
    from megaaccum.config import Plan


def with_first_samples(shrunk: Shrunk, plan: Plan, steps: int) -> Shrunk:
    """Put the first samples of `plan`'s training data into the case, with a note; if they cannot be read on this
    machine, add a note only. Nothing is written into the run's folder."""
    case, batch = shrunk.case, shrunk.case.plan().batch
    vocab, seq, count = vocab_size_of(case), batch.seq_length, steps * batch.global_batch_size
    try:
        with tempfile.TemporaryDirectory() as folder:
            data, run = replace(plan.config.data, data_cache_path=folder), replace(plan.config.run, eval_interval=0)
            alone = replace(plan, config=replace(plan.config, data=data, run=run))
            train = build_datasets(alone, train_samples=count).train
            rows = [train[index] for index in range(count)]
    except MegaaccumError as error:
        return replace(shrunk, notes=[*shrunk.notes, f"random tokens: the data cannot be read here ({error})"])
    parts = {name: torch.stack([torch.as_tensor(row[name])[:seq] for row in rows]) for name in Samples.NAMES}
    parts |= {name: parts[name] % vocab for name in ("tokens", "labels")}
    parts["position_ids"] = parts["position_ids"].clamp(max=seq - 1)
    note = (
        f"tokens and masks are those of the first {count} samples of the data, cut to {seq} tokens, ids modulo"
        f" {vocab}; each sequence is masked from another token on, so that weights differ"
    )
    return Shrunk(replace(case, samples=Samples(parts)), [*shrunk.notes, note])
