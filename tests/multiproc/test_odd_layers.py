"""Models whose layers, which fully_shard and ZeRO-3 treat as units, are of an odd kind: skipped by some micro-batches
of a rank, read by a user's hook, dicts of modules. Gradients are those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_odd_models import COUNT, LENGTH, WIDTH, Weights, data, engine_on, plan_of, stage


def of_layers(kind: str) -> Any:
    """Layers in a list, with nothing outside of it. Each is left out where a number in the sample says so."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for number, layer in enumerate(self.layers):
                if kind != "drops" or number != int(x[0, 0, 1]):
                    x = torch.cat((x[:, :, :2], (torch.tanh(layer(x)) + x)[:, :, 2:]), dim=2)
            return x

    return Model()


def far_from_one_process(kind: str) -> float:
    """The largest distance of fsdp2's gradients from those of one process, relative to these."""
    import torch

    def step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        x = next(data_iterator)
        output = model(x)
        if kind == "targets":  # two forwards with a gradient, then one without
            second = model(2 * x)
            with torch.no_grad():
                target = model(x)
            output = output + second - target
        return output, lambda out: (out.square().sum(), LENGTH, {})

    batches, (model, alone) = data(), (of_layers(kind), of_layers(kind))
    for number, batch in enumerate(batches):
        batch[0, 0, 1] = 0.0 if number == COUNT - 1 else 5.0  # rank 1 leaves layer 0 out, in its last micro-batch
        output, loss_func = step(iter([batch]), alone)
        (loss_func(output)[0] / LENGTH / COUNT).backward()
    engine = engine_on(plan_of(backend="fsdp2"), model, forward_step_func=step)
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    engine.train_step(batches[torch.distributed.get_rank() :: 2])
    named = dict(alone.named_parameters())
    return max(
        float((before[name] - tensor - named[name].grad).norm() / named[name].grad.norm())
        for name, tensor in engine.whole_weights()
    )


@pytest.mark.parametrize("kind", ["drops", "targets"])
def test_fsdp2_gathers_and_reduces_alike_on_all_ranks(kind):
    assert max(run_ranks(far_from_one_process, 2, kind, timeout=45)) < 1e-5


def with_a_hook_that_reads_a_weight(sync: str | None) -> Weights:
    """Gradients of a layer whose input a hook shifts by the sum of the layer's weight. sync: None for one process."""
    import torch

    model = stage(0, 1, "plain")
    model.layer.register_forward_pre_hook(lambda layer, args: args[0] + layer.weight.detach().sum())
    if sync is None:
        for batch in data():
            model(batch).square().sum().div(LENGTH * COUNT).backward()
        return {f"stages.0.{name}": param.grad for name, param in model.named_parameters()}
    engine = engine_on(plan_of(sharding=dict(zero_stage=3, sync=sync)), [model])
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    engine.train_step(data()[torch.distributed.get_rank() :: 2])
    return {name: before[name] - tensor for name, tensor in engine.whole_weights()}


@pytest.mark.parametrize("sync", ["resident", "streaming"])
def test_a_hook_before_a_layers_forward_reads_its_whole_weight(sync: str):
    """A weight that is not gathered has no elements, whose sum is 0."""
    whole = with_a_hook_that_reads_a_weight(None)
    for found in run_ranks(with_a_hook_that_reads_a_weight, 2, sync, timeout=60):
        assert found.keys() == whole.keys()
        for name, grad in found.items():
            assert (grad - whole[name]).norm() <= 1e-5 * whole[name].norm(), name


