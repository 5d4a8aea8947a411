"""A run's folder under attack: two jobs in it, planted links and foreign names, and the one that is asked for."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megaaccum.pretrain.launch.lock import LOCK
from megaaccum.pretrain.metrics import journal
from tests.support.whole_runs import losses, make_data, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of 8 steps that nothing disturbs, with the checkpoints of all even steps."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder)
    ended = train(folder, keep_last=0)
    assert ended.code == 0, ended.output
    return folder, losses(folder)


def two_jobs(folder: Path, seconds: float, expected: list[float]) -> None:
    """Start a job, and after `seconds` the same one in its folder: one runs, the other ends with one message."""
    make_data(folder)

    def start(wait: float):
        time.sleep(wait)
        return train(folder, worker="takes_its_time", train_iters=len(expected))

    with ThreadPoolExecutor() as pool:
        ended = sorted(pool.map(start, (0.0, seconds)), key=lambda each: each.code)
    assert [each.code for each in ended] == [0, 1], [each.output for each in ended]
    (error,) = ended[1].errors()
    assert f"{folder / 'run'} belongs to another run (process " in error and "Traceback" not in ended[1].output
    assert losses(folder) == expected
    records = [each for each in journal.lines(folder / "run" / "log.jsonl") if each["kind"] == "start"]
    assert len(records) == 1
    assert (folder / "run" / LOCK).read_text() == ""


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_of_two_jobs_one_runs_and_one_ends_with_one_message(whole, tmp_path, seconds):
    two_jobs(tmp_path, seconds, whole[1])


def test_planted_links_and_foreign_names_are_left_alone(whole, tmp_path):
    make_data(tmp_path)
    (precious := tmp_path / "precious").write_text("precious")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("log.jsonl", "loss.png", "loss.png.new", "checkpoints/latest", "checkpoints/latest.new",
                 "checkpoints/step_0000002.tmp", "checkpoints/step_0000004"):  # fmt: skip
        (tmp_path / "run" / name).symlink_to(precious)
    foreign = ("step_1000_hf", "step_analysis", "step_0000006.tmp")
    for name in foreign:
        (checkpoints / name).mkdir()
        (checkpoints / name / "notes").write_text(name)
    ended = train(tmp_path, keep_last=1, no_load=True)
    assert ended.code == 0, ended.output
    assert losses(tmp_path) == whole[1]
    assert precious.read_text() == "precious"
    kept = [checkpoints / name / "notes" for name in ("step_1000_hf", "step_analysis", "step_0000006.1.tmp")]
    assert [path.read_text() for path in kept] == list(foreign)
    assert (checkpoints / "latest").read_text().strip() == "step_0000008"


def test_a_jump_of_the_clock_changes_no_order(whole, tmp_path):
    """The newest checkpoint has the oldest time, and `latest` is lost."""
    make_data(tmp_path)
    assert train(tmp_path, keep_last=0, max_steps=6).code == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "latest").unlink()
    for at, path in enumerate(sorted(checkpoints.glob("step_*/state.json"))):
        os.utime(path, (2**31 - at * 10**8, 2**31 - at * 10**8))
    ended = train(tmp_path, keep_last=1)
    assert "step_0000006: step 6, 24 samples" in ended.output, ended.output
    assert losses(tmp_path) == whole[1]
    assert [path.parent.name for path in checkpoints.glob("*/state.json")] == ["step_0000008"]


@pytest.mark.parametrize("own_folder", [False, True], ids=["load_step", "load"])
def test_the_checkpoint_that_is_asked_for_is_loaded(whole, tmp_path, own_folder):
    folder, expected = whole
    make_data(tmp_path)
    there = folder / "run" / "checkpoints"
    asked = {"load": there / "step_0000004"} if own_folder else {"load": there, "load_step": 4}
    ended = train(tmp_path, **asked)
    assert ended.code == 0, ended.output
    assert f"resumed from {there / 'step_0000004'}: step 4" in ended.output
    records = journal.read(tmp_path / "run" / "log.jsonl")
    assert [(each["step"], each["loss"]) for each in records] == list(enumerate(expected, 1))[4:]


def test_a_step_that_is_not_there_is_one_message_that_lists_those_that_are(whole):
    ended = train(whole[0], load_step=5)
    (error,) = ended.errors()
    assert "load_step 5: " in error and error.endswith("holds no checkpoint of that step, but of: 2, 4, 6, 8")
