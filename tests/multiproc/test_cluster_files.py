"""Files in launch/ with which a cluster's scheduler starts a run: Slurm's batch script, manifests of Kubernetes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megaaccum.pretrain.metrics import journal
from tests.support import whole_runs
from tests.support.whole_runs import config_file, losses, make_data

ROOT = Path(__file__).parents[2]
STEPS = 16
KEYS = f"--dbs 4 --grad_accum_steps 8 --save_interval 0 --train_iters {STEPS}".split()


def stand_ins(folder: Path) -> dict[str, str]:
    """The environment of a batch job: `srun` of two tasks, and a `scontrol` that notes its arguments."""
    folder.mkdir()
    programs = {"srun": f'exec {sys.executable} -m tests.support.srun "$@"', "scontrol": f'echo "$*" >>{folder}/asked'}
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {
        "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "SLURM_JOB_ID": "7",
    }  # fmt: skip


def words(said: str) -> list[str]:
    """The first word of each line of a run, none of which is a warning."""
    lines = said.splitlines()
    assert not any(word in line.lower() for line in lines for word in ("warn", "deprecat", "traceback")), said
    return [line.split()[0] for line in lines if line]


def test_a_batch_job_that_is_stopped_goes_back_into_the_queue_and_resumes(tmp_path: Path):
    """To the last bit, as under every launcher (test_launchers.py)."""
    make_data(tmp_path)
    keys = dict(dbs=4, grad_accum_steps=8, save_interval=0, train_iters=STEPS)
    alone = whole_runs.train(tmp_path, output_dir=tmp_path / "alone" / "run", **keys)
    assert alone.code == 0, alone.output
    environment = stand_ins(tmp_path / "bin")
    command = ["bash", "launch/slurm.sbatch", str(config_file(tmp_path)), *KEYS, "--output_dir", str(tmp_path / "run")]

    def submitted() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    log = tmp_path / "run" / "log.jsonl"
    first = submitted()
    end = time.monotonic() + 120
    while not (log.exists() and journal.read(log)) and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)  # to the batch shell, as `--signal=B:TERM` asks for
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 0, said
    step = len(losses(tmp_path))
    assert words(said)[:6] == ["starting", "ranks", "model", "batch", "run", "params_dtype"]
    assert f"Stopped by a signal after step {step}" in said
    assert (tmp_path / "bin" / "asked").read_text() == "requeue 7\n"

    again = submitted()
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0, said
    assert words(said)[:7] == ["starting", "resumed", "ranks", "model", "batch", "run", "params_dtype"]
    assert words(said)[7 : 9 + STEPS - step] == [*["step"] * (STEPS - step), "checkpoint", "Done:"]
    assert len(losses(tmp_path)) == STEPS
    assert losses(tmp_path) == losses(tmp_path / "alone")
    assert (tmp_path / "bin" / "asked").read_text() == "requeue 7\n", "a run that is done is not queued again"


@pytest.mark.parametrize(
    ("name", "model"),
    [("jobset.yaml", "JobsetV1alpha2JobSet"), ("trainjob.yaml", "TrainerV1alpha1TrainJob")],
)
def test_manifests_are_of_their_published_schema(name: str, model: str):
    """A field that the schema does not have is dropped by its model, so that the two would differ."""
    from kubeflow_trainer_api import models  # hundreds of classes, a second

    schema = getattr(models, model)
    manifest = yaml.safe_load((ROOT / "launch" / name).read_text())
    assert schema.from_dict(manifest).to_dict() == manifest
    misspelt = manifest | {"spec": manifest["spec"] | {"replicas": 2}}
    assert schema.from_dict(misspelt).to_dict() != misspelt


def test_a_manifests_nodes_are_as_many_everywhere():
    job = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (command,) = job["template"]["spec"]["containers"][0]["command"][2:]
    assert job["parallelism"] == job["completions"]
    assert f"--nnodes={job['completions']} " in command
