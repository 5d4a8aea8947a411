"""The loss scale of FP16: large enough that small gradients do not underflow, halved when large ones overflow.

The rule is Megatron-core's (DynamicGradScaler), which with `hysteresis` 1 is torch.amp.GradScaler's: the scale doubles
after `window` steps in a row without an overflow and is halved at the `hysteresis`-th overflow since it last doubled,
and at every further one. Every rank calls `update` with the same verdict, which `Recovery.judge` (step/recovery.py)
derives from the all-reduced norm, so no collective is needed here.
"""

from __future__ import annotations

from typing import Any

from megaaccum.config import Plan
from megaaccum.errors import CheckpointError

GROWTH = 2.0
BACKOFF = 0.5
"""Powers of two, so that scaling and unscaling round nothing while the scale is one."""


class LossScaler:
    """A loss scale and what moves it. The same on every rank.

    scale: what the loss is multiplied by in the next backward. A fixed one has `window` None.
    """

    def __init__(self, scale: float, *, minimum: float = 1.0, window: int | None = None, hysteresis: int = 1):
        self.scale = scale
        self._minimum = minimum
        self._window = window
        self._hysteresis = hysteresis
        self._good_steps, self._overflows_left = 0, hysteresis

    @property
    def is_dynamic(self) -> bool:
        return self._window is not None

    @property
    def can_back_off(self) -> bool:
        """Whether another overflow is part of the search for a scale: not at the floor, and not with a fixed scale."""
        return self.is_dynamic and self.scale > self._minimum

    def update(self, overflow: bool) -> None:
        """Take note of a step's verdict."""
        if self._window is None:
            return
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * BACKOFF, self._minimum)
        elif self._good_steps >= self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= GROWTH

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: {"scale", "good_steps", "overflows_left"}."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was. A fixed scale stays what the configuration says.

        Raises CheckpointError when `state` lacks a number.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise CheckpointError(f"the checkpoint's loss scale lacks {', '.join(missing)}: it is damaged or not ours")
        if self.is_dynamic:
            self.scale = max(float(state["scale"]), self._minimum)
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])


def build(plan: Plan) -> LossScaler | None:
    """The loss scaler of an FP16 run; None for every other precision."""
    step = plan.config.step
    if plan.config.sharding.params_dtype != "fp16":
        return None
    if step.loss_scale is not None:
        return LossScaler(step.loss_scale)
    return LossScaler(
        step.initial_loss_scale, minimum=step.min_loss_scale, window=step.loss_scale_window, hysteresis=step.hysteresis
    )
