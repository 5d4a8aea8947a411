"""The fate of a bad step: the only place that knows overflows of the loss scale, `nonfinite`, the guard of the norm
and the limits on bad steps. All that it asks is the same on every rank, so its verdict is too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaaccum.errors import StepError
from megaaccum.step import loss_scaler, nonfinite

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.config.schema import StepConfig
    from megaaccum.model.fp8 import Fp8
    from megaaccum.sharding import ShardingBackend
    from megaaccum.step.again import Again


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A gradient, reduced and measured.

    loss (mean), weight (N), norm, num_zeroed (elements that `nonfinite: zero` set to 0), num_dropped (micro-batches
    left out), reports: over all ranks. factor: what the reduced gradient is still to be multiplied by, 1 / (loss scale
    * N where that was not known before); norm is that of the product."""

    loss: float
    weight: float
    norm: float
    factor: float = 1.0
    num_zeroed: int = 0
    num_dropped: int = 0
    reports: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def is_empty(self) -> bool:
        """Whether no token counts. A mean over none is no loss; a step on it would only decay weights and moments."""
        return self.weight == 0 or self.reports.get("num_tokens") == 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an attempt. overflow: the loss scale has to go down, if it can. bad: counts towards
    max_bad_steps."""

    attempt: Attempt
    skip: bool
    overflow: bool = False
    bad: bool = False
    note: str = ""


class Recovery:
    """Judges the attempts of one run. scaler: the loss scale of an FP16 run, else None."""

    def __init__(self, plan: Plan, backend: ShardingBackend, low_precision: Fp8):
        self._keys = plan.config.step
        self._fp8 = low_precision
        self.scaler = loss_scaler.build(plan)
        self.zero = nonfinite.install(backend, self._keys)
        self._guard = NormGuard(self._keys)
        self._bad_steps = BadSteps(self._keys)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def judge(self, step: int, attempt: Attempt, again: Again) -> Verdict:
        """Whether `attempt`, or another one in its place, becomes an update. Raises StepError where the configuration
        says that what happened ends the run; nothing has changed by then but what `again` puts back."""
        verdict = self._verdict(step, attempt, again)
        self._bad_steps.count(verdict.bad, step=step, why=verdict.note)
        return verdict

    def lets_pass(self, attempt: Attempt) -> bool:
        """Whether `judge` would make `attempt` an update, and find nothing wrong with it."""
        return (
            attempt.is_finite and not attempt.is_empty and not attempt.num_zeroed and attempt.norm <= self._guard.limit
        )

    def conclude(self, verdict: Verdict) -> None:
        """Move the loss scale by a verdict that was carried out."""
        if self.scaler is not None:
            self.scaler.update(verdict.overflow)

    def _verdict(self, step: int, attempt: Attempt, again: Again) -> Verdict:
        if attempt.is_empty:
            return Verdict(attempt, skip=True, bad=True, note="every token of the step is masked")
        if self._keys.nonfinite == "off":
            return Verdict(attempt, skip=False)
        if attempt.is_finite and not attempt.num_zeroed:
            alarm = self._guard.judge(attempt.norm)
            return self._on_alarm(step, attempt, alarm) if alarm else Verdict(attempt, skip=False)
        if self.scaler is not None and self.scaler.can_back_off:
            return Verdict(attempt, skip=True, overflow=True)
        if attempt.is_finite:
            assert self.zero is not None
            note = f"set to 0 before the reduction: {nonfinite.describe(self.zero)}"
            return Verdict(attempt, skip=attempt.norm == 0, overflow=True, bad=True, note=note)
        return self._on_nonfinite(step, attempt, again)

    def _on_alarm(self, step: int, attempt: Attempt, alarm: str) -> Verdict:
        if self._guard.action == "stop":
            raise StepError(f"step {step}: {alarm}. Set grad_norm_guard to warn or skip to go on.")
        skip = self._guard.action == "skip"
        return Verdict(attempt, skip=skip, bad=skip, note=alarm)

    def _on_nonfinite(self, step: int, attempt: Attempt, again: Again) -> Verdict:
        """Find where it came from; then end the run, step without those micro-batches, or skip."""
        in_fp8 = self._fp8.describe_overflow()
        findings = again.look()
        found = _UNSEEN if findings is None else str(findings)
        why = "; ".join(filter(None, (in_fp8, found if findings is None or findings.found or not in_fp8 else "")))
        if self.scaler is not None and self.scaler.is_dynamic:
            raise StepError(
                f"step {step} overflows at loss scale {self.scaler.scale:g}, the floor (min_loss_scale): {found}."
                " A smaller scale will not help: lower lr or clip_grad, or train with bf16."
            )
        if self._keys.nonfinite == "raise":
            raise StepError(f"step {step}: the gradient is not finite: {why}. (nonfinite: raise)")
        if self._keys.nonfinite == "drop_microbatch" and findings is not None:
            attempt = again.without(findings)
        skip = not attempt.is_finite or attempt.is_empty
        return Verdict(attempt, skip=skip, bad=True, note=f"not finite: {why}")

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, guard and counters, as plain numbers; the same on every rank."""
        parts: dict[str, Any] = {"bad_steps": self._bad_steps.state_dict(), "guard": self._guard.state_dict()}
        return parts | ({} if self.scaler is None else {"loss_scale": self.scaler.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A part that `state` lacks starts afresh (the precision was another)."""
        for name, part in (("bad_steps", self._bad_steps), ("guard", self._guard), ("loss_scale", self.scaler)):
            if part is not None and name in state:
                part.load_state_dict(state[name])


_UNSEEN = "its micro-batches came from an iterator and cannot be run again to look for it: give a list of them"


class BadSteps:
    """Counts bad steps and ends the run at a limit; the same on every rank.

    Bad is a step that was not finite, whatever was done about it, and one that the guard of the norm skipped. An
    overflow by which an FP16 run finds its loss scale is not.
    """

    def __init__(self, step: StepConfig):
        self._limits = {"max_bad_steps_in_a_row": step.max_bad_steps_in_a_row, "max_bad_steps": step.max_bad_steps}
        self.in_a_row = 0
        self.total = 0

    def count(self, bad: bool, *, step: int, why: str) -> None:
        """Take note of step `step`. Raises StepError at a limit; `why` goes into its text."""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        self.total += bad
        if not bad:
            return
        for (key, limit), count in zip(self._limits.items(), (self.in_a_row, self.total), strict=True):
            if 0 < limit <= count:
                raise StepError(
                    f"step {step} brings the bad steps {'in a row' if key.endswith('row') else 'of the run'} to {count}"
                    f" ({key} {limit}). {why}. Go on from the last good checkpoint with a lower lr"
                    f" (--override lr_schedule) or other data (--override data), or raise {key}."
                )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])


LEAST_DEVIATION = 0.05
"""A standard deviation counts as at least this share of the mean: norms that hardly move make no alarm of nothing."""


class NormGuard:
    """Exponentially weighted mean and variance of the norm, with weight 2 / (window + 1) (T. Finch, Incremental
    calculation of weighted mean and variance, 2009). Fed with the one norm that all ranks have: the same on each."""

    def __init__(self, step: StepConfig):
        self.action = step.grad_norm_guard
        self._deviations = step.grad_norm_guard_deviations
        self._window = step.grad_norm_guard_window
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0

    @property
    def limit(self) -> float:
        """The largest norm that passes; infinite while the guard is off or has not seen `window` steps."""
        if self.action == "off" or self._count < self._window:
            return math.inf
        deviation = max(math.sqrt(self._variance), LEAST_DEVIATION * self._mean)
        return self._mean + self._deviations * deviation

    def judge(self, norm: float) -> str | None:
        """A sentence when `norm` (finite) is above the limit, else None. A norm that is let pass enters the averages,
        so that with `warn` a new level is learnt."""
        limit, mean = self.limit, self._mean
        alarm = norm > limit
        if not alarm or self.action == "warn":
            self._learn(norm)
        if not alarm:
            return None
        return (
            f"gradient norm {norm:.4g} is above {limit:.4g}: mean {mean:.4g} over some {self._window} steps and"
            f" {self._deviations:g} deviations"
        )

    def _learn(self, norm: float) -> None:
        weight = 1.0 if self._count == 0 else 2.0 / (self._window + 1)
        difference = norm - self._mean
        self._mean += weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference**2)
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._variance = int(state["count"]), float(state["mean"]), float(state["variance"])
