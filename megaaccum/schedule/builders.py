"""Builders of the built-in schedules: functions (pp, num_microbatches) -> table. `registry` has their names and facts;
V-Half and V-Min, which are searched, are in `v_half`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

from megaaccum.errors import ScheduleError, either, nearest
from megaaccum.schedule.actions import Action, Item, Kind, Pair

Table = Sequence[Sequence[Item]]
"""Items of each rank, in order."""


def gpipe(pp: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards in the same order."""
    return [[Action(kind, 0, m) for kind in ("F", "B") for m in range(num_microbatches)]] * pp


def one_forward_one_backward(pp: int, num_microbatches: int) -> Table:
    """pp - rank - 1 forwards, then a forward and a backward in turn, then the backwards that are left."""
    return [_in_turn(num_microbatches, warmup=pp - rank - 1) for rank in range(pp)]


def _in_turn(m: int, *, warmup: int) -> list[Item]:
    warmup = min(warmup, m)
    items: list[Item] = [Action("F", 0, i) for i in range(warmup)]
    for i in range(m - warmup):
        items += [Action("F", 0, warmup + i), Action("B", 0, i)]
    return items + [Action("B", 0, i) for i in range(m - warmup, m)]


def interleaved(pp: int, num_microbatches: int, *, chunks: int, group_size: int) -> Table:
    """Megatron's order: chunks take turns every `group_size` micro-batches, and backwards visit chunks from the last.

    Raises ScheduleError for sizes that Megatron-core refuses.
    """
    if problems := list(interleaved_problems(num_microbatches, pp, group_size)):
        raise ScheduleError(problems)
    forwards = _rounds(num_microbatches, chunks, group_size)
    backwards = [(chunks - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    table = []
    for rank in range(pp):
        warmup = min((pp - rank - 1) * 2 + (chunks - 1) * group_size, len(forwards))
        items = [Action("F", *at) for at in forwards[:warmup]]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            items += [Action("F", *forward), Action("B", *backward)]
        table.append(items + [Action("B", *at) for at in backwards[len(forwards) - warmup :]])
    return table


def _rounds(m: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of Megatron's forwards: group after group, each through all chunks."""
    starts = range(0, m, group_size)
    return [(chunk, i) for at in starts for chunk in range(chunks) for i in range(at, min(at + group_size, m))]


def zb_h1(pp: int, num_microbatches: int) -> Table:
    """1F1B in which rank r puts off its weight gradients by r micro-batches, and does what is left at the end.

    Peak memory is 1F1B's: what a later rank saves in forwards it spends on weight gradients (section 2.3: worker i of p
    holds (p - i + 1) activations and (i - 1) weight gradients).
    """
    return [_zb_h1_rank(pp, rank, num_microbatches) for rank in range(pp)]


def _zb_h1_rank(pp: int, rank: int, m: int) -> list[Item]:
    items: list[Item] = []
    done = 0  # weight gradients
    for item in _in_turn(m, warmup=pp - rank - 1):
        assert isinstance(item, Action)
        if item.kind == "F":
            items.append(item)
            continue
        items.append(Action("I", 0, item.microbatch))
        if item.microbatch >= done + rank:
            items.append(Action("W", 0, done))
            done += 1
    return items + [Action("W", 0, i) for i in range(done, m)]


class _VRank:
    """Writes down one rank's part of a V-shaped schedule, counting micro-batches per chunk and kind."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._next = {(kind, chunk): 0 for kind in "FI" for chunk in (0, 1)}
        self._owed: deque[tuple[int, int]] = deque()

    def count(self, kind: Kind, chunk: int) -> int:
        """How many there are of `kind`, F or I; a B counts as I."""
        return self._next[kind, chunk]

    def repeat(self, times: int, passes: str) -> None:
        """Append `passes`, `times` times. F0 is a forward of chunk 0, F1+B0 a fused pair. W0 is the oldest weight
        gradient of chunk 0 that is owed, W that of either chunk; nothing is appended if none is owed."""
        for each in passes.split() * times:
            if "+" in each:
                forward, backward = each.split("+")
                self.items.append(Pair(self._next_of(forward), self._next_of(backward)))
            elif each[0] != "W":
                self.items.append(self._next_of(each))
            elif owed := next((at for at in self._owed if each[1:] in ("", str(at[0]))), None):
                self._owed.remove(owed)
                self.items.append(Action("W", *owed))

    def _next_of(self, written: str) -> Action:
        kind, chunk = cast("Kind", written[0]), int(written[1])
        counted = "F" if kind == "F" else "I"
        number = self._next[counted, chunk]
        self._next[counted, chunk] += 1
        if kind == "I":
            self._owed.append((chunk, number))
        return Action(kind, chunk, number)


def zbv(pp: int, num_microbatches: int) -> Table:
    """ZB-V: fill both arms of the V, then F, I, W of the two chunks in turn, and put weight gradients off at the end.

    Between passes of equal length only the fill and the drain of one chunk are idle: (pp - 1) * F of a chunk.
    Raises ScheduleError below 2 * pp - 1 micro-batches, which the fill takes.
    """
    if num_microbatches < 2 * pp - 1:
        raise ScheduleError(
            f"schedule zbv at pp {pp} needs at least 2 * {pp} - 1 = {2 * pp - 1} micro-batches in a flush, not"
            f" {num_microbatches}: raise pp_microbatches or grad_accum_steps"
        )
    return [_zbv_rank(pp, rank, num_microbatches) for rank in range(pp)]


def _zbv_rank(pp: int, rank: int, m: int) -> list[Item]:
    at = _VRank()
    at.repeat(2 * (pp - rank) - 1, "F0")  # down the V while the far ranks fill
    at.repeat(rank, "F1 F0")  # both arms
    at.repeat(pp - rank, "F1 I1 W1")  # the first micro-batches come back up
    while at.count("F", 1) < m:  # steady: each chunk gives and takes one micro-batch
        at.repeat(int(at.count("F", 0) < m), "F0")
        at.repeat(1, "I0 W0 F1 I1 W1")
    at.repeat(rank, "I0 I1")  # drain: input gradients first, others wait for them
    at.repeat(pp - rank, "I0 W0")
    for chunk in (1, 0):
        at.repeat(m, f"W{chunk}")  # all that are owed
    return at.items


def dualpipev(pp: int, num_microbatches: int) -> Table:
    """DualPipeV: a V in whose steady state every forward of one chunk is fused with a backward of the other.

    Raises ScheduleError below 2 * pp micro-batches.
    """
    if num_microbatches < 2 * pp:
        raise ScheduleError(
            f"schedule dualpipev at pp {pp} needs at least 2 * {pp} = {2 * pp} micro-batches in a flush, not"
            f" {num_microbatches}: raise pp_microbatches or grad_accum_steps"
        )
    return [_dualpipev_rank(pp, rank, num_microbatches) for rank in range(pp)]


def _dualpipev_rank(pp: int, rank: int, m: int) -> list[Item]:
    """The eight phases of DualPipe's diagram."""
    at, below = _VRank(), pp - rank - 1
    at.repeat(2 * below, "F0")
    at.repeat(rank + 1, "F0 F1")
    at.repeat(below, "I1 W F1")
    for i in range(m - 2 * pp + rank + 1):
        # The tip of the V feeds itself: its first backward waits for no other rank, so the forward goes ahead.
        at.repeat(1, "F0 B1 F1+B0" if i == 0 and rank == pp - 1 else "F0+B1 F1+B0")
    at.repeat(below, "B1 F1+B0")
    # In the second half of the last backwards weight gradients are put off, to be done in the gaps after it.
    backwards, put_off = ["B1", "B0"] * (rank + 1), ["I1", "I0"] * (rank + 1)
    at.repeat(1, " ".join(backwards[: rank + 1] + put_off[rank + 1 :]))
    at.repeat(below, "W I0")
    at.repeat(rank + 1, "W")
    return at.items


def interleaved_problems(microbatches_per_flush: int, pp: int, group_size: int) -> Iterator[str]:
    """Counts that Megatron-core's interleaved schedule would refuse (megatron.core.pipeline_parallel.schedules).

    With m micro-batches in a flush and groups of N consecutive micro-batches per model chunk, pp <= N <= m, and the
    last group (m % N) is either whole or at least pp long; otherwise stages would wait for each other inside it.
    """
    m, n = microbatches_per_flush, group_size
    key = "microbatch_group_size_per_vp_stage"
    if m < pp:
        yield (
            f"the interleaved schedule needs at least pipeline_model_parallel_size {pp} micro-batches in a flush, not"
            f" {m}: raise pp_microbatches or grad_accum_steps."
        )
    elif not pp <= n <= m:
        yield (
            f"{key} {n} must be between pipeline_model_parallel_size {pp} and the {m} micro-batches of a flush:"
            f" set it to {pp if n < pp else m}."
        )
    elif 0 < m % n < pp:
        counts = nearest(m, lambda k: k >= n and not 0 < k % n < pp, lowest=n, highest=m + n)
        groups = nearest(n, lambda k: not 0 < m % k < pp, lowest=pp, highest=m)
        yield (
            f"{m} micro-batches in a flush leave a last group of {m} % {key} {n} = {m % n}, which must be 0 or at"
            f" least pipeline_model_parallel_size {pp}: make it {either(counts)} micro-batches (pp_microbatches or"
            f" grad_accum_steps), or set {key} to {either(groups)}."
        )
