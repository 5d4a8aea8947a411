"""The gradient noise scale, from the norms of the micro-batches' gradients (McCandlish et al. 2018, arXiv 1812.06162,
appendix A): the batch size beyond which a step gains little from more samples.

If tokens are independent, the gradient g of a micro-batch of weight w has E|g|^2 = w^2 |G|^2 + w S, with G the true
gradient per unit of weight and S the trace of its covariance. The sum over a step's micro-batches and the square of the
norm of their mean are two equations for |G|^2 and S. With equal weights they are the paper's, for a batch of one
micro-batch and one of all. The estimate of one step is noisy, above all that of |G|^2, so S / |G|^2 is the quotient of
sums over a window of steps; its error is that of a quotient of means.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch

from megaaccum.observe.nonfinite import whole_parameters
from megaaccum.platform import cpu
from megaaccum.upstream import pytorch

Estimate = tuple[float, float]
"""(S / N, |G|^2) of one step: both in squares of the gradient's unit."""


def estimate(mean_square: float, squares: float, share: float) -> Estimate:
    """The estimates of one step. mean_square: |sum of g|^2 / N^2. squares: sum of |g|^2 / N^2. share: sum of w^2 / N^2,
    1 / micro-batches where they weigh the same. Without a second micro-batch both are nan."""
    if not share < 1:
        return math.nan, math.nan
    return (squares - share * mean_square) / (1 - share), (mean_square - squares) / (1 - share)


def ratio(steps: Sequence[Estimate]) -> tuple[float, float]:
    """(S / |G|^2 in the unit in which S of `steps` is, which for `estimate` is the step's batch, its standard error);
    infinite where the mean of |G|^2 is not above zero, because noise hides it. One step has no error (nan)."""
    noise, signal = (sum(values) / len(steps) for values in zip(*steps, strict=True))
    if not signal > 0:
        return math.inf, math.nan
    found = noise / signal
    if len(steps) < 2:
        return found, math.nan
    spread = sum((each - found * square) ** 2 for each, square in steps) / (len(steps) - 1)
    return found, math.sqrt(spread / len(steps)) / signal


class NoiseScale:
    """Adds up the squares of the micro-batches' gradients on this rank, and keeps the estimates of `window` steps.

    Every parameter has a hook, which sees the gradient of one micro-batch before it is added to others or handed to a
    backend. Rules refuse layouts where that is no gradient of the whole sequence.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], window: int):
        self._chunks = chunks
        self.steps: deque[Estimate] = deque(maxlen=window)
        self.square = torch.zeros((), dtype=torch.float64)

    def begin_attempt(self) -> None:
        """Forget the squares of the attempt before. The parameters are whole: the first time they get their hooks."""
        self.square = torch.zeros((), dtype=torch.float64, device=cpu.device())
        chunks, self._chunks = self._chunks, ()
        for _, param in whole_parameters(chunks):
            if param.requires_grad:
                param.register_hook(pytorch.weakly(self.add))

    def add(self, grad: torch.Tensor | None) -> None:
        """Add the square of a parameter's gradient by one micro-batch."""
        if grad is not None:  # torch calls hooks of a function that gives none
            wide = torch.float64 if grad.dtype == torch.float64 or grad.is_cpu else torch.float32  # as the step's norm
            self.square += torch.linalg.vector_norm(grad, dtype=wide).double().square()

    def own_sums(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[squares of the gradients, squares of the micro-batches' weights] of this rank, to be summed over the
        world."""
        rows = torch.stack(list(weights)).double() if weights else torch.zeros(0, dtype=torch.float64)
        return [self.square, rows.square().sum().to(cpu.device())]

    def report(
        self, sums: Sequence[float], *, norm: float, weight: float, factor: float, batch: int
    ) -> dict[str, float]:
        """The noise scale in sequences, which is the batch size it suggests, and its standard error, after a step that
        counted. sums: those of `own_sums` over the world. factor: what the gradients in them lack. batch: sequences."""
        squares, shares = sums
        found = estimate(norm**2, squares * factor**2, shares / weight**2)
        if not all(map(math.isfinite, found)):
            return {}
        self.steps.append((found[0] * batch, found[1]))  # in sequences: batches of a warm-up differ in size
        named = zip(("noise_scale_sequences", "noise_scale_error_sequences"), ratio(self.steps), strict=True)
        return {name: value for name, value in named if math.isfinite(value)}
