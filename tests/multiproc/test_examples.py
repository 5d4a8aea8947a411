"""The examples keep their promises: losses fall under their own commands, and one process and four ranks agree on every
number, under every schedule and backend."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.snippets import losses_of, run_command, run_on_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LINES = {
    "hf_zero3": 40,
    "sft": 50,
    "grpo": 60,
    "megatron_gpt": 60,
    "megatron_loop": 60,
    "rl_worker": 80,
    "rollout_weights": 90,
    "tiny_gpt": 80,
}
"""The most lines of each program; their model, tiny_gpt, may have 80."""
LAYOUT, SHARDING = 'layout=dict(pp=2, schedule="zbv")', "sharding=dict(zero_stage=3)"
FLOAT64 = {SHARDING: 'sharding=dict(backend="ddp", params_dtype="fp64")'}
RECORDED = ("result = engine.train_step(microbatches)", "result = engine.optim_step()")
RECORDED_NORM = "success, grad_norm, _ = optimizer.step()"
Cell = tuple[str, str, Mapping[str, str]]
"""An example, its lane (float64, float32), and texts of its source with what a cell has in their place."""


def layout_of(schedule: str) -> dict[str, str]:
    return {LAYOUT: "layout={}" if schedule == "none" else f'layout=dict(pp=2, schedule="{schedule}")'}


def run_example(name: str, lane: str, replaced: Mapping[str, str]) -> dict[str, Any]:
    """Run an example on this rank, with other text in some places. Returns its global names and `recorded`, what each
    of its steps returned."""
    import torch

    from megaaccum.distributed import groups

    source = (EXAMPLES / f"{name}.py").read_text()
    for text, other in replaced.items():
        assert text in source, f"{name}: {text}"
        source = source.replace(text, other)
    calls = [call for call in (*RECORDED, RECORDED_NORM) if call in source]
    assert len(calls) == 1 == source.count(calls[0]), name
    source = source.replace(calls[0], f"{calls[0]}; recorded.append({calls[0].split()[0].strip(',')})")
    if calls[0] is RECORDED_NORM:
        source = source.replace("recorded.append(success)", "recorded.append((success, grad_norm))")
    names: dict[str, Any] = {"recorded": [], "__name__": "__main__"}
    groups.destroy()
    sys.path.insert(0, str(EXAMPLES))  # as Python does for a program
    torch.set_default_dtype(getattr(torch, lane))
    try:
        exec(compile(source, f"examples/{name}.py", "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)
        sys.path.remove(str(EXAMPLES))
    return names


def trained(cells: list[Cell]) -> list[tuple[list[tuple[float, float, float]], dict]]:
    """([(loss, weight, norm) of each step], {name: master weights after the last}) of each cell, on this rank."""
    found = []
    for cell in cells:
        names = run_example(*cell)
        steps = names["recorded"]
        weights = {
            (piece.name, piece.start): piece.tensors["param"].clone() for piece in names["engine"].backend.state()
        }
        ratios = [result.reports["ratio"] for result in steps if "ratio" in result.reports]
        assert not ratios or ratios[0] == 1.0 != ratios[1], "the packing of forward is not that of the steps"
        found.append(([(result.loss, result.weight, result.grad_norm) for result in steps], weights))
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
    sharding = FLOAT64 if lane == "float64" else {}
    cells = [(example, lane, sharding | layout_of(schedule)) for schedule in ("none", "1f1b", "zbv", "dualpipev")]
    (alone,) = run_ranks(trained, 1, cells[:1], timeout=60)
    by_rank = run_ranks(trained, 4, cells, timeout=120)
    for index, cell in enumerate(cells):
        found = differences(alone, [ranks[index] for ranks in by_rank], 1e-12 if lane == "float64" else 2e-5)
        assert not found, (cell, found[:6])


BACKENDS = [
    "zero_stage=1",
    "zero_stage=3",
    'sync="streaming"',
    'backend="fsdp2"',
    'backend="fsdp2", sync="streaming"',
    'backend="megatron"',
    'backend="ddp"',
]


def test_a_hugging_face_model_under_every_backend():
    pytest.importorskip("transformers", reason="not installed: transformers")
    (alone,) = run_ranks(trained, 1, [("hf_zero3", "float32", {})], timeout=60)
    cells = [("hf_zero3", "float32", {SHARDING: f"sharding=dict({sharding})"}) for sharding in BACKENDS]
    by_rank = run_ranks(trained, 4, cells, timeout=150)
    for index, sharding in enumerate(BACKENDS):
        found = differences(alone, [ranks[index] for ranks in by_rank], 2e-5)
        assert not found, (sharding, found[:6])


def looped(cells: list[Cell]) -> list[list[float]]:
    """The gradient norms of each cell's steps, of the examples around Megatron's own loop."""
    found = []
    for cell in cells:
        steps = run_example(*cell)["recorded"]
        assert all(success for success, _ in steps)
        found.append([norm for _, norm in steps])
    return found


@pytest.mark.parametrize("lane", ["float64", "float32"])
def test_megatrons_own_loop(lane):
    """A step's norm depends on the weights that the steps before it have made."""
    sharding = FLOAT64 if lane == "float64" else {}
    examples = ("megatron_loop", "rl_worker")
    alone = run_ranks(looped, 1, [(name, lane, sharding | layout_of("none")) for name in examples], timeout=60)[0]
    cells = [(name, lane, sharding | layout_of(schedule)) for name in examples for schedule in ("none", "1f1b", "zbv")]
    for norms in run_ranks(looped, 4, cells, timeout=120):
        for (name, *cell), found in zip(cells, norms, strict=True):
            true = alone[examples.index(name)]
            assert len(found) >= 5 and found == pytest.approx(true, rel=1e-12 if lane == "float64" else 2e-5), cell


