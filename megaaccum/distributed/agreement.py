"""Checks that all ranks are about to do the same thing, before the first message that would hang otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from megaaccum.errors import LaunchError, MegaaccumError, RankDisagreement, as_users_error, listed
from megaaccum.platform import cpu

MOST_SHOWN = 8
"""Ranks or keys that a message names."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Facts that all ranks have of each other. stop: some rank wishes to stop after this step. told: for each name of
    `tell` every rank's number, in rank order. sums: over all ranks, of `add`."""

    stop: bool
    told: dict[str, list[int]]
    sums: tuple[int, int]


def check_agreement(
    digest: str,
    *,
    details: Callable[[], Mapping[str, object]] = dict,
    tell: Mapping[str, int] | None = None,
    usual: Mapping[str, int] | None = None,
    stop: bool = False,
    problem: Exception | None = None,
    add: tuple[int, int] = (0, 0),
    **facts: int,
) -> Agreed:
    """Compare `digest` (of the plan) and `facts` over all ranks, and add up `add`: one all-reduce of three integers,
    however many facts and ranks there are. `tell` is not compared, and neither is `stop`, since a signal may reach
    ranks in different steps. If the sum of digests does not match, or one of `tell` is not its `usual` number on every
    rank, all ranks gather each other's numbers; otherwise `told` is empty.

    Raises RankDisagreement on every rank, naming each fact that differs with every rank's number. If the digests
    differ, `details` (the keys and values of the plan) is called, and the error names the keys that differ. If any rank
    has a `problem`, every rank raises it.
    """
    facts, told = {"plan": _digest(digest), **facts}, dict(tell or {})
    numbers = facts | told | {"stop": int(stop), "problem": int(problem is not None)}
    expected: Mapping[str, int | None] = dict.fromkeys(told) if usual is None else usual
    compared = [number for name, number in numbers.items() if name in expected or name not in told]
    # The sum is a collective, so it comes before what only this rank knows.
    is_same, sums = _compared(str(compared), add)
    if is_same and problem is None and expected.items() <= told.items():
        return Agreed(stop, {}, sums)
    columns = dict(zip(numbers, numbers_of_all(list(numbers.values())), strict=True))
    if any(columns["problem"]):
        _raise_each(problem)
    if differing := [name for name in facts if len(set(columns[name])) > 1]:
        texts = [_disagreement(name, columns[name], details) for name in differing]
        raise RankDisagreement("; ".join(texts)).printed_once()
    is_usual = all(set(columns[name]) == {value} for name, value in expected.items())
    return Agreed(any(columns["stop"]), {} if is_usual else {name: columns[name] for name in told}, sums)


def _compared(text: str, add: tuple[int, int] = (0, 0)) -> tuple[bool, tuple[int, int]]:
    """Whether every rank has the same `text`: the sum of all digests is then a multiple of this rank's. If texts
    differ, a rank finds them equal with probability 2^-44. And the sums of `add`. Collective over the world."""
    own = _digest(text) >> 16  # the sum of 2^19 of these fits
    row = cpu.to_device(torch.tensor([own, *add], dtype=torch.int64))
    dist.all_reduce(row)
    total, *sums = row.tolist()
    return total == own * dist.get_world_size(), (sums[0], sums[1])


