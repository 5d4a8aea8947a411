"""The whole job as a user starts it: a killed and resumed run is the uninterrupted one, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaaccum.pretrain.metrics import journal

SMALL = (
    "--num_layers 4 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 10 --lr 1e-2 "
    "--pipeline_model_parallel_size 2 --nproc_per_node 4 --num_threads 1 --micro_batch_size 1 --pp_microbatches 4 "
    "--attention_dropout 0.1 --hidden_dropout 0.1 --eval_interval 5 --eval_iters 1 --log_interval 1 --save_interval 4 "
    "--reduce_bucket_size 100000 --lr_warmup_iters 2 --lr_decay_style cosine"
).split()


def start(output: Path, cache: Path, *more: str) -> subprocess.Popen[str]:
    given = set(more[::2])  # every option here takes one value, and may be given once
    small = [word for pair in zip(SMALL[::2], SMALL[1::2], strict=True) if pair[0] not in given for word in pair]
    arguments = [*small, "--output_dir", str(output), "--data_cache_path", str(cache), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "megaaccum", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str], *, code: int | None = 0) -> tuple[str, str]:
    out, err = run.communicate(timeout=180)
    if code is not None:
        assert run.returncode == code, f"exit code {run.returncode}\n{out}\n{err}"
    return out, err


def losses(output: Path) -> dict[tuple[str, int], float]:
    records = journal.read(output / "log.jsonl")
    return {(r["kind"], r["step"]): r["loss"] for r in records}


def wait_for_step(output: Path, step: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        log = output / "log.jsonl"
        if log.exists() and ("train", step) in losses_so_far(log):
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} never came (exit code {run.poll()})")


def losses_so_far(log: Path) -> set[tuple[str, int]]:
    found = set()
    for line in log.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that is being written
        found.add((record["kind"], record["step"]))
    return found


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks that `run` started."""
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    out, err = finish(start(folder / "whole", folder / "cache"))
    assert "Traceback" not in out + err
    return folder, losses(folder / "whole")


def test_a_killed_rank_ends_the_run_and_the_resumed_run_is_bit_equal(uninterrupted):
    folder, expected = uninterrupted
    killed = start(folder / "killed", folder / "cache")
    wait_for_step(folder / "killed", 6, killed)
    os.kill(ranks_of(killed)[2], signal.SIGKILL)
    _, err = finish(killed, code=None)
    assert killed.returncode != 0
    assert "rank 2" in err
    assert "SIGKILL" in err
    out, _ = finish(start(folder / "killed", folder / "cache"))
    assert "resumed from" in out
    assert losses(folder / "killed") == expected


def test_sigterm_saves_and_the_resumed_run_is_bit_equal(uninterrupted):
    folder, expected = uninterrupted
    stopped = start(folder / "stopped", folder / "cache")
    wait_for_step(folder / "stopped", 5, stopped)
    stopped.send_signal(signal.SIGTERM)
    out, _ = finish(stopped)
    assert "Stopped by a signal after step" in out
    finish(start(folder / "stopped", folder / "cache"))
    resumed = losses(folder / "stopped")
    assert {k: v for k, v in resumed.items() if k[0] == "train"} == {
        k: v for k, v in expected.items() if k[0] == "train"
    }


def test_a_checkpoint_of_another_model_is_refused_and_kept(uninterrupted):
    folder, _ = uninterrupted
    _, err = finish(start(folder / "whole", folder / "cache", "--hidden_size", "64"), code=1)
    assert "hidden_size is 32 in" in err
    assert (folder / "whole" / "checkpoints" / "latest").exists()


def test_a_checkpoint_moves_to_other_pipeline_and_data_parallel_sizes(uninterrupted):
    folder, _ = uninterrupted
    common = ["--load", str(folder / "whole" / "checkpoints"), "--eval_interval", "0"]
    out, _ = finish(
        start(folder / "moved", folder / "cache", *common, "--pipeline_model_parallel_size", "1", "--zero_stage", "2",
              "--nproc_per_node", "2", "--pp_microbatches", "4")
    )  # fmt: skip
    assert "resumed from" in out
    assert "step 10" in out
