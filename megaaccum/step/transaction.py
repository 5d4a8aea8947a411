"""State, besides the weights, that commits with a step: a step changes all of it on every rank, or none of it.

| committed together | a step that counts | a skipped one, `consumed` | a skipped one, `retried` |
| --- | --- | --- | --- |
| weights, optimizer state, Adam's count | updated | as before | as before |
| learning rate and weight decay | move on | as before | as before |
| its factor, with `lr_scaling_follows_rampup` | of the next step's batch | of the next step's batch | as before |
| random states | move on | as before | as before |
| FP8 scales and amax histories | move on | as before | as before |
| FP16 loss scale | counts a good step | halved if it overflowed | halved if it overflowed |
| consumed samples, step number | move on | move on | as before |

The factor (lr_scaling_follows_rampup) belongs to a batch and not to an update: consumed samples may bring a larger
batch, and the step that takes it takes its rate.

All ranks reach the same verdict from one collective, and after the optimizer's step nothing can fail on one rank alone.
With `speculative_step` the update comes before the verdict, and is taken back where that refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.optim.lr_schedule import LrSchedule
from megaaccum.step.result import StepResult


class Transaction:
    """Moves the learning rate and the counters of a run with its steps; the same on every rank.

    step: steps whose samples were consumed. num_updates: those of them that changed the weights. skipped_steps:
    attempts that did not. consumed_samples: sequences, over all ranks. last_weight: N of the last step by its
    sequences, 0 before one has ended.
    """

    def __init__(self, plan: Plan, lr_schedule: LrSchedule | None):
        self._retry = plan.config.step.skipped_samples == "retried"
        self._ramp = plan.ramp
        self._lr_schedule = lr_schedule
        self.step = self.num_updates = self.skipped_steps = self.consumed_samples = 0
        self.last_weight = 0.0

    @property
    def batch(self) -> BatchPlan:
        """The batch of the next step."""
        return self._ramp.at(self.consumed_samples)

    @property
    def next_batch(self) -> BatchPlan:
        """The batch of the step after it, where that one's samples are consumed."""
        return self._ramp.at(self.consumed_samples + self.batch.global_batch_size)

    def commit(self, result: StepResult, param_groups: Sequence[Mapping[str, Any]]) -> StepResult:
        """Move on by a step that is judged. Returns `result` with the learning rate that it used (of a schedule, else
        of the optimizer's first group) and whether its samples count as consumed."""
        lr = float(param_groups[0]["lr"]) if self._lr_schedule is None else self._lr_schedule.lr
        num_samples = self.batch.global_batch_size
        advanced = not (result.skipped and self._retry)
        self.skipped_steps += result.skipped
        self.num_updates += not result.skipped
        if self._lr_schedule is not None and not result.skipped:
            self._lr_schedule.step(num_samples)
        if advanced:
            self.step += 1
            self.consumed_samples += num_samples
        self._scale_lr()
        return replace(result, lr=lr, advanced=advanced)

    def _scale_lr(self) -> None:
        """The learning rate may follow the batch of the next step."""
        if self._lr_schedule is not None:
            self._lr_schedule.scale_to_batch(self._ramp.size_at(self.consumed_samples))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"num_updates": self.num_updates, "skipped_steps": self.skipped_steps, "last_weight": self.last_weight}

    def load_state_dict(self, state: dict[str, Any], *, step: int, consumed_samples: int) -> None:
        """Go on where `state_dict` was taken, after `step`; {} (a checkpoint without one) counts each as an update."""
        self.step, self.consumed_samples = step, consumed_samples
        self.num_updates = int(state.get("num_updates", step))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.last_weight = float(state.get("last_weight", 0.0))
        self._scale_lr()
