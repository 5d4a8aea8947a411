"""An error on one rank is raised on all of them, with the same text; without an error all continue."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from megaaccum.errors import ConfigError, DataError, MegaaccumError
from megaaccum.lab.verification.testing import run_ranks


def cases() -> list[str]:
    """This rank's result of each case."""
    from megaaccum.distributed.agreement import assert_same_on_ranks, raise_on_all_ranks

    rank = os.environ["RANK"]

    def only_on_1(error: Exception) -> str:
        if rank == "1":
            raise error
        return "went well"

    def everywhere() -> None:
        raise ConfigError("a broken rule")

    said = [f"returned {raise_on_all_ranks(str, rank)}"]
    for action in (
        lambda: raise_on_all_ranks(only_on_1, DataError("no such sample")),
        lambda: raise_on_all_ranks(only_on_1, KeyError("a bug")),
        lambda: raise_on_all_ranks(only_on_1, PermissionError(13, "Permission denied", "/data/x")),
        lambda: raise_on_all_ranks(everywhere),
        lambda: assert_same_on_ranks("the checkpoint", "step_4" if rank == "1" else "none"),
        lambda: assert_same_on_ranks("the checkpoint", "step_4"),
    ):
        try:
            said.append(f"returned {action()}")
        except MegaaccumError as error:
            said.append(f"{type(error).__name__}: {error} [{error.printed_by}]")
        except KeyError as error:
            said.append(f"the bug itself: {error}")
    return said


def test_a_problem_of_one_rank_is_raised_on_all():
    zero, one, two = run_ranks(cases, 3)
    assert [zero[0], one[0], two[0]] == ["returned 0", "returned 1", "returned 2"]
    assert one[2] == "the bug itself: 'a bug'"
    assert zero[2] == two[2] == "LaunchError: rank 1: ended with KeyError: 'a bug' [rank 0]"
    assert zero[1] == one[1] == two[1] == "DataError: rank 1: no such sample [rank 0]"
    expected = [
        "ConfigError: rank 1: /data/x: Permission denied [rank 0]",
        "ConfigError: a broken rule [rank 0]",
        "RankDisagreement: ranks disagree about the checkpoint (ranks 0, 2: none; rank 1: step_4) [rank 0]",
        "returned None",
    ]
    assert zero[3:] == one[3:] == two[3:] == expected


def around_a_save() -> list[str]:
    """The errors of a save, and of a run's end, before which one rank's host cannot read or write a file."""
    import torch

    from megaaccum.checkpoint import save_load
    from megaaccum.pretrain.training.saver import Saver
    from megaaccum.pretrain.training.training_run import TrainingRun

    def on_1(*_: object) -> None:
        if os.environ["RANK"] == "1":
            raise DataError("/cache is full")

    saver = Saver(MagicMock(), SimpleNamespace(state=on_1))
    saver.engine.plan.config.run.async_save = False
    run = MagicMock(saver=SimpleNamespace(written=on_1))
    said = []
    for call in (saver.save, lambda: TrainingRun.close(run)):
        with patch.object(save_load, "save", lambda *_, **__: torch.distributed.barrier()):  # which waits for all
            try:
                call()
            except DataError as error:
                said.append(str(error))
    return said


def test_files_that_one_host_cannot_use_around_a_save_end_all_ranks():
    assert run_ranks(around_a_save, 2, timeout=30) == [["rank 1: /cache is full"] * 2] * 2
