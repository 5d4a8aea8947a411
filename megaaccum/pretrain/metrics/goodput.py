"""Goodput: the share of a run's wall time, over all starts, that trained the model, and the rest by cause."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from megaaccum.pretrain.metrics.journal import TOTALS, Record
from megaaccum.pretrain.metrics.step_record import BETWEEN_STEPS, OF_A_STEP
from megaaccum.units import duration

CAUSES = ("productive", "start_up", "data", "evaluation", "checkpoint", "skipped", "repeated", "idle", "other")
"""Causes of the run's seconds. productive: steps that the model kept, less their wait for data, which is `data`.
start_up: from the launch of each start to its first step. skipped: steps that left the weights as they were. repeated:
steps that a later start took again, as it went on from a checkpoint before them. idle: from the last record of a start
to the launch of the next, so what a killed start did after its last record too. other: the end of a start, and the
difference between a rank's two clocks."""
_OF_STEPS = ("productive", "skipped", "data")
"""Causes that are `repeated` once a later start takes the steps again."""


class Goodput:
    """Sums the records of a journal, in order, including those of earlier starts (`journal.lines`), or those of this
    start on (`journal.since_totals`).

    seconds: by cause; together the time from the first launch to the last record.
    """

    def __init__(self, records: Iterable[Record] = ()):
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.num_starts = 0
        self._is_starting = False
        self._last: float | None = None
        # Step and seconds (productive, skipped, data) of each that a later start among `records` may repeat.
        self._steps: array[float] | None = array("d")
        for number, record in enumerate(records):
            if number == 0 and TOTALS in record:
                self.num_starts, self._last = record[TOTALS]["num_starts"], record["time"]
                self.seconds = {cause: record[TOTALS][cause] for cause in CAUSES}
            else:
                self.add(record)
        self._steps = None

    def totals(self) -> Record:
        """The sums so far, from which `since_totals` continues."""
        return {"num_starts": self.num_starts, **self.seconds}

    @property
    def total(self) -> float:
        """Seconds of the run."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Productive seconds over all, 0 to 1."""
        return self.seconds["productive"] / self.total if self.total > 0 else 0.0

    def add(self, record: Record) -> None:
        """Count one record; a record without a time, of an earlier version, is ignored."""
        if "time" not in record:
            return
        if record["kind"] == "start":
            self._start(record)
        else:
            self._since_the_last(record)
        self._last = record["time"]

    def _start(self, record: Record) -> None:
        launched = record["launched"]
        if self._last is not None:
            self.seconds["idle"] += max(launched - self._last, 0.0)  # below 0 where a clock was set back
        self.seconds["start_up"] += record["time"] - launched
        self.num_starts, self._is_starting = self.num_starts + 1, True
        while self._steps and self._steps[-4] > record["step"]:
            for cause in _OF_STEPS:
                spent = self._steps.pop()
                self.seconds[cause] -= spent
                self.seconds["repeated"] += spent
            self._steps.pop()

    def _since_the_last(self, record: Record) -> None:
        elapsed = 0.0 if self._last is None else record["time"] - self._last
        spent = {cause: record.get(f"seconds_{cause}", 0.0) for cause in BETWEEN_STEPS}
        if TOTALS in record:  # of steps that have no record too
            spent = {cause: record[TOTALS][cause] - self.seconds[cause] for cause in CAUSES}
        elif record["kind"] == "train":
            data = record.get("seconds_data", 0.0)
            rest = sum(record.get(f"seconds_{phase}", 0.0) for phase in OF_A_STEP) - data
            spent |= {"data": data, "skipped" if record.get("skipped") else "productive": rest}
        if record["kind"] == "train" and self._steps is not None:
            self._steps.extend((record["step"], *(spent.get(cause, 0.0) for cause in reversed(_OF_STEPS))))
        left = "start_up" if self._is_starting and record["kind"] != "end" else "other"
        spent[left] = elapsed - sum(seconds for cause, seconds in spent.items() if cause != left)
        self._is_starting &= record["kind"] != "train"
        for cause, seconds in spent.items():
            self.seconds[cause] += seconds

    def line(self) -> str:
        """`87.3% of 1:02:03 in 2 starts (start-up 5.1%, data 3.2%)`: causes of at least 0.5 %, largest first."""
        if self.total <= 0:
            return "unknown: no record has a time"
        shares = {cause: seconds / self.total for cause, seconds in self.seconds.items() if cause != "productive"}
        largest = sorted((item for item in shares.items() if item[1] >= 0.005), key=lambda item: -item[1])
        lost = ", ".join(f"{cause.replace('_', '-')} {share:.1%}" for cause, share in largest)
        starts = f"{self.num_starts} start{'s' * (self.num_starts != 1)}"
        return f"{self.share:.1%} of {duration(self.total)} in {starts}" + (f" ({lost})" if lost else "")
