"""Batch warm-up: the batch of each step, by the samples that the steps before it consumed.

Everything that follows the batch asks here: loader, learning rate, loss divisor, counters, planner, `check`, resume.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megaaccum.config.batch import BatchPlan
from megaaccum.config.schema import BatchConfig
from megaaccum.errors import ConfigError, either

KEYS = ("batch_warmup_steps", "rampup_batch_size", "step_batch_size_schedule")
"""The three keys that request a ramp, of which a run has one at most."""

Broken = Callable[[BatchPlan], list[str]]
"""The rules of the schedule that a batch breaks, one text each."""

Interval = tuple[int, int]
"""(consumed samples from which it holds, sequences of the global batch)."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Consecutive steps of one batch."""

    first_step: int
    """Number of the first of them, from 1."""
    num_steps: int | None
    """The number of steps; None for the last rung, which holds for the rest of the run."""
    consumed_samples: int
    """Sequences that the steps before them consumed."""
    size: int
    """Sequences of each step, over all ranks."""


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """The batch as a function of the samples consumed. The same on every rank.

    A run without batch warm-up has one batch; else the last one is the configured batch.
    """

    intervals: tuple[tuple[int, int], ...]
    """(consumed samples from which it holds, sequences of a step), the first from 0; independent of the ranks."""
    batches: dict[int, BatchPlan]
    """The cut of each size on these ranks; sizes that a run is past may be missing."""

    @classmethod
    def constant(cls, batch: BatchPlan) -> BatchRamp:
        """The ramp of a run whose steps all have `batch`."""
        size = batch.global_batch_size
        return cls(((0, size),), {size: batch})

    @property
    def is_constant(self) -> bool:
        return len(self.intervals) == 1

    def at(self, consumed_samples: int) -> BatchPlan:
        """The batch of the step that begins after `consumed_samples`."""
        return self.batches[self.size_at(consumed_samples)]

    def size_at(self, consumed_samples: int) -> int:
        """The sequences, over all ranks, of the step that begins after `consumed_samples`."""
        return self.intervals[bisect_right(self.intervals, consumed_samples, key=lambda each: each[0]) - 1][1]

    def rungs(self) -> Iterator[Rung]:
        """The batches in the order of steps, without those whose span an earlier step overshoots."""
        step, consumed = 1, 0
        ends = [start for start, _ in self.intervals[1:]]
        for (_, size), end in zip(self.intervals, [*ends, None], strict=True):
            if end is None:
                yield Rung(step, None, consumed, size)
            elif steps := -(-max(0, end - consumed) // size):
                yield Rung(step, steps, consumed, size)
                step, consumed = step + steps, consumed + steps * size

    def samples_after(self, steps: int) -> int:
        """Sequences that the first `steps` steps consume, over all ranks."""
        rung = [each for each in self.rungs() if each.first_step <= max(steps, 1)][-1]
        return rung.consumed_samples + (steps - rung.first_step + 1) * rung.size

    def steps_within(self, samples: int) -> int:
        """The number of whole steps in `samples` sequences."""
        rung = [each for each in self.rungs() if each.consumed_samples <= samples][-1]
        steps = (samples - rung.consumed_samples) // rung.size
        return rung.first_step - 1 + (steps if rung.num_steps is None else min(steps, rung.num_steps))

    @property
    def num_steps(self) -> int:
        """The number of steps before the first with the configured batch."""
        return [*self.rungs()][-1].first_step - 1

    def flush_sizes(self) -> list[int]:
        """All numbers of micro-batches per flush, increasing."""
        return sorted({batch.microbatches_per_flush for batch in self.batches.values()})


# --- a ramp from its keys --------------------------------------------------------------------------------------------


def build_ramp(keys: BatchConfig, batch: BatchPlan, train_iters: int, broken: Broken, notes: list[str]) -> BatchRamp:
    """The ramp that `keys` request, up to `batch`. A smaller batch that breaks a rule is rounded up to the next legal
    one, with a note.

    Args:
        train_iters: steps of the run; 0 if unknown.

    Raises:
        ConfigError: the keys contradict each other or `batch`, or the run ends before a ramp that is no schedule.
    """
    given = [name for name in KEYS if getattr(keys, name)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each give the growth of the batch: keep one of them.")
    if not given:
        return BatchRamp.constant(batch)
    cut = _Cut(batch, broken)
    if keys.batch_warmup_steps:
        ramp = _by_steps(keys.batch_warmup_steps, cut)
        if ramp.is_constant:
            cause = f"of grad_accum_steps {batch.grad_accum_steps} no smaller one is legal"
            notes.append(f"batch_warmup_steps {keys.batch_warmup_steps}: nothing grows, {cause}.")
    else:
        wanted = requested_intervals(keys, seq_length=batch.seq_length, global_batch_size=batch.global_batch_size)
        ramp = _ramp((start, cut.to(size)) for start, size in wanted)
        more = ramp.samples_after(train_iters) - BatchRamp(tuple(wanted), {}).samples_after(train_iters)
        if more and train_iters:
            notes.append(f"{given[0]}: with batches rounded up, train_iters {train_iters} take {more} samples more.")
    notes += [f"{given[0]}: {note}" for note in cut.notes()]
    if train_iters and ramp.num_steps >= train_iters:
        ends = (
            f"{given[0]}: the batch reaches its {batch.global_batch_size} sequences after {ramp.num_steps} steps, but"
            f" the run ends after train_iters {train_iters}"
        )
        # A ramp in samples or tokens belongs to the whole training, of which a run may be the beginning.
        if keys.batch_warmup_steps:
            raise ConfigError(f"{ends}: shorten the ramp, or set train_iters to more than {ramp.num_steps}.")
        notes.append(f"{ends}, in the middle of the ramp.")
    return ramp


def recut(intervals: Sequence[Sequence[int]], batch: BatchPlan, broken: Broken, consumed_samples: int) -> BatchRamp:
    """The ramp of a checkpoint (`intervals`) on the ranks of `batch`, which may differ from those that saved it.

    Raises:
        ConfigError: a batch that is still to come, after `consumed_samples`, cannot be cut over these ranks.
    """
    cut = _Cut(batch, broken)
    present = bisect_right(intervals, consumed_samples, key=lambda interval: interval[0]) - 1
    batches = {size: cut.to(size) for _, size in intervals[present:]}
    for size, made in batches.items():
        if made.global_batch_size != size:
            unit = batch.micro_batch_size * batch.data_parallel_size
            raise ConfigError(
                f"the ramp of the checkpoint has steps of {size} sequences still to come, which micro_batch_size"
                f" {batch.micro_batch_size} * data_parallel_size {batch.data_parallel_size} = {unit} cannot make"
                f" ({cut.reason(size)}): keep the number of ranks and micro-batches until the ramp is over."
            )
    return BatchRamp(tuple((start, size) for start, size in intervals), batches)


def requested_intervals(keys: BatchConfig, *, seq_length: int, global_batch_size: int) -> list[Interval]:
    """The intervals that `rampup_batch_size` or `step_batch_size_schedule` request, before rounding.

    Raises:
        ConfigError: they do not lead to global_batch_size, or cannot be read.
    """
    if keys.step_batch_size_schedule is not None:
        found = parse_schedule(keys.step_batch_size_schedule, seq_length)
        if found[-1][1] != global_batch_size:
            raise ConfigError(
                f"step_batch_size_schedule ends with {found[-1][1]} sequences, but global_batch_size is"
                f" {global_batch_size}: leave global_batch_size out, or make them equal."
            )
        return found
    assert keys.rampup_batch_size is not None
    return _rampup(keys.rampup_batch_size, global_batch_size)


def _rampup(triple: Sequence[int], size: int) -> list[Interval]:
    """The intervals of START INCREMENT SAMPLES: equal spans of samples, each batch larger by INCREMENT."""
    if len(triple) != 3:
        raise ConfigError(f"rampup_batch_size needs three numbers, START INCREMENT SAMPLES, not {len(triple)}.")
    start, increment, samples = triple
    if start < 1 or increment < 1 or samples < 0:
        raise ConfigError(
            f"rampup_batch_size {start} {increment} {samples}: START and INCREMENT must be at least 1, SAMPLES at"
            " least 0."
        )
    if start > size or (size - start) % increment:
        legal = [n for n in (size - (size - start) // increment * increment, size) if 0 < n <= size]
        raise ConfigError(
            f"rampup_batch_size {start} {increment} {samples} never reaches global_batch_size {size}: {size} - {start}"
            f" is no multiple of {increment}. Set START to {either(sorted(set(legal)))}, or INCREMENT to a divisor."
        )
    count = (size - start) // increment
    if samples == 0 or count == 0:
        return [(0, size)]
    return [(-(-each * samples // count), start + each * increment) for each in range(count + 1)]


def parse_schedule(text: str, seq_length: int) -> list[Interval]:
    """The intervals of Megatron's `THRESHOLD:SIZE THRESHOLD:SIZE ...`: from that number of tokens on, that number of
    sequences. The suffixes K, M, B and T mean 10^3, 10^6, 10^9 and 10^12.

    Raises:
        ConfigError: with the entry that cannot be read, or thresholds that do not grow from 0.
    """
    found = sorted(_entry(word, max(seq_length, 1)) for word in text.replace(",", " ").split())
    thresholds = [at for at, _ in found]
    if not found or thresholds[0] != 0 or len(set(thresholds)) < len(thresholds):
        raise ConfigError(
            f"step_batch_size_schedule {text!r}: thresholds must grow from 0, in whole samples of seq_length"
            f" {seq_length} tokens: write it as '0:64 1M:128'."
        )
    return found


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _entry(word: str, seq_length: int) -> Interval:
    try:
        tokens, size = (_number(part) for part in word.split(":"))
    except (ValueError, OverflowError):  # of infinity
        tokens, size = -1, 0
    if tokens < 0 or size < 1:
        raise ConfigError(f"step_batch_size_schedule: {word!r} is not TOKENS:SEQUENCES, as in 250B:1536.")
    return tokens // seq_length, size


def _number(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


# --- rounding up to what the schedule can run ------------------------------------------------------------------------


class _Cut:
    """The cuts of global batches over the ranks of `batch`, and which of them were rounded up, and why."""

    def __init__(self, batch: BatchPlan, broken: Broken):
        self.batch, self._broken = batch, broken
        self._made: dict[int, BatchPlan] = {}

    def to(self, size: int, *, unit: int = 1) -> BatchPlan:
        """The smallest legal batch of at least `size` sequences, of a multiple of `unit` micro-batches."""
        if size not in self._made:
            self._made[size] = self._search(size, unit)
        return self._made[size]

    def _search(self, size: int, unit: int) -> BatchPlan:
        whole = self.batch
        if whole.flush == "per_round":
            unit = whole.pp_microbatches
        least = -(-size // (whole.micro_batch_size * whole.data_parallel_size))
        least = -(-least // unit) * unit
        most = max(whole.num_microbatches, 2 * least)
        for count in range(least, most + 1, unit):
            made = _with_microbatches(whole, count)
            if count == whole.num_microbatches or not self._broken(made):
                return made
        raise ConfigError(f"a batch of {size} sequences is not possible on these ranks: {self.reason(size)}.")

    def reason(self, size: int) -> str:
        """The reason why `size` sequences are not legal."""
        unit = self.batch.micro_batch_size * self.batch.data_parallel_size
        if size % unit:
            return f"not divisible by micro_batch_size * data_parallel_size = {unit}"
        count = size // unit
        if self.batch.flush == "per_round" and count % self.batch.pp_microbatches:
            return f"flush per_round needs multiples of pp_microbatches {self.batch.pp_microbatches} micro-batches"
        problems = self._broken(_with_microbatches(self.batch, count))
        return problems[0].partition(": ")[0] if problems else "legal"

    def notes(self) -> list[str]:
        """The notes on sizes that were rounded up, one per legal size."""
        rounded: dict[int, list[int]] = {}
        for size, made in self._made.items():
            if made.global_batch_size != size:
                rounded.setdefault(made.global_batch_size, []).append(size)
        return [
            f"batches of {either(sizes)} sequences are rounded up to {legal} ({self.reason(sizes[0])})."
            for legal, sizes in rounded.items()
        ]


def _with_microbatches(whole: BatchPlan, count: int) -> BatchPlan:
    """`whole` with `count` micro-batches per step, in the largest device batches that divide them."""
    chunks = math.gcd(count, whole.pp_microbatches)
    return replace(whole, pp_microbatches=chunks, grad_accum_steps=count // chunks)


def _by_steps(steps: int, cut: _Cut) -> BatchRamp:
    """The ramp of grad_accum_steps, in equal parts from an eighth of its value to the whole, over `steps` steps."""
    whole = cut.batch
    last = whole.grad_accum_steps
    first = max(1, last // 8)
    per_accumulation = whole.device_batch_size * whole.data_parallel_size
    wanted, consumed = [], 0
    for step in range(steps + 1):
        made = cut.to((first + (last - first) * step // steps) * per_accumulation, unit=whole.pp_microbatches)
        wanted.append((consumed, made))
        consumed += made.global_batch_size
    return _ramp(wanted)


def _ramp(wanted: Iterable[tuple[int, BatchPlan]]) -> BatchRamp:
    """The ramp of these batches, equal neighbours merged."""
    intervals: list[tuple[int, int]] = []
    batches: dict[int, BatchPlan] = {}
    for start, batch in wanted:
        size = batch.global_batch_size
        if not intervals or size != intervals[-1][1]:
            intervals.append((start, size))
            batches[size] = batch
    return BatchRamp(tuple(intervals), batches)
