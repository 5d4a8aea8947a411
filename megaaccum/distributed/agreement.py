"""Ranks agree on what they are about to do before the first message that would hang if they did not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from megaaccum.errors import LaunchError, MegaaccumError, RankDisagreement
from megaaccum.platform import cpu

MOST_SHOWN = 8
"""Ranks or keys that a message names."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Facts that all ranks have of each other. stop: some rank wishes to stop after this step. told: for each name of
    `tell` what every rank said, in rank order."""

    stop: bool
    told: dict[str, list[int]]


def check_agreement(
    digest: str,
    *,
    details: Callable[[], Mapping[str, object]] = dict,
    tell: Mapping[str, int] | None = None,
    usual: Mapping[str, int] | None = None,
    stop: bool = False,
    problem: MegaaccumError | None = None,
    **facts: int,
) -> Agreed:
    """Compare `digest` (of the plan) and `facts` over all ranks: one all-reduce of one integer, however many facts and
    ranks there are. `tell` is not compared, and neither is `stop`, since a signal may reach ranks in different steps.
    Every rank's numbers are gathered where ranks do not all say the same, and where one of `tell` is not what `usual`
    says on every rank; `told` is empty elsewhere.

    Raises RankDisagreement on every rank, naming each fact that differs and who says what. Where the digests differ,
    `details` (what they are made of) is asked for, and the keys that differ are named. If any rank comes with a
    `problem`, every rank raises that.
    """
    facts, told = {"plan": _digest(digest), **facts}, dict(tell or {})
    numbers = facts | told | {"stop": int(stop), "problem": int(problem is not None)}
    expected: Mapping[str, int | None] = dict.fromkeys(told) if usual is None else usual
    compared = [number for name, number in numbers.items() if name in expected or name not in told]
    if (
        _is_everyones(str(compared))
        and problem is None
        and all(told[name] == value for name, value in expected.items())
    ):
        return Agreed(stop, {})
    columns = dict(zip(numbers, _everyones(list(numbers.values())), strict=True))
    if any(columns["problem"]):
        _raise_each(problem)
    if differing := [name for name in facts if len(set(columns[name])) > 1]:
        texts = [_disagreement(name, columns[name], details) for name in differing]
        raise printed_once(RankDisagreement("; ".join(texts)))
    is_usual = all(set(columns[name]) == {value} for name, value in expected.items())
    return Agreed(any(columns["stop"]), {} if is_usual else {name: columns[name] for name in told})


def _is_everyones(text: str) -> bool:
    """Whether every rank says `text`: the sum of all digests is then as many times this rank's. Where ranks say
    different things none finds that they agree, but for a chance of 2^-44."""
    own = _digest(text) >> 16  # the sum of 2^19 of these fits
    total = torch.tensor(own, dtype=torch.int64).to(cpu.device())
    dist.all_reduce(total)
    return int(total) == own * dist.get_world_size()


def _everyones(numbers: list[int]) -> list[list[int]]:
    """For each number what every rank has, in rank order."""
    mine = torch.tensor(numbers, dtype=torch.int64).to(cpu.device())
    everyone = torch.empty(dist.get_world_size() * len(numbers), dtype=torch.int64, device=cpu.device())
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(-1, len(numbers)).t().tolist()


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def assert_same_on_ranks(what: str, value: str) -> None:
    """Raise RankDisagreement on every rank, saying who has which, unless all ranks have the same `value`; collective
    over the world."""
    if _is_everyones(value):
        return
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    raise printed_once(RankDisagreement(describe(what, everyone)))


def raise_on_all_ranks[**P, T](action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `action` on every rank of the world and return this rank's result; if any rank fails, every rank raises.

    For work that can fail on some ranks and that other ranks do not wait for: the others would go on into a collective
    and stay there. `action` may hold collectives only if it fails on all ranks before or after each of them. Raises
    the MegaaccumError of the rank that failed; for a bug on one rank, that bug there and a LaunchError elsewhere.
    """
    problem: BaseException | None = None
    try:
        result = action(*args, **kwargs)
    except Exception as error:
        problem = error
    raise_together(problem)
    return result


def raise_together(problem: BaseException | None) -> None:
    """Raise on every rank what any rank brings as `problem`; return if none brings one. Collective over the world: one
    integer where none does."""
    some = torch.tensor(problem is not None, dtype=torch.uint8).to(cpu.device())
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    if some:
        _raise_each(problem)


def _raise_each(problem: BaseException | None) -> NoReturn:
    """Raise on every rank what some bring as `problem`. Collective over the world."""
    mine = None if problem is None else _portable(problem)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if problem is not None and not isinstance(problem, MegaaccumError):
        raise problem
    kind = next(each[0] for each in everyone if each)
    said: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        if each:
            said.setdefault(each[1], []).append(rank)
    texts = [text if len(ranks) == len(everyone) else f"{_ranks(ranks)}: {text}" for text, ranks in said.items()]
    raise printed_once(kind("\n".join(texts))) from problem


def _portable(problem: BaseException) -> tuple[type[MegaaccumError], str]:
    """Class and text under which other ranks raise `problem`."""
    if isinstance(problem, MegaaccumError):
        return type(problem), str(problem)
    return LaunchError, f"ended with {type(problem).__name__}: {problem}"


def printed_once[E: MegaaccumError](error: E) -> E:
    """`error`, which every rank is about to raise, marked so that rank 0 alone prints it."""
    error.printed_by = "rank 0"
    return error


def describe(name: str, values: list) -> str:
    """`ranks disagree about NAME (rank 0: 1; ranks 1, 2: 2)` for what each rank said, in rank order."""
    said = "; ".join(f"{_ranks([r for r, x in enumerate(values) if x == v])}: {v}" for v in dict.fromkeys(values))
    return f"ranks disagree about {name} ({said})"


def _disagreement(name: str, values: list[int], details: Callable[[], Mapping[str, object]]) -> str:
    if name != "plan":
        return describe(name, values)
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {key: str(value) for key, value in details().items()})
    said = [each or {} for each in everyone]
    keys = [key for key in dict.fromkeys(key for each in said for key in each) if len({e.get(key) for e in said}) > 1]
    if not keys:
        return describe("the plan", [f"digest {value:x}" for value in values])
    texts = [describe(key, [each.get(key, "nothing") for each in said]) for key in keys[:MOST_SHOWN]]
    more = f"; and about {len(keys) - MOST_SHOWN} more keys" if len(keys) > MOST_SHOWN else ""
    return "; ".join(texts) + more + ". Start every rank with the same configuration and command line"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:MOST_SHOWN]))}" + (", ..." if len(ranks) > MOST_SHOWN else "")
