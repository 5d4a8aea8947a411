"""Benchmarks that run by hand keep to the package: each starts, and what `observing` replaces and leaves out exists."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace

import pytest

from benchmarks import libraries, muon, observing, sync_modes, tune
from benchmarks.__main__ import BY_NAME
from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.observe.memory import HighWater
from megaaccum.step import flush, train_step


@pytest.mark.parametrize("name", BY_NAME)
def test_a_benchmark_tells_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_observers_that_are_timed_exist() -> None:
    count = SimpleNamespace(calls=3)
    found = observing.own_seconds(lambda: SimpleNamespace(traffic={"dp": count}), 2)  # type: ignore[arg-type, return-value]
    assert set(found) == {"memory", "phases", "log and receipt", "ranks", "counting"}


def test_nothing_is_noted_inside() -> None:
    marks = HighWater()
    with observing._nothing_is_noted():
        marks.note("p2p", 8)
        marks.measure(lambda: pytest.fail("it looked"))
    assert marks.pop() == {}


def test_a_step_without_observers_finds_all_that_it_calls() -> None:
    source = inspect.getsource(train_step) + inspect.getsource(flush)
    called = set(re.findall(r"(?:self|steps)\.observer\.(\w+)", source))
    assert {"watching", "flushing", "phase", "pop", "trace"} <= called
    nothing = observing._NoObserver(Trace())
    assert [name for name in called - {"last_microbatch"} if not hasattr(nothing, name)] == []


@pytest.mark.parametrize(
    ("main", "argv", "words"),
    [
        (sync_modes.main, ["--megabits", "0", "--only", "ddp"], "--only ddp: there are deepspeed zero-3 resident"),
        (tune.main, ["--all", "2"], "at least 3"),
        (muon.main, ["--steps", "2"], "at least 3"),
        (libraries.main, ["--only", "nothing"], "fits none of"),
    ],
)
def test_flags_that_leave_nothing_to_measure(main, argv, words, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
