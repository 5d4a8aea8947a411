"""Process groups that do not fit a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megaaccum.step.chunk_config import _layout_problems
from tests.support.configs import plan


def _groups(sizes: dict[str, int]) -> Any:
    groups = {name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
    return cast(Any, SimpleNamespace(collection=SimpleNamespace(**groups)))


SIZES = {"tp": 1, "pp": 1, "cp": 1, "dp": 4, "ep": 2, "expt_tp": 1, "expt_dp": 2}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"expt_dp": None}, ["the expt_dp group is missing, but the plan says 2: give the groups"]),
        ({"ep": 4, "tp": None}, ["the tp group is missing, but the plan says 1", "the ep group has 4 ranks, but"]),
    ],
)
def test_groups_that_are_missing_or_of_another_size(changed: dict[str, int | None], words: list[str]) -> None:
    experts = dict(num_experts=4, expert_model_parallel_size=2, untie_embeddings_and_output_weights=True)
    sizes = {name: size for name, size in (SIZES | changed).items() if size is not None}
    problems = _layout_problems(plan(4, **experts), _groups(sizes))
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))
