"""A model that its user changes after `initialize`: an error on every rank before the step, since the optimizer and the
reductions are for another one."""

from __future__ import annotations

from contextlib import nullcontext
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


def with_a_hook(model: Any) -> None:
    model[0].weight.register_hook(lambda grad: grad * 0)


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
    """A model of which a step has been taken, and its engine. evaluated: FSDP2 has made its parameters whole since."""
    import torch

    from megaaccum import Plan, initialize

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    batch = dict(micro_batch_size=4, seq_length=1, grad_accum_steps=2)
    plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(clip_grad=0.0), world_size=2)
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
        for change in (*CHANGES, with_a_frozen_teacher, with_a_hook):
            model, engine = made(sharding, evaluated=evaluated)
            change(model)
            found[change.__name__, backend] = said(engine)
    return found


@pytest.mark.parametrize("evaluated", [False, True])
def test_changes_that_no_optimizer_sees_are_refused(evaluated):
    for found in run_ranks(refusals, 2, evaluated, timeout=120):
        for change, words in CHANGES.items():
            texts = {backend: found[change.__name__, backend] for backend in BACKENDS}
            assert all(words in text for text in texts.values()), (change, texts)
        assert {found["with_a_frozen_teacher", backend] for backend in BACKENDS} == {""}
        # A shard of FSDP2's never has a gradient.
        assert {each for each in BACKENDS if found["with_a_hook", each]} == {"fsdp2", "fsdp2 streaming"}
        text = found["with_a_hook", "fsdp2 streaming"]
        assert "a hook on 0.weight is never called" in text and "set backend to deepspeed, megatron or ddp" in text


def in_modes(mode: str) -> dict[str, bool]:
    """Whether an engine has the same weights inside a mode of torch's as outside, by backend."""
    import torch

    makes = nullcontext if mode == "inference_mode" else getattr(torch, mode)  # torch uses no tensors made in that one

    def weights(sharding: Any, around: Any, makes: Any) -> dict[str, Any]:
        with makes():
            _, engine = made(sharding)
        with around():
            engine.load_weights(dict(engine.whole_weights()))
            loss, _ = engine.evaluate(batches(1))
        with makes():
            engine.train_step(batches(1))
        return dict(engine.whole_weights(), loss=torch.tensor(loss))

    found = {}
    for backend, sharding in BACKENDS.items():
        due = weights(sharding, nullcontext, nullcontext)
        there = weights(sharding, getattr(torch, mode), makes)
        found[backend] = all(torch.equal(there[name], due[name]) for name in due)
    return found


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_the_mode_of_a_caller_is_not_the_steps(mode):
    """Without gradients Megatron's schedules run no backward, and the step would be one of zeros."""
    for found in run_ranks(in_modes, 2, mode, timeout=120):
        assert found == dict.fromkeys(BACKENDS, True)


def autocast_inside(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        return forward_step(data_iterator, chunk)


def of_autocast() -> bool:
    """Whether a streamed step in torch.autocast has the weights of one whose forwards are in it one by one."""
    import torch

    found = []
    for around in (True, False):
        _, engine = made(BACKENDS["zero-3 streaming"])
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            engine.forward_backward(batches(1), forward_step_func=forward_step if around else autocast_inside)
        engine.optim_step()
        found.append(dict(engine.whole_weights()))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_streamed_weight_is_not_one_that_autocast_has_kept():
    assert run_ranks(of_autocast, 2, timeout=60) == [True, True]


def with_a_weight_of_another() -> list[str]:
    """The error of an engine over a model that shares one trained parameter with another's, by backend."""
    import torch

    from megaaccum import Plan, initialize
    from megaaccum.errors import ConfigError

    found = []
    for sharding in BACKENDS.values():
        model, other = (torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)) for _ in range(2))
        other[0].weight = model[0].weight
        plan = Plan.of(
            batch=dict(micro_batch_size=4, seq_length=1, grad_accum_steps=2), sharding=sharding, world_size=2
        )
        initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
        with pytest.raises(ConfigError) as caught:
            initialize(plan, other, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
        found.append(str(caught.value))
    return found


def test_two_engines_share_no_trained_parameter():
    """The hooks of both would be on it."""
    for found in run_ranks(with_a_weight_of_another, 2, timeout=60):
        assert all("another engine's already" in text for text in found), found
