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

    loaded: list[Path] = []
    keys = {"output_dir": ("runs/first", "run.yaml"), "save": (save or "runs/first/checkpoints", "derived")}
    if save is not None:
        keys["save"] = save, "run.yaml"
    section = {name: {"value": value, "from": origin} for name, (value, origin) in keys.items()}
    wanted = Generation(Path("moved"), ["a"], 1)
    vars(wanted).update(_receipt={"data": {"vocab_size": 64}, "configuration": {"run": section}, "megatron": {}})
    planned = plan(output_dir="runs/first")
    wanted.load(SimpleNamespace(plan=planned, load=lambda path: loaded.append(path) is None))
    assert loaded == [Path(folder)]
