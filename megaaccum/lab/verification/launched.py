"""A verification on ranks that a launcher started (torchrun, deepspeed): they take the layout's steps.

The first rank leads. It starts the process of the reference and, when a failure is traced to a smaller layout, that
layout's ranks, on its own machine. The others take each layout's steps that it asks for, and receive its verdict.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megaaccum.distributed import preload
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.lab.verification import on_ranks
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.records import Observed
from megaaccum.lab.verification.verdict import Observe, Verdict

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def num_ranks() -> int:
    """Ranks that a launcher started with this one; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Whether this rank prints and writes."""
    return num_ranks() == 1 or int(os.environ["RANK"]) == 0


def together(case: Case, verify: Callable[[Observe], Verdict]) -> Verdict:
    """Run `verify` on the first rank, with a function that observes on all, and return its verdict on every rank.
    Raises on every rank the error that `verify` raises, and ConfigError if the case has another number of ranks."""
    if case.world_size != num_ranks():
        raise ConfigError(
            f"the launcher started {num_ranks()} ranks, but the layout that is verified has {case.world_size}: start"
            f" {case.world_size}, or add --whole to keep the configuration as it is"
        )
    if case.device == "cpu":  # as the ranks that are started here: weights drawn on a GPU differ
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    preload.libraries()  # installs the CPU lane's stand-ins, which precede the import of Megatron
    from megaaccum.distributed.start import end_process_group, start_process_group

    start_process_group(case.plan())
    os.environ.pop(_AGENT_STORE, None)  # ranks that this one starts meet in a store of their own
    try:
        verdict = _lead(verify) if is_first() else _follow()
    except MegaaccumError:
        end_process_group()
        raise
    end_process_group()
    return verdict


def _lead(verify: Callable[[Observe], Verdict]) -> Verdict:
    try:
        verdict = verify(_observe)
    except MegaaccumError as error:
        _send(("raise", (type(error), str(error))))
        raise
    _send(("return", verdict))
    return verdict


def _follow() -> Verdict:
    while True:
        what, content = _send(None)
        if what == "observe":
            _gather(content)
        elif what == "raise":
            kind, text = content
            raise kind(text)
        else:
            return content  # type: ignore[no-any-return]


def _observe(case: Case, steps: int, at_borders: bool) -> list[Observed]:
    """Steps of a layout that all launched ranks take; a smaller one has ranks of its own."""
    if case.world_size != num_ranks():
        return on_ranks.start_and_observe(case, steps, at_borders)
    _send(("observe", (case, steps, at_borders)))
    return _gather((case, steps, at_borders))


def _gather(request: tuple[Case, int, bool]) -> list[Observed]:
    """The steps of every rank, on the first; an empty list elsewhere. Raises what all ranks raise."""
    mine: Any
    try:
        mine = on_ranks.observed(*request)
    except MegaaccumError as error:  # all ranks raise it together
        mine = error
    found: list[Any] = [None] * num_ranks()
    dist.gather_object(mine, found if is_first() else None)
    if is_first() and isinstance(found[0], MegaaccumError):
        raise found[0]
    return found if is_first() else []


def _send(message: Any) -> Any:
    """The first rank's message, on every rank."""
    box = [message]
    dist.broadcast_object_list(box)
    return box[0]
