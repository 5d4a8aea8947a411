"""The folder of a run's checkpoints: what is removed, in which order, and what is left alone; without ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaaccum.checkpoint import folders
from megaaccum.checkpoint.folders import Files, Progress, latest, resume_candidates
from megaaccum.errors import CheckpointError


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders.dist, "all_reduce", lambda total, group: None)
    monkeypatch.setattr(folders.dist, "get_rank", lambda: 0)


def save(folder: Path, step: int, *, keep_last: int = 2, retain: int | None = None) -> Path:
    progress = Progress(step=step, consumed_samples=step, lr_schedule={}, data={}, shape={})
    written = Files(folder, progress, keep_last, retain)
    written.prepare([], None)
    (written.aside / ".metadata").write_bytes(b"list")
    (written.aside / "__0_0.distcp").write_bytes(b"tensors")
    written.publish_on_rank0()
    return written.target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def test_the_last_ones_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep_last=2, retain=20)
    assert names(tmp_path) == ["step_0000020", "step_0000030", "step_0000040"]


FOREIGN = (
    "step_1000_hf",
    "step_analysis",
    "step_0000001_old",
    "step_5",
    "step_0000002",
    "step_0000003",
    "step_0000020",
)


def test_rotation_leaves_everything_alone_that_is_not_ours(tmp_path):
    """Names that begin like ours, ours without a record, and ours with another's."""
    for name in FOREIGN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text(name)
    (tmp_path / "step_0000003" / "state.json").write_text('{"format": 2, "step": 3}')
    (elsewhere := tmp_path / "elsewhere").mkdir()
    linked = save(elsewhere, 4)
    (tmp_path / "step_0000004").symlink_to(linked)
    (tmp_path / "step_best").write_text("a file")
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=1)
    assert all((tmp_path / name / "precious").read_text() == name for name in FOREIGN)
    assert (linked / "state.json").exists() and (tmp_path / "step_0000004").is_symlink()
    assert names(tmp_path) == sorted([*FOREIGN, "elsewhere", "step_0000004", "step_best", "step_0000030"])


def test_a_renamed_checkpoint_is_kept(tmp_path):
    save(tmp_path, 10).rename(tmp_path / "step_0000007")
    save(tmp_path, 20, keep_last=1)
    assert names(tmp_path) == ["step_0000007", "step_0000020"]


def test_times_of_files_and_the_order_of_a_listing_decide_nothing(tmp_path):
    paths = {step: save(tmp_path, step, keep_last=0) for step in (20, 9, 30, 8, 10, 7)}
    os.utime(paths[10] / "state.json", (2**32, 2**32))
    os.utime(paths[30] / "state.json", (0, 0))
    (tmp_path / "latest").unlink()
    assert resume_candidates(tmp_path)[0] == [paths[step] for step in (30, 20, 10, 9, 8, 7)]
    save(tmp_path, 40, keep_last=2)
    assert names(tmp_path) == ["step_0000030", "step_0000040"]


def test_a_run_from_an_earlier_step_removes_first_what_it_does_not_come_from(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=0)
    save(tmp_path, 15, keep_last=2)  # resumed from 10
    assert names(tmp_path) == ["step_0000010", "step_0000015"]
    assert [path.name for path in resume_candidates(tmp_path)[0]] == ["step_0000015", "step_0000010"]


def test_a_step_that_is_written_again_replaces_the_one_before_when_it_is_whole(tmp_path):
    save(tmp_path, 10)
    assert save(tmp_path, 10).name == "step_0000010-2"
    assert save(tmp_path, 10).name == "step_0000010-3"
    assert names(tmp_path) == ["step_0000010-3"]
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == tmp_path / "step_0000010-3"


