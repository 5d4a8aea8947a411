"""A short campaign of hostile inputs, and readers that break in each way that it has to notice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks import hostile


def test_no_input_breaks_its_reader() -> None:
    outcomes = hostile.run(seed=11, numbers=range(3 * len(hostile.KINDS)))
    assert [each for each in outcomes if each.broken] == []
    assert {each.kind for each in outcomes} == {kind.name for kind in hostile.KINDS}


@pytest.mark.parametrize(
    ("reads", "told"),
    [
        (lambda path: {}["absent"], "KeyError"),
        (lambda path: print("\x1b[31m"), "control character"),
        (lambda path: Path("../outside").write_text("x"), "wrote outside"),
        (lambda path: Path.home().joinpath(".bashrc").write_text("x"), "wrote .bashrc"),
        (lambda path: bytearray(5 << 30), "MemoryError"),
        (lambda path: time.sleep(60), "no end"),
        (lambda path: os.kill(os.getpid(), signal.SIGKILL), "ended with status"),
    ],
    ids=["traceback", "control", "outside", "home", "memory", "time", "killed"],
)
def test_a_broken_reader_is_noticed(reads, told, monkeypatch) -> None:
    monkeypatch.setattr(hostile, "WALL", 2.0)
    (outcome,) = hostile.run(seed=0, numbers=range(1), kinds=(hostile.Kind("broken", "run.yaml", reads),))
    assert told in outcome.broken
