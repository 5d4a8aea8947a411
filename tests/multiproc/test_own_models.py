"""Models of a user's own with unusual parameters and buffers, beside torch and through checkpoints."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine_inputs import batches, forward_step, said


def of_unusual_shapes(backend: str) -> dict:
    """How far the gradient of each parameter is from torch's own, over two ranks: a transposed one, and a scalar where
    the backend takes it."""
    import copy

    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(8, 8)
            self.turned = torch.nn.Parameter(torch.randn(4, 8).t())
            self.scale = torch.nn.Parameter(torch.tensor(1.5)) if backend in ("ddp", "megatron") else 1.5

        def forward(self, batch):
            return self.layer(batch * self.scale) @ self.turned

    model, data = Model(), batches(8)
    reference = copy.deepcopy(model)
    batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=dict(backend=backend), optimizer=dict(clip_grad=0.0), world_size=2)
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    torch.stack([reference(batch).square().sum() for batch in data]).sum().div(4.0 * len(data)).backward()
    wanted, distances = dict(reference.named_parameters()), {}

    def compare() -> None:
        for shard in engine.backend.shards():
            whole = wanted[shard.name].grad.reshape(-1)[shard.start :][: shard.grad.numel()]
            if whole.numel():
                distances[shard.name] = float(
                    (shard.grad.view(-1) - whole).abs().max() / wanted[shard.name].grad.norm()
                )

    engine.backend.step = compare
    engine.train_step(data[torch.distributed.get_rank() :: 2])
    return distances


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron", "ddp"])
def test_parameters_of_unusual_shapes(backend):
    found = {name: error for rank in run_ranks(of_unusual_shapes, 2, backend) for name, error in rank.items()}
    assert {"layer.weight", "layer.bias", "turned"} <= found.keys()
    assert ("scale" in found) == (backend in ("ddp", "megatron"))
    assert max(found.values()) < 1e-6


def with_a_running_mean(folder: str) -> tuple[list[str], float, float, str]:
    """Warnings of a model whose forward binds another running mean; that mean, and what a checkpoint has of it; a
    weight that is read outside of its module under streaming."""
    import warnings

    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, batch):
            self.mean = 0.9 * self.mean + 0.1 * batch.mean((0, 1))
            return self.layer(batch - self.mean)

    class Reading(Model):
        def forward(self, batch):
            return torch.nn.functional.linear(super().forward(batch), self.layer.weight)

    def made(kind, **sharding):
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
        plan = Plan.of(batch=batch, sharding=sharding or dict(backend="ddp"), world_size=1)
        return initialize(plan, kind(), forward_step_func=forward_step, optimizer=torch.optim.AdamW)

    engine = made(Model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.train_step(batches())
    engine.save(folder)
    loaded = made(Model)
    loaded.load(folder)
    means = [float(each.chunks[0].module.mean.norm()) for each in (engine, loaded)]
    try:
        made(Reading, zero_stage=3, sync="streaming").train_step(batches())
    except RuntimeError as error:
        return [str(each.message) for each in caught], *means, " ".join(error.__notes__)
    return [str(each.message) for each in caught], *means, "nothing"


def test_a_buffer_that_a_forward_changes_and_a_weight_that_is_not_there(tmp_path):
    ((texts, mean, of_checkpoint, note),) = run_ranks(with_a_running_mean, 1, str(tmp_path))
    assert [text.startswith("the forward of a micro-batch changes mean: steps depend") for text in texts] == [True]
    assert of_checkpoint == mean > 0
    assert "With sync streaming a module's parameters are there while its forward runs" in note


class OfTwoDtypes:
    """A model with layers in BF16, and after them norms in FP32, which Megatron's optimizer lists first."""

    def __new__(cls, seed: int):
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(seed)
                self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8).bfloat16() for _ in range(2))
                self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))

            def forward(self, batch):
                for norm, layer in zip(self.norms, self.layers, strict=True):
                    batch = batch + layer(norm(batch).bfloat16())
                return batch

        return Model()


def through_a_checkpoint(backend: str, folder: str) -> tuple[list[str], list[str]]:
    """Parameters that have other values than they began with, or after a step, a save and a load into `ddp`; what
    other backends say to them."""
    import torch

    from megaaccum import Plan, initialize

    def made(backend, seed):
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
        plan = Plan.of(batch=batch, sharding=dict(backend=backend), world_size=2)
        return initialize(plan, OfTwoDtypes(seed), forward_step_func=forward_step, optimizer=torch.optim.AdamW)

    first = made(backend, 0)
    before = dict(OfTwoDtypes(0).named_parameters())
    wrong = [name for name, whole in first.whole_weights() if not torch.equal(whole, before[name])]
    first.train_step(batches())
    after = dict(first.whole_weights())
    first.save(folder)
    other = made("ddp", 1)
    other.load(folder)
    wrong += [name for name, whole in other.whole_weights() if not torch.equal(whole, after[name])]
    return wrong, [said(lambda backend=backend: made(backend, 0)) for backend in ("deepspeed", "fsdp2")]


@pytest.mark.parametrize("backend", ["megatron", "ddp"])
def test_parameters_of_two_dtypes(backend, tmp_path):
    words = (
        "gives all parameters one dtype, but the model has layers.0.weight in bfloat16 and norms.0.weight in float32"
    )
    for wrong, errors in run_ranks(through_a_checkpoint, 2, backend, str(tmp_path)):
        assert not wrong
        assert all(words in error for error in errors)
