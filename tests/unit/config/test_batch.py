"""The batch: its arithmetic, what is derived from what, and every rule broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megaaccum.config import resolve
from megaaccum.config.batch import BatchPlan
from megaaccum.config.schema import BatchConfig
from megaaccum.errors import ConfigError
from megaaccum.schedule.builders import interleaved_problems
from tests.support import configs


def solve(*, dp: int = 1, pp: int = 1, **keys: object) -> BatchPlan:
    return BatchPlan.solve(BatchConfig(**keys), data_parallel_size=dp, pipeline_model_parallel_size=pp, seq_length=8)


def split(plan: BatchPlan) -> tuple[int, int, int]:
    return plan.micro_batch_size, plan.pp_microbatches, plan.grad_accum_steps


def problem(**sizes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        solve(**sizes)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


def test_the_arithmetic() -> None:
    plan = solve(dp=3, pp=2, micro_batch_size=2, pp_microbatches=4, grad_accum_steps=5)
    assert plan.device_batch_size == 8
    assert plan.num_microbatches == 20
    assert plan.global_batch_size == 120
    assert plan.tokens_per_step == 960
    assert (plan.microbatches_per_flush, plan.num_flushes) == (20, 1)


def test_rounds_kept_apart_make_as_many_flushes_as_accumulation_steps() -> None:
    plan = solve(pp=2, micro_batch_size=2, pp_microbatches=4, grad_accum_steps=5, flush="per_round")
    assert (plan.microbatches_per_flush, plan.num_flushes) == (4, 5)


def test_description_writes_every_factor() -> None:
    text = solve(dp=3, pp=2, micro_batch_size=2, pp_microbatches=4, grad_accum_steps=5).describe()
    assert "global_batch_size = device_batch_size 8 * grad_accum_steps 5 * data_parallel_size 3 = 120 sequences" in text
    assert "num_microbatches = grad_accum_steps 5 * pp_microbatches 4 = 20" in text
    assert "1 flush of 20 micro-batches" in text


def test_a_plan_cannot_be_changed() -> None:
    plan = solve(micro_batch_size=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.pp_microbatches = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(micro_batch_size=2), (2, 1, 1)),
        (dict(micro_batch_size=2, global_batch_size=48), (2, 12, 1)),
        (dict(micro_batch_size=2, global_batch_size=48, grad_accum_steps=3), (2, 4, 3)),
        (dict(micro_batch_size=2, global_batch_size=48, pp_microbatches=3), (2, 3, 4)),
        (dict(micro_batch_size=2, global_batch_size=48, device_batch_size=4), (2, 2, 6)),
        (dict(device_batch_size=12, pp_microbatches=3), (4, 3, 1)),
        (dict(device_batch_size=12, pp_microbatches=3, grad_accum_steps=2), (4, 3, 2)),
        (dict(device_batch_size=12), (1, 12, 1)),
        (dict(global_batch_size=48, pp_microbatches=4, grad_accum_steps=3), (2, 4, 3)),
        (dict(global_batch_size=48, grad_accum_steps=3), (1, 8, 3)),
        (dict(global_batch_size=48), (1, 24, 1)),
        (dict(pp_microbatches=4), (1, 4, 1)),
        (dict(grad_accum_steps=4), (1, 1, 4)),
    ],
)
def test_what_is_left_open_is_derived(sizes: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert split(solve(dp=2, **sizes)) == expected


def test_any_subset_of_a_plans_sizes_gives_a_plan_with_those_sizes() -> None:
    names = ("micro_batch_size", "pp_microbatches", "device_batch_size", "grad_accum_steps", "global_batch_size")
    whole = solve(dp=3, micro_batch_size=2, pp_microbatches=4, grad_accum_steps=6)
    for length in range(1, len(names) + 1):
        for subset in itertools.combinations(names, length):
            sizes = {name: getattr(whole, name) for name in subset}
            derived = solve(dp=3, **sizes)
            assert {name: getattr(derived, name) for name in subset} == sizes


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(micro_batch_size=0), ["micro_batch_size is 0", "at least 1"]),
        (dict(grad_accum_steps=-2), ["grad_accum_steps is -2", "at least 1"]),
        (
            dict(device_batch_size=10, pp_microbatches=4),
            ["10", "pp_microbatches 4", "device_batch_size to 8 or 12", "2 or 5"],
        ),
        (dict(device_batch_size=3, pp_microbatches=4), ["device_batch_size to 4", "pp_microbatches to 3"]),
        (dict(device_batch_size=10, micro_batch_size=4), ["not divisible by micro_batch_size 4", "2 or 5"]),
        (
            dict(device_batch_size=6, micro_batch_size=2, pp_microbatches=4),
            ["device_batch_size 6 contradicts micro_batch_size 2 * pp_microbatches 4 = 8", "to 8"],
        ),
        (
            dict(global_batch_size=30, micro_batch_size=4, dp=2),
            ["global_batch_size 30", "micro_batch_size 4 * data_parallel_size 2 = 8", "24 or 32"],
        ),
        (dict(global_batch_size=7, micro_batch_size=4, dp=2), ["global_batch_size to 8,"]),
        (
            dict(global_batch_size=64, micro_batch_size=1, pp_microbatches=4, grad_accum_steps=2, dp=2),
            ["64 contradicts", "pp_microbatches 4", "grad_accum_steps 2", "= 16", "global_batch_size to 16"],
        ),
        (
            dict(global_batch_size=64, device_batch_size=4, grad_accum_steps=2, dp=2),
            ["64 contradicts device_batch_size 4 * grad_accum_steps 2 * data_parallel_size 2 = 16"],
        ),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], words: list[str]) -> None:
    text = problem(**sizes)
    assert [word for word in words if word not in text] == []


def test_every_size_that_is_not_positive_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(micro_batch_size=0, pp_microbatches=0)
    assert len(caught.value.problems) == 2


def test_a_flush_holds_two_micro_batches_per_pipeline_rank() -> None:
    text = problem(pp=4, dp=2, micro_batch_size=2, pp_microbatches=3, grad_accum_steps=2)
    for words in ("2 * 4 = 8", "grad_accum_steps 2 * pp_microbatches 3 = 6",
                  "pp_microbatches to 4 (device_batch_size 8)",
                  "grad_accum_steps to 3", "global_batch_size to 32", "pipeline_model_parallel_size to 3"):  # fmt: skip
        assert words in text
    assert solve(pp=4, micro_batch_size=2, pp_microbatches=4, grad_accum_steps=2).microbatches_per_flush == 8


@pytest.mark.parametrize("remedy", [dict(pp_microbatches=4), dict(grad_accum_steps=3)])
def test_the_remedies_of_a_short_flush_are_legal(remedy: dict[str, int]) -> None:
    solve(pp=4, **(dict(micro_batch_size=2, pp_microbatches=3, grad_accum_steps=2) | remedy))


def test_rounds_kept_apart_must_each_fill_the_pipeline() -> None:
    sizes = dict(pp=2, micro_batch_size=1, pp_microbatches=2, grad_accum_steps=4)
    assert solve(**sizes).microbatches_per_flush == 8
    text = problem(**sizes, flush="per_round")
    assert "flushes of pp_microbatches 2" in text
    assert "pp_microbatches to 4" in text
    assert "flush to merged" in text
    assert "merged" not in problem(**sizes | dict(pp=5), flush="per_round"), "8 micro-batches are too few as well"


def test_one_rank_needs_no_pipeline_to_fill() -> None:
    assert solve(pp=1, micro_batch_size=1).microbatches_per_flush == 1


@pytest.mark.parametrize(
    ("m", "pp", "group", "words"),
    [
        (3, 4, 4, ["at least pipeline_model_parallel_size 4", "not 3"]),
        (8, 4, 3, ["microbatch_group_size_per_vp_stage 3", "set it to 4"]),
        (8, 4, 9, ["microbatch_group_size_per_vp_stage 9", "set it to 8"]),
        (10, 4, 4, ["10 % microbatch_group_size_per_vp_stage 4 = 2", "8 or 12", "to 5"]),
        (9, 4, 6, ["= 3", "6 or 10", "to 5 or 9"]),
    ],
)
def test_megatrons_interleaved_rule_broken(m: int, pp: int, group: int, words: list[str]) -> None:
    (text,) = interleaved_problems(m, pp, group)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_interleaved_rule_is_megatrons(pp: int) -> None:
    """pp <= N <= m, and the last group whole or at least pp (forward_backward_pipelining_with_interleaving)."""
    for m, group in itertools.product(range(1, 20), range(1, 20)):
        legal = pp <= group <= m and not 0 < m % group < pp
        assert legal == (not list(interleaved_problems(m, pp, group)))


def test_tokens_per_step_are_a_way_to_give_the_batch() -> None:
    settled = configs.plan(2, pp_microbatches=4, total_batch_size=64 * 4 * 2 * 3)
    assert (settled.batch.grad_accum_steps, settled.batch.tokens_per_step) == (3, 1536)
    assert configs.plan(2, pp_microbatches=None, device_batch_size=2, total_batch_size=512).batch.grad_accum_steps == 2
    bare = configs.make(pp_microbatches=4, total_batch_size=1536)
    bare.origin.clear()  # as of a Config that no loader made
    assert resolve(bare, world_size=2).batch.tokens_per_step == 1536


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (dict(total_batch_size=1000), "= 512: set total_batch_size to 512 or 1024"),
        (dict(total_batch_size=100), "pp_microbatches 4 * seq_length 64 * data_parallel_size 2 = 512: set"),
        (dict(total_batch_size=1024, global_batch_size=8), "= 16 sequences contradicts global_batch_size 8"),
        (dict(total_batch_size=0), "total_batch_size is 0: it must be at least 1"),
        (dict(total_batch_size=1024, grad_accum_steps=3), "contradicts"),
    ],
)
def test_tokens_per_step_that_do_not_divide(keys, text) -> None:
    with pytest.raises(ConfigError) as raised:
        configs.plan(2, pp_microbatches=4, **keys)
    assert any(text in problem for problem in raised.value.problems), raised.value.problems
