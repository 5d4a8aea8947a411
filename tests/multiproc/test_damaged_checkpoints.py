"""Checkpoints that are damaged, malicious or of another run are refused on every rank, and the one before is used."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megaaccum.checkpoint.folders import DamagedCheckpoint, read_progress, write_progress
from megaaccum.errors import CheckpointError
from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_checkpoint import CASE, EVERY_BACKEND, MOE, SHAPE, Run, progress, same
from tests.support.parity import Case


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


def without_a_piece(folder: Path) -> str:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    del metadata.state_dict_metadata[next(key for key in metadata.state_dict_metadata if "/param/" in key)]
    _sealed(folder, metadata)
    return "of the same names and shapes: elements are missing or there twice"


def another_model(folder: Path) -> str:
    write_progress(folder, replace(read_progress(folder), shape={"num_layers": 3}))
    return f"num_layers is 3 in {folder}, but 2 in the configuration"


def another_format(folder: Path) -> str:
    (folder / "state.json").write_text('{"format": 1}')
    return f"{folder} was written in another format than 2"


DAMAGE = (cut_short, garbage, gone, half_a_state, empty_metadata, without_metadata, without_a_piece)
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
