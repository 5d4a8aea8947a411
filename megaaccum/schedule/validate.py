"""Proof that a schedule can run: complete, in order, free of deadlock. And what it holds in memory.

`validate(schedule)` raises a ScheduleError that points at the action, or returns a `Footprint`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import NAMES, Action, Item, Schedule, passes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The most that each rank holds at one time during a flush, in passes of one micro-batch through one chunk.

    in_flight[rank]: forwards whose input gradient is not done (the pass that runs counts): that many activations live.
    deferred[rank]: input gradients whose weight gradient is not done (a full backward defers nothing): for each, inputs
    and output gradients of the chunk's matrices live on. The two peaks may lie at different times.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]


def validate(schedule: Schedule) -> Footprint:
    """Prove that `schedule` runs to its end on ranks that do their actions in order; returns their footprint.

    The rules: every micro-batch has on every chunk one F and then either one B or one I and later one W; forwards of a
    chunk are in micro-batch order (Megatron's data iterators only go on); and no rank waits for an action that waits
    for it. Sends do not wait, and messages between two ranks may be asked for in another order than they are sent.

    Raises ScheduleError (a ConfigError) with the rank and the action. Does not check sizes against a configuration.
    """
    peaks = [_check_rank(schedule, rank) for rank in range(schedule.pp)]
    _check_progress(schedule)
    return Footprint(in_flight=tuple(live for live, _ in peaks), deferred=tuple(owed for _, owed in peaks))


def _fail(schedule: Schedule, rank: int, text: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}, rank {rank}: {text}")


_AFTER = {"F": (0, 1), "I": (1, 2), "B": (1, 3), "W": (2, 3)}
"""The state a micro-batch must be in before each pass (0 untouched, 1 F done, 2 I done, 3 all), and the state after."""


def _check_rank(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Completeness and local order on one rank; (peak in flight, peak deferred)."""
    m, chunks = schedule.num_microbatches, schedule.chunks
    state = bytearray(m * chunks)
    next_forward = [0] * chunks
    live = owed = peak_live = peak_owed = 0
    for action in schedule.actions(rank):
        kind, chunk, microbatch = action
        if not (0 <= chunk < chunks and 0 <= microbatch < m):
            raise _fail(schedule, rank, f"{action.describe()} is outside {chunks} chunks and {m} micro-batches")
        needed, then = _AFTER[kind]
        at = chunk * m + microbatch
        if state[at] != needed:
            raise _fail(schedule, rank, _wrong_order(action, state[at]))
        state[at] = then
        if kind == "F":
            if microbatch != next_forward[chunk]:
                due = action._replace(microbatch=next_forward[chunk])
                why = "forwards of a chunk go in the order of micro-batches, as data iterators give them"
                raise _fail(schedule, rank, f"{action.describe()} comes before {due}; {why}")
            next_forward[chunk] += 1
            live += 1
            if live > peak_live:
                peak_live = live
        elif kind == "W":
            owed -= 1
        else:
            live -= 1
            if kind == "I":
                owed += 1
                if owed > peak_owed:
                    peak_owed = owed
    if state.count(3) != len(state):
        raise _fail(schedule, rank, _missing(schedule, state))
    return peak_live, peak_owed


def _wrong_order(action: Action, state: int) -> str:
    """Why `action` cannot come when its micro-batch is in `state`."""
    if _AFTER[action.kind][0] < state:
        return f"{action.describe()} comes when that is done already"
    needs = action._replace(kind="I" if action.kind == "W" and state == 1 else "F")
    return f"{action.describe()} comes before {needs} ({NAMES[needs.kind]})"


def _missing(schedule: Schedule, state: bytearray) -> str:
    """Names the first action that is missing."""
    at = next(i for i, value in enumerate(state) if value != 3)
    chunk, microbatch = divmod(at, schedule.num_microbatches)
    return f"{Action('FIW'[state[at]], chunk, microbatch).describe()} is missing"  # type: ignore[arg-type]


# --- messages --------------------------------------------------------------------------------------------------------

Channel = tuple[int, int, str]
"""(sending rank, receiving rank, F for activations or B for their gradients)."""
Message = tuple[int, int]
"""(stage that sends, micro-batch)."""


def sends(schedule: Schedule, rank: int) -> dict[Channel, list[Message]]:
    """The rank's sends, in order, for each channel."""
    found: dict[Channel, list[Message]] = defaultdict(list)
    stages, owner, last = schedule.stages[rank], schedule.rank_of_stage, schedule.num_stages - 1
    for kind, chunk, microbatch in schedule.actions(rank):
        stage = stages[chunk]
        if kind == "F" and stage < last and owner[stage + 1] != rank:
            found[rank, owner[stage + 1], "F"].append((stage, microbatch))
        elif kind in "IB" and stage > 0 and owner[stage - 1] != rank:
            found[rank, owner[stage - 1], "B"].append((stage, microbatch))
    return dict(found)


def receives(schedule: Schedule, rank: int) -> dict[Channel, list[Message]]:
    """The rank's receives over each channel, in the order in which it is sent. The rank may ask for it in another:
    then it keeps what came too early."""
    stages, owner, last = schedule.stages[rank], schedule.rank_of_stage, schedule.num_stages - 1
    sources = {owner[other] for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last} - {rank}
    found: dict[Channel, list[Message]] = {}
    for source in sorted(sources):
        found |= {channel: sent for channel, sent in sends(schedule, source).items() if channel[1] == rank}
    return found


def sends_needed(schedule: Schedule, rank: int, *, forward_only: bool = False) -> dict[tuple[str, Message], int]:
    """How many of the rank's sends come before each message (kind, (stage that sends, micro-batch)), which depends on
    the last of them, over whatever ranks. forward_only: in a flush of forwards alone. The schedule is valid."""
    queues: Sequence[Sequence[Item]] = schedule.items
    if forward_only:
        queues = [[each for each in schedule.actions(r) if each.kind == "F"] for r in range(schedule.pp)]
    owner, last, sent = schedule.rank_of_stage, schedule.num_stages - 1, 0
    latest = [0] * schedule.pp
    """On each rank, the number of `rank`'s sends that its next action comes after."""
    made: dict[tuple[str, Message], int] = {}
    for here, item in in_order(schedule, queues):
        latest[here] = max([latest[here], *(made[source] for source in _sources(schedule, here, item))])
        for action in passes_of([item]):
            stage, (kind, step) = schedule.stage(here, action), _GIVES[action.kind]
            if kind and 0 <= stage + step <= last:
                if here == rank and owner[stage + step] != rank:
                    sent += 1
                    latest[here] = sent
                made[kind, (stage, action.microbatch)] = latest[here]
    return made


def _sources(schedule: Schedule, rank: int, item: Item) -> list[tuple[str, Message]]:
    """The messages, from whatever rank, that an item of `rank` needs."""
    found: list[tuple[str, Message]] = []
    for action in passes_of([item]):
        kind, step = _GIVES[action.kind]
        stage = schedule.stage(rank, action) - step
        if kind and 0 <= stage < schedule.num_stages:
            found.append((kind, (stage, action.microbatch)))
    return found


_GIVES = {"F": ("F", 1), "I": ("B", -1), "B": ("B", -1), "W": ("", 0)}
"""The message that each pass takes and gives, and to which stage from its own."""


# --- progress --------------------------------------------------------------------------------------------------------


def in_order(schedule: Schedule, queues: Sequence[Sequence[Item]]) -> Iterator[tuple[int, Item]]:
    """(rank, item) of all that ranks come to which do their `queues` in order, each after what it waits for. A fused
    pair begins when the inputs of both are there."""
    m, last, owner = schedule.num_microbatches, schedule.num_stages - 1, schedule.rank_of_stage
    made = {kind: bytearray(m * (last + 1)) for kind in ("F", "B")}
    left, waits = [iter(queue) for queue in queues], [False] * schedule.pp
    due, ready = [next(items, None) for items in left], list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        stages, item, waits[rank] = schedule.stages[rank], due[rank], False
        while item is not None:
            passes = item if len(item) == 2 else (item,)
            for kind, chunk, microbatch in passes:
                given, step = _GIVES[kind]
                source = stages[chunk] - step
                if given and 0 <= source <= last and not made[given][source * m + microbatch]:
                    waits[rank] = True
            if waits[rank]:
                break
            yield rank, item
            for kind, chunk, microbatch in passes:
                given, step = _GIVES[kind]
                if given:
                    stage = stages[chunk]
                    made[given][stage * m + microbatch] = 1
                    if 0 <= stage + step <= last and waits[owner[stage + step]]:
                        waits[owner[stage + step]] = False
                        ready.append(owner[stage + step])
            item = next(left[rank], None)
        due[rank] = item


@lru_cache
def warm_up(schedule: Schedule) -> tuple[int, ...]:
    """By rank, the number of its first items that are forwards and need nothing but those of other ranks: all ranks can
    come that far and stop.

    In a schedule whose ranks end one after the other, a rank that is done can begin the next step's forwards while
    others still work (`speculative_step`). Its verdict on the step is there before its first backward: in any pipeline
    a backward comes after a forward of every stage, so after the end of the flush before on every rank."""
    heads = [[*takewhile(lambda item: len(item) == 3 and item.kind == "F", items)] for items in schedule.items]
    counts = Counter(rank for rank, _ in in_order(schedule, heads))
    return tuple(counts[rank] for rank in range(schedule.pp))


def _check_progress(schedule: Schedule) -> None:
    """Raise with who waits for whom, rank by rank, if some ranks wait for ever."""
    done = Counter(rank for rank, _ in in_order(schedule, schedule.items))
    lines = [f"schedule {schedule.name} cannot end: every rank that is not done waits for another"]
    for rank, items in enumerate(schedule.items):
        for each in passes_of(items[done[rank] : done[rank] + 1]):
            for _, (other, microbatch) in _sources(schedule, rank, each):
                owner = schedule.rank_of_stage[other]
                needed = Action("F" if each.kind == "F" else "I", schedule.stages[owner].index(other), microbatch)
                lines.append(f"rank {rank} waits in {each.describe()} for {needed} of rank {owner}")
    if len(lines) > 1:
        raise ScheduleError("\n".join(lines))
