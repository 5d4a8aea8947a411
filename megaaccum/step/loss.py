"""The one owner of the loss divisor: it computes every factor by which a loss or a gradient is multiplied.

The multiplications themselves are in three places: `forward_step` multiplies the loss by `Divisor.in_loss`,
`side_losses` has Megatron multiply the losses on the side by it, and `grad_norm.scale_and_clip` multiplies the reduced
gradient by what is left.

Megatron's schedules divide nothing (`calculate_per_token_loss`), DeepSpeed's accumulation is 1, and data-parallel
averaging is taken back here. A loss function returns Megatron's triple: the sum of a micro-batch's losses, the weight
of that sum (its unmasked tokens, sequences, advantages, ...), and what it reports. The gradient of a step is

    1/N * sum over all micro-batches, calls and ranks of d sum,     N = the weights of the whole step added up

N is known before the first backward if the weights are (masks in host memory): the loss is then multiplied by 1/N.
Otherwise gradients are sums until the commit, which multiplies the reduced shards by 1/N once, together with the loss
scale and the clip factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import gathered
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError, StepError
from megaaccum.platform import cpu

Reports = dict[str, torch.Tensor]
"""By name: a scalar, Megatron's pair [sum, count], or any tensor that is wanted per micro-batch."""

LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | float, Mapping[str, torch.Tensor | float]]]
"""`loss_func(output) -> (sum of the losses, a scalar to differentiate; its weight, a scalar; reports)`."""


ForwardStepFunc = Callable[[Any, Any], tuple[torch.Tensor, LossFunc]]
"""Megatron's `forward_step_func(data_iterator, chunk)`: takes the next micro-batch of the iterator through a chunk,
a module of the user's own class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisor:
    """The factor on one step's sums, and where it is applied.

    in_loss: before the backward, in every micro-batch. total: N, None while it is not known. reduction_divisor: by how
    much the backend's reduction divides the sum over ranks. num_microbatches: of the step over all ranks, without
    dummies; 0 where not known.
    """

    in_loss: float
    total: float | None
    reduction_divisor: int
    num_microbatches: int = 0

    @classmethod
    def known(cls, total: float, num_microbatches: int = 0, *, reduction_divisor: int) -> Divisor:
        """N is `total`. A step without any weight has no gradient; its divisor is 1, so that it is zero rather than
        not a number."""
        in_loss = reduction_divisor / (total or 1)
        return cls(in_loss=in_loss, total=total, reduction_divisor=reduction_divisor, num_microbatches=num_microbatches)

    @classmethod
    def at_commit(cls, *, reduction_divisor: int, nominal: float | None = None) -> Divisor:
        """N is known after the last backward. nominal: about N, for FP16 alone: a power of two near 1 / nominal keeps
        sums of millions of tokens from driving the loss scale to its floor, and rounds nothing."""
        power = 1.0 if nominal is None else 2.0 ** -round(math.log2(max(nominal, 1.0)))
        return cls(in_loss=reduction_divisor * power, total=None, reduction_divisor=reduction_divisor)

    def at_end(self, total: float) -> float:
        """The factor that the reduced gradient still lacks, where the step's weights add up to `total`."""
        return self.reduction_divisor / (self.in_loss * (total or 1)) if self.total is None else 1.0


Spread = Callable[[torch.Tensor], torch.Tensor]
"""Puts numbers of this rank's micro-batches, in their order, at their positions in the global batch: [micro-batches of
the global batch], zeros elsewhere. Ranks' sums of it are exact."""


def spread_over_batch(plan: Plan, groups: Groups, each: int) -> Spread | None:
    """For `each` micro-batches of every rank; None if no sum has to be the same in every layout."""
    if plan.config.sharding.reproducible != "layout":
        return None
    rank, ranks = groups.dp.rank(), groups.dp.size()
    positions = range(rank * each, (rank + 1) * each) if plan.in_runs else range(rank, each * ranks, ranks)

    def spread(numbers: torch.Tensor) -> torch.Tensor:
        row = numbers.new_zeros(each * ranks)
        row[list(positions[: len(numbers)])] = numbers
        return row

    return spread


