"""The script that other launchers start: what it takes from them."""

import importlib.util
import os
from pathlib import Path

import pytest

from megaaccum.pretrain.launch.local import threads_per_rank

SCRIPT = Path(__file__).parents[3] / "launch" / "pretrain_gpt.py"


@pytest.fixture
def script(monkeypatch):
    """The script as a module, with none of a launcher's variables set."""
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        # Set first, so that what the script sets is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option", ["--local_rank=3", "--local-rank=3"])
def test_the_local_rank_of_the_deepspeed_launcher_is_taken_out(script, option):
    assert script.without_local_rank([option, "--config", "a.yaml", "--lr=1"]) == ["--config", "a.yaml", "--lr=1"]
    assert os.environ["LOCAL_RANK"] == "3"


def test_a_local_rank_in_the_environment_stays(script, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert script.without_local_rank(["--local_rank=3"]) == []
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_cores_are_shared_out(script, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    script.share_cores()
    assert os.environ["OMP_NUM_THREADS"] == str(threads_per_rank(2))


def test_threads_that_were_set_stay(script, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script.share_cores()
    assert os.environ["OMP_NUM_THREADS"] == "7"
