"""Muon's update on shards, its iteration, and the parts of fused weights."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megaaccum.config import resolve
from megaaccum.config.schema import OptimizerConfig
from megaaccum.errors import ConfigError
from megaaccum.optim.chosen import optimizer_of
from megaaccum.optim.muon import Muon, Part, matrices_of, parts_of
from megaaccum.pretrain.interop.load import load
from megaaccum.sharding.ownership import Held
from megaaccum.upstream import emerging
from tests.support.parity import MODEL, merged

torch.manual_seed(0)


def parameters(matrices: bool = True):
    params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    groups = [{"params": params[:1], "weight_decay": 0.1, "matrices": matrices}, {"params": params[1:]}]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, groups


def test_a_matrix_takes_the_update_that_stands_for_its_gradient_and_all_others_adamw():
    params, groups = parameters()
    weight, update = params[0].detach().clone(), params[0].grad.clone()
    other = torch.nn.Parameter(params[1].detach().clone())
    other.grad = params[1].grad.clone()
    Muon(groups, decoupled=True, lr=0.1, weight_decay=0.0).step()
    torch.optim.AdamW([other], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(params[0].detach(), weight * (1 - 0.1 * 0.1) - 0.1 * update)
    assert torch.equal(params[1], other)


def test_l2_decay_is_in_the_gradient_already():
    params, groups = parameters()
    weight, update = params[0].detach().clone(), params[0].grad.clone()
    Muon(groups, decoupled=False, lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(params[0].detach(), weight - 0.1 * update)


def test_groups_are_what_they_were_after_a_step_that_fails():
    params, groups = parameters()
    optimizer = Muon(groups, decoupled=True, lr=0.1)
    params[1].grad = torch.sparse_coo_tensor([[0]], [1.0], (5,))
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("coefficients", ["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_the_float64_lane_iterates_as_the_library(coefficients, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kept = dict(steps=7, coefficients=coefficients, precision="highest")
    single, double = emerging.newton_schulz(matrix, **kept), emerging.newton_schulz(matrix.double(), **kept)
    assert double.dtype is torch.float64
    torch.testing.assert_close(single.double(), double, rtol=0, atol=2e-5)


def test_singular_values_come_close_to_one():
    found = emerging.newton_schulz(
        torch.randn(16, 64).double(), steps=8, coefficients="polar_express", precision="high"
    )
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 1e-3


def test_bf16_products_end_in_numbers_of_bf16():
    found = emerging.newton_schulz(torch.randn(16, 64), steps=5, coefficients="quintic", precision="medium")
    assert torch.equal(found, found.bfloat16().float())


def held(start: int, numel: int) -> Held:
    """Two query groups: in each 4 rows of queries, 2 of keys and 2 of values, 3 columns."""
    parts = (Part(0, 4, 8), Part(4, 2, 8), Part(6, 2, 8))
    return Held("qkv", parts, 16, 3, 0, 1, 0, start, numel)


@pytest.mark.parametrize("cuts", [[0, 48], [0, 7, 48], [0, 12, 13, 40, 48], list(range(49))])
def test_the_runs_of_all_shards_are_the_fused_matrices(cuts):
    whole = torch.arange(48.0)
    rows = whole.view(2, 8, 3)
    wanted = [rows[:, :4].reshape(-1), rows[:, 4:6].reshape(-1), rows[:, 6:].reshape(-1)]
    for number, exact in enumerate(wanted):
        found = torch.full_like(exact, -1)
        for start, stop in itertools.pairwise(cuts):
            for first, position, count in held(start, stop - start).runs(number):
                assert (found[position : position + count] == -1).all()
                found[position : position + count] = whole[start:stop][first : first + count]
        assert torch.equal(found, exact)


def test_matrices_of_a_part_cut_over_tp_are_whole():
    across = Held("proj", (Part(0, 16, 16),), 16, 3, 1, 2, 0, 0, 48)
    assert [(m.rows, m.columns) for m in across.matrices()] == [(16, 6)]
    assert [(m.rows, m.columns) for m in held(0, 48).matrices()] == [(8, 3), (4, 3), (4, 3)]
    down = Held("fc1", (Part(0, 8, 16), Part(8, 8, 16)), 16, 3, 0, 2, 0, 0, 48)
    assert [(m.rows, m.columns) for m in down.matrices()] == [(16, 3), (16, 3)]


@pytest.mark.parametrize(
    ("flags", "name", "gates", "parts"),
    [
        ("", "linear_qkv", False, [(0, 6, 12), (6, 3, 12), (9, 3, 12)]),
        ("", "linear_qkv", True, [(0, 6, 18), (6, 6, 18), (12, 3, 18), (15, 3, 18)]),
        ("--no_muon_split_qkv", "linear_qkv", False, [(0, 36, 36)]),
        ("", "linear_fc1", False, [(0, 18, 36), (18, 18, 36)]),
        ("--no_muon_split_gated", "linear_fc1", False, [(0, 36, 36)]),
        ("", "linear_fc2", False, [(0, 36, 36)]),
    ],
)
def test_a_fused_weight_is_the_matrices_that_the_keys_say(flags, name, gates, parts):
    plan = resolve(load(None, merged(MODEL, f"--optimizer muon {flags}")), world_size=1)
    sizes = dict(num_attention_heads=4, num_query_groups=2, kv_channels=3, gated_linear_unit=True)
    config = SimpleNamespace(**sizes, attention_output_gate=gates)
    weight = torch.nn.Parameter(torch.zeros(36, 2))
    assert list(parts_of(plan, f"layers.0.{name}.weight", weight, config)) == parts


def test_an_optimizer_of_the_callers_own_is_refused():
    plan = resolve(load(None, merged(MODEL, "--optimizer muon")), world_size=1)
    with pytest.raises(ConfigError) as caught:
        optimizer_of(plan, [], torch.optim.AdamW)
    assert "give initialize none" in str(caught.value)


def test_an_empty_shard_has_no_runs():
    assert held(8, 0).runs(0) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_soap_in_another_default_precision_is_refused(dtype):
    """The library makes its state in it, and its compiled bias corrections, which in BF16 stand still from step 256."""
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(ConfigError, match=f"default precision: make that torch.float32, not {dtype}"):
            matrices_of(OptimizerConfig(optimizer="soap"), [torch.nn.Linear(2, 2)])
    finally:
        torch.set_default_dtype(torch.float32)


def test_soap_has_the_numbers_of_the_plan() -> None:
    numbers = dict(adam_beta1=0.8, adam_beta2=0.85, adam_eps=1e-3, soap_shampoo_beta=0.7, soap_use_kl_shampoo=False)
    library = emerging.soap(torch.nn.Parameter(torch.ones(2, 3)), OptimizerConfig(**numbers))
    group = library.param_groups[0]
    assert (group["betas"], group["eps"], group["shampoo_beta"]) == ((0.8, 0.85), 1e-3, 0.7)
    assert (vars(library)["use_kl_shampoo"], group["lr"], group["weight_decay"]) == (False, 1.0, 0.0)
