"""Megatron's PackedSeqParams on its local layers, micro-batches of unequal length: the gradient of every document
alone, under every schedule."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.data import pack
from megaaccum.schedule.registry import BUILT_IN
from tests.support.distance import relative_error
from tests.support.parity import VOCAB, Case, Gradient, Rig, named, one_process

MODEL = "--position_embedding_type rope --num_query_groups 2 --num_layers 4 "
PP = "--pipeline_model_parallel_size 2 --pp_microbatches 4 --variable_seq_lengths "
INTERLEAVED = "--schedule interleaved --virtual_pipeline_model_parallel_size 2 "
SCHEDULES = {name: f"--schedule {name} " for name in BUILT_IN} | {"interleaved": INTERLEAVED}
CASES = {
    "recomputed": Case(2, PP, MODEL + "--attention_backend unfused --recompute_granularity selective ", "fp64"),
    "fused": Case(2, PP + "--schedule zb-h1 ", MODEL + "--attention_backend flash ", "fp64"),
    **{name: Case(2, PP + flags, MODEL + "--attention_backend unfused ", "fp64") for name, flags in SCHEDULES.items()},
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
    from megaaccum.pretrain.model import gpt

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
    from megaaccum.pretrain.model import layer_specs

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


def each_alone(models: list[str]) -> list[dict[str, torch.Tensor]]:
    return [one_by_one(model) for model in models]


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


def each_way() -> dict[str, Gradient]:
    """The gradients of CASES by their names, of Megatron's own layers, and of a step with a mistake."""
    plain = CASES["1f1b"]
    found = {name: packed_step(case) for name, case in CASES.items()}
    return found | {"Megatron's layers": in_megatrons_layers(plain), "a mistake": without_documents(plain)}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """The largest error of a parameter, by the name of the case."""
    by_model = dict.fromkeys(case.model for case in CASES.values())
    expected = dict(zip(by_model, run_ranks(each_alone, 1, list(by_model))[0], strict=True))
    ranks = run_ranks(each_way, 2, timeout=180)
    models = {name: case.model for name, case in CASES.items()}
    return {
        name: max(errors([rank[name] for rank in ranks], expected[models.get(name, models["1f1b"])]).values())
        for name in ranks[0]
    }


@pytest.mark.parametrize("name", [*CASES, "Megatron's layers"])
def test_packed_documents_are_those_alone(found, name):
    assert found[name] <= 1e-12


def test_documents_that_see_each_other_are_seen(found):
    assert found["a mistake"] > 1e-3


def test_every_schedule_is_here():
    assert len(SCHEDULES) == 8
