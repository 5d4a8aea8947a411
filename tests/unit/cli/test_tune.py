"""`megaaccum tune`: what is asked for; tests/multiproc has its runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.cli import tune
from megaaccum.cli.arguments import Source, read_source
from megaaccum.errors import ConfigError
from megaaccum.lab.planner.fallbacks import FAILED, Outcome
from megaaccum.lab.planner.trial import Trials

CONFIG = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"


def test_an_unknown_knob_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tune", str(CONFIG), "--gpus", "4", "--output", str(tmp_path / "tune")]
    assert cli.main([*argv, "--knob", "mbs,recompte"]) == 2
    assert "--knob recompte (did you mean recompute?)" in capsys.readouterr().err
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize("option", ["--gpus", "--top", "--rounds"])
def test_a_number_below_1_is_refused(option: str, monkeypatch, capsys) -> None:
    """`--gpus 0` meant the file's ranks, and `--rounds 0` one."""
    monkeypatch.setattr(Trials, "run", lambda self, candidate: pytest.fail("a layout was run"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", str(CONFIG), option, "0"])
    assert f"argument {option}: 0: give a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--time-limit inf", "argument --time-limit: inf: give a finite number above 0"),
        ("--time-limit 0", "argument --time-limit: 0: give a finite number above 0"),
        ("--band inf", "argument --band: inf: give a finite number above 0"),
        ("--band wide", "argument --band: wide: give a finite number above 0"),
        ("--band 1 --settle 9", "--time-limit is above 0, and --band above 1, and neither is infinite"),
        ("--band 3", "--band: no effect without --settle: give that, or leave --band out"),
    ],
)
def test_a_limit_that_is_none_is_refused(words: str, text: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Trials, "run", lambda self, candidate: pytest.fail("a layout was run"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", str(CONFIG), *words.split()])
    assert text in capsys.readouterr().err


def test_data_that_no_layout_could_read_ends_it_before_the_first(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Trials, "run", lambda self, candidate: pytest.fail("a layout was run"))
    argv = ["tune", str(CONFIG), "--gpus", "4", "--output", str(tmp_path / "tune"), "--tokenizer_model", "nowhere.json"]
    assert cli.main(argv) == 1
    assert "cannot read tokenizer nowhere.json" in capsys.readouterr().err
    assert not (tmp_path / "tune").exists()


def test_a_file_that_was_made_for_more_ranks_is_refused(monkeypatch, capsys) -> None:
    """Its layouts were measured on this machine's 4, as if those were what it was made for."""
    monkeypatch.setattr(Trials, "run", lambda self, candidate: pytest.fail("a layout was run"))
    assert cli.main(["tune", str(CONFIG), "--world_size", "64"]) == 2
    assert "made for 64 ranks (world_size), and 4 would start on this machine" in capsys.readouterr().err


def test_the_line_of_a_layout_that_failed_has_the_reason(tmp_path: Path, monkeypatch, capsys) -> None:
    failed = Outcome(verdict=FAILED, text="exit code 1\nmegaaccum: error: no port")
    monkeypatch.setattr(Trials, "run", lambda self, candidate: failed)
    argv = ["tune", str(CONFIG), "--gpus", "4", "--fix", "tp=1,dbs=2", "--output", str(tmp_path / "tune")]
    assert cli.main(argv) == 2
    assert ": failed: megaaccum: error: no port\n" in capsys.readouterr().err


def test_hosts_start_each_layout_by_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    command = tune.launch_command(argparse.Namespace(hostfile="hosts"))
    assert command == ["deepspeed", "--hostfile", "hosts", "--module", "megaaccum.train", "--config"]
    assert read_source([command[-1], "row_1/config.yaml"]) == Source("row_1/config.yaml")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="`deepspeed`, which is not on PATH"):
        tune.launch_command(argparse.Namespace(hostfile="hosts"))
