"""Whole runs that meet what goes wrong: one clear message, an exit code that is not 0, no hang, and nothing lost."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics import journal, receipts
from tests.support import whole_runs
from tests.support.data_samples import write_pair
from tests.support.whole_runs import VOCAB, flags, losses, make_data, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 8 steps that nothing disturbs: its folder and losses."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder)
    ended = train(folder)
    assert ended.code == 0, ended.output
    return folder, losses(folder)


@pytest.fixture(scope="module")
def first_half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    make_data(folder)
    assert train(folder, max_steps=4).code == 0
    return folder


@pytest.fixture
def half(first_half, tmp_path):
    """A folder with data, and a run of which 4 steps of 8 are done and saved."""
    return Path(shutil.copytree(first_half, tmp_path / "copy"))


def only_error(ended, text: str, *, code: int = 1) -> str:
    """The one message of the run, which has `text` in it."""
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output
    assert len(ended.errors()) == 1, ended.output
    (error,) = ended.errors()
    assert text in error, ended.output
    return error


# --- before the first step -------------------------------------------------------------------------------------------


def no_dataset(folder: Path) -> dict:
    (folder / "corpus.bin").unlink()
    (folder / "corpus.idx").unlink()
    return {"error": f"{folder / 'corpus'}.idx does not exist"}


def truncated_bin(folder: Path) -> dict:
    path = folder / "corpus.bin"
    path.write_bytes(path.read_bytes()[:-100])
    return {"error": f"{path} is truncated: 3,900 bytes, where {folder / 'corpus'}.idx says 4,000"}


def idx_of_another_bin(folder: Path) -> dict:
    whole_runs.counting_pair(folder / "other", num_documents=10)
    (folder / "other.idx").replace(folder / "corpus.idx")
    return {"error": f"{folder / 'corpus'}.bin is too long: 4,000 bytes"}


def unreadable_tokenizer(folder: Path) -> dict:
    (folder / "tokenizer.json").write_text("{")
    return {"error": f"{folder / 'tokenizer.json'}", "tokenizer_model": folder / "tokenizer.json"}


def output_dir_is_a_file(folder: Path) -> dict:
    (folder / "file").touch()
    return {"error": "output_dir", "output_dir": folder / "file" / "run", "code": 2}


def save_is_a_file(folder: Path) -> dict:
    return {"error": f"save '{folder / 'corpus.idx'}' cannot be written", "save": folder / "corpus.idx", "code": 2}


def trace_is_in_a_file(folder: Path) -> dict:
    trace = folder / "corpus.idx" / "trace.json"
    text = f"schedule_trace '{trace.parent}' cannot be written"
    return {"error": text, "schedule_trace": trace, "schedule": "gpipe", "code": 2}


def world_does_not_factor(folder: Path) -> dict:
    return {"error": "world size 3 is not divisible by", "nproc_per_node": 3, "code": 2}


BAD_DATA = (no_dataset, truncated_bin, idx_of_another_bin, unreadable_tokenizer)
BAD_PLACES = (output_dir_is_a_file, save_is_a_file, trace_is_in_a_file, world_does_not_factor)


@pytest.mark.parametrize("fault", [*BAD_DATA, *BAD_PLACES])
def test_bad_input_is_one_message_before_the_first_step(tmp_path, fault):
    make_data(tmp_path)
    expected = fault(tmp_path)
    text, code = expected.pop("error"), expected.pop("code", 1)
    ended = train(tmp_path, **expected)
    only_error(ended, text, code=code)
    assert "step 1" not in ended.output


def test_a_port_in_use_is_one_message(tmp_path):
    make_data(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = train(tmp_path, master_port=port)
    only_error(ended, f"--master_port {port}: this port of 127.0.0.1 cannot be used (Address already in use)")


@pytest.mark.parametrize("worker", ["dies_before_the_ranks_meet", "dies_while_groups_are_built"])
def test_a_rank_that_dies_at_start_ends_the_run(tmp_path, worker):
    make_data(tmp_path)
    ended = train(tmp_path, worker=worker)
    assert ended.code == 128 + 9
    assert "Traceback" not in ended.output
    assert ended.errors()[0].startswith("megaaccum: rank 1 ended with SIGKILL")
    assert "for want of memory" in ended.errors()[-1]
    assert "There is no checkpoint of this run." in ended.errors()[-1]


def test_what_a_killed_compiler_left_behind_holds_up_nobody(half):
    """DeepSpeed's operator for sums in shared memory: every start would compile it, or wait for the one that does."""
    lock = half / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert train(half, env={"TORCH_EXTENSIONS_DIR": str(half / "extensions")}).code == 0
    assert [entry.name for entry in lock.parent.iterdir()] == ["lock"]


