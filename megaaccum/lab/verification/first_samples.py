"""The first samples of a configuration's data, as a case takes them."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from megaaccum.config import Plan
from megaaccum.errors import MegaaccumError
from megaaccum.lab.verification.shrink import Shrunk
from megaaccum.lab.verification.subject import vocab_size_of
from megaaccum.pretrain.data.dataset import build_datasets
from megaaccum.pretrain.data.loader import starts_of

_NAMES = ("tokens", "labels", "loss_mask", "position_ids", "document_starts", "padding_mask")


def with_first_samples(shrunk: Shrunk, plan: Plan, steps: int) -> Shrunk:
    """Put the first samples of `plan`'s training data into the case, with a note; if they cannot be read on this
    machine, add a note only. Nothing is written into the run's folder."""
    case, batch = shrunk.case, shrunk.case.plan().batch
    vocab, seq, count = vocab_size_of(case), batch.seq_length, steps * batch.global_batch_size
    try:
        with tempfile.TemporaryDirectory() as folder:
            data, run = replace(plan.config.data, data_cache_path=folder), replace(plan.config.run, eval_interval=0)
            alone = replace(plan, config=replace(plan.config, data=data, run=run))
            found = build_datasets(alone, train_samples=count)
            rows = [found.train[index] for index in range(count)]
    except MegaaccumError as error:
        return replace(shrunk, notes=[*shrunk.notes, f"random tokens: the data cannot be read here ({error})"])
    parts = {n: torch.stack([torch.as_tensor(row[n])[:seq] for row in rows]) for n in _NAMES if n in rows[0]}
    if plan.config.data.reset_attention_mask:
        if "document_starts" not in parts:
            assert found.vocabulary.eod is not None, "reset_attention_mask needs it"
            parts["document_starts"] = starts_of(parts["tokens"], found.vocabulary.eod)
        case = replace(case, keys=case.keys | {"reset_attention_mask": True})
    parts |= {name: parts[name] % vocab for name in ("tokens", "labels")}
    parts["position_ids"] = parts["position_ids"].clamp(max=seq - 1)
    note = (
        f"tokens and masks are those of the first {count} samples of the data, cut to {seq} tokens, ids modulo"
        f" {vocab}; each sequence is masked from another token on, so that weights differ"
    )
    return Shrunk(replace(case, samples=parts), [*shrunk.notes, note])
