"""Ranks agree on what they are about to do before the first message that would hang if they did not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from megaaccum import cpu
from megaaccum.errors import LaunchError, MegaaccumError, RankDisagreement


def agree(digest: str, *, stop: bool = False, problem: MegaaccumError | None = None, **facts: int) -> bool:
    """Compare `digest` (of the plan) and `facts` over all ranks: one all-gather of a few integers per rank.

    Returns whether any rank wishes to `stop` after this step (a signal may reach ranks in different steps). Raises
    RankDisagreement on every rank, naming each fact that differs and who says what. If any rank comes with a `problem`,
    every rank raises that.
    """
    numbers = {"plan": int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16), **facts}
    row = [*numbers.values(), int(stop), int(problem is not None)]
    mine = torch.tensor(row, dtype=torch.int64, device=cpu.device())
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64, device=cpu.device())
    dist.all_gather_into_tensor(everyone, mine)
    rows = everyone.view(-1, len(mine)).cpu()
    if rows[:, -1].any():
        _raise_together(problem)
    if (rows[:, :-2] == rows[0, :-2]).all():
        return bool(rows[:, -2].any())
    texts = [_describe(rows, column, name) for column, name in enumerate(numbers)]
    raise said_once(RankDisagreement("; ".join(text for text in texts if text)))


def alike(what: str, value: str) -> None:
    """Raise RankDisagreement on every rank, saying who has which, unless all ranks have the same `value`; collective
    over the world."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    if len(set(everyone)) > 1:
        said = {v: [r for r, x in enumerate(everyone) if x == v] for v in dict.fromkeys(everyone)}
        texts = ", ".join(f"{_ranks(ranks)}: {v}" for v, ranks in said.items())
        raise said_once(RankDisagreement(f"ranks disagree about {what} ({texts})"))


def together[**P, T](action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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
    _raise_together(problem)
    return result


def _raise_together(problem: BaseException | None) -> None:
    """Raise on every rank what any rank brings as `problem`; return if none brings one. Collective over the world."""
    mine = None if problem is None else _portable(problem)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if not any(everyone):
        return
    if problem is not None and not isinstance(problem, MegaaccumError):
        raise problem
    kind = next(each[0] for each in everyone if each)
    said: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        if each:
            said.setdefault(each[1], []).append(rank)
    texts = [text if len(ranks) == len(everyone) else f"{_ranks(ranks)}: {text}" for text, ranks in said.items()]
    raise said_once(kind("\n".join(texts))) from problem


def _portable(problem: BaseException) -> tuple[type[MegaaccumError], str]:
    """Class and text under which other ranks raise `problem`."""
    if isinstance(problem, MegaaccumError):
        return type(problem), str(problem)
    return LaunchError, f"ended with {type(problem).__name__}: {problem}"


def said_once[E: MegaaccumError](error: E) -> E:
    """`error`, which every rank is about to raise, marked so that rank 0 alone prints it."""
    error.said_by = "rank 0"
    return error


def _describe(rows: torch.Tensor, column: int, name: str) -> str:
    values = rows[:, column].tolist()
    if len(set(values)) == 1:
        return ""
    shown = {v: [r for r, x in enumerate(values) if x == v] for v in dict.fromkeys(values)}
    said = ", ".join(f"{_ranks(ranks)}: {f'{v:x}' if name == 'plan' else v}" for v, ranks in shown.items())
    return f"ranks disagree about {name} ({said})"


def _ranks(ranks: list[int]) -> str:
    return (
        f"rank {ranks[0]}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks[:8]))}" + (", ..." if len(ranks) > 8 else "")
    )