@dataclass
class Tally:
    """Values that loss functions returned in one step on this rank; empty except on a last stage. `problem`: the first
    error in them, raised on all ranks at the next collective that they share. keeps_errors: any error of the user's
    code is such a problem, after which the flush continues."""

    spread: Spread | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    reports: list[Reports] = field(default_factory=list)
    problem: Exception | None = None
    keeps_errors: bool = False

    def add(self, weight: torch.Tensor | float) -> None:
        """Take note of a weight alone: the losses are another loop's to report."""
        given = cpu.to_device(torch.as_tensor(weight)).detach().double().reshape(())
        self.losses.append(torch.zeros_like(given))
        self.weights.append(given)
        self.reports.append({})

    def total(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of one number per micro-batch, in their order, or each at its position in the global batch;
        float64."""
        row = torch.stack([*numbers]).double() if numbers else torch.zeros(0, dtype=torch.float64, device=cpu.device())
        return row.sum() if self.spread is None else self.spread(row)

    def sums(self) -> list[torch.Tensor]:
        """[total of the losses, total of the weights], float64."""
        return [self.total(self.losses), self.total(self.weights)]

    def faults(self) -> list[torch.Tensor]:
        """[weights that are negative or not finite, 1 if there is a problem], float64 scalars."""
        weights = torch.stack([flag(False), *self.weights]).nan_to_num(-1.0, posinf=-1.0)
        return [(weights < 0).sum(dtype=torch.float64), flag(self.problem is not None)]


def flag(value: bool) -> torch.Tensor:
    """1 or 0, float64 scalar on this rank's device."""
    return torch.full((), float(value), dtype=torch.float64, device=cpu.device())


def read_triple(given: Any) -> tuple[torch.Tensor, torch.Tensor, Reports]:
    """(sum, weight as a float64 scalar on its device, reports) from a loss function's result. Raises StepError."""
    if not isinstance(given, tuple) or len(given) != 3:
        found = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise StepError(
            f"a loss function has to return (sum of the losses, weight, reports), but it returned {found}: give the sum"
            " over the micro-batch, not its mean, the weight of that sum (its tokens), and a dict (it may be empty)"
        )
    total, weight, reports = given
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise StepError(f"the first value of a loss function has to be a scalar tensor, the sum of losses, not {shape}")
    if not isinstance(reports, Mapping):
        raise StepError(f"the third value of a loss function has to be a dict of reports, not {type(reports).__name__}")
    # Cloned: what is weighed and reported must not change if the caller changes it in place.
    try:
        if isinstance(weight, int | float):  # filled there: for a copy the host would wait
            weight = torch.full((), weight, dtype=torch.float64, device=total.device)
        weight = torch.as_tensor(weight).detach()
        kept = {name: torch.as_tensor(value).detach().clone() for name, value in reports.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepError(f"weight and reports of a loss function have to be numbers or tensors: {error}") from None
    if weight.numel() != 1:
        raise StepError(f"a loss function's weight has to be one number, not a tensor of shape {tuple(weight.shape)}")
    if any(each.is_complex() for each in (total, weight, *kept.values())):
        raise StepError("a loss function returned a complex number: give a real sum, weight and reports, as by .abs()")
    weight = cpu.to_device(weight).to(device=total.device, dtype=torch.float64, copy=True)
    return total if total.dim() == 0 else total.reshape(()), weight.reshape(()), kept


class ReportReducer:
    """Reduces the reports of loss functions over the step's micro-batches and all ranks.

    how: by name `sum`, `mean` (by the micro-batch's weight; of Megatron's pair [sum, count] the quotient of sums) or
    `microbatch` (as they are, on the ranks of the last stage). Names that are not given are means, but a whole number
    (a tensor of integers or booleans) is a count and is added up, and a tensor of another shape stays as it is.
    """

    def __init__(self, how: Mapping[str, str] | None = None):
        self._how = dict(how or {})
        if wrong := {name: each for name, each in self._how.items() if each not in ("sum", "mean", "microbatch")}:
            raise ConfigError(f"reports are reduced by sum, mean or microbatch, not {wrong}")
        self._names: list[str] = []

    def unknown_names(self, tally: Tally) -> torch.Tensor:
        """1 if this rank has reports whose names other ranks do not know yet, else 0; float64 scalar."""
        return flag(not set(self._reduced(tally)) <= set(self._names))

    def register(self, tally: Tally) -> None:
        """Make the names known to all ranks; collective over the world."""
        for each in gathered(self._reduced(tally)):
            self._how = each | self._how
            self._names = sorted({*self._names, *each})

    def _how_of(self, name: str, value: torch.Tensor) -> str:
        """How a report is reduced over micro-batches."""
        if name in self._how:
            return self._how[name]
        if value.numel() > 1 and value.shape != (2,):
            return "microbatch"
        return "mean" if value.is_floating_point() or value.numel() > 1 else "sum"

    def _reduced(self, tally: Tally) -> dict[str, str]:
        """How each report of this rank is reduced, by name, without those that are not."""
        named = [item for reports in tally.reports for item in reports.items()]
        return {name: how for name, value in named if (how := self._how_of(name, value)) != "microbatch"}

    def sums(self, tally: Tally) -> list[torch.Tensor]:
        """[numerator, denominator] of each known name, of this rank's micro-batches; float64."""
        return [part for name in self._names for part in self._parts(name, tally)]

    def _parts(self, name: str, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros((), dtype=torch.float64, device=cpu.device())
        pairs = [
            self._part(name, cpu.to_device(reports[name]).double(), weight) if name in reports else (zero, zero)
            for reports, weight in zip(tally.reports, tally.weights, strict=True)
        ]
        return tally.total([p for p, _ in pairs]), tally.total([q for _, q in pairs])

    def _part(self, name: str, value: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if value.numel() == 2 and value.dim() == 1:
            return value[0], value[1]
        value = value.reshape(-1).sum()
        weighed = torch.where(weight > 0, value * weight, 0.0)  # the mean over no token is not a number
        return (value, torch.ones_like(value)) if self._how.get(name) == "sum" else (weighed, weight)

    def reduced(self, totals: Sequence[float]) -> dict[str, float]:
        """Each report by its name, from the sums over all ranks."""
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return {
            name: value if self._how.get(name) == "sum" else value / (weight or 1.0)
            for name, (value, weight) in zip(self._names, pairs, strict=True)
        }

    def per_microbatch(self, tally: Tally) -> dict[str, list[torch.Tensor]]:
        """This rank's reports that are wanted per micro-batch, in their order."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name, how in self._how.items() if how == "microbatch"}
        for name, value in (item for reports in tally.reports for item in reports.items()):
            if self._how_of(name, value) == "microbatch":
                found.setdefault(name, []).append(value)
        return found
