"""Builders: from (pp, num_microbatches) to a schedule. `build` finds one by name; users `register` their own.

A built-in schedule is a builder and an `Entry` of `_BUILT_IN_ENTRIES`, from which keys, rules, planner and command line
have its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from megaaccum.errors import ScheduleError, did_you_mean, either, nearest
from megaaccum.schedule.actions import Action, Item, Kind, Pair, Placement, Schedule, make_schedule
from megaaccum.schedule.table import parse_csv, read_csv
from megaaccum.schedule.v_half import v_half, v_min
from megaaccum.schedule.validate import validate

Table = Sequence[Sequence[Item]]
"""Items of each rank, in order."""
Builder = Callable[[int, int], Table]
"""(pp, num_microbatches) -> table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A schedule that can be built by name."""

    name: str
    chunks: int | None = 1
    """Model chunks per rank; None if the caller chooses (interleaved)."""
    placement: Placement = "loop"
    splits: bool = False
    """Whether it splits the backward into I and W."""
    build: Builder | None = None
    """None for the interleaved schedule, which has parameters of its own."""
    least: Callable[[int], int] = lambda pp: 1
    """Micro-batches below which there is no table of its own for pp ranks."""
    by_megatron: bool = False
    """Whether Megatron's own functions run it."""
    title: str = ""
    """Its name in prose."""


_REGISTRY: dict[str, Entry] = {}
_SHARED: dict[str, Schedule] = {}
"""Tables that a run's ranks have from its first rank, by the paths of their files."""


def names() -> list[str]:
    """The names that `build` knows, registered ones included."""
    return list(_REGISTRY)


def entry(name: str) -> Entry:
    """Facts about a schedule by its name or .csv file. Raises ScheduleError, with the nearest name, if there
    is none, or if the file is no table."""
    if name.endswith(".csv"):
        return _entry_of_file(name)
    if name not in _REGISTRY:
        near = did_you_mean(name, _REGISTRY, most=1)
        raise ScheduleError(
            f"there is no schedule {name!r}{near}. Known are {', '.join(_REGISTRY)}, and the path of a CSV file, which"
            " ends in .csv"
        )
    return _REGISTRY[name]


def by_executor(name: str | None) -> bool:
    """Whether megaaccum's executor runs the schedule of this name, which does every backward in two parts. False for
    Megatron's schedules, for `none`, and for one that is still open (None, `auto`)."""
    return name not in ("none", "auto", None) and not (name in _REGISTRY and _REGISTRY[name].by_megatron)


def is_v_shaped(name: str) -> bool:
    """Whether rank r holds stages r and 2 * pp - 1 - r under this schedule; otherwise stage s is on rank s % pp."""
    return name in _REGISTRY and _REGISTRY[name].placement == "v"


def set_shared_table(path: str, text: str | None) -> None:
    """Build the schedule of a CSV file from `text` from now on, whatever the file holds; None: from the file, as it is
    now. Raises ScheduleError if `text` is no table."""
    _SHARED.pop(path, None)
    if text is not None:
        _SHARED[path] = parse_csv(path, text)
    build.cache_clear()


def is_shared(path: str) -> bool:
    """Whether the ranks have shared the table of this file."""
    return path in _SHARED


def stored_table(path: str) -> Schedule:
    """The table of a CSV file: the one that ranks have shared, else the file's present content. Raises ScheduleError if
    the file is no table."""
    return _SHARED.get(path) or read_csv(path)


def _entry_of_file(path: str) -> Entry:
    stored = stored_table(path)
    if stored.placement is None:
        raise ScheduleError(
            f"schedule {path} places stages as {stored.stages}: rank r has to hold stages r, r + pp, ... (as the"
            " interleaved schedule) or r and 2 * pp - 1 - r (a V)"
        )
    return Entry(
        name=path, chunks=stored.chunks, placement=stored.placement, splits=stored.splits_backward,
        build=_from_file(stored),
    )  # fmt: skip


def register(name: str, builder: Builder | str | Path, *, chunks: int = 1, placement: Placement = "loop") -> None:
    """Make a schedule of one's own known by `name`, to `build` and as the configuration's `schedule`.

    builder: a function (pp, num_microbatches) -> per rank a list of actions; or a CSV file, which holds one pp and one
    number of micro-batches (chunks and placement are then the file's). What it builds is validated by `build`.
    Raises ScheduleError if the name is taken.
    """
    if name in _REGISTRY:
        raise ScheduleError(f"there is a schedule {name!r} already: register yours under another name")
    if callable(builder):
        _REGISTRY[name] = Entry(name=name, chunks=chunks, placement=placement, splits=True, build=builder)
    else:
        _REGISTRY[name] = replace(_entry_of_file(str(builder)), name=name)


