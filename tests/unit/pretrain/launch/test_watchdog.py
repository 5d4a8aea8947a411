"""How long a step may take; the end of a process is in tests/multiproc/test_watchdog.py."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

import pytest

from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.pretrain.launch.watchdog import Watchdog


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limits of the steps that are watched; none ends a process."""
    found: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, function: object, args: tuple):
            found.append(seconds)

        def start(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: None)
    return found


def watched(steps: int, limit: float, first: float) -> Watchdog:
    dog = Watchdog(limit, rank=0, folder=Path("unused"), trace=Trace(), first_limit=first)
    for step in range(1, steps + 1):
        with dog.step(step):
            pass
    return dog


def test_the_first_step_of_a_start_may_take_longer(limits: list[float]):
    watched(3, 60.0, 540.0)
    watched(2, 60.0, 30.0)
    assert limits == [540.0, 60.0, 60.0, 60.0, 60.0]


def test_without_a_limit_nothing_is_watched(limits: list[float]):
    watched(2, 0.0, 540.0)
    assert limits == []


def test_the_report_names_the_limit_that_counted(limits: list[float]):
    dog = watched(1, 60.0, 540.0)
    assert "step 2 takes 61 s, more than step_timeout_seconds 60." in dog.report(2, 60.0, 61.0)
    assert "step 1 takes 541 s, more than a first step may (by distributed_timeout_minutes) 540." in dog.report(
        1, 540.0, 541.0
    )
