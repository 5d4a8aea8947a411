"""`megaaccum tune`: what is asked for; tests/multiproc has its runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.cli import tune
from megaaccum.cli.arguments import Source, read_source
from megaaccum.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"


def test_an_unknown_knob_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tune", str(CONFIG), "--gpus", "4", "--output", str(tmp_path / "tune")]
    assert cli.main([*argv, "--knob", "mbs,recompte"]) == 2
    assert "--knob recompte (did you mean recompute?)" in capsys.readouterr().err
    assert not (tmp_path / "tune").exists()


def test_hosts_start_each_layout_by_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    command = tune.launch_command(argparse.Namespace(hostfile="hosts"))
    assert command == ["deepspeed", "--hostfile", "hosts", "--module", "megaaccum.train", "--config"]
    assert read_source([command[-1], "row_1/config.yaml"]) == Source("row_1/config.yaml")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="`deepspeed`, which is not on PATH"):
        tune.launch_command(argparse.Namespace(hostfile="hosts"))
