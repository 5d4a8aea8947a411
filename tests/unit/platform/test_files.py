"""Files of a run: what a planted link, pipe or name does to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaaccum.platform import files


def test_a_planted_link_is_not_followed(tmp_path):
    (target := tmp_path / "theirs").write_text("precious")
    (tmp_path / "state.json.new").symlink_to(target)
    files.replace_text(tmp_path / "state.json", "ours")
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").symlink_to(target)
    files.replace_text(tmp_path / "state.json", "ours")
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
