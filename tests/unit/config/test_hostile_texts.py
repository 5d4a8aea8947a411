"""Texts that were made to break their readers: each is one error, with file and line where there are lines."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.cli.arguments import read_source
from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.source import MOST_FLAGS
from megaaccum.errors import ConfigError, DataError, MegaaccumError, printable
from megaaccum.pretrain.data.vocabulary import read_gpt2_vocabulary, read_vocabulary
from megaaccum.pretrain.interop.deepspeed.reconcile import read_json
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.launch.hostfile import read_hostfile
from megaaccum.texts import parse_json, read_text

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "[" * 5000 + "]" * 5000


def problems(tmp_path: Path, text: str, name: str = "run.yaml") -> list[str]:
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name)
    assert len(str(caught.value)) < 150_000
    return caught.value.shown


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("tp: 1\nlr: 2024-13-45\n", 2, "month must be"),
        ("tp: 1\nlr: 2024-01-01 99:99:99\n", 2, "hour must be"),
        ("tp: 1\nlr: !!python/object/apply:os.system [id]\n", 2, "could not determine a constructor"),
        ("tp: 1\nlr: !!binary ü\n", 2, "cannot be read"),
        ("tp: 1\nlr: !!int x\n", 2, "cannot be read"),
        ("tp: 1\nlr: !!float []\n", 2, "cannot be read"),
        (f"tp: 1\nlr: {'9' * 5000}\n", 2, "cannot be read"),
        (f"tp: 1\nlr: {'9' * 400}\n", 2, "must be a number"),
        (f"tp: 1\nlr: {DEEP}\n", 2, "nest"),  # PyYAML from 6.0.4 says "exceeded maximum nesting depth"
        ("tp: 1\n" + "- " * 5000, 2, ""),
        ("tp: 1\nlr: " + "{a: " * 5000 + "1" + "}" * 5000, 2, "nest"),
        ("tp: 1\nlr: " + "{a: " * 50, 3, ""),
        ("tp: 1\n<<: 3\n", 2, "merging"),
        ("tp: 1\nlr: *a\n", 2, "undefined alias"),
        ("tp: 1\n? [a, b]\n: 1\n", 2, "a key is a name"),
        ("tp: 1\nlr: {[a]: 1}\n", 2, "a key is a name"),
        ("tp: 1\nlr: &a [*a]\n", 1, "aliases"),
        ("&a tp: 1\nx: &x {<<: *x}\n", 1, "aliases"),
        (LAUGHS, 1, "aliases"),
        ("tp: 1\nlr: \x07\n", 1, "not allowed"),
        ("tp: 1\nlr: 'a\n", 3, ""),
        ("tp: 1\noutput_dir: \"\\e[31m\"\n", 2, "without control characters"),
        ("tp: 1\n%YAML 9\n", 2, ""),
    ],
)  # fmt: skip
def test_yaml_is_refused_in_one_error_with_file_and_line(tmp_path, text, line, words):
    (told,) = problems(tmp_path, text)
    assert told.startswith(f"run.yaml:{line}: "), told
    assert words in told and len(told) < 500


BAD_VALUES = (
    "2024-13-45", "2024-02-30", "0001-00-00", "2024-01-01 99:99:99", "2024-01-01T00:00:00+99:99",
    "!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!python/tuple [1]", "!mine x", "!!map x",
    "!!binary ü", "!!int x", "!!int ''", "!!int 0x", "!!int 1:x", "!!float []", "!!float x", "!!timestamp x",
    "!!bool maybe", "!!seq x", "9" * 5000, "*unknown", "&a [*a]", "&a {b: *a}", DEEP, "{" * 300, "'open", '"open',
    "[1, 2", "{a: 1", "\x07", "\x00", "\ufffe", "@at", "`tick", "%percent", "a: b: c", "- x", "? [a]", "<<: 3",
    '"\\q"', '"\\ud800"', "{<<: [1]}", "{<<: x}", "!<tag:yaml.org,2002:set> [x]", "!!omap x", "!!pairs x",
)  # fmt: skip
PLACES = {
    "key": "tp: 1\nlr: {}\n", "section": "optimizer:\n  lr: {}\n", "list": "tp: 1\ndata_path: [a, {}]\n",
    "block": "tp: 1\ndeepspeed:\n  fp16: {}\n", "unknown": "tp: 1\nothers_key: {}\n",
}  # fmt: skip
"""A name of each, and a text in which a bad value is in its second line."""


@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_cannot_be_read_is_one_error_wherever_it_stands(tmp_path, place):
    for value in BAD_VALUES:
        told = [text for text in problems(tmp_path, PLACES[place].replace("{}", value)) if "others_key" not in text]
        assert len(told) == 1 and re.match(r"run\.yaml:[1-4]: ", told[0]), (value, told)
        assert len(told[0]) < 500


def test_30_000_unknown_keys_are_cut(tmp_path):
    for text in ("".join(f"key_{i}: {i}\n" for i in range(30_000)), json.dumps({f"k{i}": i for i in range(30_000)})):
        told = problems(tmp_path, text)
        assert len(told) <= ConfigError.MOST_SHOWN + 1 and "more" in told[-1]


def test_30_000_flags_are_refused(tmp_path):
    (told,) = problems(tmp_path, "\n".join(f"--flag-{i} {i}" for i in range(30_000)), "flags.txt")
    assert str(MOST_FLAGS) in told
    words = [word for i in range(30_000) for word in (f"--flag-{i}", str(i))]
    with pytest.raises(ConfigError, match=f"30000 flags are given: the most that are read are {MOST_FLAGS}"):
        read_source(words)  # argparse would take 24 s for them


def test_json_nested_too_deeply_or_with_repeats_is_told(tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    told: list[str] = []
    (tmp_path / "ds.json").write_text(DEEP)
    assert read_json(tmp_path / "ds.json", "run.yaml:1", told) is None and "nested too deeply" in told[0]
    (tmp_path / "ds.json").write_text("{" + ",".join(f'"k{i}": 1' for i in range(30_000)) + ', "k7": 2}')
    told.clear()
    read_json(tmp_path / "ds.json", "run.yaml:1", told)
    assert told == [f"run.yaml:1: {tmp_path / 'ds.json'} gives k7 more than once."]


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "long").write_text("x" * 101)
    for name in ("pipe", "zero", "long", "."):
        with pytest.raises(OSError):
            read_text(tmp_path / name, most=100)
        with pytest.raises(MegaaccumError):
            load(tmp_path / name)
        with pytest.raises((ConfigError, OSError)):
            read_hostfile(tmp_path / name)
    for read in (read_vocabulary, lambda path: read_vocabulary(path, "TikTokenizer"), read_gpt2_vocabulary):
        with pytest.raises(DataError):
            read(str(tmp_path / "pipe"))


def test_a_pipe_of_the_shell_is_read():
    reading, writing = os.pipe()
    os.write(writing, b"lr: 1\n")
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}") == "lr: 1\n"
    os.close(reading)


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a;id", "$(id)", "a\x1b[31m", "ü", "a/b", "'a'"])
def test_a_host_is_named_as_hosts_are(tmp_path, host):
    (tmp_path / "hosts").write_text(f"worker-1 slots=8\n{host} slots=8\n")
    with pytest.raises(ConfigError, match="hosts:2: "):
        read_hostfile(tmp_path / "hosts")


def test_a_hostfile_that_is_no_utf_8_is_refused(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xff slots=8\n")
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize("value", ["1e400", "-1e400", "nan", "9" * 400, 10**400, 2**53 + 1, -(2**53) - 1, float("inf")])
def test_numbers_beyond_a_float_are_none(value):
    with pytest.raises(NotOfType):
        coerce(value, int)
    if value not in (2**53 + 1, -(2**53) - 1):
        with pytest.raises(NotOfType):
            coerce(value, float)


@pytest.mark.parametrize("key", ["num_layers", "mtp_num_layers", "hidden_size", "grad_accum_steps",
                                 "batch_warmup_steps", "memory_gib"])  # fmt: skip
def test_sizes_that_no_machine_has_are_refused_at_once(capsys, key):
    assert cli.main(["check", "configs/tiny_cpu.yaml", "--world-size", "4", f"--{key}", "4294967296"]) == 2
    assert "at most" in capsys.readouterr().err


def test_control_characters_are_printed_escaped(tmp_path, capsys):
    path = tmp_path / "a\x1b[31m\u202eb.yaml"
    path.write_text('"\\e]0;title\\a": 1\n')
    assert cli.main(["check", str(path)]) == 2
    assert cli.main(["train", str(path)]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\u202e" not in told and "\\x1b" in told
    assert printable("a\tb\nü€") == "a\tb\nü€"
