"""Which checkpoint a run goes on from, and what of it may differ from the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from megaaccum.checkpoint.folders import DamagedCheckpoint, to_try
from megaaccum.distributed.agreement import assert_same_on_ranks, printed_once, raise_on_all_ranks
from megaaccum.errors import CheckpointError


def first_good[Taken](
    folder: str | os.PathLike[str], take: Callable[[Path], Taken], report: Callable[[str], None]
) -> Taken | None:
    """`take` of the current checkpoint of `folder`, or, where that is damaged, of the one before it, and so on; None
    where `folder` holds no checkpoint. Each damaged one is `report`ed. Collective over the world.

    Raises CheckpointError on every rank when none is whole, or what `take` raises beside DamagedCheckpoint, on all of
    them; RankDisagreement when hosts see different folders.
    """
    found, problem = raise_on_all_ranks(to_try, folder)
    # Ranks that each resume from what their own host has would wait for each other for ever.
    assert_same_on_ranks(
        "the checkpoints to resume from; hosts have to share their folder",
        " ".join(path.name for path in found) or "none",
    )
    problems = [problem] if problem else []
    for checkpoint in found:
        if problems:
            report(f"{problems[-1]}: the run goes on from {checkpoint.name}")
        try:
            return take(checkpoint)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if not problems:
        return None
    remedy = f"{folder} holds no other whole checkpoint: start afresh with --no_load"
    raise printed_once(CheckpointError("\n".join([*problems, remedy])))


def settle(checkpoint: Path, differing: Mapping[str, Mapping[str, str]], override: Collection[str]) -> list[str]:
    """Lines on what differs between a checkpoint and the configuration, all of it asked for by name. differing: texts
    with what to set back, by the name under which they may be asked for (the key `override`). Raises CheckpointError,
    naming all that was not asked for."""
    refused = [name for name, texts in differing.items() if texts and name not in override]
    if refused:
        texts = [f"{text}; {remedy}" for name in refused for text, remedy in differing[name].items()]
        names = ",".join(refused)
        raise CheckpointError("\n".join([f"{checkpoint} is of another run:", *texts, f"or add --override {names}"]))
    return [f"override {name}: {text}" for name, texts in differing.items() for text in texts]
