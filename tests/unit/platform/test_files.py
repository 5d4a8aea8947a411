"""Files of a run: what a planted link, pipe or name does to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaaccum import texts
from megaaccum.platform import files
from tests.support.data_samples import largest_file


def test_a_planted_link_is_not_followed(tmp_path):
    (target := tmp_path / "theirs").write_text("precious")
    (tmp_path / "state.json.new").symlink_to(target)
    texts.replace_text(tmp_path / "state.json", "ours")
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").symlink_to(target)
    texts.replace_text(tmp_path / "state.json", "ours")
    assert (target.read_text(), (tmp_path / "state.json").read_text()) == ("precious", "ours")
    assert not (tmp_path / "state.json").is_symlink()


def test_a_pipe_or_device_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            files.open_regular(path)


def test_what_is_set_aside_replaces_nothing(tmp_path):
    (tmp_path / "log.1.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "log.jsonl").write_text("1")
    assert files.set_aside(tmp_path / "log.jsonl").name == "log.2.jsonl"


def test_a_full_disk_leaves_the_file_that_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "planned.yaml"
    path.write_text("mine\n")
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        texts.write_text(path, "x" * 1000)
    assert path.read_text() == "mine\n" and os.listdir(tmp_path) == [path.name]


def test_the_file_that_a_link_of_the_user_names_is_written_and_a_device_stays_one(tmp_path):
    (target := tmp_path / "theirs.yaml").write_text("old")
    (link := tmp_path / "here.yaml").symlink_to(target)
    texts.write_text(link, "new")
    (fifo := tmp_path / "new" / "pipe").parent.mkdir()
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    texts.write_text(fifo, "piped")
    assert (target.read_text(), link.is_symlink(), os.read(reader, 100)) == ("new", True, b"piped")
    os.close(reader)
    assert fifo.is_fifo() and os.listdir(fifo.parent) == ["pipe"]
