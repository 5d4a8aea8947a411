"""Choice of the checkpoint from which a run resumes, and its permitted differences from the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaaccum.checkpoint.folders import DamagedCheckpoint, resume_candidates
from megaaccum.distributed.agreement import assert_same_on_ranks, raise_on_all_ranks
from megaaccum.errors import CheckpointError, listed


def first_good[Loaded](
    folder: str | os.PathLike[str],
    load: Callable[[Path], Loaded],
    report: Callable[[str], None],
    *,
    step: int | None = None,
) -> Loaded | None:
    """Call `load` with the current checkpoint of `folder` and, while that is damaged, with the one before it. Returns
    what `load` returns, or None if `folder` holds no checkpoint. Each damaged one is passed to `report`. step: only the
    checkpoint of this step will do. Collective over the world.

    Raises CheckpointError on every rank if no checkpoint is whole, RankDisagreement if hosts see different folders, and
    whatever `load` raises other than DamagedCheckpoint.
    """
    found, problem = raise_on_all_ranks(resume_candidates, folder, step)
    # Ranks that resumed from different checkpoints would wait for each other forever.
    assert_same_on_ranks(
        "the checkpoints to resume from; hosts have to share their folder",
        " ".join(path.name for path in found) or "none",
    )
    problems = [problem] if problem else []
    for checkpoint in found:
        if problems:
            report(f"{problems[-1]}: the run resumes from {checkpoint.name}")
        try:
            return load(checkpoint)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if not problems:
        return None
    remedy = f"{folder} holds no other whole checkpoint: set no_load to true to start afresh"
    raise CheckpointError("\n".join([*problems, remedy])).printed_once()


def changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, str]:
    """{difference: remedy} of the keys whose value was another in a checkpoint, which may lack some."""
    return {
        f"{name}: the checkpoint was made with {then[name]}, the configuration says {value}": f"set it to {then[name]}"
        for name, value in now.items()
        if then.get(name, value) != value
    }


def check_differences(
    checkpoint: Path, differing: Mapping[str, Mapping[str, str]], override: Collection[str]
) -> list[str]:
    """Describe the differences of a checkpoint from the configuration, all of which `override` permits. differing:
    {name for `override`: {difference: remedy}}. Raises CheckpointError, naming all that it does not permit."""
    if refused := [name for name, texts in differing.items() if texts and name not in override]:
        texts = [f"{text}; {remedy}" for name in refused for text, remedy in differing[name].items()]
        names = ",".join(refused) + (" (to muon and soap), or no_load_optim to true" if "optimizer" in refused else "")
        raise CheckpointError("\n".join([f"{checkpoint} is of another run:", *texts, f"or set override to {names}"]))
    return [f"override {name}: {text}" for name, texts in differing.items() for text in texts]


def check_kept(others: Sequence[str]) -> None:
    """Raise CheckpointError for an optimizer of a user's own that keeps `others`, which no checkpoint has (stages may
    differ)."""
    if others:
        raise CheckpointError(
            f"the optimizer keeps {listed(others)}, and a checkpoint has tensors of a parameter's shape that begin at"
            " zero: take an optimizer such as torch.optim.AdamW, or save whole_weights alone"
        )