def gathered[T](mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `mine`, which is pickled, in rank order. Collective over `group`, default the world."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def distinct_values[T](mine: T, host: dist.ProcessGroup | None) -> list[T]:
    """The different `mine` of all ranks, lists of the same texts on the ranks of a stage: each is sent once, however
    many ranks have it. Collective over `host`, all ranks over gloo (`Groups.host`)."""
    (digests,) = numbers_of_all([_digest(repr(mine))], host)
    found = []
    for source in sorted(map(digests.index, set(digests))):
        box = [mine]
        dist.broadcast_object_list(box, group=host, group_src=source)
        found.append(box[0])
    return found


def numbers_of_all(numbers: list[int], host: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every rank's value of each number, in rank order. Collective over the world. host: all ranks over gloo, for what
    should not pass through the GPU."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    mine = mine if host is not None else mine.to(cpu.device())
    everyone = mine.new_empty(dist.get_world_size() * len(numbers))
    dist.all_gather_into_tensor(everyone, mine, group=host)
    return cast("list[list[int]]", everyone.view(-1, len(numbers)).t().tolist())


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def assert_same_on_ranks(what: str, value: str) -> None:
    """Raise RankDisagreement on every rank, with each rank's value, unless all ranks have the same `value`; collective
    over the world."""
    if not _compared(value)[0]:
        raise RankDisagreement(describe(what, gathered(value))).printed_once()


def raise_on_all_ranks[**P, T](action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `action` on every rank of the world and return this rank's result; if any rank fails, every rank raises.

    For work that can fail on some ranks while others do not wait for it: those would enter a collective and hang.
    `action` may hold collectives only if it fails on all ranks before or after each of them. Raises the MegaaccumError
    of the rank that failed, or one for a file that the system refused; for a bug on one rank, that bug there and a
    LaunchError elsewhere.
    """
    problem: BaseException | None = None
    try:
        result = action(*args, **kwargs)
    except Exception as error:
        problem = error
    raise_together(problem)
    return result


def raise_together(problem: BaseException | None) -> None:
    """Raise on every rank the `problem` that any rank has; return if none has one. Collective over the world: one
    integer if none has."""
    if any_rank(problem is not None):
        _raise_each(problem)


def any_rank(is_so: bool) -> bool:
    """Whether it is so on any rank. Collective over the world."""
    some = torch.tensor(is_so, dtype=torch.uint8).to(cpu.device())
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    return bool(some)


def _raise_each(problem: BaseException | None) -> NoReturn:
    """Raise on every rank the `problem` that some ranks have. Collective over the world."""
    mine: tuple[type[MegaaccumError], str] | None = None
    problem = problem and as_users_error(problem)
    if isinstance(problem, MegaaccumError):
        mine = type(problem), str(problem)
    elif problem is not None:
        mine = LaunchError, f"ended with {type(problem).__name__}: {problem}"
    everyone = gathered(mine)
    if problem is not None and not isinstance(problem, MegaaccumError):
        raise problem
    # The first rank's, and beside a bug, after which an engine cannot be used, one that says so on every rank.
    kind = max((each[0] for each in everyone if each), key=lambda kind: kind is LaunchError)
    said: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        if each:
            said.setdefault(each[1], []).append(rank)
    texts = [text if len(ranks) == len(everyone) else f"{_ranks(ranks)}: {text}" for text, ranks in said.items()]
    raise kind(listed(texts, "\n", most=MOST_SHOWN)).printed_once() from problem


def describe(name: str, values: Sequence[object]) -> str:
    """`ranks disagree about NAME (rank 0: 1; ranks 1, 2: 2)` for every rank's value, in rank order, MOST_SHOWN of
    them."""
    ranks: dict[object, list[int]] = {}
    for rank, each in enumerate(values):
        ranks.setdefault(each, []).append(rank)
    said = listed((f"{_ranks(numbers)}: {each}" for each, numbers in ranks.items()), "; ", most=MOST_SHOWN)
    return f"ranks disagree about {name} ({said})"


def _disagreement(name: str, values: list[int], details: Callable[[], Mapping[str, object]]) -> str:
    if name != "plan":
        return describe(name, values)
    said = gathered({key: str(value) for key, value in details().items()})
    keys = [key for key in dict.fromkeys(key for each in said for key in each) if len({e.get(key) for e in said}) > 1]
    if not keys:
        return describe("the plan", [f"digest {value:x}" for value in values])
    texts = (describe(key, [each.get(key, "nothing") for each in said]) for key in keys)
    return f"{listed(texts, '; ', most=MOST_SHOWN)}. Start every rank with the same configuration"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, most=MOST_SHOWN)}"
