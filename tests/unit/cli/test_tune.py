"""`megaaccum tune` over many layouts, with faults and a kill in the middle. The runs are stand-ins that write what real
ones write; tests/multiproc/test_tune.py has some of these."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaaccum.cli import train, tune
from megaaccum.interop.load import load
from megaaccum.planner.hardware import load_hardware
from megaaccum.planner.ladder import MEASURED, NOT_FINITE, OUT_OF_MEMORY
from megaaccum.planner.search import search
from megaaccum.planner.workload import make_workload

TOP = 6
MODEL = dict(
    num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=64, global_batch_size=16, lr=1e-3, train_iters=100,
    vocab_size=512,
)  # fmt: skip
RUN = """
import json, os, pathlib, resource, sys, yaml
row = int(pathlib.Path(sys.argv[1]).parent.name.removeprefix("row_"))
with open("rows", "a") as file:
    print(row, file=file)
turn = len(open("rows").readlines())
if turn == 1:
    import numpy
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    numpy.ones(2**31)
if turn == 4:
    os.kill(os.getppid(), 9)
    sys.exit()
folder = yaml.safe_load(open(sys.argv[1]))["run"]["output_dir"]
os.makedirs(folder + "/receipts")
with open(folder + "/log.jsonl", "w") as log:
    for number, seconds in enumerate([900.0, 1 + 1 / row, 3.0, 1.0], start=1):  # the last layout is the fastest
        norm = None if turn == 2 else 1.0
        print(json.dumps(dict(kind="train", step=number, seconds_per_step=seconds, grad_norm=norm)), file=log)
receipt = dict(schema="megaaccum receipt", version=1, number=1, measured=dict(memory=dict(parameters=3)))
json.dump(receipt, open(folder + "/receipts/start_1.json", "w"))
"""
TUNE = """
import sys
from megaaccum.cli import tune
tune._start = lambda args: [sys.executable, "run.py"]
sys.exit(tune.main(["model.yaml", "--gpus", "4", "--top", sys.argv[1], "--output", "tune", "--write", "best.yaml"]))
"""


def started(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TUNE, str(TOP)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_faults_and_a_kill_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL))
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


def test_hosts_start_each_layout_by_their_launcher() -> None:
    command = tune._start(argparse.Namespace(hostfile="hosts"))
    assert command == ["deepspeed", "--hostfile", "hosts", "--module", "megaaccum.train", "--config"]
    assert train._config_path([command[-1], "row_1/config.yaml"]) == ("row_1/config.yaml", [])
