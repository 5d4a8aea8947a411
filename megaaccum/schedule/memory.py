"""Holdings of stages, in bytes or in passes, and the most that a schedule makes of it on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Schedule

TINY = 1e-9
"""Share of a limit that sums of floating-point numbers may be over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Amounts per stage, in any one unit.

    activation: of one micro-batch, from the start of its forward to the end of its input gradient. deferred: from then
    to the end of its weight gradient. state: at all times (parameters, gradients, optimizer).
    """

    activation: tuple[float, ...]
    deferred: tuple[float, ...]
    state: tuple[float, ...]

    @classmethod
    def counted(cls, num_stages: int, *, chunks: int = 1) -> Memory:
        """In micro-batches of a whole rank: 1 / chunks for each that went through a stage, from its forward until its
        weight gradient is done."""
        each = (1.0 / chunks,) * num_stages
        return cls(activation=each, deferred=each, state=(0.0,) * num_stages)

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        """The most that each rank of `schedule` holds at one time. It follows from the order alone, not from times."""
        return tuple(self._peak(schedule, rank) for rank in range(schedule.pp))

    def _peak(self, schedule: Schedule, rank: int) -> float:
        stages = schedule.stages[rank]
        held = most = sum(self.state[stage] for stage in stages)
        for kind, chunk, _ in schedule.actions(rank):
            stage = stages[chunk]
            if kind == "F":
                held += self.activation[stage]
            elif kind == "W":
                held -= self.deferred[stage]
            else:
                held += self.deferred[stage] - self.activation[stage]
            most = max(most, held)
            if kind == "B":
                held -= self.deferred[stage]
        return most

    def least(self, held: Sequence[int]) -> float:
        """The least room that a rank with the stages `held` needs beside its state: for one micro-batch, which comes to
        them one after the other, and leaves them in turn."""
        below = [*accumulate((self.activation[s] for s in held), initial=0.0)]
        return max(below[-1], *(b + self.deferred[s] for b, s in zip(below, held, strict=False)))

    def check(self, stages: Sequence[Sequence[int]], limit: float) -> None:
        """Raises ScheduleError, with what each rank needs, if `limit` cannot hold state and one micro-batch."""
        short = []
        for rank, held in enumerate(stages):
            state = sum(self.state[s] for s in held)
            if (need := state + self.least(held)) > limit * (1 + TINY):
                short.append(f"rank {rank} needs {need:.6g} ({state:.6g} of it state)")
        if short:
            raise ScheduleError(
                f"memory limit {limit:.6g} does not hold one micro-batch: {'; '.join(short)}: raise the limit, or cut"
                " the layers onto more ranks"
            )
