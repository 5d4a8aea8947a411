"""Files that other processes read: locks, errors in words, pairs that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megaaccum.errors import DataError
from megaaccum.pretrain.data.files import disk_errors, locked, publish_pair, staging_folder, with_suffix

HOLD = """
import sys, pathlib
from megaaccum.pretrain.data.files import locked, staging_folder
with {manager}(pathlib.Path(sys.argv[1])) as folder:
    {inside}
    print("held", flush=True)
    sys.stdin.read()
"""


class Holder:
    """Another process that holds `path` until it gets a line."""

    def __init__(self, manager: str, path: Path, inside: str = "pass"):
        code = HOLD.format(manager=manager, inside=inside)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_with_the_path_and_the_free_bytes(tmp_path, code):
    path = tmp_path / "new" / "corpus.bin"
    text = r"cannot write .*corpus\.bin: no space left \([\d,]+ bytes are free"
    with pytest.raises(DataError, match=text), disk_errors("cannot write", path):
        raise OSError(code, os.strerror(code))


def test_a_full_disk_as_numpy_reports_it(tmp_path):
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, size[1]))
    try:
        with pytest.raises(DataError, match="no space left"), disk_errors("cannot write", tmp_path):
            np.save(tmp_path / "table.npy", np.zeros(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)


def test_other_errors_of_the_system_keep_their_text_and_cause(tmp_path):
    text = r"cannot read .*missing\.txt: No such file"
    with pytest.raises(DataError, match=text) as caught, disk_errors("cannot read", tmp_path):
        open(tmp_path / "missing.txt").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_errors_that_are_not_the_systems_pass(tmp_path):
    with pytest.raises(KeyError), disk_errors("cannot read", tmp_path):
        raise KeyError("x")


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    with Holder("locked", lock) as holder:
        with open(lock) as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.kill()
        with locked(lock):
            pass


def test_a_folder_that_cannot_hold_a_lock_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot lock .*file"), locked(tmp_path / "file" / ".lock"):
        pass


def test_staging_is_hidden_empty_and_gone_afterwards(tmp_path):
    with staging_folder(tmp_path / "corpus") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        assert not list(folder.iterdir())
        (folder / "half").write_text("x")
    assert not list(tmp_path.iterdir())


def test_staging_is_gone_after_an_error(tmp_path):
    with suppress(KeyError), staging_folder(tmp_path / "corpus") as folder:
        (folder / "half").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_target_the_second_is_told(tmp_path):
    target = tmp_path / "corpus"
    text = r"another process is writing .*corpus now"
    with Holder("staging_folder", target), pytest.raises(DataError, match=text), staging_folder(target):
        pass


def test_leavings_of_a_killed_writer_are_removed(tmp_path):
    make_half = "(folder / 'half').write_text('x'); (folder / 'sub').mkdir()"
    with Holder("staging_folder", tmp_path / "corpus", make_half) as holder:
        holder.kill()
    assert list(tmp_path.iterdir()), "nothing was left, so this test shows nothing"
    with staging_folder(tmp_path / "corpus") as folder:
        assert not list(folder.iterdir())
    assert not list(tmp_path.iterdir())


def stage(folder: Path, *suffixes: str) -> Path:
    folder.mkdir()
    for suffix in suffixes:
        with_suffix(folder / "new", suffix).write_text(f"new {suffix}")
    return folder / "new"


def test_a_pair_replaces_the_old_one(tmp_path):
    prefix = tmp_path / "a.b"
    with_suffix(prefix, ".idx").write_text("old")
    publish_pair(stage(tmp_path / "staged", ".bin", ".idx", ".tokenizer.json"), prefix)
    assert (tmp_path / "a.b.idx").read_text() == "new .idx"
    assert sorted(p.name for p in tmp_path.glob("a.*")) == ["a.b.bin", "a.b.idx", "a.b.tokenizer.json"]


def test_an_interrupted_replacement_leaves_no_index(tmp_path):
    prefix = tmp_path / "a"
    with_suffix(prefix, ".idx").write_text("old")
    with pytest.raises(DataError, match="cannot write"):
        publish_pair(stage(tmp_path / "staged", ".bin", ".idx"), prefix)  # the tokenizer is missing, midway
    assert not with_suffix(prefix, ".idx").exists(), "an index of another .bin is worse than none"
