"""Checkpoints on ranks: one written in the background holds its step, to the bit; bad ones are refused."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megaaccum.checkpoint.folders import Progress
from megaaccum.errors import CheckpointError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support import no_gradient
from tests.support.parity import Case, Rig

CASE = Case(
    2, "--pipeline_model_parallel_size 1 --grad_accum_steps 2 --pp_microbatches 2", "--num_layers 2 --clip_grad 1"
)
BIASED = (
    "--num_experts 4 --no_add_bias_linear --moe_router_topk 2 --moe_router_score_function sigmoid "
    "--moe_router_enable_expert_bias "
    "--moe_aux_loss_coeff 0.01 --num_layers 2 "
)
MOE = Case(2, "--pipeline_model_parallel_size 1 --grad_accum_steps 2 --pp_microbatches 2", BIASED, "bf16")
SHAPE = {"num_layers": 2}


def progress(step: int) -> Progress:
    return Progress(step=step, consumed_samples=step * 8, lr_schedule={}, data={}, shape=SHAPE)


@dataclass
class Run(Rig):
    """A training run, as far as a checkpoint holds one."""

    def __post_init__(self):
        from megaaccum.model import names

        self.buffers = dict(names.named_buffers(self.chunks))

    def step(self, number: int) -> None:
        self.train(step=number, first=number * self.plan.batch.global_batch_size)

    def state(self) -> dict:
        buffers = {(name, "buffer", 0): buffer.clone() for name, buffer in self.buffers.items()}
        return buffers | {
            (piece.name, kind, piece.start): tensor.clone()
            for piece in self.backend.state()
            for kind, tensor in piece.tensors.items()
        }

    def loss(self) -> float:
        """The loss of the batch of step 5."""
        from megaaccum.step import evaluation

        first = 5 * self.plan.batch.global_batch_size
        return evaluation.evaluate(self.train_step, self.microbatches(first))[0]

    def load(self, folder: Path) -> Progress:
        from megaaccum.checkpoint import save_load

        current = save_load.latest(folder)
        assert current is not None
        return self.load_from(current)

    def load_from(self, checkpoint: Path) -> Progress:
        from megaaccum.checkpoint import save_load

        return save_load.load(checkpoint, self.backend, self.groups, shape=SHAPE, buffers=self.buffers)


def same(one: dict, other: dict) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Held:
    """Holds the writing thread of a rank at the start of its files, until `release`d."""

    def __init__(self):
        import threading

        import torch.distributed.checkpoint as dcp

        self.released, self.write_data = threading.Event(), dcp.FileSystemWriter.write_data
        dcp.FileSystemWriter.write_data = self._write_data = lambda *args: (
            self.released.wait(60),
            self.write_data(*args),
        )[1]

    def release(self) -> None:
        self.released.set()


def written_while_training(folder: str, case: Case) -> tuple[bool, bool, bool, str, int]:
    """Save after step 2 in the background, take step 3 before a byte is written, then resume from the checkpoint."""
    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave

    run, held = Run.of(case), Held()
    run.step(1)
    run.step(2)
    then = run.state()
    writing = BackgroundSave(
        folder,
        run.backend,
        run.groups,
        progress(2),
        keep_last=2,
        group=groups.for_background(1),
        buffers=run.buffers,
    )
    run.step(3)
    not_yet = save_load.latest(folder) is None
    held.release()
    path = writing.finish()
    moved_on = not same(run.state(), then)
    uninterrupted = run.state()
    resumed = Run.of(case)
    step = resumed.load(Path(folder)).step
    holds_step_2 = same(resumed.state(), then)
    resumed.step(3)
    return not_yet and moved_on, holds_step_2, same(resumed.state(), uninterrupted), path.name, step


@pytest.mark.parametrize("case", [CASE, MOE], ids=["dense", "moe"])
def test_a_background_checkpoint_holds_its_step_while_training_moves_on(tmp_path, case):
    for outcome in run_ranks(written_while_training, 2, str(tmp_path), case):
        assert outcome == (True, True, True, "step_0000002", 2)


def planned_beside_the_gpu(folder: str) -> tuple[bool, list[str]]:
    """Save and load as where the world is NCCL's: the state is the same, and the backend that plans are sent over."""
    from unittest.mock import patch

    import torch.distributed.checkpoint as dcp

    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups

    run, over = Run.of(CASE), []

    def noting(function):
        return lambda *args, process_group, **keys: (
            over.append(process_group.name()), function(*args, process_group=process_group, **keys)
        )[1]  # fmt: skip

    run.step(1)
    with (
        patch.object(groups, "carries_by_nccl", lambda group: True),
        patch.object(dcp, "save", noting(dcp.save)),
    ):
        save_load.save(folder, run.backend, run.groups, progress(1), keep_last=2, buffers=run.buffers)
        then = run.state()
        run.step(2)
        run.load(Path(folder))
    return same(run.state(), then), over


