"""Who is late and what leaves the plan, judged from the reports of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megaaccum.lab.planner.expected import Expected
from megaaccum.platform import cpu
from megaaccum.pretrain.metrics.ranks import RankReport, Ranks
from tests.support.configs import plan

MIB = 2.0**20
MEMORY = {
    "parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB, "activations": 300 * MIB,
    "loss": 90 * MIB, "workspace": 10 * MIB, "buffers": 0.0,
}  # fmt: skip
PLANNED = [Expected(stage, 50 * MIB, 50 * MIB, 4.0, MEMORY) for stage in range(2)]
USUAL = RankReport(
    pp_rank=0, least_data=0.01, data=0.02, least_compute=1.0, compute=1.1, step=2.0, moved=100 * MIB, calls=20,
    parameters=100 * MIB, gradients=100 * MIB, optimizer=200 * MIB, activations=400 * MIB, tensors=10, largest=1000,
    frozen=0,
)  # fmt: skip


def ranks(planned=PLANNED, **keys) -> Ranks:
    of = plan(4, pipeline_model_parallel_size=2, **keys)
    groups = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0))
    return Ranks(of, groups, [torch.nn.Linear(2, 2)], planned)


def four(**of_rank_3) -> list[RankReport]:
    return [USUAL, USUAL, replace(USUAL, pp_rank=1, compute=1.5), replace(USUAL, pp_rank=1, **of_rank_3)]


def test_ranks_as_planned_and_in_time_stand_out_in_nothing():
    assert (ranks().stragglers(four()), ranks().alarms(four())) == ({}, {})


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            dict(least_data=0.5, data=0.9),
            ["rank 3 waits for data at least 0.5 s in each of the last 10", "0.02 s", "step of 2 s"],
        ),
        (dict(least_compute=2.0), ["rank 3 takes in its forwards at least 2 s", "1.1 s"]),
    ],
)
def test_a_rank_that_is_late_in_every_step_is_named_with_the_numbers(report, words):
    (text,) = ranks().stragglers(four(**report)).values()
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("report", "keys"),
    [
        (dict(least_data=0.3, data=9.0), {}),  # late, but in one of the steps by less than the threshold
        (dict(least_data=math.nan, data=math.nan), {}),  # it is sent its micro-batches
        (dict(least_compute=1.3, compute=9.0), {}),
        (dict(least_data=0.5), dict(straggler_threshold=0.5)),
    ],
)
def test_a_rank_that_was_in_time_once_is_not(report, keys):
    assert ranks(**keys).stragglers(four(**report)) == {}


@pytest.mark.parametrize(("interval", "late", "named"), [(4, {3, 4}, []), (3, {1, 2, 3}, [3]), (3, {3, 6}, [])])
def test_a_straggler_is_late_in_all_steps_that_its_text_counts(monkeypatch, interval, late, named):
    """The report after the second step, of bytes alone, takes none of them away. late: steps in which rank 1 waits."""
    two = ranks(planned=[], rank_report_interval=interval)
    monkeypatch.setattr("megaaccum.pretrain.metrics.ranks._gathered", lambda mine: [replace(mine, data=0.0), mine])
    step = SimpleNamespace(forward_seconds=1.0, seconds={"forward_backward": 1.0}, memory={}, note="", traffic={})
    found = {n: two.after(step, data=float(n in late)) for n in range(1, 7)}
    assert [n for n, each in found.items() if each] == named
    assert all(f"in each of the last {interval} steps" in found[n][0][1] for n in named)


def test_a_stage_is_compared_with_itself():
    slower = [USUAL, USUAL, *[replace(USUAL, pp_rank=1, least_compute=5.0, compute=5.0)] * 2]
    assert ranks().stragglers(slower) == {}
    assert ranks().stragglers([USUAL, replace(USUAL, pp_rank=1, least_compute=9.0)]) == {}  # no peer to compare with


ALARMS = [
    (dict(moved=400 * MIB), ["rank 3 received 400.00 MiB", "the plan says 100.00 MiB"]),
    (dict(moved=40 * MIB), ["received 40.00 MiB", "100.00 MiB"]),
    (dict(calls=160.0), ["made 160 collectives", "at most 20"]),
    (dict(parameters=120 * MIB), ["holds 120.00 MiB of parameters", "100.00 MiB"]),
    (dict(gradients=115 * MIB), ["of gradients"]),
    (dict(optimizer=300 * MIB), ["of optimizer"]),
    (dict(activations=510 * MIB), ["holds 510.00 MiB of activations", "the plan says 400.00 MiB"]),
]


@pytest.mark.parametrize(("report", "words"), ALARMS, ids=lambda value: str(next(iter(value))))
def test_what_leaves_the_plan_is_an_alarm_with_both_numbers(report, words):
    (text,) = ranks().alarms(four(**report)).values()
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "report",
    [
        dict(moved=math.nan, calls=math.nan),  # no step was as planned
        dict(moved=109 * MIB),
        dict(moved=50 * MIB),  # gathered in an evaluation before it
        dict(moved=40 * MIB, frozen=1.0),
        dict(activations=490 * MIB),
        dict(parameters=10 * MIB),
        dict(gradients=110.5 * MIB),
    ],
)
def test_what_is_within_the_tolerance_or_unknown_is_none(report):
    assert ranks().alarms(four(**report)) == {}


def test_on_a_gpu_workspaces_of_libraries_are_no_alarm(monkeypatch):
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    assert ranks().alarms(four(activations=810 * MIB)) == {}
    assert list(ranks().alarms(four(activations=830 * MIB))) == ["memory activations"]


def test_without_a_plan_there_is_nothing_to_leave():
    assert ranks(planned=[]).alarms(four(moved=1e12)) == {}


def test_streaming_may_reduce_for_every_microbatch():
    assert ranks(sync="streaming").alarms(four(calls=160.0)) == {}
