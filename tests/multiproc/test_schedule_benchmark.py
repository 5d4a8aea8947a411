"""The benchmark of schedules runs all three runtimes, and what it writes has its conditions beside it."""

import json

from benchmarks.schedules import main


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
    assert {"processor", "cores", "load_average", "torch", "megatron_core", "commit", "date"} <= report[
        "conditions"
    ].keys()
    assert (tmp_path / "zbv-4.json").exists()
    assert "zbv" in capsys.readouterr().out