def test_what_a_killed_save_left_is_removed_and_anything_else_moved_aside(tmp_path):
    ours = tmp_path / "step_0000009.tmp"
    ours.mkdir()
    for name in ("__0_0.distcp", "__12_1.distcp", ".metadata.tmp", "state.json.new"):
        (ours / name).write_text("")
    (theirs := tmp_path / "step_0000010.tmp").mkdir()
    (theirs / "notes.txt").write_text("precious")
    (theirs / "__0_0.distcp").write_text("beside a file of ours")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_0000011.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step_analysis.tmp").mkdir()
    save(tmp_path, 10)
    assert names(tmp_path) == [
        "elsewhere", "step_0000010", "step_0000010.1.tmp", "step_0000011.1.tmp", "step_analysis.tmp",
    ]  # fmt: skip
    assert (tmp_path / "step_0000010.1.tmp" / "notes.txt").read_text() == "precious"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_a_killed_removal_left_is_removed(tmp_path, monkeypatch):
    """The record may be the first file to go; without one nothing tells what the others are."""

    def is_killed(path: Path, **_: object) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    save(tmp_path, 10)
    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", is_killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 20, keep_last=1)
    assert latest(tmp_path) == tmp_path / "step_0000020"
    save(tmp_path, 30, keep_last=1)
    assert names(tmp_path) == ["step_0000030"]


def test_planted_links_lead_nowhere(tmp_path):
    (precious := tmp_path / "precious").write_text("precious")
    (folder := tmp_path / "run").mkdir()
    for name in ("latest", "latest.new", "step_0000010", "step_0000010.tmp"):
        (folder / name).symlink_to(precious)
    assert save(folder, 10).name == "step_0000010-2"
    assert precious.read_text() == "precious"
    assert (folder / "latest").read_text() == "step_0000010-2\n"


def test_one_checkpoint_s_own_folder_is_itself_alone(tmp_path):
    first = save(tmp_path, 10)
    save(tmp_path, 20)
    assert resume_candidates(first) == ([first], "")
    assert resume_candidates(first.rename(tmp_path / "any name"))[0] == [tmp_path / "any name"]


def test_load_step_names_one_or_lists_what_there_is(tmp_path):
    paths = {step: save(tmp_path, step, keep_last=0) for step in (10, 20)}
    assert resume_candidates(tmp_path, 10) == ([paths[10]], "")
    with pytest.raises(CheckpointError, match=r"load_step 15: .* holds no checkpoint of that step, but of: 10, 20"):
        resume_candidates(tmp_path, 15)
    own = paths[10].rename(tmp_path / "copied")
    assert resume_candidates(own, 10) == ([own], "")
    with pytest.raises(CheckpointError, match=r"load_step 20: .*copied is the checkpoint of step 10: leave load_step"):
        resume_candidates(own, 20)
    with pytest.raises(CheckpointError, match="but of: none"):
        resume_candidates(tmp_path / "nowhere", 15)


def test_latest_may_be_a_pipe_or_name_another_folder(tmp_path):
    path = save(tmp_path, 10)
    for content in ("../elsewhere", "", "x" * 10_000, "\0"):
        (tmp_path / "latest").write_text(content)
        found, problem = resume_candidates(tmp_path)
        assert found == [path] and "is not a whole checkpoint" in problem
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    found, problem = resume_candidates(tmp_path)
    assert found == [path] and "not a regular file" in problem


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"step": "1"}, {"step": True}, {"step": 1 << 70}, {"consumed_samples": None}, {"data": []},
     {"transaction": 1}, {"shape": "x"}, {"unknown": 1}],
    ids=str,
)  # fmt: skip
def test_a_crafted_record_is_damaged(tmp_path, change):
    path = save(tmp_path, 10) / "state.json"
    state = json.loads(path.read_text()) | change
    del state["sha256"]
    path.write_text(json.dumps(state | {"sha256": folders._seal(state)}))
    with pytest.raises(folders.DamagedCheckpoint, match=r"state\.json is damaged"):
        folders.read_progress(path.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "[]", "null", "{}", '{"format": 2}'])
def test_no_record_is_a_traceback(tmp_path, text):
    path = save(tmp_path, 10) / "state.json"
    path.write_text(text)
    with pytest.raises(folders.DamagedCheckpoint):
        folders.read_progress(path.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(folders.DamagedCheckpoint, match="not a regular file"):
        folders.read_progress(path.parent)