def _from_file(stored: Schedule) -> Builder:
    def build_from_file(pp: int, num_microbatches: int) -> Table:
        if (pp, num_microbatches) != (stored.pp, stored.num_microbatches):
            raise ScheduleError(
                f"{stored.name} is a schedule of pp {stored.pp} and {stored.num_microbatches} micro-batches, not of pp"
                f" {pp} and {num_microbatches}"
            )
        return stored.items

    return build_from_file


@lru_cache(maxsize=64)
def build(
    name: str,
    *,
    pp: int,
    num_microbatches: int,
    chunks: int | None = None,
    group_size: int | None = None,
    short: bool = False,
) -> Schedule:
    """The schedule `name` for pp ranks and num_microbatches micro-batches per flush; the same object when asked again.

    short: a flush of fewer micro-batches than the schedule takes runs as the first ones of the least that it takes.
    chunks: model chunks per rank, which only the interleaved schedule leaves open (default 2). group_size: its
    microbatch_group_size_per_vp_stage (default pp). `name` may be a CSV file's path.
    Raises ScheduleError if the schedule does not exist for these sizes. A registered one is validated.
    """
    if pp < 1 or num_microbatches < 1:
        raise ScheduleError(f"pp {pp} and {num_microbatches} micro-batches: both must be at least 1")
    known = entry(name)
    if short and num_microbatches < (least := known.least(pp)):
        return _first(build(name, pp=pp, num_microbatches=least, chunks=chunks), num_microbatches)
    if known.chunks is not None and chunks not in (None, known.chunks):
        raise ScheduleError(
            f"schedule {name} has {known.chunks} model chunk{'s' * (known.chunks > 1)} per rank, not {chunks}: set"
            f" virtual_pipeline_model_parallel_size to {known.chunks}, or leave it out"
        )
    if known.build is None:
        chunks = chunks or 2
        table = interleaved(pp, num_microbatches, chunks=chunks, group_size=group_size or pp)
    else:
        chunks = known.chunks or 1
        table = known.build(pp, num_microbatches)
    schedule = make_schedule(
        name, num_microbatches=num_microbatches, placement=known.placement, chunks=chunks, items=table
    )
    schedule = replace(schedule, by_megatron=known.by_megatron)
    return schedule if name in BUILT_IN else _validated(schedule)


