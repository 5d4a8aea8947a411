"""The same few steps under every launcher: torchrun, deepspeed, and the module run by hand; Slurm's srun is in
test_cluster_files.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import whole_runs
from tests.support.snippets import try_on_ranks
from tests.support.whole_runs import config_file, losses, make_data

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "pretrain_gpt.py")
BIN = Path(sys.executable).parent
MORE = "--dbs 4 --grad_accum_steps 8 --save_every 0 --eval_every 0 --max_steps 4".split()
LAUNCHERS = {
    "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", SCRIPT],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", SCRIPT],
    "python": [sys.executable, "-m", "megaaccum.train"],
}
NOT_OURS = ("[INFO] [launch.py", "[INFO] [runner.py", "Unable to find hostfile", "torch/distributed/run.py")
"""Lines that the launchers themselves write."""


def start(launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The launcher's run of `arguments`, both streams in one. It finds the package where these tests do."""
    free_port = [] if launcher == "python" else ["--master_port", str(whole_runs.free_port())]
    command = LAUNCHERS[launcher]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return whole_runs.run_bounded([command[0], *free_port, *command[1:], *arguments], environment, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A configuration file, and the losses of its run by `megaaccum train`."""
    folder = tmp_path_factory.mktemp("launch")
    make_data(folder)
    ended = whole_runs.train(folder, dbs=4, grad_accum_steps=8, save_interval=0, max_steps=4, pp_microbatches=4)
    assert ended.code == 0, ended.output
    return config_file(folder), losses(folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_runs_the_same_job(run, tmp_path, launcher):
    """To the last bit: one thread per rank, and gloo sums two ranks in one order."""
    path, expected = run
    ended = start(launcher, "--config", str(path), *MORE, "--output_dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stdout
    assert losses(tmp_path) == expected
    ours = [line for line in ended.stdout.splitlines() if not any(text in line for text in NOT_OURS)]
    assert [line.split()[0] for line in ours[:6]] == ["starting", "ranks", "model", "batch", "run", "params_dtype"]
    assert [line[:8] for line in ours[6:10]] == [f"step {number}/8" for number in range(1, 5)]
    assert [line.split()[0] for line in ours[10:12]] == ["checkpoint", "Done:"]
    assert not any(word in line.lower() for line in ours for word in ("warn", "deprecat", "traceback"))


def test_torchrun_shows_an_error_of_all_ranks_once(run):
    path, _ = run
    ended = start("torchrun", "--config", str(path), "--pipeline_model_parallel_size", "3")
    assert ended.returncode != 0
    said = [line for line in ended.stdout.splitlines() if line.startswith("megaaccum: ")]
    assert len(said) == 1
    assert "world size 2 is not divisible by" in said[0]


def test_a_verification_takes_the_launchers_ranks():
    argv = "-m megaaccum verify configs/tiny_cpu.yaml --shrink --steps 1"
    ranks = try_on_ranks(f"torchrun --nproc-per-node 2 {argv}", ROOT)
    said = "".join(rank.output for rank in ranks)
    assert [rank.status for rank in ranks] == [0, 0], said
    assert said.count("PASS: 1 step") == 1
    assert "pp 2 on 2 ranks" in said