def of_odd_microbatches(sharding: dict[str, Any], kind: str, odd: tuple[int, ...]) -> list[tuple[float, float]]:
    """(norm, that of one process) of three steps, of two calls each, on two ranks. Micro-batches `odd` of the second
    one run a part of the model: from the second step on its head alone (`skips`), or nothing in any step (`empty`)."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.head = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            for layer in self.layers if float(x.mean()) < 9 else ():
                x = torch.tanh(layer(x))
            return self.head(x)

    def output(model: Any, x: Any) -> Any:
        return x * 0.0 if kind == "empty" and float(x.mean()) > 9 else model(x)

    def step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        return output(chunk, next(data_iterator)), lambda out: (out.square().sum(), float(LENGTH * bool(out.any())), {})

    torch.manual_seed(7)
    plan = plan_of(batch=dict(global_batch_size=2 * COUNT), sharding=sharding)
    made, whole, found = Model(), Model(), []
    optimizer = lambda params: torch.optim.AdamW(params, lr=0.0, weight_decay=0.0)  # noqa: E731
    engine = engine_on(plan, made, forward_step_func=step, optimizer=optimizer)
    whole.load_state_dict(dict(engine.whole_weights()))
    for number in range(3):
        every = [torch.randn(LENGTH, 1, WIDTH) for _ in range(2 * COUNT)]
        for index in odd if kind == "empty" or number else ():
            every[COUNT + index] = every[COUNT + index] + 10.0
        mine = every[COUNT * torch.distributed.get_rank() :][:COUNT]
        engine.forward_backward(mine[:4])
        engine.forward_backward(mine[4:])
        outputs = [out for x in every if (out := output(whole, x)).requires_grad]
        loss = sum(out.square().sum() for out in outputs) / (LENGTH * len(outputs))
        norm = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(whole.parameters()))]).norm()
        found.append((engine.optim_step().grad_norm, float(norm)))
    return found


SMALL_BUCKETS = dict(reduce_bucket_size=10)


@pytest.mark.parametrize(
    ("sharding", "kind", "odd"),
    [
        (SMALL_BUCKETS | dict(zero_stage=1), "skips", (COUNT - 1,)),
        (SMALL_BUCKETS | dict(zero_stage=3), "skips", (COUNT - 1,)),
        (dict(backend="fsdp2"), "empty", (COUNT - 1,)),
        (dict(backend="fsdp2"), "empty", tuple(range(COUNT))),
        (dict(backend="fsdp2", reproducible="layout"), "empty", (1, COUNT - 1)),
    ],
    ids=["zero-1 skips", "zero-3 skips", "fsdp2 last", "fsdp2 all", "fsdp2 in one order"],
)
def test_no_rank_waits_for_one_whose_microbatches_run_less(sharding: dict[str, Any], kind: str, odd: tuple[int, ...]):
    for found in run_ranks(of_odd_microbatches, 2, sharding, kind, odd, timeout=30):
        for norm, expected in found:
            assert norm == pytest.approx(expected, rel=1e-5)


def with_dicts_of_layers(sharding: dict[str, Any]) -> Weights:
    """Gradients of layers that are dicts of modules, which have no forward, with a dropout after each."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            kinds = {"norm": torch.nn.LayerNorm, "linear": partial(torch.nn.Linear, WIDTH)}
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict({name: kind(WIDTH) for name, kind in kinds.items()}) for _ in range(3)
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + torch.nn.functional.dropout(layer["linear"](layer["norm"](x)), 0.5, self.training)
            return x

    engine = engine_on(plan_of(sharding=sharding), Model())
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    ranks = torch.distributed
    engine.train_step(data()[ranks.get_rank() :: ranks.get_world_size()])
    return {name: before[name] - tensor for name, tensor in engine.whole_weights()}


@pytest.mark.parametrize(
    "sharding", [dict(backend="fsdp2"), dict(zero_stage=3), dict(zero_stage=3, sync="streaming")], ids=str
)
def test_layers_that_are_dicts_of_modules(sharding: dict[str, Any]):
    """Backends shard the modules inside, and change no dropout by what they put in a module's place."""
    (whole,) = run_ranks(with_dicts_of_layers, 1, dict(backend="ddp"), timeout=60)
    for found in run_ranks(with_dicts_of_layers, 2, sharding, timeout=60):
        assert found.keys() == whole.keys()
        for name, grad in found.items():
            assert (grad - whole[name]).norm() <= 1e-5 * whole[name].norm(), name
