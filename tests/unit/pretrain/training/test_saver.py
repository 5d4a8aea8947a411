"""When a checkpoint is due, and what a folder without one means; without ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaaccum.errors import CheckpointError
from megaaccum.pretrain.training.saver import Saver, continued
from tests.support.configs import plan


def saver(**keys: object) -> Saver:
    engine: Any = SimpleNamespace(plan=plan(**keys), print=print)
    return Saver(engine, data=None)  # type: ignore[arg-type]


def saved(bad: set[int], steps: int, **keys: object) -> list[int]:
    """After which of `steps` steps a checkpoint is written when those in `bad` were bad."""
    of = saver(**keys)
    return [step for step in range(1, steps + 1) if of.is_due(step, step == steps, bad=step in bad)]


def test_after_every_interval_and_at_the_end():
    assert saved(set(), 7, save_interval=3) == [3, 6, 7]
    assert saved(set(), 7, save_interval=3, save_at_end=False) == [3, 6]
    assert saved(set(), 7) == [7]
    assert saved(set(), 7, save_at_end=False) == []


def test_not_after_a_bad_step_but_after_the_next_good_one_or_at_the_end():
    assert saved({3, 4}, 7, save_interval=3) == [5, 6, 7]
    assert saved({3, 4, 5, 6, 7}, 7, save_interval=3) == [7]
    assert saved({7}, 7) == [7]
    assert saved({3, 7}, 7, save_interval=7, save_at_end=False) == []


def test_an_empty_folder_to_load_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saver(load=str(tmp_path))._start_afresh()
    assert "holds no checkpoint (no file named latest): the run starts afresh" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="exit_on_missing_checkpoint is true"):
        saver(load=str(tmp_path), exit_on_missing_checkpoint=True)._start_afresh()


def test_a_step_of_another_programs_run_is_not_looked_for_among_ours(tmp_path: Path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    there = plan(load=str(tmp_path), load_step=3)
    assert continued(there) is there