def _first(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule with its first micro-batches alone: what is left keeps its order, so it is as free of deadlock."""

    def kept(item: Item) -> Item | None:
        if isinstance(item, Pair):
            left = [action for action in (item.forward, item.backward) if action.microbatch < num_microbatches]
            return item if len(left) == 2 else left[0] if left else None
        return item if item.microbatch < num_microbatches else None

    items = tuple(tuple(item for each in rank if (item := kept(each)) is not None) for rank in schedule.items)
    return replace(schedule, num_microbatches=num_microbatches, items=items)


def _validated(schedule: Schedule) -> Schedule:
    validate(schedule)
    return schedule


# --- the builders ---------------------------------------------------------------------------------------------------


def gpipe(pp: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards in the same order."""
    passes = [Action(kind, 0, m) for kind in ("F", "B") for m in range(num_microbatches)]
    return [passes] * pp


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
        self._next = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}
        self._owed: deque[tuple[int, int]] = deque()

    def count(self, kind: Kind, chunk: int) -> int:
        """How many there are of `kind`; a B counts as I and W."""
        return self._next[kind, chunk]

    def _count_up(self, kind: str, chunk: int) -> int:
        self._next[kind, chunk] += 1
        return self._next[kind, chunk] - 1

    def forward(self, chunk: int) -> None:
        self.items.append(Action("F", chunk, self._count_up("F", chunk)))

    def input_grad(self, chunk: int) -> None:
        self.items.append(Action("I", chunk, self._count_up("I", chunk)))
        self._owed.append((chunk, self._next["I", chunk] - 1))

    def weight_grad(self, chunk: int | None = None) -> None:
        """The oldest weight gradient that is owed, of `chunk` or (None) of either; nothing if none is."""
        for at in self._owed:
            if chunk is None or at[0] == chunk:
                self._owed.remove(at)
                self.items.append(Action("W", *at))
                self._next["W", at[0]] += 1
                return

    def backward(self, chunk: int) -> None:
        self.items.append(self._full_backward(chunk))

    def fused(self, forward_chunk: int, backward_chunk: int) -> None:
        forward = Action("F", forward_chunk, self._count_up("F", forward_chunk))
        self.items.append(Pair(forward, self._full_backward(backward_chunk)))

    def _full_backward(self, chunk: int) -> Action:
        self._count_up("W", chunk)
        return Action("B", chunk, self._count_up("I", chunk))


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
    for _ in range(2 * (pp - rank) - 1):  # down the V while the far ranks fill
        at.forward(0)
    for _ in range(rank):  # both arms
        at.forward(1)
        at.forward(0)
    for _ in range(pp - rank):  # the first micro-batches come back up
        at.forward(1)
        at.input_grad(1)
        at.weight_grad(1)
    while at.count("F", 1) < m:  # steady: each chunk gives and takes one micro-batch
        if at.count("F", 0) < m:
            at.forward(0)
        at.input_grad(0)
        at.weight_grad(0)
        at.forward(1)
        at.input_grad(1)
        at.weight_grad(1)
    for _ in range(rank):  # drain: input gradients first, others wait for them
        at.input_grad(0)
        at.input_grad(1)
    for _ in range(pp - rank):
        at.input_grad(0)
        at.weight_grad(0)
    for chunk in (1, 0):
        while at.count("W", chunk) < m:
            at.weight_grad(chunk)
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
    """The eight phases, in the shorthand of DualPipe's diagram: nF0 is n forwards of chunk 0."""
    at, below = _VRank(), pp - rank - 1
    for _ in range(2 * below):  # nF0
        at.forward(0)
    for _ in range(rank + 1):  # nF0F1
        at.forward(0)
        at.forward(1)
    for _ in range(below):  # nI1W1F1
        at.input_grad(1)
        at.weight_grad()
        at.forward(1)
    for i in range(m - 2 * pp + rank + 1):  # nF0B1-F1B0
        if i == 0 and rank == pp - 1:
            # The tip of the V feeds itself: its first backward waits for no other rank, so the forward goes ahead.
            at.forward(0)
            at.backward(1)
        else:
            at.fused(0, 1)
        at.fused(1, 0)
    for _ in range(below):  # nB1-F1B0
        at.backward(1)
        at.fused(1, 0)
    _dualpipev_drain(at, below, rank)
    return at.items


def _dualpipev_drain(at: _VRank, below: int, rank: int) -> None:
    """nB1B0, nW0B0, nW0; in the second half of nB1B0 weight gradients are put off, to be done in the gaps after it."""
    for i, chunk in enumerate([1, 0] * (rank + 1)):
        if i < rank + 1:
            at.backward(chunk)
        else:
            at.input_grad(chunk)
    for _ in range(below):
        at.weight_grad()
        at.input_grad(0)
    for _ in range(rank + 1):
        at.weight_grad()


_BUILT_IN_ENTRIES = (
    Entry(name="1f1b", title="1F1B", build=one_forward_one_backward, by_megatron=True),  # arXiv 2104.04473
    Entry(name="interleaved", title="interleaved 1F1B", chunks=None, by_megatron=True),  # the same, section 2.2
    Entry(name="gpipe", title="GPipe", build=gpipe),  # Huang et al., arXiv 1811.06965
    Entry(name="zb-h1", title="ZB-H1", build=zb_h1, splits=True),  # Qi et al., arXiv 2401.10241
    Entry(
        name="zbv", title="ZB-V", chunks=2, placement="v", build=zbv, splits=True, least=lambda pp: 2 * pp - 1
    ),  # the same, section 6
    Entry(
        name="dualpipev", title="DualPipeV", chunks=2, placement="v", build=dualpipev, splits=True,
        least=lambda pp: 2 * pp,
    ),  # DeepSeek-AI/DualPipe, arXiv 2412.19437
    Entry(name="v-half", title="V-Half", chunks=2, placement="v", build=v_half, splits=True),  # arXiv 2405.15362
    Entry(name="v-min", title="V-Min", chunks=2, placement="v", build=v_min, splits=True),
)  # fmt: skip
_REGISTRY.update({each.name: each for each in _BUILT_IN_ENTRIES})
BUILT_IN = tuple(_REGISTRY)


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
            f" {m}: raise pp_microbatches or grad_accum_steps until their product is at least {pp}."
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
            f" least pipeline_model_parallel_size {pp}: make it {either(counts)} micro-batches (grad_accum_steps *"
            f" pp_microbatches), or set {key} to {either(groups)}."
        )
