"""A model that its user changes after `initialize`: an error on every rank before the step, since the optimizer and the
reductions are for another one."""

from __future__ import annotations

from typing import Any

import pytest

from megaaccum.errors import StepError
from megaaccum.lab.verification.testing import run_ranks

BACKENDS = {
    "zero-1": dict(zero_stage=1),
    "zero-3": dict(zero_stage=3),
    "zero-3 streaming": dict(zero_stage=3, sync="streaming"),
    "fsdp2": dict(backend="fsdp2"),
    "fsdp2 streaming": dict(backend="fsdp2", sync="streaming"),
    "ddp": dict(backend="ddp"),
    "megatron": dict(backend="megatron"),
}


def replaced(model: Any) -> None:
    import torch

    model[0].weight = torch.nn.Parameter(model[0].weight.detach() * 0.5)


def with_an_adapter(model: Any) -> None:
    import torch

    model[0].adapter = torch.nn.Linear(5, 5)


def with_another_head(model: Any) -> None:
    import torch

    model[2] = torch.nn.Linear(7, 3)


def tied(model: Any) -> None:
    model[2].bias = model[0].bias


def without_a_bias(model: Any) -> None:
    model[0].bias = None


def in_half(model: Any) -> None:
    model.bfloat16()


def frozen(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def with_a_frozen_teacher(model: Any) -> None:
    import torch

    model[1].teacher = torch.nn.Linear(5, 5).requires_grad_(False)


CHANGES = {
    replaced: "requires_grad of 0.weight has changed",
    with_an_adapter: "requires_grad of 0.adapter.weight, 0.adapter.bias has changed",
    with_another_head: "requires_grad of 2.weight, 2.bias has changed",
    tied: "requires_grad of 2.bias has changed",
    without_a_bias: "requires_grad of 0.bias has changed",
    frozen: "requires_grad of 0.weight has changed",
    in_half: "dtype or requires_grad of 0.weight, 0.bias, 2.weight, 2.bias has changed",
}
"""Changes that every backend refuses, with words of the error."""


def made(sharding: dict[str, Any], *, evaluated: bool = False) -> tuple[Any, Any]:
    """A model of which a step has been taken, and its engine. evaluated: FSDP2's parameters are whole then."""
    import torch

    from megaaccum import Plan, initialize

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    batch = dict(micro_batch_size=4, seq_length=1, grad_accum_steps=2)
    plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(lr=0.1, clip_grad=0.0), world_size=2)
    keys = dict(forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    engine = initialize(plan, model, **keys)
    engine.train_step(batches(0))
    if evaluated:
        engine.evaluate(batches(0))
    return model, engine


def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
    return chunk(next(data_iterator)), lambda out: (out.square().sum(), out.new_tensor(float(len(out))), {})


def batches(step: int) -> list[Any]:
    import torch

    whole = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(step))
    return list(whole[torch.distributed.get_rank() :: 2])


def said(engine: Any) -> str:
    try:
        engine.train_step(batches(1))
    except StepError as error:
        return str(error)
    return ""


def refusals(evaluated: bool) -> dict[tuple[str, str], str]:
    """The error of a step after each change, by its name and the backend's."""
    found = {}
    for backend, sharding in BACKENDS.items():
        for change in (*CHANGES, with_a_frozen_teacher):
            if evaluated and change is in_half and backend == "fsdp2":
                continue  # torch refuses the product
            model, engine = made(sharding, evaluated=evaluated)
            change(model)
            found[change.__name__, backend] = said(engine)
    return found


@pytest.mark.parametrize("evaluated", [False, True])
def test_changes_that_no_optimizer_sees_are_refused(evaluated):
    for found in run_ranks(refusals, 2, evaluated, timeout=120):
        for change, words in CHANGES.items():
            texts = {backend: found.get((change.__name__, backend), words) for backend in BACKENDS}
            assert all(words in text for text in texts.values()), (change, texts)
        assert {found["with_a_frozen_teacher", backend] for backend in BACKENDS} == {""}
