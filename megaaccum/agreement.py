"""Ranks agree on what they are about to do before the first message that would hang if they did not."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from megaaccum import cpu
from megaaccum.errors import RankDisagreement


def agree(digest: str, *, stop: bool = False, **facts: int) -> bool:
    """Compare `digest` (of the plan) and `facts` over all ranks: one all-gather of a few integers per rank.

    Returns whether any rank wishes to `stop` after this step (a signal may reach ranks in different steps). Raises
    RankDisagreement on every rank, naming each fact that differs and who says what.
    """
    numbers = {"plan": int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16), **facts}
    mine = torch.tensor([*numbers.values(), int(stop)], dtype=torch.int64, device=cpu.device())
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64, device=cpu.device())
    dist.all_gather_into_tensor(everyone, mine)
    rows = everyone.view(-1, len(mine)).cpu()
    if (rows[:, :-1] == rows[0, :-1]).all():
        return bool(rows[:, -1].any())
    texts = [_describe(rows, column, name) for column, name in enumerate(numbers)]
    raise RankDisagreement("; ".join(text for text in texts if text))


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