# --- as a rank of torchrun -------------------------------------------------------------------------------------------


def as_a_rank(argv: list[str], without_agent: bool = False) -> None:
    """A rank as torchrun starts it; `without_agent`: as the deepspeed launcher does, so that rank 0 opens the port."""
    from megaaccum import cli

    if without_agent:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with patch.object(cli, "GRACE_SECONDS", 0.5):  # 3 s after the first the harness ends ranks that still wait
        sys.exit(cli.main(["train", *argv]))


def test_under_torchrun_a_world_that_does_not_factor_is_said_once_and_fails_on_every_rank(tmp_path):
    outcomes = try_ranks(as_a_rank, 3, flags(tmp_path), init=False)
    assert [outcome.status for outcome in outcomes] == [2, 2, 2]
    said = [line for outcome in outcomes for line in outcome.output.splitlines()]
    start, *errors = sorted(said, reverse=True)
    assert start.startswith("starting 3 ranks")
    assert [line.partition(" is not")[0] for line in errors] == ["megaaccum: error: world size 3"]


def test_under_torchrun_bad_data_is_said_once_and_fails_on_every_rank(tmp_path):
    outcomes = try_ranks(as_a_rank, 2, flags(tmp_path), init=False)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    said = [line for outcome in outcomes for line in outcome.output.splitlines()]
    (said,) = [line for line in said if not line.startswith("starting 2 ranks")]
    assert "corpus.idx does not exist" in said


def test_where_ranks_open_the_port_themselves_a_port_in_use_is_one_message(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        more = {"pipeline_model_parallel_size": 1}
        (rank,) = try_ranks(as_a_rank, 1, flags(tmp_path, **more), True, init=False, env={"MASTER_PORT": port})
    assert rank.status == 1
    assert "Traceback" not in rank.output
    assert f"127.0.0.1:{port}" in rank.output


# --- in the middle of a run ------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on_from_it(whole, tmp_path):
    """A real one: a file system with room for one checkpoint and a half, enlarged before the second start."""
    folder, expected = whole
    make_data(tmp_path)
    size = sum(file.stat().st_size for file in (folder / "run/checkpoints/step_0000008").iterdir())
    ended = whole_runs.train_on_a_small_disk(tmp_path, int(1.5 * size) + 100_000, keep_last=1)
    if ended is None:
        pytest.skip("a full disk is a small file system in a mount namespace: run it as root, or allow user namespaces")
    first, second = ended
    error = only_error(first, "the checkpoint of step 4 could not be written: No space left on device")
    assert re.search(r"[\d.]+ KiB were free in .*, the checkpoint's tensors are [\d.]+ [KM]iB\)", error)
    hint = "go on from it with: megaaccum train --num_layers"
    assert first.output.splitlines()[0] == "starting 2 ranks, importing torch, DeepSpeed and Megatron"
    assert first.output.count("starting 2 ranks") == 1, "the ranks do not repeat it"
    assert "Free some space. The last checkpoint is" in first.output and hint in first.output
    assert error.endswith("the last good checkpoint is " + str(tmp_path / "disk/checkpoints/step_0000002"))
    assert second.code == 0, second.output
    assert "resumed from" in second.output
    shutil.move(tmp_path / "kept", tmp_path / "run")
    assert losses(tmp_path) == expected


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_may_not_grow_leaves_the_one_before(whole, half, background):
    """RLIMIT_FSIZE refuses the write that goes beyond it, for every user, much as a full disk does."""
    ended = train(half, max_bytes=30_000, async_save=background)
    error = only_error(ended, "the checkpoint of step 6 could not be written: File too large")
    assert error.endswith(f"the last good checkpoint is {half / 'run/checkpoints/step_0000004'}")
    assert train(half).code == 0
    assert losses(half) == whole[1]


@pytest.mark.parametrize(("failed", "saved"), [(2, 4), (8, 8)])
def test_a_write_that_fails_before_the_next_or_the_end_loses_no_step(whole, tmp_path, failed, saved):
    """The save that is due next, and the end of the run, wait for it."""
    make_data(tmp_path)
    env = {"TEST_FAILS": f"step_000000{failed}"}
    ended = train(tmp_path, worker="fails_to_write_once", async_save=True, env=env)
    only_error(ended, f"the checkpoint of step {failed} could not be written: No space left on device")
    assert f"step_000000{saved} holds the {saved} steps before" in ended.output
    assert train(tmp_path).code == 0
    assert losses(tmp_path) == whole[1]


def test_a_log_that_cannot_be_written_ends_the_run_on_every_rank(half):
    only_error(train(half, max_bytes=1500, save_interval=0), "log.jsonl cannot be written: File too large")


def place_of_a_sample(argv: list[str]) -> tuple[int, int]:
    """Number and position (in tokens) of a training sample that is taken in step 3 or later and lies in the middle of
    the dataset: where its bytes are no part of the digest that a resumed run has to agree with."""
    from megaaccum import config
    from megaaccum.pretrain.data.dataset import build_datasets
    from megaaccum.pretrain.data.indexed import open_pair

    plan = config.resolve(load(None, argv), world_size=2)
    train, ids = build_datasets(plan).train, open_pair(plan.config.data.data_path[0]).ids
    for index in range(2 * plan.batch.global_batch_size, plan.config.run.train_iters * plan.batch.global_batch_size):
        tokens = train[index]["tokens"].numpy()
        starts = np.flatnonzero(ids[: -len(tokens)] == tokens[0])
        (position,) = [start for start in starts if (ids[start : start + len(tokens)] == tokens).all()]
        if 40_000 < position < len(ids) - 40_000:
            return index, int(position)
    raise AssertionError("no such sample")


def test_a_sample_that_one_rank_cannot_use_ends_all_with_the_steps_before_saved(tmp_path):
    """A bit flips after the dataset was checked. The sample is met by one of two data-parallel ranks."""
    random = np.random.default_rng(0)
    write_pair(tmp_path / "corpus", [list(random.integers(0, VOCAB, 2500)) for _ in range(50)])
    layout = {"pipeline_model_parallel_size": 1, "save_interval": 100}
    assert train(tmp_path, **layout).code == 0
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "run")
    ((index, position),) = run_ranks(place_of_a_sample, 1, flags(tmp_path, **layout), init=False)
    put_id(tmp_path / "corpus.bin", position + 3, 60_000, good := tmp_path / "good.bin")
    ended = train(tmp_path, **layout)
    only_error(ended, f"sample {index} holds id 60000, but the vocabulary has 2000 entries")
    assert "nothing is lost: " in ended.output
    assert losses(tmp_path) == expected[: index // 8]
    good.rename(tmp_path / "corpus.bin")
    assert train(tmp_path, **layout).code == 0
    assert losses(tmp_path) == expected


def put_id(path: Path, position: int, value: int, original: Path) -> None:
    """Give `path` another token at `position`, and its old times, by which a changed dataset would be noticed."""
    shutil.copy2(path, original)
    ids = np.memmap(path, dtype=np.uint16, mode="r+")
    ids[position] = value
    ids.flush()
    status = original.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_signal_waits_for_the_checkpoint_that_is_being_written(whole, tmp_path):
    make_data(tmp_path)
    ended = train(tmp_path, worker="is_told_to_stop_while_it_writes", async_save=True)
    assert ended.code == 0, ended.output
    assert "Stopped by a signal after step" in ended.output
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "step_0000002" / "state.json").exists()
    assert not list(checkpoints.glob("*.tmp"))
    assert train(tmp_path, async_save=True).code == 0
    assert losses(tmp_path) == whole[1]


