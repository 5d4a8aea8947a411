"""The command line: which command runs, how errors look, which exit code."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.errors import CheckpointError, ConfigError, DataError, LaunchError, MegaaccumError


@pytest.fixture
def command(monkeypatch):
    """Puts a module with the given main in the place of megaaccum.cli.check."""

    def replace(main):
        module = types.ModuleType("megaaccum.cli.check")
        module.main = main
        monkeypatch.setitem(sys.modules, "megaaccum.cli.check", module)

    return replace


def raiser(error):
    def main(argv):
        raise error

    return main


def test_arguments_reach_the_command_and_its_code_comes_back(command):
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert cli.main(["check", "a.yaml", "--world-size", "4"]) == 7
    assert seen == [["a.yaml", "--world-size", "4"]]


def test_a_command_that_returns_nothing_succeeded(command):
    command(lambda argv: None)
    assert cli.main(["check"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("lr: required"), 2),
        (MegaaccumError("plain"), 1),
        (DataError("no such file"), 1),
        (CheckpointError("torn"), 1),
        (LaunchError("rank 1 died"), 1),
    ],
)
def test_an_error_is_one_message_without_a_traceback(command, capsys, error, code):
    command(raiser(error))
    assert cli.main(["check"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"megaaccum: error: {error}\n"


def test_a_file_that_the_system_refuses_is_one_message(command, capsys):
    command(raiser(PermissionError(13, "Permission denied", "/data/corpus.bin")))
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "megaaccum: error: /data/corpus.bin: Permission denied\n"
    command(raiser(OSError(28, "No space left on device")))  # of a write, which names no file
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "megaaccum: error: No space left on device: free some, or write elsewhere\n"
    command(raiser(ConnectionResetError(104, "Connection reset by peer")))
    with pytest.raises(ConnectionResetError):
        cli.main(["check"])


@pytest.mark.parametrize("keys", [["--data_path"], ["--tokenizer_model"]])
def test_a_name_that_is_too_long_is_one_message(keys, capsys):
    assert cli.main(["check", "configs/tiny_cpu.yaml", *keys, "x" * 5000]) == 2
    err = capsys.readouterr().err
    assert "xxx" in err and err.endswith("File name too long\n") and len(err) < 400


def test_a_configuration_of_a_name_that_is_too_long(capsys):
    assert cli.main(["check", "x" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_every_problem_of_a_config_is_shown(command, capsys):
    command(raiser(ConfigError(["first", "second"])))
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "megaaccum: error: first\nsecond\n"


def test_under_another_launcher_the_rank_is_named(command, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    command(raiser(DataError("torn")))
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == "megaaccum: rank 3: error: torn\n"


def test_ctrl_c_is_no_traceback(command, capsys):
    command(raiser(KeyboardInterrupt()))
    assert cli.main(["check"]) == 130
    assert capsys.readouterr().err == "megaaccum: interrupted\n"


@pytest.mark.parametrize(
    "words",
    [
        "schedule --pp 2 -m 4 --schedule 1f1b --csv {folder}",
        "schedule --pp 2 -m 4 --schedule 1f1b --csv {file}/table.csv",
        "schedule --pp 2 -m 4 --schedule 1f1b --no-timeline --config configs/tiny_cpu.yaml --write {folder}",
        "plan configs/tiny_cpu.yaml --gpus 4 --gpu h100 --write {folder}",
        "plan configs/tiny_cpu.yaml --gpus 4 --gpu h100 --write {file}/run.yaml",
    ],
)
def test_a_file_that_cannot_be_written_is_no_traceback(words, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(words.format(folder=tmp_path, file=tmp_path / "file").split()) == 2
    assert f"megaaccum: error: {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["train", "--help"], ["keys"]])
def test_a_listing_that_the_disk_does_not_hold_is_no_traceback(words, monkeypatch, capsys):
    full = types.SimpleNamespace(write=raiser(OSError(28, "No space left on device")))
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(words) == 2
    assert capsys.readouterr().err == "megaaccum: error: No space left on device: free some, or write elsewhere\n"


def test_a_file_that_a_run_misses_keeps_its_traceback(monkeypatch):
    module = types.ModuleType("megaaccum.cli.train")
    module.main = raiser(FileNotFoundError(2, "No such file or directory", "/gone"))
    monkeypatch.setitem(sys.modules, "megaaccum.cli.train", module)
    with pytest.raises(FileNotFoundError):
        cli.main(["train", "run.yaml"])


def test_a_bug_keeps_its_traceback(command):
    command(raiser(ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["check"])


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["trian"], "`megaaccum train`"),
        (["data", "buidl"], "`megaaccum data build`"),
        (["data", "--help"], "`megaaccum data build`"),
        (["build"], None),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, argv, near):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("megaaccum: error: there is no command")
    assert near is None or near in err


def test_a_checkout_of_megatron_before_the_installed_one_is_one_message(monkeypatch, capsys, tmp_path):
    """Megatron-LM's own programs have it on PYTHONPATH; that of another version may not even import."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 3\n")

    def fail(argv):
        raise ModuleNotFoundError("No module named 'six'")

    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(main=fail))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["train"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"megaaccum: error: Megatron-core 0.12.3 in {core} is imported in place of the installed")
    assert f"take {tmp_path} out of PYTHONPATH" in err and "No module named 'six'" in err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(capsys, argv):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("name", ["train", "convert", "verify"])