def test_plans_of_a_checkpoint_stay_off_the_gpu(tmp_path):
    assert run_ranks(planned_beside_the_gpu, 2, str(tmp_path)) == [(True, ["gloo"])] * 2


BACKENDS = ("", "--sync streaming", "--zero_stage 2", "--zero_stage 1 --bf16", "--backend fsdp2", "--backend megatron",
            "--backend ddp")  # fmt: skip


EVERY_BACKEND = [replace(CASE, layout=f"--pp_microbatches 4 {backend}") for backend in BACKENDS]


def frozen_move(folder: str) -> list[tuple[str, float, float]]:
    """(backend, loss, loss after a resume) of a half-frozen model whose frozen weights are not those of the seed, saved
    at dp 2 and resumed at pp 2 by the next backend of the list."""
    from megaaccum.checkpoint import save_load
    from megaaccum.pretrain.model import gpt

    no_gradient.changed(no_gradient.frozen)
    found = []
    for number, backend in enumerate(BACKENDS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpt, "initialize", functools.partial(and_moved, gpt.initialize))
            run = Run.of(Case(2, "--pp_microbatches 4 " + backend, "--num_layers 4"))
        run.step(1)
        save_load.save(f"{folder}/{number}", run.backend, run.groups, progress(1), keep_last=1)
        loss = run.loss()
        following = BACKENDS[(number + 1) % len(BACKENDS)]
        other = Run.of(Case(2, "--pipeline_model_parallel_size 2 --pp_microbatches 8 " + following, "--num_layers 4"))
        other.load(Path(folder, str(number)))
        found.append((f"{backend} > {following}", loss, other.loss()))
    return found


def and_moved(initialize, chunk, *args, **kwargs) -> None:
    """Draw the weights, and move each of them."""
    initialize(chunk, *args, **kwargs)
    for param in chunk.parameters():
        param.data.add_(0.01)


def test_frozen_weights_are_in_every_backend_s_checkpoint(tmp_path):
    for moves in run_ranks(frozen_move, 2, str(tmp_path), timeout=120):
        for backends, loss, resumed in moves:
            assert resumed == pytest.approx(loss, rel=5e-3 if "bf16" in backends else 1e-6), backends


