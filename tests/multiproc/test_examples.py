"""The examples do what they promise: the same numbers on one process and on four ranks, under every schedule."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaaccum.lab.verification.testing import run_ranks

ROOT = Path(__file__).parents[2]
EXACT = dict(sharding=dict(backend="ddp", params_dtype="fp64"))
Cell = tuple[str, dict[str, Any]]


def trained(cells: list[Cell]) -> list[tuple[list[tuple[float, float, float]], dict]]:
    """([(loss, weight, norm) of each step], {name: master weights after the last}) of each cell, on this rank."""
    import torch

    from megaaccum.distributed import groups

    found = []
    for example, keys in cells:
        groups.destroy()
        keys = {name: getattr(torch, value) if name == "dtype" else value for name, value in keys.items()}
        steps = [(engine, result) for engine, result in importlib.import_module(f"examples.{example}").train(**keys)]
        engine = steps[-1][0]
        weights = {(piece.name, piece.start): piece.tensors["param"].clone() for piece in engine.backend.state()}
        ratios = [result.reports["ratio"] for _, result in steps if "ratio" in result.reports]
        assert not ratios or ratios[0] == 1.0 != ratios[1], "the packing of forward is not that of the steps"
        found.append(([(result.loss, result.weight, result.grad_norm) for _, result in steps], weights))
    return found


def differences(one: list, other: list, tolerance: float) -> list[str]:
    import torch

    (numbers, whole), found = one[0], []
    whole = {name: weight for (name, _), weight in whole.items()}
    for rank, (mine, weights) in enumerate(other):
        for step, (mine_, true) in enumerate(zip(mine, numbers, strict=True)):
            if any(abs(a - b) > tolerance * abs(b) for a, b in zip(mine_, true, strict=True)):
                found.append(f"rank {rank} step {step}: {mine_}, not {true}")
        for (name, start), weight in weights.items():
            true_part = whole[name].view(-1)[start : start + weight.numel()]
            if not torch.allclose(weight.view(-1), true_part, rtol=tolerance, atol=20 * tolerance):
                found.append(f"rank {rank}: {name} is off by {(weight.view(-1) - true_part).abs().max():.2e}")
    return found


@pytest.mark.parametrize("example", ["sft", "grpo"])
@pytest.mark.parametrize("lane", ["float64", "float32"])
def test_one_process_and_every_schedule(example, lane):
    keys = dict(dtype=lane) | (EXACT if lane == "float64" else {})
    cells = [(example, keys | dict(schedule=schedule)) for schedule in ("none", "1f1b", "zbv", "dualpipev")]
    (alone,) = run_ranks(trained, 1, [(example, keys)], timeout=60)
    by_rank = run_ranks(trained, 4, cells, timeout=120)
    for index, (_, cell) in enumerate(cells):
        found = differences(alone, [ranks[index] for ranks in by_rank], 1e-12 if lane == "float64" else 2e-5)
        assert not found, (cell, found[:6])


BACKENDS = [
    dict(zero_stage=1),
    dict(zero_stage=3),
    dict(sync="streaming"),
    dict(backend="fsdp2"),
    dict(backend="fsdp2", sync="streaming"),
    dict(backend="megatron"),
    dict(backend="ddp"),
]


def test_a_hugging_face_model_under_every_backend():
    pytest.importorskip("transformers", reason="not installed: transformers")
    (alone,) = run_ranks(trained, 1, [("hf_zero3", {})], timeout=60)
    cells = [("hf_zero3", dict(sharding=sharding)) for sharding in BACKENDS]
    by_rank = run_ranks(trained, 4, cells, timeout=150)
    for index, sharding in enumerate(BACKENDS):
        found = differences(alone, [ranks[index] for ranks in by_rank], 2e-5)
        assert not found, (sharding, found[:6])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("[a-s]*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 40


def test_a_user_starts_one_by_hand():
    command = [sys.executable, "-m", "examples.grpo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 1: loss 0.0487, mean ratio 1.000000" in done.stdout


def looped(cells: list[Cell]) -> list[list[float]]:
    """The gradient norms of each cell's steps, of the examples around Megatron's own loop."""
    import torch

    from megaaccum.distributed import groups

    found = []
    for example, keys in cells:
        groups.destroy()
        keys = {name: getattr(torch, value) if name == "dtype" else value for name, value in keys.items()}
        results = [result for _, result in importlib.import_module(f"examples.{example}").train(**keys)]
        assert all(success for success, _, _ in results)
        found.append([norm for _, norm, _ in results])
    return found


@pytest.mark.parametrize("lane", ["float64", "float32"])
def test_megatrons_own_loop(lane):
    """A step's norm depends on the weights that the steps before it have made."""
    keys = dict(dtype=lane) | (EXACT if lane == "float64" else {})
    examples = ("megatron_loop", "rl_worker")
    alone = run_ranks(looped, 1, [(example, keys) for example in examples], timeout=60)[0]
    cells = [(example, keys | dict(schedule=schedule)) for example in examples for schedule in ("none", "1f1b", "zbv")]
    for norms in run_ranks(looped, 4, cells, timeout=120):
        for (example, cell), found in zip(cells, norms, strict=True):
            true = alone[examples.index(example)]
            assert found == pytest.approx(true, rel=1e-12 if lane == "float64" else 2e-5), (example, cell)
