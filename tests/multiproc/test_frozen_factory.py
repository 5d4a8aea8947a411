"""Frozen parameters under an optimizer that the user's own function builds: it gets the trained ones."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine_inputs import batches, chunk_of, engine, said

BATCH = dict(micro_batch_size=1, seq_length=16, pp_microbatches=4)
BACKENDS = {
    "zero-1": dict(zero_stage=1), "zero-3": dict(zero_stage=3), "streaming": dict(zero_stage=3, sync="streaming"),
    "megatron": dict(backend="megatron"), "fsdp2": dict(backend="fsdp2"), "ddp": dict(backend="ddp"),
}  # fmt: skip


def half_frozen(rank: int):
    import torch

    chunk = chunk_of(0, 1)
    chunk.weight.bias.requires_grad_(False)
    torch.nn.init.ones_(chunk.weight.bias)
    return chunk


def all_frozen(rank: int):
    return chunk_of(0, 1).requires_grad_(False)


def step(sharding: dict) -> dict[str, object]:
    """Parameters that the optimizer was given, and which of them a step changed."""
    import torch

    given: list[torch.Size] = []

    def adamw(params):
        params = list(params)
        given.extend(param.shape for param in params)
        return torch.optim.AdamW(params, lr=0.1)

    made = engine(half_frozen, keys=dict(batch=BATCH, sharding=sharding), optimizer=adamw)
    before = {piece.name: piece.tensors["param"].clone() for piece in made.backend.state()}
    torch.manual_seed(torch.distributed.get_rank())
    result = made.train_step(batches())
    changed = {
        piece.name: bool((piece.tensors["param"] != before[piece.name]).any())
        for piece in made.backend.state()
        if piece.tensors["param"].numel()
    }
    return {"given": given, "norm": result.grad_norm, "changed": changed}


@pytest.mark.parametrize("name", BACKENDS)
def test_it_gets_the_trained_ones(name):
    for seen in run_ranks(step, 2, BACKENDS[name]):
        assert [tuple(shape) for shape in seen["given"]] == [(8, 8)]
        assert seen["changed"].get("stages.0.weight.weight", True) and not seen["changed"].get(
            "stages.0.weight.bias", False
        )
        assert seen["norm"] > 0


def nothing_trained() -> str:
    return said(lambda: engine(all_frozen, keys=dict(batch=BATCH)))


def test_nothing_to_train_is_one_error():
    for text in run_ranks(nothing_trained, 2):
        assert text.startswith("ConfigError: the model has no trained parameter, and backend deepspeed shards by")
