"""The estimates of the gradient noise scale, on numbers whose noise is known, and the layouts that are refused."""

from __future__ import annotations

import math

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.observe.noise_scale import NoiseScale, estimate, ratio
from tests.support.configs import plan

SIGNAL = torch.linspace(-1, 1, 40, dtype=torch.float64)
DEVIATION = 3.0
TRUE = DEVIATION**2 * len(SIGNAL) / float(SIGNAL.square().sum())
"""S / |G|^2 in tokens: the trace of the covariance over the square of the mean."""


def step(weights: list[int], generator: torch.Generator) -> tuple[float, float, float]:
    """(|mean|^2, squares, share) of a step whose tokens have SIGNAL and noise as gradients."""
    total = sum(weights)
    parts = []
    for weight in weights:
        noise = torch.randn(weight, len(SIGNAL), generator=generator, dtype=torch.float64)
        parts.append((SIGNAL * weight + DEVIATION * noise.sum(dim=0)) / total)
    squares = sum(float(part.square().sum()) for part in parts)
    return float(sum(parts).square().sum()), squares, sum(weight**2 for weight in weights) / total**2


@pytest.mark.parametrize("weights", [[8] * 16, [1, 2, 4, 8, 16, 32, 64, 1]], ids=["equal", "unequal"])
def test_the_noise_that_was_put_in_is_found_within_its_error(weights: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    found, error = ratio([estimate(*step(weights, generator)) for _ in range(400)])
    tokens, error = found * sum(weights), error * sum(weights)
    assert abs(tokens - TRUE) < 4 * error
    assert error < 0.1 * TRUE


def test_the_error_is_the_spread_of_repetitions() -> None:
    generator = torch.Generator().manual_seed(2)
    each = [ratio([estimate(*step([8] * 16, generator)) for _ in range(50)]) for _ in range(100)]
    values, errors = map(torch.tensor, zip(*each, strict=True))
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.25)


def test_equal_weights_give_the_formulas_of_the_paper() -> None:
    """|G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b), S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), with b 1 of B micro-batches."""
    big, small, count = 2.0, 5.0, 16
    noise, signal = estimate(big, small / count, 1 / count)
    assert signal == pytest.approx((count * big - small) / (count - 1))
    assert noise * count == pytest.approx((small - big) / (1 - 1 / count))


def test_what_cannot_be_estimated_is_not_reported() -> None:
    assert all(map(math.isnan, estimate(2.0, 2.0, 1.0)))  # one micro-batch
    assert ratio([(1.0, -0.5)])[0] == math.inf
    assert math.isnan(ratio([(1.0, 0.5)])[1])
    assert ratio([(1.0, 1.0), (3.0, 1.0)]) == (2.0, 1.0)  # sqrt((1 + 1) / (2 - 1) / 2)
    meter = NoiseScale([], window=4)
    sums: dict = dict(norm=2.0**0.5, weight=8.0, factor=1.0, batch=64)
    assert meter.report([2.0, 64.0], **sums) == {}
    first = meter.report([0.5, 8.0], **sums)
    assert first.keys() == {"noise_scale_sequences"}  # the error of one step is not known
    assert first["noise_scale_sequences"] == pytest.approx(64 * (0.5 - 2 / 8) / (2 - 0.5))
    second = meter.report([0.6, 8.0], **sums)
    assert second["noise_scale_error_sequences"] > 0


def test_steps_of_a_growing_batch_tell_one_noise_scale() -> None:
    """A batch warm-up: the noise of a mean over 64 sequences is an eighth of that over 8."""
    signal, noise, meter, told = 2.0, 48.0, NoiseScale([], window=4), []
    for batch in (8, 16, 32, 64):
        # The expectation of |mean|^2 and of the sum of squares, over micro-batches of one sequence each.
        mean_square, squares = signal + noise / batch, (signal + noise) / batch
        told.append(
            meter.report([squares, float(batch)], norm=mean_square**0.5, weight=float(batch), factor=1.0, batch=batch)
        )
    assert [each["noise_scale_sequences"] for each in told] == pytest.approx([noise / signal] * 4)
    later = dict(norm=(signal + 2 * noise / 8) ** 0.5, weight=8.0, factor=1.0, batch=8)
    last = [meter.report([(signal + 2 * noise) / 8, 8.0], **later) for _ in range(4)][-1]  # type: ignore[arg-type]
    assert last["noise_scale_sequences"] == pytest.approx(2 * noise / signal), "steps before the window are over"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (dict(tensor_model_parallel_size=2), "tensor_model_parallel_size 2: ranks have parts"),
        (dict(context_parallel_size=2, transformer_impl="transformer_engine"), "context_parallel_size 2: ranks have"),
        (dict(pipeline_model_parallel_size=2, schedule="zb-h1"), "schedule zb-h1: weight gradients come apart"),
        (dict(pipeline_model_parallel_size=2), "untie_embeddings_and_output_weights false with a pipeline"),
    ],
)
def test_a_layout_without_whole_gradients_is_refused(keys: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=f"noise_scale_window 8 does not support {told}"):
        plan(4, noise_scale_window=8, **keys)
    assert plan(4, noise_scale_window=8).config.step.noise_scale_window == 8
