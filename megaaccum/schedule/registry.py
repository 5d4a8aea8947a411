"""Schedules by name: `build` makes one from (pp, num_microbatches), and users `register` their own.

A built-in schedule is a builder and an `Entry` of `_BUILT_IN_ENTRIES`, from which keys, rules, planner and command line
have its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from megaaccum.errors import ScheduleError, did_you_mean
from megaaccum.schedule.actions import Item, Pair, Placement, Schedule, make_schedule
from megaaccum.schedule.builders import Table, dualpipev, gpipe, interleaved, one_forward_one_backward, zb_h1, zbv
from megaaccum.schedule.table import parse_csv, read_csv
from megaaccum.schedule.v_half import v_half, v_min
from megaaccum.schedule.validate import validate

Builder = Callable[[int, int], Table]
"""(pp, num_microbatches) -> table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A schedule that can be built by name."""

    name: str
    chunks: int | None = 1
    """Model chunks per rank; None if the caller chooses (interleaved)."""
    placement: Placement = "loop"
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
    return Entry(name=path, chunks=stored.chunks, placement=stored.placement, build=partial(_build_from_file, stored))


def register(name: str, builder: Builder | str | Path, *, chunks: int = 1, placement: Placement = "loop") -> None:
    """Make a schedule of one's own known by `name`, to `build` and as the configuration's `schedule`.

    builder: a function (pp, num_microbatches) -> per rank a list of actions; or a CSV file, which holds one pp and one
    number of micro-batches (chunks and placement are then the file's). What it builds is validated by `build`.
    Raises ScheduleError if the name is taken.
    """
    if name in ("none", "auto", *_REGISTRY):
        raise ScheduleError(f"there is a schedule {name!r} already: register yours under another name")
    if callable(builder):
        _REGISTRY[name] = Entry(name=name, chunks=chunks, placement=placement, build=builder)
    else:
        _REGISTRY[name] = replace(_entry_of_file(str(builder)), name=name)


def _build_from_file(stored: Schedule, pp: int, num_microbatches: int) -> Table:
    if (pp, num_microbatches) != (stored.pp, stored.num_microbatches):
        raise ScheduleError(
            f"{stored.name} is a schedule of pp {stored.pp} and {stored.num_microbatches} micro-batches, not of pp"
            f" {pp} and {num_microbatches}"
        )
    return stored.items


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
    Raises ScheduleError if the schedule does not exist for these sizes. A registered one is validated
    here, a built-in one by the executor before it runs.
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
    if name not in BUILT_IN:
        validate(schedule)
    return schedule


def _first(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule with its first micro-batches alone: what is left keeps its order, so it is as free of deadlock."""

    def kept(item: Item) -> Item | None:
        actions = [*item] if isinstance(item, Pair) else [item]
        left = [action for action in actions if action.microbatch < num_microbatches]
        return item if left == actions else next(iter(left), None)

    items = tuple(tuple(item for each in rank if (item := kept(each)) is not None) for rank in schedule.items)
    return replace(schedule, num_microbatches=num_microbatches, items=items)


_BUILT_IN_ENTRIES = (
    Entry(name="1f1b", title="1F1B", build=one_forward_one_backward, by_megatron=True),  # arXiv 2104.04473
    Entry(name="interleaved", title="interleaved 1F1B", chunks=None, by_megatron=True),  # the same, section 2.2
    Entry(name="gpipe", title="GPipe", build=gpipe),  # Huang et al., arXiv 1811.06965
    Entry(name="zb-h1", title="ZB-H1", build=zb_h1),  # Qi et al., arXiv 2401.10241
    # arXiv 2401.10241, section 6.
    Entry(name="zbv", title="ZB-V", chunks=2, placement="v", build=zbv, least=lambda pp: 2 * pp - 1),
    # DeepSeek-AI/DualPipe, arXiv 2412.19437.
    Entry(name="dualpipev", title="DualPipeV", chunks=2, placement="v", build=dualpipev, least=lambda pp: 2 * pp),
    Entry(name="v-half", title="V-Half", chunks=2, placement="v", build=v_half),  # arXiv 2405.15362
    Entry(name="v-min", title="V-Min", chunks=2, placement="v", build=v_min),
)
_REGISTRY.update({each.name: each for each in _BUILT_IN_ENTRIES})
BUILT_IN = tuple(_REGISTRY)
