"""`megaaccum train` before it starts a rank: what a launcher has to give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.pretrain.launch import local
from megaaccum.pretrain.metrics.receipts import LAUNCHED
from tests.support.whole_runs import LAUNCHER

CONFIG = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
RANK = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "0"},
        {name: value for name, value in RANK.items() if name != "MASTER_ADDR"},
        RANK | {"RANK": "2"},
        RANK | {"RANK": "x"},
        RANK | {"WORLD_SIZE": "two"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    ],
    ids=["rank alone", "no address", "beyond the world", "no number", "no world", "mpirun"],
)
def test_half_a_launcher_is_refused_at_once(given: dict[str, str], monkeypatch, capsys) -> None:
    """Such a rank ended in a traceback, or waited ten minutes for others; each of mpirun's started all ranks."""
    monkeypatch.setattr("megaaccum.cli.train._train", lambda plan: pytest.fail("it trained"))
    monkeypatch.setattr(local, "launch_local", lambda *args, **keys: pytest.fail("it started ranks"))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", str(CONFIG)]) == 1
    text = capsys.readouterr().err
    assert "a launcher has started this process with RANK=" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("given", [RANK, RANK | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}])
def test_a_rank_of_a_launcher_trains(given: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr("megaaccum.cli.train._train", lambda plan: plan.layout.world_size)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", str(CONFIG)]) == 2


@pytest.mark.parametrize("given", [{}, RANK])
def test_the_time_of_a_start_is_not_left_to_what_follows_in_the_process(given: dict[str, str], monkeypatch) -> None:
    """A notebook's next run would count its start from this one."""
    seen = []
    monkeypatch.setattr("megaaccum.cli.train._train", lambda plan: seen.append(os.environ[LAUNCHED]) or 0)
    monkeypatch.setattr(local, "launch_local", lambda *args, **keys: seen.append(os.environ[LAUNCHED]) or 0)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", str(CONFIG)]) == 0
    assert len(seen) == 1
    assert LAUNCHED not in os.environ
