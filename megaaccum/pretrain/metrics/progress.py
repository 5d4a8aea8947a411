"""The progress line, printed every `log_interval` steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from megaaccum.config.layout import RankLayout
from megaaccum.config.schema import RunConfig
from megaaccum.pretrain.metrics.journal import Record
from megaaccum.pretrain.metrics.speed import Speed
from megaaccum.units import duration

SHOWN_WAIT = 0.05
"""Share of the time from which the wait for data is shown."""


def last_step(run: RunConfig, start_step: int) -> int:
    """The step after which a start that continues after `start_step` ends."""
    return run.train_iters if run.max_steps is None else min(run.train_iters, start_step + run.max_steps)


def ranks_of(layout: RankLayout) -> str:
    """`tp 2 x pp 4 x dp 2`, for a heading: the axes of a layout that are cut, and dp."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "dp")


class Progress:
    """Collects the steps since the last progress line and formats the next one, as plain text for a terminal or a
    file."""

    def __init__(self, speed: Speed, *, start_step: int, last_step: int, total_steps: int, clock: Callable[[], float]):
        """`last_step` is where this start ends, `total_steps` the whole run; `clock` gives seconds."""
        self._speed = speed
        self._first_step = start_step + 1
        self._last_step = last_step
        self._total_steps = total_steps
        self._clock = clock
        self._first_seen: float | None = None
        self._clear()

    def add(self, record: Record) -> None:
        """Count a step, also a skipped one."""
        if self._first_seen is None:
            self._first_seen = self._clock()
        self._num_skipped += bool(record.get("skipped"))
        self._seconds += record["seconds_per_step"]
        self._batches += self._speed.share(record)
        self._data += record.get("seconds_data", 0.0)

    def line(self, record: Record) -> str:
        """The line after `record`, the step added last: its loss, norm and learning rate; rates over all steps since
        the line before; the estimated time to the end of this start, including evaluations and checkpoints at their
        rate so far."""
        parts = [self.position(record["step"]), f"loss {record['loss']:.4f}"]
        if "grad_norm" in record:
            parts.append(f"grad norm {record['grad_norm']:.3g}")
        parts.append(f"lr {record['lr']:.2e}")
        if "expert_imbalance" in record:
            parts.append(f"experts {record['expert_imbalance']:.2f}x the mean")
        if record.get("expert_dropped_share"):
            parts.append(f"{record['expert_dropped_share']:.1%} of tokens dropped")
        parts += [_RATES[name].format(rate) for name, rate in self._speed.rates(self._seconds, self._batches).items()]
        if self._data >= SHOWN_WAIT * self._seconds:
            parts.append(f"{self._data / self._seconds:.0%} waiting for data")
        if self._num_skipped:
            parts.append(f"{self._num_skipped} skipped")
        parts += self._time_left(record["step"])
        self._clear()
        return " | ".join(parts)

    def position(self, step: int) -> str:
        """`step 20/200`, equally wide for every step of the run."""
        return f"step {step:{len(str(self._total_steps))}}/{self._total_steps}"

    def _time_left(self, step: int) -> list[str]:
        # The pace excludes the first step, which compiles, allocates and warms up.
        num_timed = step - self._first_step
        if num_timed <= 0 or self._first_seen is None:
            return []
        pace = (self._clock() - self._first_seen) / num_timed
        return [f"ETA {duration(pace * (self._last_step - step))}"]

    def _clear(self) -> None:
        self._num_skipped = 0
        self._seconds = self._data = self._batches = 0.0


def evaluation_text(loss: float) -> str:
    """Validation loss, and its perplexity where that is a readable number."""
    return f"validation loss {loss:.4f}" + (f" | perplexity {math.exp(loss):,.2f}" if loss < 20 else "")


_RATES = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops_per_second_per_rank": "{:.3g} TFLOP/s per rank",
    "mfu": "MFU {:.1%}",
}
