"""The benchmark of schedules runs all three runtimes, and what it writes has its conditions beside it."""

import json

import pytest
import torch

from benchmarks import delays
from benchmarks.schedules import main
from megaaccum.schedule.profile import LayerCost, Profile, write_profile


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
