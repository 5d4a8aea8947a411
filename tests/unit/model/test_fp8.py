"""FP8 as far as no layer computes: what a GPU can do, what is reported, and who may touch a scale."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megaaccum.errors import ConfigError
from megaaccum.model import fp8
from megaaccum.pretrain.model import machine
from tests.support.check import run
from tests.support.configs import plan

PACKAGE = Path(fp8.__file__).parents[1]
HOPPER, BLACKWELL, AMPERE, ADA = (9, 0), (10, 0), (8, 0), (8, 9)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "words"),
    [
        ("delayed", None, None, ["needs a GPU", "leave fp8_format out", "bf16"]),
        ("delayed", AMPERE, "13.0", ["8.9", "8.0", "leave fp8_format out"]),
        ("mxfp8", HOPPER, "13.0", ["Blackwell", "9.0", "fp8_recipe to blockwise"]),
        ("mxfp8", ADA, "13.0", ["Blackwell", "8.9", "fp8_recipe to delayed"]),
        ("mxfp8", (12, 0), "13.0", ["Blackwell", "12.0"]),
        ("blockwise", ADA, "13.0", ["Hopper", "8.9", "tensorwise"]),
        ("blockwise", HOPPER, "12.6", ["CUDA 12.9", "CUDA 12.6", "tensorwise"]),
    ],
)
def test_a_gpu_that_cannot_is_told_with_the_reason(recipe, capability, cuda, words):
    told = machine.device_problem(recipe, capability, cuda)
    assert told is not None
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("recipe", "capability"),
    [("delayed", ADA), ("tensorwise", HOPPER), ("blockwise", HOPPER), ("mxfp8", BLACKWELL), ("delayed", BLACKWELL)],
)
def test_a_gpu_that_can_is_taken(recipe, capability):
    assert machine.device_problem(recipe, capability, "13.0") is None


def test_the_cpu_lane_refuses_before_a_model_is_built():
    with pytest.raises(ConfigError, match="FP8 needs a GPU, but none was found"):
        machine.check_machine(plan(1, fp8_format="hybrid", bf16=True))


def test_a_run_without_fp8_has_nothing_to_do_and_needs_no_transformer_engine():
    none = fp8.build(plan(1), chunks=[object()])
    none.begin_forward(0, 0)
    none.end_forward(0, 0, None)
    none.begin_backward(0, 0)
    none.begin_attempt()
    none.end_backward()
    none.restore(none.snapshot())
    assert none.tensors == {}
    assert none.overflow() is None
    assert none.describe_overflow() == ""


def test_the_plan_tells_what_is_computed_in_fp8(tmp_path):
    keys = "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 8\nseq_length: 64\nlr: 1e-3\ntrain_iters: 9\n"
    (tmp_path / "run.yaml").write_text(keys + "vocab_size: 100\nglobal_batch_size: 4\nbf16: true\nfp8: hybrid\n")
    text = run(tmp_path / "run.yaml", ["--fp8_amax_history_len", "16"], world_size=2)
    assert "e4m3 forward and e5m2 for gradients, fp8_recipe delayed" in text
    assert "most_recent of the last 16 micro-batches, the same on the tp 1 * cp 1 * dp 2 ranks" in text
    bf16 = run(
        tmp_path / "run.yaml", ["--fp8_recipe", "blockwise", "--first_last_layers_bf16"], world_size=1
    )  # fmt: skip
    assert "one per block of 128" in bf16
    assert "in BF16: the first 1 and the last 1 layers" in bf16


# --- Transformer Engine owns the scales ------------------------------------------------------------------------------

STATE = re.compile(r"amax_history_[fb]wd|\bfp8_meta\b|scaling_[fb]wd|global_scale_buffer|\.scale_inv\b")
OWNERS = {"upstream/te.py", "model/fp8.py"}
ARITHMETIC = (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.MatMult)
METHODS = {"mul", "mul_", "div", "div_", "true_divide", "reciprocal", "reciprocal_", "pow", "pow_", "rsqrt", "exp2"}


def products_in(source: str) -> list[int]:
    """Lines on which something is multiplied or divided, with operators or methods of tensors."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        scales = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ARITHMETIC)
        calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        if scales or calls:
            lines.append(node.lineno)
    return lines


def test_two_files_know_where_scales_are_and_they_multiply_nothing():
    knowing = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if STATE.search(path.read_text("utf-8"))
    }
    assert knowing <= OWNERS
    for name in sorted(OWNERS):
        assert products_in((PACKAGE / name).read_text("utf-8")) == [], name


@pytest.mark.parametrize("line", ["scale = scale * 2", "scale /= 2", "scale.mul_(2)", "scale = scale.reciprocal()"])
def test_a_product_would_be_seen(line):
    assert products_in(f"def change(scale):\n    {line}\n") == [2]
