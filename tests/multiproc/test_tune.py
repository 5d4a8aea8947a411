"""`megaaccum tune` on two ranks of this machine, by our launcher and by DeepSpeed's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from megaaccum import cli
from megaaccum.config import resolve
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.verification.testing import try_ranks
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics import receipts
from tests.support.whole_runs import LAUNCHER, VOCAB, free_port, make_data

MODEL = dict(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=16, attention_dropout=0.0, hidden_dropout=0.0,
    global_batch_size=8, lr=1e-2, train_iters=100, vocab_size=VOCAB, split="100,0,0",
)  # fmt: skip


def tune(folder: Path, *words: str, hosts: str = "") -> tuple[bool, str]:
    """Whether it ended well, and what it printed. hosts: a hostfile, for DeepSpeed's launcher."""
    where = ["--hostfile", hosts] if hosts else ["--gpus", "2"]
    argv = ["tune", str(folder / "run.yaml"), *where, "--fix", "tp=1", "--output", str(folder / "tune"), *words]
    (rank,) = try_ranks(_tune, 1, argv, init=False, timeout=110)
    return not rank.failed and rank.output.rstrip().endswith("exit code 0"), rank.output


def _tune(argv: list[str]) -> None:
    import os

    from megaaccum.cli import tune

    for name in LAUNCHER:
        os.environ.pop(name, None)
    if "--hostfile" in argv:
        os.environ |= {"PATH": f"{argv[1]}.bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        start, port = tune.launch_command, str(free_port())
        tune.launch_command = lambda args: [*start(args)[:1], "--master_port", port, *start(args)[1:]]
    print("exit code", cli.main(argv), flush=True)


def written(folder: Path) -> None:
    """The configuration, and the data that it names."""
    make_data(folder)
    keys = MODEL | dict(data_path=[str(folder / "corpus")], output_dir=str(folder / "run"))
    (folder / "run.yaml").write_text(yaml.safe_dump(keys))


def test_a_layout_on_hosts_is_one_launch(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    ssh = tmp_path / "run.yaml.bin" / "ssh"  # DeepSpeed asks hosts for their address
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\necho 127.0.0.1\n")
    ssh.chmod(0o755)
    good, output = tune(
        tmp_path, "--top", "1", "--fix", "pp=1,mbs=2,sync=resident,recompute=none", hosts=str(tmp_path / "hosts")
    )
    assert good, output
    (outcome,) = json.loads((tmp_path / "tune" / "results.json").read_text())["outcomes"].values()
    assert (outcome["verdict"], len(outcome["steps"])) == ("measured", 4)
    (receipt,) = receipts.read_all(Path(outcome["receipt"]).parents[1])
    assert [each["rank"] for each in receipt["ranks"]] == [0, 1]
    assert "deepspeed.launcher.launch" in receipt["launcher"]


def test_two_layouts_are_measured_and_a_second_start_runs_none(tmp_path: Path) -> None:
    written(tmp_path)
    files = ["--write", str(tmp_path / "best.yaml"), "--calibrate", str(tmp_path / "hardware.yaml")]
    good, output = tune(tmp_path, "--top", "2", *files)
    assert good, output
    results = json.loads((tmp_path / "tune" / "results.json").read_text())["outcomes"]
    seconds = [each["seconds"] for each in results.values()]
    assert len(seconds) == 2
    assert all(len(each["steps"]) == 4 for each in results.values())
    assert f"Measured by `megaaccum tune`: {min(seconds):.4g} s" in (tmp_path / "best.yaml").read_text()
    best = load(tmp_path / "best.yaml")
    assert resolve(best, world_size=2).layout.world_size == 2
    assert best.model.transformer_impl == "auto", "what was measured here has to run here"
    load_hardware("h100_tuned", file=tmp_path / "hardware.yaml")
    runs = sorted((tmp_path / "tune").glob("row_*/run/log.jsonl"))
    before = [path.stat().st_mtime_ns for path in runs]

    good, output = tune(tmp_path, "--top", "2")
    assert good, output
    assert [path.stat().st_mtime_ns for path in runs] == before
    good, output = tune(tmp_path, "--top", "2", "--lr", "1e-3")
    assert not good
    assert "holds results of another run (configuration differ)" in output
