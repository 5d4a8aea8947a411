"""`megaaccum tune` over many layouts, with faults and a kill in the middle. The runs are stand-ins that write what real
ones write; test_tune.py has some of these."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaaccum.cli import tune
from megaaccum.lab.planner.fallbacks import HANGS, MEASURED, NOT_FINITE, OUT_OF_MEMORY
from megaaccum.lab.planner.hardware import Hardware, load_hardware
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.workload import Workload, make_workload
from megaaccum.pretrain.interop.load import load

TOP = 6
MODEL = dict(
    num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=64, global_batch_size=16, lr=1e-3, train_iters=100,
    vocab_size=2048,
)  # fmt: skip
WRITTEN = ("--write", "best.yaml", "--calibrate", "hardware.yaml")
RUN = """
import json, os, pathlib, resource, sys, time, yaml
row = int(pathlib.Path(sys.argv[1]).parent.name.split("_")[1])
with open("rows", "a") as file:
    print(row, file=file)
turn = len(open("rows").readlines())
if turn == 1:
    import numpy
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    numpy.ones(2**31)
if turn == 4:
    os.kill(os.getppid(), 9)
    time.sleep(1)
    open("outlived", "w")
folder = yaml.safe_load(open(sys.argv[1]))["run"]["output_dir"]
os.makedirs(folder + "/receipts")
with open(folder + "/log.jsonl", "w") as log:
    for number, seconds in enumerate([900.0, 1 + 1 / row, 3.0, 1.0], start=1):  # the last layout is the fastest
        norm = None if turn == 2 else 1.0
        print(json.dumps(dict(kind="train", step=number, seconds_per_step=seconds, grad_norm=norm)), file=log)
receipt = dict(schema="megaaccum receipt", version=1, number=1, measured=dict(memory=dict(parameters=3)))
json.dump(receipt, open(folder + "/receipts/start_1.json", "w"))
"""
HANGS_WITH_A_CHILD = """
import subprocess, sys, time
print("waiting", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3); open('outlived', 'w')"])
time.sleep(60)
"""
TUNE = """
import sys
from megaaccum import cli
from megaaccum.cli import tune
tune.launch_command = lambda args: [sys.executable, "run.py"]
sys.exit(cli.main(["tune", "model.yaml", "--gpus", "4", "--output", "tune", *sys.argv[1:]]))
"""


def started(folder: Path, *words: str, run: str = RUN) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(run)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    command = [sys.executable, "-c", TUNE, *(words or ("--top", str(TOP), "--wide", *WRITTEN))]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_faults_and_a_kill_in_the_middle(tmp_path: Path) -> None:
    assert started(tmp_path).returncode == -signal.SIGKILL
    ended = started(tmp_path)
    assert ended.returncode == 0, ended.stderr

    rows = [int(row) for row in (tmp_path / "rows").read_text().split()]
    workload = make_workload(load(tmp_path / "model.yaml", []), world_size=4, hardware=load_hardware("h100"))
    ranked = {each.row: each for each in tune.candidates_of(search(workload))}
    first = ranked[1]
    smaller = [each for each in ranked.values() if each.bytes < first.bytes]
    kept = [each.row for each in smaller if each.axes["recompute"] == first.axes["recompute"]]
    assert rows[:2] == [1, kept[0]]
    assert rows[3] == rows[4]  # the one that was running when the tuning was killed
    done = rows[:3] + rows[4:]
    assert len(set(done)) == len(done) == TOP + 2
    assert done[2:] == sorted(done[2:])  # by rank, once it is over with those two

    outcomes = json.loads((tmp_path / "tune" / "results.json").read_text())["outcomes"]
    verdicts = [outcomes[ranked[row].name]["verdict"] for row in done]
    assert verdicts == [OUT_OF_MEMORY, NOT_FINITE, *[MEASURED] * TOP]
    seconds = {row: outcomes[ranked[row].name]["seconds"] for row in done[2:]}
    assert seconds == {row: pytest.approx(1 + 1 / row) for row in seconds}  # step 0 and its 900 seconds count nowhere
    best = max(seconds)
    assert f"{seconds[best]:.4g} s per step" in (tmp_path / "best.yaml").read_text()
    assert f"row {done[0]} was dropped: out of memory" in ended.stdout
    assert not (tmp_path / "outlived").exists()  # the killed tuning's run, which the second start takes again

    table = {int(cells[0]): cells for cells in map(_cells, ended.stdout.splitlines()) if cells[0].isdecimal()}
    for row in done[2:]:
        predicted, measured, ratio = map(float, table[row][2:5])
        assert measured == pytest.approx(seconds[row], rel=1e-3)
        assert ratio == pytest.approx(measured / predicted, rel=1e-2)
    assert table[best][-1] == "best"
    assert [table[row][-1] for row in done[:2]] == [OUT_OF_MEMORY, NOT_FINITE]
    assert all(Path(tmp_path, outcomes[ranked[row].name]["receipt"]).exists() for row in done[2:])

    # The next plan predicts, on the whole, what was measured.
    hardware = load_hardware("h100_tuned", file=tmp_path / "hardware.yaml")
    again = {each.name: each for each in tune.candidates_of(search(replace_hardware(workload, hardware)))}
    ratios = [seconds[row] / again[ranked[row].name].seconds for row in seconds]
    assert statistics.geometric_mean(ratios) == pytest.approx(1, rel=1e-3)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("\u2502").split("\u2502")]


def replace_hardware(workload: Workload, hardware: Hardware) -> Workload:
    return make_workload(workload.config, world_size=workload.world_size, hardware=hardware)


def test_layouts_that_hang_are_ended_with_their_ranks_and_named(tmp_path: Path) -> None:
    words = ("--top", "1", "--fix", "pp=1,tp=1,mbs=1,recompute=none,sync=resident", "--time-limit", "1")
    ended = started(tmp_path, *words, run=HANGS_WITH_A_CHILD)
    assert ended.returncode == 2, ended.stderr
    assert f"row 1 was dropped: {HANGS}: it had not ended after 1 s (waiting)" in ended.stdout
    outcomes = json.loads((tmp_path / "tune" / "results.json").read_text())["outcomes"]
    assert f"none of the {len(outcomes)} layouts that were tried could be measured: see tune." in ended.stderr
    assert "Traceback" not in ended.stderr
    again = started(tmp_path, *words, run=HANGS_WITH_A_CHILD)
    assert again.returncode == 2
    assert "row 1: " in ended.stderr
    assert "row 1: " not in again.stderr
    assert not (tmp_path / "outlived").exists()
