"""The dependence of a sample's draws on seed and position, and the ranks on which they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megaaccum.distributed import rng
from megaaccum.model.torch_chunk import TorchChunk
from megaaccum.platform import cpu
from megaaccum.step.seeds import SampleSeeds, _may_draw
from tests.support.configs import plan


class _Group:
    def __init__(self, rank: int = 0, size: int = 1):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def seeds(
    mode: str = "sample",
    *,
    tp: int = 0,
    cp: int = 0,
    dp: tuple[int, int] = (0, 1),
    chunks: Sequence[torch.nn.Module] = (),
) -> SampleSeeds:
    collection = SimpleNamespace(cp=_Group(cp))
    groups = SimpleNamespace(tp=_Group(tp), dp=_Group(*dp), collection=collection)
    return SampleSeeds(plan(world_size=dp[1], rng=mode), cast(Any, groups), chunks)


@pytest.fixture(autouse=True)
def _as_before():
    cpu.install()
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    before = rng.snapshot()
    yield
    rng.restore(before)


def draws(of: SampleSeeds, microbatch: int = 0, step: int = 1) -> dict[str, float]:
    """The first number of each stream in the forward of a micro-batch."""
    with of.flush(step):
        of.begin_forward(0, microbatch)
        drawn = {"default": float(torch.rand(()))}
        for name in ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"):
            with get_cuda_rng_tracker().fork(name):
                drawn[name] = float(torch.rand(()))
    return drawn


def test_a_global_microbatch_has_one_set_of_draws_on_any_number_of_ranks():
    assert draws(seeds(), 5) == draws(seeds(dp=(1, 2)), 2) == draws(seeds(dp=(1, 4)), 1)
    first = draws(seeds())
    for other in (draws(seeds(), 1), draws(seeds(), step=2), draws(seeds(cp=1)), draws(seeds(dp=(1, 2)))):
        assert all(other[name] != first[name] for name in first)
    assert len({*first.values()}) == len(first)


def test_ranks_of_a_tp_group_share_what_megatron_lets_them_share():
    first, second = draws(seeds()), draws(seeds(tp=1))
    assert {name for name in first if first[name] == second[name]} == {"default", "data-parallel-rng"}


def _model(first: int = 1, last: int = 3) -> torch.nn.Module:
    """The part of a model of dropouts that begins at layer `first`, and with the embedding if that is the first."""
    model = torch.nn.Module()
    model.embedding = torch.nn.Sequential(torch.nn.Embedding(1, 1), torch.nn.Dropout(0.5)) if first == 1 else None
    model.layers = torch.nn.ModuleList(torch.nn.Dropout(0.5) for _ in range(first, last + 1))
    for number, layer in enumerate(model.layers, first):
        layer.layer_number = number
    return model


def _masks(chunk: Any) -> list[torch.Tensor]:
    """The draws of the embedding and of the layers of a chunk in a forward."""
    chunk.config = SimpleNamespace()
    found = []
    with (of := seeds(chunks=[chunk])).flush(1):
        of.begin_forward(0, 2)
        if chunk.embedding is not None:
            found.append(chunk.embedding(torch.zeros(64, dtype=torch.int64)) != 0)
        found += [layer(torch.ones(64)) for layer in chunk.layers]
    return found


def test_a_plain_module_draws_what_its_pipeline_draws():
    whole = _masks(_model())
    for parts in ([TorchChunk(_model())], [_model(last=1), _model(first=2)]):
        torch.rand(7)  # the states of the process do not matter
        found = [mask for part in parts for mask in _masks(part)]
        assert len(found) == len(whole) == 4 and all(map(torch.equal, found, whole))


class _DrawsBetween(torch.nn.Module):
    """A model that itself draws after each of its layers, of which a backend has replaced the forwards of some."""

    def __init__(self, *replaced: int):
        super().__init__()
        self.config = SimpleNamespace()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
        for number in replaced:
            vars(self.layers[number])["forward"] = self.layers[number].forward

    def forward(self) -> list[float]:
        return [float(torch.rand(())) for layer in self.layers if layer(torch.ones(1)) is not None]


def test_draws_between_layers_are_those_of_the_layer_before_under_every_backend():
    found = []
    for chunk in (_DrawsBetween(), _DrawsBetween(1), TorchChunk(_DrawsBetween(0, 2))):
        with (of := seeds(chunks=[chunk])).flush(1):
            of.begin_forward(0, 2)
            found.append(chunk())
    assert found[0] == found[1] == found[2] and len({*found[0]}) == 3


def test_a_seed_is_torchs():
    rng.seed_generators(5)
    here = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(here, torch.rand(3))


def test_the_states_of_the_process_are_left_alone():
    before = rng.snapshot()
    draws(seeds())
    after = rng.snapshot()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    of = seeds("megatron")
    assert draws(of) != draws(of), "Megatron's states draw on"


class _OfAUser(torch.nn.Linear):
    pass


def _replaced() -> torch.nn.Module:
    linear = torch.nn.Linear(1, 1)
    linear.forward = lambda x: x * torch.rand(())
    return linear


def _of_a_library(module: str) -> torch.nn.Module:
    """A layer whose class is defined in `module`."""
    return type("Linear", (torch.nn.Linear,), {"__module__": module})(1, 1)


@pytest.mark.parametrize(
    ("module", "config", "may"),
    [
        (torch.nn.Linear(1, 1), {}, False),
        (torch.nn.Sequential(torch.nn.Embedding(1, 1), torch.nn.Dropout(0.0)), {"hidden_dropout": 0.0}, False),
        (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)), {}, True),
        (torch.nn.Linear(1, 1), {"hidden_dropout": 0.1}, True),
        (torch.nn.Linear(1, 1), {"attention_dropout": 1}, True),
        (torch.nn.Sequential(_OfAUser(1, 1)), {}, True),
        (torch.nn.RReLU(), {}, True),
        (_replaced(), {}, True),
        (_of_a_library("transformer_engine.pytorch.module.linear"), {}, False),
        (_of_a_library("megatron.core.extensions.transformer_engine"), {}, False),
        (_of_a_library("megatron.core.extensions.transformer_engine"), {"attention_dropout": 0.1}, True),
    ],
    ids="linear dropout-0 dropout hidden attention own unknown replaced te te-layer te-dropout".split(),
)
def test_what_may_draw(module, config, may):
    assert _may_draw(module, SimpleNamespace(**config)) is may
