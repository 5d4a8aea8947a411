"""The source of the weights of `megaaccum generate`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.configs import plan


@pytest.mark.parametrize(("save", "folder"), [(None, "moved/checkpoints"), ("kept", "kept")])
def test_the_checkpoints_of_a_run_are_in_the_folder_that_is_given(save: str | None, folder: str) -> None:
    """The output_dir that the run had is of another working directory, or has another name now."""
    from megaaccum.pretrain.training.generate import Generation

    planned, loaded = plan(output_dir="runs/first"), []
    planned.config.run.save = save
    wanted = Generation(Path("moved"), ["a"], 1)
    vars(wanted).update(_receipt={"data": {"vocab_size": 64}}, _run_config=planned.config)
    wanted.load(SimpleNamespace(plan=planned, load=lambda path: loaded.append(path) is None))
    assert loaded == [Path(folder)]
