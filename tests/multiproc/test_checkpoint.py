"""Checkpoints on ranks: one written in the background holds its step, to the bit; bad ones are refused."""

from __future__ import annotations

import functools
import pickle
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megaaccum.checkpoint.folders import DamagedCheckpoint, Progress, read_progress, write_progress
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
        first = 5 * self.plan.batch.global_batch_size
        return self.train_step.evaluate(self.microbatches(first))[0]

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

    run, held = Run.of(case), Held()
    run.step(1)
    run.step(2)
    then = run.state()
    writing = save_load.BackgroundSave(
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
    from megaaccum.model import gpt

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

    run, group, create = Run.of(case), groups.for_background(1), FileSystem.create_stream
    save_load.save(folder, run.backend, run.groups, progress(1), keep_last=2)
    full = Path("/dev/full")
    if dist.get_rank() == 1:
        FileSystem.create_stream = lambda self, path, mode: create(self, full, mode)
    try:
        if background:
            writing = save_load.BackgroundSave(folder, run.backend, run.groups, progress(2), keep_last=1, group=group)
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


class Runs:
    """Pickled, it is the creation of a file by the process that unpickles it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def cut_short(folder: Path) -> str:
    (file, *_) = sorted(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:1000])
    return f"{file} is cut short: 1,000 bytes, where .metadata says at least"


def garbage(folder: Path) -> str:
    (file, *_) = sorted(folder.glob("*.distcp"))
    file.write_bytes(b"x" * file.stat().st_size)
    return f"{file} is damaged: "


def gone(folder: Path) -> str:
    (file, *_) = sorted(folder.glob("*.distcp"))
    file.unlink()
    return f"{file} cannot be read: No such file or directory"


def malicious(folder: Path) -> str:
    return _sealed(folder, Runs(folder / "owned")) + " names pathlib"


def not_a_list(folder: Path) -> str:
    return _sealed(folder, {"a": 1}) + " holds a dict, not a list of tensors"


def _sealed(folder: Path, content: object) -> str:
    """Put `content` in place of the list of tensors, with hashes that fit, as who means harm would."""
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    write_progress(folder, read_progress(folder))
    return str(folder / ".metadata")


def empty_metadata(folder: Path) -> str:
    (folder / ".metadata").write_bytes(b"")
    return f"{folder / '.metadata'} is damaged"


def without_metadata(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return f"{folder / '.metadata'} cannot be read: No such file or directory"


def half_a_state(folder: Path) -> str:
    (folder / "state.json").write_text((folder / "state.json").read_text()[:20])
    return f"{folder / 'state.json'} is damaged"


def another_model(folder: Path) -> str:
    write_progress(folder, replace(read_progress(folder), shape={"num_layers": 3}))
    return f"num_layers is 3 in {folder}, but 2 in the configuration"


def another_format(folder: Path) -> str:
    (folder / "state.json").write_text('{"format": 1}')
    return f"{folder} was written in another format than 2"


DAMAGE = (cut_short, garbage, gone, half_a_state, empty_metadata, without_metadata)
"""For which the checkpoint before is used."""
REFUSED = (another_model, another_format, malicious, not_a_list)


def damaged(folder: str) -> list[str]:
    """The error on this rank for each damaged copy of a good checkpoint; rank 0 makes the copies."""
    import torch.distributed as dist

    from megaaccum.checkpoint import save_load

    run = Run.of(CASE)
    run.step(1)
    good = save_load.save(folder, run.backend, run.groups, progress(1), keep_last=2)
    before, raised = run.state(), []
    for damage in DAMAGE + REFUSED:
        copy = Path(folder) / damage.__name__
        if dist.get_rank() == 0:
            shutil.copytree(good, copy)
            expected = [damage(copy)]
        else:
            expected = [""]
        dist.broadcast_object_list(expected, src=0)
        try:
            save_load.load(copy, run.backend, run.groups, shape=SHAPE)
            raised.append(f"{damage.__name__} was not seen")
        except CheckpointError as error:
            kind = DamagedCheckpoint if damage in DAMAGE else CheckpointError
            as_expected = expected[0] in str(error) and type(error) is kind
            raised.append("seen" if as_expected else f"{error!r}, not {kind.__name__} {expected[0]}")
    assert same(run.state(), before)
    return raised


def test_damaged_and_malicious_checkpoints_are_refused_on_every_rank(tmp_path):
    for raised in run_ranks(damaged, 2, str(tmp_path)):
        assert raised == ["seen"] * len(DAMAGE + REFUSED)
    assert not (tmp_path / "malicious" / "owned").exists()


def attacked(folder: str, cases: list[Case], places: list[float]) -> list[list[str]]:
    """Errors on this rank for a checkpoint of each case: with one bit flipped in each of its files, at these shares of
    their lengths, and with each file missing."""
    return [_attacked(Path(folder, str(number)), case, places) for number, case in enumerate(cases)]


def _attacked(folder: Path, case: Case, places: list[float]) -> list[str]:
    from megaaccum.checkpoint import save_load

    run = Run.of(case)
    run.step(1)
    good = save_load.save(folder, run.backend, run.groups, progress(1), keep_last=2, buffers=run.buffers)
    before, raised = run.state(), []
    for file in sorted(good.iterdir()):
        content = file.read_bytes()
        for at in (int(share * (len(content) - 3)) for share in places):
            flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
            raised.append(_raised(run, folder, file, flipped, f"{file} is damaged"))
        missing = "not a whole checkpoint" if file.name == "state.json" else f"{file} cannot be read"
        raised.append(_raised(run, folder, file, None, missing))
        _write(file, content)
    assert same(run.state(), before)
    run.load(folder)
    return raised


def _raised(run: Run, folder: Path, file: Path, content: bytes | None, expected: str) -> str:
    """`seen`, where a start with `content` in `file`, or without it, names the damage; else what it did."""
    from megaaccum.checkpoint.resume import first_good

    _write(file, content)
    try:
        first_good(folder, run.load_from, lambda text: None)
    except CheckpointError as error:
        return "seen" if expected in str(error) else str(error)
    return f"{file.name} was not seen"


def _write(file: Path, content: bytes | None) -> None:
    """Rank 0 writes it, or removes the file."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        file.unlink() if content is None else file.write_bytes(content)
    dist.barrier()


@pytest.mark.parametrize(
    ("cases", "places"), [([MOE], [0, 1 / 3, 1 / 2, 1]), (EVERY_BACKEND, [0.4])], ids=["places", "backends"]
)
def test_a_flipped_bit_and_a_missing_file_are_seen(tmp_path, cases, places):
    """In .metadata, state.json and the files of two ranks."""
    for outcomes in run_ranks(attacked, 2, str(tmp_path), cases, places, timeout=180):
        assert outcomes == [["seen"] * 4 * (len(places) + 1)] * len(cases)


def with_bad_ones(folder: str, *bad: str) -> tuple[int | None, list[str]]:
    """The step after which a run resumes, or None after an error, if the `bad` of four checkpoints are cut short; and
    its reports."""
    import torch.distributed as dist

    from megaaccum.checkpoint import save_load
    from megaaccum.checkpoint.resume import first_good

    run, reports = Run.of(CASE), []
    for step in (1, 2, 3, 4):
        save_load.save(folder, run.backend, run.groups, progress(step), keep_last=0)
    dist.barrier()
    if dist.get_rank() == 0:
        for name in bad:
            if name == "latest":
                (Path(folder) / "latest").write_text("step_000")
            else:
                cut_short(Path(folder, name))
    dist.barrier()

    def take(checkpoint: Path) -> int:
        return save_load.load(checkpoint, run.backend, run.groups, shape=SHAPE).step

    try:
        return first_good(folder, take, reports.append), reports
    except CheckpointError as error:
        return None, [*reports, str(error)]


@pytest.mark.parametrize(
    ("bad", "step", "texts"),
    [
        (["step_0000004"], 3, ["is cut short", "the run resumes from step_0000003"]),
        (["step_0000004", "step_0000003"], 2, ["step_0000003/__0_0.distcp is cut short", "resumes from step_0000002"]),
        (["latest"], 4, ["names 'step_000', which is not a whole checkpoint", "resumes from step_0000004"]),
        (["latest", "step_0000004"], 3, ["step_0000004/__0_0.distcp is cut short"]),
        ([f"step_000000{n}" for n in (1, 2, 3, 4)], None, ["holds no other whole checkpoint: set no_load"]),
    ],
    ids=["current", "two", "pointer", "both", "all"],
)
def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path, bad, step, texts):
    for found, reports in run_ranks(with_bad_ones, 2, str(tmp_path), *bad):
        assert found == step
        assert all(text in "\n".join(reports) for text in texts), reports


def killed_while_it_writes(folder: str) -> None:
    """Every rank dies with step 2 in the background, step 1 being current."""
    import os
    import signal

    from megaaccum.checkpoint import save_load
    from megaaccum.distributed import groups

    run = Run.of(CASE)
    run.step(1)
    save_load.save(folder, run.backend, run.groups, progress(1), keep_last=1)
    Held()
    save_load.BackgroundSave(folder, run.backend, run.groups, progress(2), keep_last=1, group=groups.for_background(1))
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
