"""Decides whether a step updates the weights, is skipped, or ends the run: the only place that knows overflows of the
loss scale, `nonfinite`, the guard of the norm and the limits on bad steps. Its inputs are all-reduced values, so every
rank decides alike; `conclude` then moves the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megaaccum.config import Plan
from megaaccum.errors import StepError
from megaaccum.model.fp8 import Fp8
from megaaccum.observe import nonfinite
from megaaccum.observe.nonfinite import Findings
from megaaccum.observe.norm_guard import NormGuard
from megaaccum.optim import loss_scaler
from megaaccum.sharding import ShardingBackend

Look = Callable[[], Findings | None]
Without = Callable[[Findings], "Attempt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A gradient, reduced and measured, and the verdict on it once it is judged. The same on every rank.

    loss (mean), weight (N), norm, num_zeroed (elements that `nonfinite: zero` set to 0), num_dropped (micro-batches
    left out), reports, noise (NoiseScale.own_sums): over all ranks. factor: what the reduced gradient is still to be
    multiplied by, 1 / (loss scale * N if that was not known before); norm is that of the product. skip: no rank
    updates. overflow: the loss scale has to go down, if it can. bad: the step counts towards max_bad_steps. note: what
    was wrong.
    """

    loss: float
    weight: float
    norm: float
    factor: float = 1.0
    num_zeroed: int = 0
    num_dropped: int = 0
    reports: dict[str, float]
    noise: tuple[float, ...] = ()
    skip: bool = False
    overflow: bool = False
    bad: bool = False
    note: str = ""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def is_empty(self) -> bool:
        """Whether no token counts. A mean over none is no loss; a step on it would only decay weights and moments."""
        return self.weight == 0 or self.reports.get("num_tokens") == 0


class Recovery:
    """Judges the attempts of one run. scaler: the loss scale of an FP16 run, else None. zero: sets elements of
    gradients to 0 before they are reduced (`nonfinite: zero`), else None."""

    def __init__(self, plan: Plan, backend: ShardingBackend, low_precision: Fp8):
        self._keys = plan.config.step
        self._fp8 = low_precision
        self.scaler = loss_scaler.build(plan)
        self.zero = nonfinite.ZeroNonFinite() if self._keys.nonfinite == "zero" else None
        if self.zero is not None:
            backend.before_reduce = self.zero
        self._guard = NormGuard(self._keys)
        self._bad_in_a_row = self._bad_in_all = 0

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def judge(self, step: int, attempt: Attempt, *, look: Look, without: Without) -> Attempt:
        """The verdict on `attempt`, or on another one in its place.

        look: runs the step's micro-batches again and returns which were not finite, None if they cannot be run again.
        without: makes the gradient of the others. Both are collective over the world. Raises StepError if the
        configuration says that what happened ends the run; nothing has changed by then but what `look` puts back.
        """
        judged = self._judge(step, attempt, look, without)
        self._count(step, judged)
        return judged

    def lets_pass(self, attempt: Attempt) -> bool:
        """Whether `judge` would make `attempt` an update, and find nothing wrong with it."""
        return attempt.is_finite and not (attempt.is_empty or attempt.num_zeroed) and attempt.norm <= self._guard.limit

    def conclude(self, verdict: Attempt) -> None:
        """Move the loss scale by a verdict that was carried out."""
        if self.scaler is not None:
            self.scaler.update(verdict.overflow)

    def _judge(self, step: int, attempt: Attempt, look: Look, without: Without) -> Attempt:
        if attempt.is_empty:
            return replace(attempt, skip=True, bad=True, note="every token of the step is masked")
        if attempt.is_finite and not attempt.num_zeroed:
            if not (alarm := self._guard.judge(attempt.norm)):
                return attempt
            if self._guard.action == "stop":
                raise StepError(f"step {step}: {alarm}. Set grad_norm_guard to warn or skip to go on.")
            skip = self._guard.action == "skip"
            return replace(attempt, skip=skip, bad=skip, note=alarm)
        if self._keys.nonfinite == "off":
            return attempt
        if self.scaler is not None and self.scaler.can_back_off:
            return replace(attempt, skip=True, overflow=True)
        if attempt.is_finite:
            assert self.zero is not None
            note = f"set to 0 before the reduction: {nonfinite.describe(self.zero)}"
            return replace(attempt, skip=attempt.norm == 0, overflow=True, bad=True, note=note)
        return self._trace_back(step, attempt, look(), without)

    def _trace_back(self, step: int, attempt: Attempt, findings: Findings | None, without: Without) -> Attempt:
        """End the run, step without the micro-batches that were not finite, or skip."""
        in_fp8 = self._fp8.describe_overflow()
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
            attempt = without(findings)
        return replace(attempt, skip=not attempt.is_finite or attempt.is_empty, bad=True, note=f"not finite: {why}")

    def _count(self, step: int, verdict: Attempt) -> None:
        """Count bad steps: those that were not finite, whatever was done about it, and those that the guard of the norm
        skipped. An overflow by which an FP16 run finds its loss scale is not bad. Raises StepError at a limit."""
        self._bad_in_a_row = self._bad_in_a_row + 1 if verdict.bad else 0
        self._bad_in_all += verdict.bad
        limits = (
            ("max_bad_steps_in_a_row", self._keys.max_bad_steps_in_a_row, self._bad_in_a_row, "in a row"),
            ("max_bad_steps", self._keys.max_bad_steps, self._bad_in_all, "of the run"),
        )
        for key, limit, count, which in limits:
            if verdict.bad and 0 < limit <= count:
                raise StepError(
                    f"step {step} is bad, number {count} {which} ({key} {limit}). {verdict.note}. Resume"
                    " from the last good checkpoint with a lower lr (set override to lr_schedule) or other data"
                    f" (override data), or raise {key}."
                )

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, guard and counters, as plain numbers; the same on every rank."""
        bad = {"in_a_row": self._bad_in_a_row, "total": self._bad_in_all}
        parts: dict[str, Any] = {"bad_steps": bad, "guard": self._guard.state_dict()}
        return parts | ({} if self.scaler is None else {"loss_scale": self.scaler.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. A part that `state` lacks starts afresh (the precision was another)."""
        bad = state.get("bad_steps", {"in_a_row": 0, "total": 0})
        self._bad_in_a_row, self._bad_in_all = int(bad["in_a_row"]), int(bad["total"])
        self._guard.load_state_dict(state.get("guard", NormGuard(self._keys).state_dict()))
        if self.scaler is not None and "loss_scale" in state:
            self.scaler.load_state_dict(state["loss_scale"])


_UNSEEN = "its micro-batches came from an iterator and cannot be run again to look for it: give a list of them"
