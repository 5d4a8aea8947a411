"""`verify_at_start`: the other split of a step's samples, and the verdict on two gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megaaccum.config.resolve import flush_problems
from megaaccum.lab.verification.at_start import NUM_PROJECTIONS, Sketch, compare, other_split
from tests.support.configs import plan

PIPELINE = dict(pipeline_model_parallel_size=2, pp_microbatches=8, attention_dropout=0.0, hidden_dropout=0.0)


@pytest.mark.parametrize(
    ("keys", "cut"),
    [
        (dict(micro_batch_size=2), "16 of 1 in 1"),
        (dict(micro_batch_size=2, num_experts=4, add_bias_linear=False), "8 of 2 in 2"),
        (dict(micro_batch_size=2, mtp_num_layers=1, position_embedding_type="rope"), "8 of 2 in 2"),
        (dict(micro_batch_size=2, loss_norm="microbatch"), "8 of 2 in 2"),
        (dict(micro_batch_size=2, hidden_dropout=0.1), "8 of 2 in 2"),
        (dict(micro_batch_size=3), "8 of 3 in 2"),
        (dict(pp_microbatches=6), "6 of 1 in 1"),
        (dict(pp_microbatches=4, grad_accum_steps=3), "12 of 1 in 2"),
        (dict(pp_microbatches=4, grad_accum_steps=3, flush="per_round"), "12 of 1 in 1"),
        (dict(schedule="dualpipev"), "8 of 1 in 2"),
        (dict(schedule="gpipe", pp_microbatches=4, grad_accum_steps=2, flush="per_round"), "8 of 1 in 2"),
        (dict(micro_batch_size=2, static_graph=True), "8 of 2 in 1"),
    ],
    ids=str,
)
def test_the_other_split_has_the_same_samples_and_can_run(keys, cut):
    of = plan(2, **PIPELINE | keys)
    other = other_split(of, of.batch)
    assert f"{other.num_microbatches} of {other.micro_batch_size} in {other.num_flushes}" == cut
    assert other.global_batch_size == of.batch.global_batch_size
    assert flush_problems(of.config, other) == []


def sketch(factors: dict[str, float], *, weight: float = 10.0, noise: float = 0.0) -> Sketch:
    """A gradient of a norm of 3 each, times a factor by name."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(factors), NUM_PROJECTIONS, dtype=torch.float64, generator=generator)
    rows = 3 * rows / rows.square().mean(dim=1, keepdim=True).sqrt()
    table = torch.cat([rows, torch.full((len(factors), 1), 9.0, dtype=torch.float64)], dim=1)
    by = torch.tensor(list(factors.values()), dtype=torch.float64)[:, None]
    table[:, :-1] += noise * torch.randn(rows.shape, dtype=torch.float64, generator=generator)
    return Sketch(list(factors), torch.cat([table[:, :-1] * by, table[:, -1:] * by**2], dim=1), weight, 1.0, 1.0)


def found(other: dict[str, float], **more: float) -> tuple[float, str]:
    of = plan(2, **PIPELINE)
    return compare(of, sketch(dict.fromkeys(other, 1.0)), sketch(other, **more), of.batch, other_split(of, of.batch))


def test_equal_gradients_pass():
    assert found({"a": 1.0, "b": 1.0}) == (0.0, "")
    assert found({"a": 1.0, "b": 1.0}, noise=1e-4)[1] == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a": 1.0, "b": 3.0, "c": 3.0}, ["2 of 3 parameters", "is b, x 0.333333 of that of the other split"]),
        ({"a": 0.5, "b": 1.0}, ["is a, x 2 of that of the other split, whose flushes have 0.5 times"]),
        ({"a": 0.0, "b": 1.0}, ["1 of 2", "is a"]),
    ],
    ids=str,
)
def test_a_factor_is_named_with_the_first_parameter(other, words):
    problem = found(other)[1]
    assert problem.startswith("verify_at_start: the step depends on how its samples are split")
    for each in words:
        assert each in problem


def test_a_gradient_that_is_no_multiple_says_how_far_it_is():
    assert "% away from it" in found({"a": 1.0, "b": 1.0}, noise=1.0)[1]


def test_another_weight_fails_although_gradients_agree():
    assert "the weight N is 10 as planned and 11 in the other split" in found({"a": 1.0}, weight=11.0)[1]


def test_a_tiny_gradient_is_measured_beside_the_others():
    """Rounding of a bias of keys, whose gradient is zero but for it, is no failure; a wrong small gradient is."""
    of = plan(2, **PIPELINE)
    one = sketch({"a": 1.0, "key bias": 1e-9})
    other = replace(one, table=one.table * torch.tensor([[1.0], [2.0]]))
    assert compare(of, one, other, of.batch, of.batch)[1] == ""
    assert "is bias" in found({"a": 1.0, "bias": 1.01})[1]