def with_a_disk_that_fails(folder: str, background: bool, case: Case = CASE) -> tuple[str, str, str, int]:
    """Step 1 is saved well; then rank 1 finds no space. Returns the error, what is current and left, and its step."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystem

    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave

    run, group, create = Run.of(case), groups.for_background(1), FileSystem.create_stream
    save_load.save(folder, run.backend, run.groups, progress(1), keep_last=2)
    full = Path("/dev/full")
    if dist.get_rank() == 1:
        FileSystem.create_stream = lambda self, path, mode: create(self, full, mode)
    try:
        if background:
            writing = BackgroundSave(folder, run.backend, run.groups, progress(2), keep_last=1, group=group)
            run.step(2)
            writing.finish()
        else:
            save_load.save(folder, run.backend, run.groups, progress(2), keep_last=1)
        text = "no error"
    except CheckpointError as error:
        text = f"{error} [{error.printed_by}]"
    FileSystem.create_stream = create
    dist.barrier()
    left = sorted(entry.name for entry in Path(folder).iterdir())
    return text, str(save_load.latest(folder)), " ".join(left), Run.of(case).load(Path(folder)).step


def saved_apart(folder: str, background: bool) -> str:
    """The error of a save to a folder that each rank has for itself."""
    import torch.distributed as dist

    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave

    run, own = Run.of(CASE), Path(folder, str(dist.get_rank()))
    save = functools.partial(save_load.save, own, run.backend, run.groups, progress(1), keep_last=1)
    if background:
        group = groups.for_background(1)
        saving = BackgroundSave(own, run.backend, run.groups, progress(1), keep_last=1, group=group)
        save = saving.finish
    with pytest.raises(CheckpointError) as raised:
        save()
    assert not (own / "latest").exists()
    return str(raised.value)


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_that_hosts_do_not_share_is_refused_when_it_is_written(tmp_path, background):
    """Every checkpoint of such a run was named complete, and none could be read."""
    for text in run_ranks(saved_apart, 2, str(tmp_path), background, timeout=60):
        assert "rank 0 does not see __1_0.distcp of other ranks: hosts have to share the folder" in text


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_on_every_rank_and_what_was_current_stays(tmp_path, background):
    current = tmp_path / "step_0000001"
    ended = run_ranks(with_a_disk_that_fails, 2, str(tmp_path), background)
    written = sum(file.stat().st_size for file in current.glob("*.distcp"))
    for text, latest, left, step in ended:
        assert text.startswith("the checkpoint of step 2 could not be written: No space left on device (")
        found = re.search(rf"iB were free in {tmp_path}, the checkpoint's tensors are (\S+) KiB\); the last", text)
        assert found and written / 2 < float(found[1]) * 1024 < written, "files have a name and a record of each tensor"
        assert text.endswith(f"; the last good checkpoint is {current} [rank 0]")
        assert (latest, left, step) == (str(current), "latest step_0000001", 1)


def with_disks_that_fail(folder: str, cases: list[Case]) -> list[tuple[str, str, str, int]]:
    return [with_a_disk_that_fails(f"{folder}/{number}", False, case) for number, case in enumerate(cases)]


def test_a_full_disk_leaves_what_was_current_of_every_backend(tmp_path):
    for outcomes in run_ranks(with_disks_that_fail, 2, str(tmp_path), EVERY_BACKEND, timeout=120):
        for number, (text, latest, left, step) in enumerate(outcomes):
            current = tmp_path / str(number) / "step_0000001"
            assert "No space left on device" in text and f"the last good checkpoint is {current}" in text
            assert (latest, left, step) == (str(current), "latest step_0000001", 1)


def killed_while_it_writes(folder: str) -> None:
    """Every rank dies with step 2 in the background, step 1 being current."""
    import os
    import signal

    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups
    from megaaccum.pretrain.training.background_save import BackgroundSave

    run = Run.of(CASE)
    run.step(1)
    save_load.save(folder, run.backend, run.groups, progress(1), keep_last=1)
    Held()
    BackgroundSave(folder, run.backend, run.groups, progress(2), keep_last=1, group=groups.for_background(1))
    os.kill(os.getpid(), signal.SIGKILL)


def after_a_kill(folder: str) -> tuple[int, str]:
    """The step that is current, and what is there once another checkpoint was written."""
    from megaaccum.checkpoint import save_load

    run = Run.of(CASE)
    step = run.load(Path(folder)).step
    save_load.save(folder, run.backend, run.groups, progress(2), keep_last=1)
    return step, " ".join(sorted(entry.name for entry in Path(folder).iterdir()))


def test_a_kill_during_a_background_checkpoint_leaves_the_one_before(tmp_path):
    outcomes = try_ranks(killed_while_it_writes, 2, str(tmp_path))
    assert [outcome.status for outcome in outcomes] == [-9, -9]
    assert run_ranks(after_a_kill, 2, str(tmp_path)) == [(1, "latest step_0000002")] * 2