def test_a_hang_up_finishes_the_step_and_saves(whole, tmp_path):
    make_data(tmp_path)
    ended = train(tmp_path, worker="is_hung_up_in_step_3", save_interval=0)
    assert ended.code == 0, ended.output
    assert "Stopped by a signal after step 4" in ended.output
    assert train(tmp_path).code == 0
    assert losses(tmp_path) == whole[1]


@pytest.mark.parametrize(("how", "why"), [("dead", "Broken pipe"), ("full", "No space left on device"), ("closed", "")])
def test_an_output_that_cannot_be_written_ends_nothing(whole, tmp_path, how, why):
    make_data(tmp_path)
    ended = train(tmp_path, env={whole_runs.STDOUT: how})
    assert (ended.code, ended.errors()) == (0, []), ended.output
    assert losses(tmp_path) == whole[1]
    noted = [each["output"] for each in journal.lines(tmp_path / "run" / "log.jsonl") if "output" in each]
    events = [each["text"] for each in receipts.read_all(tmp_path / "run")[-1]["events"] if each["kind"] == "output"]
    assert noted == events == ([f"standard output is lost: {why}"] if why else [])


def test_a_checkpoint_of_another_shape_is_refused_and_kept(half):
    for others in ({}, dict(lr=2e-3)):  # the model comes first
        words = f"hidden_size is 16 in {half / 'run/checkpoints/step_0000004'}, but 32"
        only_error(train(half, hidden_size=32, **others), words)
    assert (half / "run/checkpoints/latest").read_text().strip() == "step_0000004"
