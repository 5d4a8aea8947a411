"""The benchmark of schedules runs all three runtimes, and what it writes has its conditions beside it."""

import itertools
import json
from typing import Any

import pytest
import torch

from benchmarks import delays, exchanges, steps
from benchmarks.schedules import Setup, main
from megaaccum.lab.search.profile import LayerCost, Profile, write_profile
from megaaccum.lab.verification.testing import run_ranks


def test_it_reports_every_runtime(tmp_path, capsys):
    command = f"--pp 2 --microbatches 4 --seconds 0.01 --repeat 1 --only zbv,interleaved --json {tmp_path}/r.json"
    assert main([*command.split(), "--trace", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    results = {(each["runtime"], each["schedule"]): each for each in report["results"]}
    assert results.keys() == {
        ("megaaccum", "interleaved"), ("megatron", "interleaved"), ("torch", "interleaved"), ("megaaccum", "zbv"),
        ("torch", "zbv"),
    }  # fmt: skip
    for each in results.values():
        # Nothing is faster than its schedule; how much slower depends on the machine.
        assert each["over_simulated"] >= 1
        assert each["wall"] == min(each["all_walls"])
        assert each["seconds_per_pass"] >= 0
    assert {"processor", "cores", "load_average", "torch", "megatron_core", "commit", "date"} <= report[
        "conditions"
    ].keys()
    assert (tmp_path / "zbv-4.json").exists()
    assert "zbv" in capsys.readouterr().out


def test_stretched_stages_of_a_profile(tmp_path, capsys):
    """Six layers and a head as long as two: the even cut of two stages is not the best. The stages hold the thread that
    runs them, or do not: neither is faster than its schedule."""
    layer, head = (LayerCost(forward=f, input_grad=f, weight_grad=f) for f in (1e-3, 2e-3))
    write_profile(Profile(pattern="TTTTTTL", kinds={"T": layer, "L": head}), tmp_path / "p.json")
    simulated = {}
    for times in (1, 2):
        command = f"--pp 2 --microbatches 4 --repeat 1 --only 1f1b --profile {tmp_path}/p.json --stretch {times}"
        assert main([*command.split(), "--json", f"{tmp_path}/r.json"]) == 0
        assert "of its simulated gain over the first" in capsys.readouterr().out
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["stretch"] == times
        assert [each["stages"] for each in report["results"]] == ["host"] * 3 + ["device"] * 3
        assert all(each["over_simulated"] >= 1 for each in report["results"])
        simulated[times] = [each["simulated"] for each in report["results"]]
    assert simulated[2] == pytest.approx([2 * seconds for seconds in simulated[1]])
    assert simulated[1][0] > simulated[1][2]


def test_orders_with_and_without_the_all_to_all(tmp_path, capsys):
    """Stages run both tables, fused pairs as one pass of two lanes; nothing is faster than its schedule."""
    command = f"--pp 2 --microbatches 4 --repeat 1 --stretch 0.005 --iterations 200 --json {tmp_path}/r.json"
    assert exchanges.main(command.split()) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert all(each["wall"] >= 0.005 * each["simulated"] * 0.999 for each in rows)
    without, aware = (each["simulated"] for each in rows[:2])
    assert aware < without
    assert "faster simulated" in capsys.readouterr().out


def test_a_device_runs_what_was_launched_one_after_the_other(monkeypatch):
    """Launching takes no time; a pass waits for the one before it, for what it needs, and for its launch."""
    now = 100.0
    monkeypatch.setattr(delays.time, "perf_counter", lambda: now)
    device, made = delays.Device(), lambda: torch.zeros(2, dtype=torch.float64)
    assert device.run(2, None, made)[0] == 102
    assert device.run(3, None, made)[0] == 105
    assert device.run(1, torch.tensor([104.0]), made)[0] == 106
    assert device.run(1, torch.tensor([110.0]), made)[0] == 111
    now = 200.0
    assert device.run(1, torch.tensor([110.0]), made)[0] == 201


@pytest.mark.parametrize("stages", delays.PROCESSORS)
def test_steps_in_a_row_end_before_their_verdict_on_stages_of_either_kind(stages):
    setup = Setup(runtime="megaaccum", schedule="zbv", pp=2, num_microbatches=4, seconds=0.004, repeat=1, stages=stages)
    for kept, norms in run_ranks(ended_early, 2, setup, timeout=60):
        assert kept == [True] * 2  # the first of four waits, and the last has none after it
        assert norms == [0.0] * 4


def ended_early(setup: Setup) -> tuple[list[bool], list[float]]:
    """For each step that ended before its verdict, whether its update was kept; and the norm of every step."""
    engine, kept = delays.engine(setup, speculative_step=True), []
    speculation: Any = engine.train_steps
    end = speculation.end_early

    def ends(*args, **more):
        kept.append((result := end(*args, **more))[1])
        return result

    speculation.end_early = ends
    batches = [[{} for _ in range(setup.num_microbatches)] for _ in range(4)] + [None]
    pairs = itertools.pairwise(batches)
    return kept, [engine.train_step(batch, upcoming=after).grad_norm for batch, after in pairs]


def test_the_benchmark_of_steps_reports_both_kinds_of_stages(tmp_path, capsys):
    command = f"--pp 2 --microbatches 4 --seconds 0.004 --steps 2 --repeat 1 --json {tmp_path}/r.json"
    assert steps.main(command.split()) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    expected = [(stages, early) for stages in ("host", "device") for early in (False, True)]
    assert [(each["stages"], each["speculative_step"]) for each in rows] == expected
    assert all(each["over_work"] >= each["simulated"] >= 1 for each in rows if not each["speculative_step"])
    with pytest.raises(SystemExit):
        steps.main(["--stages", "gpu"])
    assert "gpu: there are host and device" in capsys.readouterr().err
