"""The typed arguments of `Plan.of`: the same plan as from dicts, the same errors, and types that a checker sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megaaccum import Batch, ConfigError, Layout, Optimizer, Plan, Quantization, Run, Sharding, Step

ROOT = Path(__file__).parents[3]

TYPED = dict(
    layout=Layout(pp=2, schedule="zbv"),
    batch=Batch(micro_batch_size=1, seq_length=16, grad_accum_steps=8),
    sharding=Sharding(backend="ddp", params_dtype="fp64"),
    step=Step(nonfinite="skip"),
    optimizer=Optimizer(lr=1e-3),
    run=Run(seed=7),
    quantization=Quantization(),
)
DICTS = dict(
    layout=dict(pp=2, schedule="zbv"),
    batch=dict(micro_batch_size=1, seq_length=16, grad_accum_steps=8),
    sharding=dict(backend="ddp", params_dtype="fp64"),
    step=dict(nonfinite="skip"),
    optimizer=dict(lr=1e-3),
    seed=7,
)


def test_both_forms_make_one_plan() -> None:
    typed, plain = Plan.of(**TYPED, world_size=4), Plan.of(**DICTS, world_size=4)
    assert typed.digest() == plain.digest()
    assert typed.config == plain.config
    assert (typed.layout.pp, typed.layout.vpp, typed.layout.dp, typed.batch.num_microbatches) == (2, 2, 2, 8)
    assert typed.digest() != Plan.of(**TYPED | dict(run=Run(seed=8)), world_size=4).digest()


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(pp="two"), "layout.pp: pipeline_model_parallel_size must be a whole number, not 'two'."),
        (Layout(tp=2, tensor_model_parallel_size=2), "layout.tp: tp (another name of tensor_model_parallel_size) was"),
        (Layout(pp=0), "pipeline_model_parallel_size is 0: it must be at least 1."),
        (dict(ppp=2), "layout.ppp: unknown key ppp (did you mean pp"),
        (3, "layout is of type int: it must be a Layout or a dict."),
    ],
)
def test_a_mistake_is_one_message(layout, problem) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.of(batch=DICTS["batch"], layout=layout, world_size=2)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


SNIPPET = """import megaaccum, torch; from collections.abc import Iterator; from megaaccum.step.loss import LossFunc
from megaaccum import Batch, Layout, Plan, Sharding
plan = Plan.of(layout=Layout(pp=2), batch=Batch(seq_length=16), sharding={"backend": "ddp"}, hidden_size=8)
reveal_type(plan)
reveal_type(plan.layout.dp)
Layout(pp="two")
Batch(microbatch_size=1)
Sharding(backend="fsdp3")
Plan.of(batch=Batch(), layout=Batch())
megaaccum.Plam


class Stage(torch.nn.Linear):
    pass


def loss(output: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, float]]:
    return output.sum(), 2, {"two": 2.0}


def forward_step(data: Iterator[torch.Tensor], chunk: Stage) -> tuple[torch.Tensor, LossFunc]:
    return chunk(next(data)), loss


megaaccum.initialize(plan, [Stage(2, 2)], forward_step_func=forward_step)
"""

SEEN = {
    4: 'note: Revealed type is "megaaccum.config.plan.Plan"',
    5: 'note: Revealed type is "int"',
    6: 'error: Argument "pp" to "Layout" has incompatible type "str"',
    7: 'error: Unexpected keyword argument "microbatch_size" for "Batch"',
    8: 'error: Argument "backend" to "ShardingConfig" has incompatible type "Literal[\'fsdp3\']"',
    9: 'error: Argument "layout" to "of" of "Plan" has incompatible type "Batch"',
    10: 'error: Module has no attribute "Plam"',
}
"""The checker's word on each line that has one; the others are right."""


def test_a_type_checker_sees_the_arguments(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(snippet)]
    # In the project's folder: with its settings and the cache of `make types`.
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line.partition("snippet.py:")[2] for line in answer.stdout.splitlines()]
    said = [(int(number), text.strip()) for number, _, text in (line.partition(":") for line in lines)]
    for line, text in SEEN.items():
        assert any(number == line and each.startswith(text) for number, each in said), answer.stdout + answer.stderr
    assert {number for number, each in said if each.startswith("error")} == {6, 7, 8, 9, 10}
