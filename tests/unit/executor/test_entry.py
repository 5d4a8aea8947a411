"""A drop-in schedule holds the rule on the micro-batches of a flush, unless `allow_underfilled_pipeline` is true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaaccum import Plan, get_forward_backward_func
from megaaccum.errors import ConfigError


class Chunk:
    """The part of a model that a flush reads before it begins."""

    config: Any = SimpleNamespace()


def flush(function: Any, num_microbatches: int, *, forward_only: bool = False, pp: int = 2) -> None:
    group = SimpleNamespace(size=lambda: pp, rank=lambda: 0)
    function(
        forward_step_func=None, data_iterator=[None], model=[Chunk()], num_microbatches=num_microbatches, seq_length=4,
        micro_batch_size=1, forward_only=forward_only, pg_collection=SimpleNamespace(pp=group),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv"])
def test_a_flush_that_does_not_fill_the_pipeline_is_refused(name):
    with pytest.raises(ConfigError, match=r"num_microbatches 3 .* at least 2 \* 2 = 4 .* allow_underfilled_pipeline"):
        flush(get_forward_backward_func(name), 3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("keys", "call"),
    [({}, dict(num_microbatches=4)), ({}, dict(num_microbatches=1, forward_only=True)),
     ({}, dict(num_microbatches=1, pp=1)), (dict(allow_underfilled_pipeline=True), dict(num_microbatches=1))],
)  # fmt: skip
def test_any_other_begins(name, keys, call):
    """It fails later, for want of a model."""
    with pytest.raises(Exception) as error:
        flush(get_forward_backward_func(name, **keys), **call)
    assert "does not fill" not in str(error.value)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_plan_tells_it(allowed):
    batch = dict(micro_batch_size=1, seq_length=4, grad_accum_steps=4, allow_underfilled_pipeline=allowed)
    plan = Plan.of(batch=batch, layout=dict(pp=2), hidden_size=8, world_size=2)
    with pytest.raises(Exception) as error:
        flush(get_forward_backward_func(plan), 1)
    assert ("does not fill" in str(error.value)) is not allowed
