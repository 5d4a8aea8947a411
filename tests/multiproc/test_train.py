"""The whole job as a user starts it: a killed and resumed run is the uninterrupted one, to the last bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaaccum.pretrain.metrics import journal
from tests.support import whole_runs

SMALL = (
    "--num_layers 4 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 10 --lr 1e-2 "
    "--pipeline_model_parallel_size 2 --nproc_per_node 4 --num_threads 1 --micro_batch_size 1 --pp_microbatches 4 "
    "--attention_dropout 0.1 --hidden_dropout 0.1 --eval_interval 5 --eval_iters 1 --log_interval 1 --save_interval 4 "
    "--reduce_bucket_size 100000 --lr_warmup_iters 2 --lr_decay_style cosine"
).split()


def arguments(output: Path, cache: Path, *more: str) -> list[str]:
    given = set(more[::2])  # every option here takes one value, and may be given once
    small = [word for pair in zip(SMALL[::2], SMALL[1::2], strict=True) if pair[0] not in given for word in pair]
    return [*small, "--output_dir", str(output), "--data_cache_path", str(cache), *more]


def start(output: Path, cache: Path, *more: str, worker: str = "", code: int = 0) -> str:
    """The output of a run that began in a process with the libraries imported, and ended with `code`."""
    ended = whole_runs.started(arguments(output, cache, *more), worker, timeout=180)
    assert ended.code == code, f"exit code {ended.code}\n{ended.output}"
    return ended.output


def losses(output: Path) -> dict[tuple[str, int], float]:
    records = journal.read(output / "log.jsonl")
    return {(r["kind"], r["step"]): r["loss"] for r in records}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, texts):
    """The folder and the losses of a run that a shell starts."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "cache").symlink_to(texts)
    command = [sys.executable, "-m", "megaaccum", "train", *arguments(folder / "whole", folder / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "\nparams_dtype fp32: " in ended.stdout  # a note that `check` prints
    return folder, losses(folder / "whole")


def test_a_killed_rank_ends_the_run_and_the_resumed_run_is_bit_equal(uninterrupted):
    """Step 3 is made again after the checkpoint of step 2."""
    folder, expected = uninterrupted
    places = folder / "killed", folder / "cache", "--save_interval", "2"
    output = start(*places, worker="dies_after_three_steps", code=128 + signal.SIGKILL)
    assert "rank 1" in output
    assert "SIGKILL" in output
    assert "resumed from" in start(*places)
    assert losses(folder / "killed") == expected


def test_sigterm_saves_and_the_resumed_run_is_bit_equal(uninterrupted):
    folder, expected = uninterrupted
    output = start(folder / "stopped", folder / "cache", worker="is_stopped_in_step_5")
    assert "Stopped by a signal after step" in output
    assert "resumed from" in start(folder / "stopped", folder / "cache")
    resumed = losses(folder / "stopped")
    assert {k: v for k, v in resumed.items() if k[0] == "train"} == {
        k: v for k, v in expected.items() if k[0] == "train"
    }


def test_a_checkpoint_of_another_model_is_refused_and_kept(uninterrupted):
    folder, _ = uninterrupted
    output = start(folder / "whole", folder / "cache", "--hidden_size", "64", code=1)
    assert "hidden_size is 32 in" in output
    assert (folder / "whole" / "checkpoints" / "latest").exists()


def test_a_checkpoint_moves_to_other_pipeline_and_data_parallel_sizes(uninterrupted):
    folder, _ = uninterrupted
    common = ["--load", str(folder / "whole" / "checkpoints"), "--eval_interval", "0"]
    output = start(
        folder / "moved", folder / "cache", *common, "--pipeline_model_parallel_size", "1", "--zero_stage", "2",
        "--nproc_per_node", "2", "--pp_microbatches", "4",
    )  # fmt: skip
    assert "resumed from" in output
    assert "step 10" in output
