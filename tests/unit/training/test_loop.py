"""How long a step took, by a clock that stands still."""

import pytest

from megaaccum.training import loop


def test_a_step_has_the_seconds_of_its_data_and_log_and_none_of_an_evaluation(monkeypatch):
    now = 100.0
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now)
    pace = loop.Pace()
    now += 0.5 + 2.0  # waiting for micro-batches, and the step
    assert pace.lap() == pytest.approx(2.5)
    now += 0.25 + 2.0  # the log of the first, and the second
    assert pace.lap() == pytest.approx(2.25)
    now += 60.0
    pace.leave_out()
    now += 2.0
    assert pace.lap() == pytest.approx(2.0)
