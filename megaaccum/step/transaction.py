"""The step as a transaction: what a step changes, it changes everywhere and together, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaaccum.errors import MegaaccumError, StepError

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.data.loader import MicrobatchLoader
    from megaaccum.step.train_step import StepResult, TrainStep
    from megaaccum.training.lr_schedule import LrSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What an attempt at a step came to; the same on every rank, but for the result's seconds.

    step: number of the step that was attempted, from 1. lr: learning rate that it used, or would have. advanced: its
    samples count as consumed, so that the next attempt is the next step.
    """

    step: int
    lr: float
    advanced: bool
    result: StepResult


class Transaction:
    """Takes steps, each of which commits as a whole. Every method is collective over the world.

    | committed together | a step that counts | a skipped one, `consumed` | a skipped one, `retried` |
    | --- | --- | --- | --- |
    | weights, optimizer state, Adam's count | updated | as before | as before |
    | learning rate and weight decay | move on | as before | as before |
    | random states | move on | as before | as before |
    | FP8 scales and amax histories | move on | as before | as before |
    | FP16 loss scale | counts a good step | halved if it overflowed | halved if it overflowed |
    | consumed samples, step number | move on | move on | as before |

    All ranks reach the same verdict from one collective, and behind the optimizer's step nothing can fail on one rank
    alone. What ends the run ends it before anything has changed.

    step: steps whose samples were consumed. num_updates: those of them that changed the weights. skipped_steps:
    attempts that did not.
    """

    def __init__(
        self,
        plan: Plan,
        train_step: TrainStep,
        loader: MicrobatchLoader,
        schedule: LrSchedule,
        *,
        step: int = 0,
        last_good: Callable[[], str] = lambda: "",
    ):
        """Go on behind step `step`. `last_good` words the last good checkpoint, for the text of an error."""
        self._batch = plan.batch
        self._retry = plan.config.step.skipped_samples == "retried"
        self._stepper = train_step
        self._loader = loader
        self._schedule = schedule
        self._last_good = last_good
        self.step = self.num_updates = step
        self.skipped_steps = 0

    def run(self, *, stop: bool = False, problem: MegaaccumError | None = None) -> Committed:
        """Attempt the next step. Raises StepError, with the last good checkpoint named, and what `TrainStep.train`
        raises: a `problem` of one rank, or one with its data, on every rank, before any of them begins."""
        number, lr = self.step + 1, self._schedule.lr
        microbatches, unreadable = self._loader.try_next_step(self._batch.num_microbatches)
        try:
            result = self._stepper.train(
                microbatches,  # type: ignore[arg-type]
                step=number,
                stop=stop,
                problem=problem or unreadable,
            )
        except StepError as error:
            raise StepError(f"{error} {self._last_good()}".strip()) from error
        advanced = not (result.skipped and self._retry)
        self._commit(applied=not result.skipped, advanced=advanced)
        return Committed(step=number, lr=lr, advanced=advanced, result=result)

    def _commit(self, *, applied: bool, advanced: bool) -> None:
        if applied:
            self._schedule.step()
            self.num_updates += 1
        else:
            self.skipped_steps += 1
        if advanced:
            self._loader.commit(self._batch.global_batch_size)
            self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside weights, schedule, samples and random states: plain numbers."""
        return {
            "num_updates": self.num_updates,
            "skipped_steps": self.skipped_steps,
            "train_step": self._stepper.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; {} (a checkpoint without one) leaves all as built."""
        self.num_updates = int(state.get("num_updates", self.step))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self._stepper.load_state_dict(state.get("train_step", {}))