def test_a_command_without_its_configuration_shows_its_help_and_fails(capsys, name):
    """A script whose variable is empty does not pass for a run."""
    assert [cli.main([name]), cli.main([name, "--help"])] == [2, 0]
    assert f"megaaccum {name}" in capsys.readouterr().out


def test_a_prompt_of_other_bytes_than_utf_8_is_one_message(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "run", "--prompt", "a\udcff"])
    assert "argument --prompt: invalid utf_8 value: 'a\\udcff'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("schedule --pp 2 -m 4 --schedule 1f1b --config run.yaml", "--config: no effect without --write"),
        ("schedule --pp 2 -m 4 --schedule 1f1b --no-timeline --width 70", "--width: no effect beside --no-timeline"),
        ("generate run --prompt a --top_k 3", "--top_k: no effect without --temperature: give that, or leave"),
        (
            "generate run --prompt a --nproc_per_node 2 --world-size=4",
            "--world_size: no effect beside --nproc_per_node",
        ),
        ("schedule --pp 2 -m 4 --schedule 1f1b --seed 3", "--seed: no effect without --search"),
        ("plan run.yaml --row 2", "--row: no effect without --write: give that, or leave --row out"),
        ("plan run.yaml --even", "--even: no effect without --write"),
        ("plan run.yaml --profile layers.json", "--profile: no effect without --search or --write"),
        ("plan run.yaml --explain 1 --json", "--explain: no effect beside --json: leave one of them out"),
        ("plan run.yaml --why-not tp=2 --json", "--json: no effect beside --why-not"),
        ("plan run.yaml --why-not tp=2 --write f.yaml", "--write: no effect beside --why-not"),
        ("plan run.yaml --gpus 2 --hostfile hosts", "--gpus: no effect beside --hostfile"),
        ("export run --consolidated f --family llama", "--family: no effect without --hf"),
        ("export run --megatron f --max_shard_size 1MB", "--max_shard_size: no effect without --hf"),
        ("export run --hf f --only_weights", "--only_weights: no effect without --megatron"),
        ("calibrate name --dp 2", "--dp: no effect without --layers"),
        ("calibrate --layers run.yaml --like a100", "--like: no effect beside --layers"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(words, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "convert", "train"])
def test_a_file_beside_a_recorded_script_is_refused(command, capsys):
    """The file was ignored."""
    assert cli.main([command, "run.yaml", "--record", "--", "bash", "train.sh"]) == 2
    assert "run.yaml: no effect beside the command after --, which is recorded" in capsys.readouterr().err


def test_a_conversion_keeps_the_sizes_that_fit_its_ranks(tmp_path, capsys):
    """The file's grad_accum_steps 2 cuts 20 sequences for one data-parallel rank, not for the two of the file."""
    assert cli.main(["convert", "configs/tiny_cpu.yaml", "--global_batch_size", "20"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["check", str(tmp_path / "run.yaml")]) == 0


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "megaaccum 0.1.0\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_module(command):
    assert importlib.util.find_spec(cli.module_of(command)) is not None


def test_the_rank_that_speaks_for_all_is_not_ended_by_another(monkeypatch, capsys):
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    error = ConfigError("too few ranks")
    error.printed_by = "rank 0"
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert cli.complain(error, 2) == 2
    assert waits == [cli.GRACE_SECONDS]
    assert capsys.readouterr().err == "megaaccum: error: too few ranks\n"


@pytest.mark.parametrize("launcher", ["", "SLURM_PROCID", "TORCHELASTIC_USE_AGENT_STORE"])
def test_a_rank_that_was_started_by_hand_says_what_no_launcher_has_ended_it_for(monkeypatch, capsys, launcher):
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    error = ConfigError("unknown key lrr")
    error.printed_by = "one rank per host"
    for name in ("RANK", "LOCAL_RANK", *filter(None, [launcher])):
        monkeypatch.setenv(name, "1")
    assert cli.complain(error, 2) == 2
    assert waits == [cli.GRACE_SECONDS]
    assert capsys.readouterr().err == ("" if launcher else "megaaccum: rank 1: error: unknown key lrr\n")


def test_a_machine_does_not_start_another_number_of_ranks_than_the_file_is_for(capsys) -> None:
    """The one of tiny_cpu.yaml starts 4 ranks; a plan for 64 needs its hosts' launcher."""
    config = str(Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml")
    assert cli.main(["train", config, "--world_size", "64"]) == 2
    assert "made for 64 ranks (world_size), and 4 would start on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["schedule --pp 4 -m 8 --schedule 1f1b --no-timeline", "--help", "--version"])
def test_a_reader_that_stops_is_no_error(words):
    """`megaaccum ... | head` ends with the shell's code for it and prints no traceback."""
    command = [sys.executable, "-m", "megaaccum", *words.split()]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.stdout.close()
    assert started.stderr.read() == ""
    assert started.wait(timeout=60) == 141


def test_another_broken_pipe_is_an_error(command, capsys):
    command(raiser(BrokenPipeError("a rank's socket")))
    with pytest.raises(BrokenPipeError, match="socket"):
        cli.main(["check", "a.yaml"])


@pytest.mark.parametrize("content", ["", "# a comment\n"])
def test_a_file_without_a_key_is_nothing_to_convert(tmp_path, capsys, content):
    (tmp_path / "run.yaml").write_text(content)
    assert cli.main(["convert", str(tmp_path / "run.yaml")]) == 2
    out, err = capsys.readouterr()
    assert not out and "run.yaml has no key of a run" in err
