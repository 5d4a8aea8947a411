"""Seconds by phase, and where the time of a run of several starts went; the clocks are the tests' own."""

from __future__ import annotations

import pytest

from megaaccum.observe.observer import Stopwatch
from megaaccum.pretrain.metrics.goodput import TOTALS, Goodput
from megaaccum.pretrain.metrics.step_record import OF_A_STEP, between_steps, by_phase


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_time_that_passed_whatever_interrupts_them():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 100  # before the first phase
    watch.enter("between")
    passed = 0.0
    for phase, seconds in (("data", 2.0), ("agree", 0.5), ("forward_backward", 4.0), ("norm", 1.0), ("between", 0.25)):
        with watch.during("evaluation") if phase == "norm" else watch.during("between"):
            clock.now += 0.125
        watch.enter(phase)
        clock.now += seconds
        passed += seconds + 0.125
    seen = watch.pop()
    assert sum(seen.values()) == passed
    assert seen["between"] == 0.25 + 4 * 0.125
    assert watch.pop() == {"between": 0.0}


def test_the_log_has_every_second_under_its_own_phases():
    seconds = {"data": 1.0, "agree": 0.5, "norm": 0.25, "verdict": 0.25, "between": 2.0, "checkpoint": 8.0}
    record = by_phase(seconds)
    assert record["seconds_per_step"] == 4.0 == sum(record[f"seconds_{phase}"] for phase in OF_A_STEP)
    assert (record["seconds_other"], record["seconds_checkpoint"], record["seconds_data"]) == (2.5, 8.0, 1.0)
    assert between_steps(seconds) == {"seconds_checkpoint": 8.0}


def train(step: int, time: float, *, data: float = 0.0, rest: float = 4.0, skipped: bool = False, **more: float):
    seconds = {"seconds_data": data, "seconds_forward_backward": rest}
    return {"kind": "train", "step": step, "time": time, "skipped": skipped, **seconds, **more}


def test_every_second_of_a_run_has_one_cause():
    records = [
        {"kind": "start", "step": 0, "launched": 100.0, "time": 108.0},
        train(1, 115.0, data=1.0),
        train(2, 119.0, skipped=True),
        train(3, 130.0, seconds_checkpoint=6.0),  # and a second that no phase has
        train(4, 134.0),
        train(5, 138.0, data=2.0, rest=2.0),  # killed after it, and the checkpoint is that of step 2
        {"kind": "start", "step": 2, "launched": 200.0, "time": 205.0},
        train(3, 209.0),
        train(4, 213.0),
        {"kind": "end", "step": 4, "time": 220.0, "seconds_evaluation": 3.0, "seconds_checkpoint": 1.0},
    ]
    goodput = Goodput(records)
    assert goodput.seconds == {
        "productive": 4.0 + 4.0 + 4.0, "start_up": 10.0 + 5.0, "data": 1.0, "evaluation": 3.0, "checkpoint": 7.0,
        "skipped": 4.0, "repeated": 4.0 + 4.0 + 4.0, "idle": 62.0, "other": 1.0 + 3.0,
    }  # fmt: skip
    assert goodput.total == 120.0
    assert goodput.share == 0.1
    assert goodput.line() == (
        "10.0% of 2:00 in 2 starts (idle 51.7%, start-up 12.5%, repeated 10.0%, checkpoint 5.8%, skipped 3.3%,"
        " other 3.3%, evaluation 2.5%, data 0.8%)"
    )


def test_a_start_lasts_until_its_first_step_whatever_comes_between():
    records = [
        {"kind": "start", "step": 0, "launched": 100.0, "time": 108.0},
        {"kind": "valid", "step": 0, "time": 141.0},  # after 30 s of verify_at_start
        train(1, 145.0, seconds_evaluation=3.0),
        train(2, 150.0),  # and a second that no phase has
        {"kind": "start", "step": 2, "launched": 152.0, "time": 160.0},
        {"kind": "end", "step": 2, "time": 161.0},
    ]
    spent = {"start_up": 38.0 + 8.0, "evaluation": 3.0, "productive": 8.0, "idle": 2.0, "other": 1.0 + 1.0}
    assert {cause: seconds for cause, seconds in Goodput(records).seconds.items() if seconds} == spent


def test_steps_without_a_record_are_in_the_totals_of_a_later_one():
    records = [
        {"kind": "start", "step": 0, "launched": 100.0, "time": 108.0},
        train(1, 115.0, data=1.0),
        train(2, 119.0, skipped=True),
        train(3, 130.0, seconds_checkpoint=6.0),
    ]
    end = {"kind": "end", "step": 3, "time": 132.0}
    last = records[-1] | {TOTALS: Goodput(records).totals()}
    for fewer in ([records[0], last, end], [last, end]):
        assert Goodput(fewer).totals() == Goodput([*records, end]).totals()


def test_a_clock_that_was_set_back_between_starts_leaves_no_share_above_one():
    records = [
        {"kind": "start", "step": 0, "launched": 1000.0, "time": 1000.0},
        train(1, 1004.0),
        {"kind": "start", "step": 1, "launched": 500.0, "time": 500.0},
        train(2, 504.0),
    ]
    assert Goodput(records).line() == "100.0% of 0:08 in 2 starts"


@pytest.mark.parametrize("records", [[], [{"kind": "train", "step": 1, "loss": 2.0}]])
def test_records_without_a_time_say_nothing(records):
    goodput = Goodput(records)
    assert (goodput.total, goodput.share, goodput.line()) == (0.0, 0.0, "unknown: no record has a time")
