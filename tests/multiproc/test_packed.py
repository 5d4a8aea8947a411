"""Megatron's PackedSeqParams on its local layers: the gradient of every document alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.data import pack
from tests.support.distance import relative_error
from tests.support.parity import VOCAB, Case, Gradient, Rig, named, one_process

MODEL = "--position_embedding_type rope --num_query_groups 2 --num_layers 4 "
PP = "--pipeline_model_parallel_size 2 --pp_microbatches 4 --variable_seq_lengths "
CASES = {
    "whole scores": Case(2, PP, MODEL + "--attention_backend unfused ", "fp64"),
    "fused": Case(2, PP + "--schedule zb-h1 ", MODEL + "--attention_backend flash ", "fp64"),
    "recomputed": Case(2, PP, MODEL + "--attention_backend unfused --recompute_granularity selective ", "fp64"),
}


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (2, 5, 9, 3, 16, 7, 4, 11, 6)]


def forward_step(data_iterator, chunk):
    """A forward step function over Megatron's packed sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(data_iterator)
    bounds = torch.nn.functional.pad(batch["lengths"].cumsum(0), (1, 0)).int()
    longest = int(batch["lengths"].max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    mask = batch["loss_mask"]
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
    return output, lambda losses: ((losses * mask).sum(), mask.sum(), {})


def packed_step(case: Case) -> Gradient:
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.model import gpt

    plan = case.plan()
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    engine = initialize(plan, chunks, groups=built.collection, forward_step_func=forward_step)
    rig = Rig(case, plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    seen: dict[str, torch.Tensor] = {}
    engine.backend.step = lambda: seen.update(rig.assemble())
    result = engine.train_step(pack(documents(), 16, num_microbatches=plan.batch.num_microbatches))
    return Gradient(seen, result.grad_norm, result.loss, int(result.weight))


def in_megatrons_layers(case: Case) -> Gradient:
    """The chunks of a user who builds Megatron's own local layers."""
    from megaaccum.model import layer_specs

    with patch.object(layer_specs, "LocalAttention", layer_specs.DotProductAttention):
        return packed_step(case)


def without_documents(case: Case) -> Gradient:
    """By mistake the whole micro-batch is one document."""
    from megaaccum.model import attention

    split = attention._as_documents

    def one(packed, *parts):
        *parts, starts = split(packed, *parts)
        starts[:, 1:] = False
        return *parts, starts

    with patch.object(attention, "_as_documents", one):
        return packed_step(case)


def one_by_one(model: str) -> dict[str, torch.Tensor]:
    """The gradient of the mean over all tokens, each document in a forward of its own."""
    chunk, _ = one_process(model, "fp64")
    tokens = sum(len(each) - 1 for each in documents())
    for each in documents():
        losses = chunk(each[None], torch.arange(len(each))[None], None, labels=each.roll(-1)[None])
        (losses[:, :-1].sum() / tokens).backward()
    return {name: param.grad for name, param in named(chunk)}


def errors(found: list[Gradient], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    parts = {name: part for gradient in found for name, part in gradient.parts.items()}
    assert parts.keys() == expected.keys()
    return {name: relative_error(parts[name], expected[name]) for name in expected}


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_are_those_alone(name):
    case = CASES[name]
    (expected,) = run_ranks(one_by_one, 1, case.model)
    found = run_ranks(packed_step, 2, case, timeout=60)
    assert max(errors(found, expected).values()) <= 1e-12
    if name == "whole scores":
        theirs = run_ranks(in_megatrons_layers, 2, case, timeout=60)
        assert max(errors(theirs, expected).values()) <= 1e-12


def test_documents_that_see_each_other_are_seen():
    (expected,) = run_ranks(one_by_one, 1, CASES["whole scores"].model)
    found = run_ranks(without_documents, 2, CASES["whole scores"], timeout=60)
    assert max(errors(found, expected).values()) > 1e-3