# --- the commands that the examples' first lines show ----------------------------------------------------------------


def commands_of(name: str) -> list[str]:
    shown = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert shown, name
    return re.findall(r"((?:torchrun|megaaccum) .*)", shown)


@pytest.fixture
def folder(tmp_path):
    """A working folder in which the paths of the commands lead to the examples."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fall"), [("sft", 0.4), ("grpo", 0.05), ("hf_zero3", 0.2), ("megatron_loop", 0.3), ("rl_worker", 0.1)]
)
def test_losses_fall_under_the_command_that_is_shown(name, fall, folder):
    """The program of the README is started by torchrun itself (test_snippets.py). Two steps are compared, because
    rl_worker takes the halves of its batch in turn."""
    if name == "hf_zero3":
        pytest.importorskip("transformers", reason="not installed: transformers")
    (command,) = commands_of(name)
    losses = losses_of(run_on_ranks(command, folder))
    assert len(losses) == (6 if name == "rl_worker" else 5)
    assert sum(losses[-2:]) / 2 < sum(losses[:2]) / 2 - fall, losses


def test_a_program_around_megatrons_loop_imports_what_it_needs_in_an_interpreter_of_its_own(tmp_path):
    (tmp_path / "tiny_gpt.py").symlink_to(EXAMPLES / "tiny_gpt.py")
    source = (EXAMPLES / "megatron_loop.py").read_text().replace(LAYOUT, "layout={}")
    (tmp_path / "program.py").write_text(source)
    losses = losses_of(run_command("python program.py", tmp_path))
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.3, losses


def test_a_rollout_engine_has_the_weights_of_each_step(folder):
    pytest.importorskip("transformers", reason="not installed: transformers")
    (command,) = commands_of("rollout_weights")
    output = run_on_ranks(command, folder)
    losses = re.findall(r"loss ([\d.]+), of the rollout engine ([\d.]+)", output)
    elements = [int(each) for each in re.findall(r"(\d+) elements handed over", output)]
    assert len(losses) == 4 and losses[-1][0] < losses[0][0], output
    assert all(float(there) == pytest.approx(float(here), rel=2e-3) for here, there in losses), losses
    assert all(0 < each < 0.9 * elements[0] for each in elements[1:]), elements


def test_megatron_gpt_trains_evaluates_saves_and_resumes(folder):
    text = (ROOT / "megaaccum" / "pretrain" / "data" / "text" / "emma.txt").read_text(encoding="utf-8")
    (folder / "book.txt").write_text(text[:400_000], encoding="utf-8")
    build, train = commands_of("megatron_gpt")
    run_command(build, folder)
    first = run_on_ranks(train, folder)
    losses = losses_of(first)
    validation = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", first)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5, losses
    assert len(validation) == 2 and validation[1] < validation[0], validation

    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / "step_0000020")
    (checkpoints / "latest").write_text("step_0000010\n")
    resumed = run_on_ranks(train, folder)
    assert losses_of(resumed) == losses[10:]
    assert resumed.splitlines()[-1] == first.splitlines()[-1], "the last evaluation"


def test_megatron_gpt_without_its_data_says_how_it_is_started():
    ended = subprocess.run([sys.executable, EXAMPLES / "megatron_gpt.py"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "torchrun --nproc-per-node 4" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- programs that a reader can follow -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_stands_alone(path):
    """It imports no other example but the model."""
    source = path.read_text()
    assert len(source.splitlines()) <= LINES.get(path.stem, 80)
    siblings = {other.stem for other in EXAMPLES.glob("*.py")} - {"tiny_gpt"}
    imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert not siblings & set(imported) and not any("examples" in (module or "") for module in imported)
    packages = [(module or "").partition(".")[0] for module in imported]
    assert "deepspeed" not in packages
    if "megatron" in packages:
        assert packages.index("megaaccum") < packages.index("megatron"), "its CPU stand-ins precede Megatron's import"
