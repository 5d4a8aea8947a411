"""Which checkpoint of another program's folder is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights import foreign
from tests.support.configs import make


def test_load_step_names_one_of_deepspeeds_or_lists_what_there_is(tmp_path: Path):
    for step in (3, 5, 10):
        place = tmp_path / f"global_step{step}" / "zero" / "embedding.weight"
        place.mkdir(parents=True)
        (place / "fp32.pt").touch()
    (tmp_path / "latest").write_text("global_step5")
    assert foreign.holds_foreign(tmp_path)
    assert foreign._open(tmp_path, make(), 64).folder.name == "global_step5"
    assert foreign._open(tmp_path, make(), 64, 3).folder.name == "global_step3"
    with pytest.raises(CheckpointError) as caught:
        foreign._open(tmp_path, make(), 64, 4)
    there = "global_step3, global_step5, global_step10"
    assert str(caught.value) == f"load_step 4: {tmp_path} holds no global_step4, but: {there}"


def test_load_step_names_one_of_megatrons_or_lists_what_there_is(tmp_path: Path):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(CheckpointError, match=r"load_step 3: .* holds no iter_0000003, but: iter_0000005"):
        foreign._open(tmp_path, make(), 64, 3)
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match="iter_0000003 is no torch_dist checkpoint"):
        foreign._open(tmp_path, make(), 64, 3)
