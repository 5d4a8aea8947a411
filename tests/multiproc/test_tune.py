"""`megaaccum tune` on two ranks of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from megaaccum import cli
from megaaccum.config import resolve
from megaaccum.interop.load import load
from megaaccum.planner.hardware import load_hardware
from megaaccum.testing import try_ranks
from tests.support.whole_runs import LAUNCHER, VOCAB, make_data

MODEL = dict(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=16, attention_dropout=0.0, hidden_dropout=0.0,
    global_batch_size=8, lr=1e-2, train_iters=100, vocab_size=VOCAB, split="100,0,0",
)  # fmt: skip


def tune(folder: Path, *words: str) -> tuple[bool, str]:
    """Whether it ended well, and what it printed."""
    argv = ["tune", str(folder / "run.yaml"), "--gpus", "2", "--fix", "tp=1", "--output", str(folder / "tune"), *words]
    (rank,) = try_ranks(_tune, 1, argv, init=False, timeout=110)
    return not rank.failed and rank.output.rstrip().endswith("exit code 0"), rank.output


def _tune(argv: list[str]) -> None:
    import os

    for name in LAUNCHER:
        os.environ.pop(name, None)
    print("exit code", cli.main(argv), flush=True)


def test_two_layouts_are_measured_and_a_second_start_runs_none(tmp_path: Path) -> None:
    make_data(tmp_path)
    keys = MODEL | dict(data_path=[str(tmp_path / "corpus")], output_dir=str(tmp_path / "run"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    written = ["--write", str(tmp_path / "best.yaml"), "--calibrate", str(tmp_path / "hardware.yaml")]
    good, output = tune(tmp_path, "--top", "2", *written)
    assert good, output
    results = json.loads((tmp_path / "tune" / "results.json").read_text())["outcomes"]
    seconds = [each["seconds"] for each in results.values()]
    assert len(seconds) == 2
    assert all(len(each["steps"]) == 4 for each in results.values())
    assert f"Measured by `megaaccum tune`: {min(seconds):.4g} s" in (tmp_path / "best.yaml").read_text()
    assert resolve(load(tmp_path / "best.yaml"), world_size=2).layout.world_size == 2
    load_hardware("h100_tuned", file=tmp_path / "hardware.yaml")
    runs = sorted((tmp_path / "tune").glob("row_*/run/log.jsonl"))
    before = [path.stat().st_mtime_ns for path in runs]

    good, output = tune(tmp_path, "--top", "2")
    assert good, output
    assert [path.stat().st_mtime_ns for path in runs] == before
    good, output = tune(tmp_path, "--top", "2", "--lr", "1e-3")
    assert not good
    assert "holds results of another run (configuration differ)" in output
