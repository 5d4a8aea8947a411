"""Ranks agree on what they are about to do before the first message that would hang if they did not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaaccum import cpu
from megaaccum.errors import RankDisagreement

MOST_SHOWN = 8
"""Ranks or keys that a message names."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of each other. stop: some rank wishes to stop after this step. told: for each name of `tell`
    what every rank said, in rank order."""

    stop: bool
    told: dict[str, list[int]]


def agree(
    digest: str,
    *,
    details: Callable[[], Mapping[str, object]] = dict,
    tell: Mapping[str, int] | None = None,
    stop: bool = False,
    **facts: int,
) -> Agreed:
    """Compare `digest` (of the plan) and `facts` over all ranks: one all-gather of a few integers per rank. `tell`
    comes along and is not compared; `stop` neither, since a signal may reach ranks in different steps.

    Raises RankDisagreement on every rank, naming each fact that differs and who says what. Where the digests differ,
    `details` (what they are made of) is asked for, and the keys that differ are named.
    """
    facts = {"plan": int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16), **facts}
    told = dict(tell or {})
    numbers = [*facts.values(), *told.values(), int(stop)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=cpu.device())
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64, device=cpu.device())
    dist.all_gather_into_tensor(everyone, mine)
    rows = everyone.view(-1, len(mine)).tolist()
    columns = dict(zip([*facts, *told, "stop"], map(list, zip(*rows, strict=True)), strict=True))
    differing = [name for name in facts if len(set(columns[name])) > 1]
    if differing:
        raise RankDisagreement("; ".join(_disagreement(name, columns[name], details) for name in differing))
    return Agreed(any(columns["stop"]), {name: columns[name] for name in told})


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
