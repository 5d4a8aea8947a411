"""Checkpoints: written aside and then made current, in pieces keyed by a parameter's name in the whole model.

Every rank hands torch.distributed.checkpoint the pieces that only it holds, as plain tensors under
`NAME/KIND/tpR/START:STOP` (KIND: param, exp_avg, exp_avg_sq; START, STOP: elements of the flattened parameter). A load
reads the pieces that overlap what this rank holds, so pipeline, data-parallel and ZeRO layout may differ from those of
the save. What is not a tensor is JSON beside them.

    SAVE/step_0000120/   the pieces, .metadata and state.json
    SAVE/latest          the name of the folder to resume from, replaced in one rename
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megaaccum import model, rng
from megaaccum.errors import CheckpointError

if TYPE_CHECKING:
    from megaaccum.boundary import Boundary
    from megaaccum.config import Plan
    from megaaccum.groups import Groups

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands, next to its tensors. step: committed optimizer steps; consumed_samples: over all ranks;
    lr_schedule: its state; data: digest of the dataset; shape: what a model must share to take these tensors;
    transaction: state of StepTransaction (skipped steps, loss scale, guards), empty in a checkpoint from before it."""

    step: int
    consumed_samples: int
    lr_schedule: dict[str, Any]
    data: str
    shape: dict[str, Any]
    transaction: dict[str, Any] = field(default_factory=dict)

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights: what Adam's bias correction counts."""
        return self.transaction.get("num_updates", self.step)


def shape_of(plan: Plan, vocab_size: int) -> dict[str, Any]:
    """What has to be equal between a checkpoint and the model that takes it (layouts of pp, dp and ZeRO may differ)."""
    m = plan.config.model
    return {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "ffn_hidden_size": m.ffn_hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "num_query_groups": m.num_query_groups,
        "vocab_size": model.padded_vocab_size(plan, vocab_size),
        "num_experts": m.num_experts,
        "swiglu": m.swiglu,
        "normalization": m.normalization,
        "position_embedding_type": m.position_embedding_type,
        "untie_embeddings_and_output_weights": m.untie_embeddings_and_output_weights,
        "tensor_model_parallel_size": plan.layout.tp,
    }


def latest(folder: str | os.PathLike) -> Path | None:
    """The checkpoint that `folder` calls current; None where there is none. Raises CheckpointError when it is named
    but not there."""
    pointer = Path(folder) / "latest"
    if not pointer.exists():
        return None
    current = Path(folder) / pointer.read_text().strip()
    if not (current / "state.json").exists():
        raise CheckpointError(
            f"{pointer} names {current.name}, which is not a whole checkpoint: write the name of another folder of "
            f"{folder} into it, or start afresh with --no_load"
        )
    return current


def save(folder: str | os.PathLike, boundary: Boundary, groups: Groups, progress: Progress, *, keep_last: int) -> Path:
    """Write a checkpoint of the run and make it current; collective over the world.

    Raises CheckpointError on every rank when any of them could not write; what was current before still is.
    """
    target = Path(folder) / f"step_{progress.step:07d}"
    aside = target.with_name(target.name + ".tmp")
    try:
        _on_rank0(lambda: _make_empty(aside), f"cannot prepare {aside}")
        dcp.save(_pieces(boundary, groups) | _rng(groups), storage_writer=dcp.FileSystemWriter(aside))
        _on_rank0(lambda: _publish(aside, target, progress, keep_last), f"cannot make {target} current")
    except (CheckpointException, CheckpointError) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(_reason(error, folder, progress.step)) from error
    return target


def load(current: Path, boundary: Boundary, groups: Groups, *, shape: dict[str, Any]) -> Progress:
    """Read a checkpoint into the model and optimizer; collective. Raises CheckpointError on every rank, naming each
    number that differs, when it is of another model, or a piece is missing."""
    progress = Progress(**_read_state(current))
    wrong = [
        f"{key} is {progress.shape.get(key)} in {current} and {shape[key]} in the configuration"
        for key in shape
        if progress.shape.get(key) != shape[key]
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong) + ": set what differs back, or start afresh with --no_load")
    reader = dcp.FileSystemReader(current)
    try:
        stored = dict(reader.read_metadata().state_dict_metadata)
        wanted = _overlapping(stored, boundary, groups)
        read = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in wanted}  # type: ignore[union-attr]
        random_states = {key: torch.empty(stored[key].size, dtype=torch.uint8) for key in _rng(groups) if key in stored}  # type: ignore[union-attr]
        dcp.load(read | random_states, storage_reader=reader)
    except (CheckpointException, OSError, EOFError) as error:
        raise CheckpointError(f"{current} cannot be read: {_first_line(error)}") from error
    _fill(boundary, groups, read)
    boundary.adopt_state(progress.num_updates)
    rng.restore({key.rsplit("/", 1)[1]: state for key, state in random_states.items()})
    return progress


# --- pieces ----------------------------------------------------------------------------------------------------------


def _prefix(name: str, kind: str, param, groups: Groups) -> str:
    rank = groups.tp.rank() if model.is_sharded_over_tp(param) else 0
    return f"{name}/{kind}/tp{rank}/"


def _pieces(boundary: Boundary, groups: Groups) -> dict[str, torch.Tensor]:
    """What this rank writes: its pieces, without those that another rank writes too."""
    pieces = {}
    for piece in boundary.state():
        twice = model.is_tied_copy(piece.param) or (groups.tp.rank() > 0 and not model.is_sharded_over_tp(piece.param))
        if twice or (boundary.replicated_over_dp and groups.dp_cp.rank() > 0):
            continue
        for kind, tensor in piece.tensors.items():
            if tensor.numel():
                stop = piece.start + tensor.numel()
                pieces[_prefix(piece.name, kind, piece.param, groups) + f"{piece.start}:{stop}"] = tensor
    return pieces


def _ranges(stored: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """{prefix: sorted (start, stop) of the stored pieces}."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, what in stored.items():
        if isinstance(what, TensorStorageMetadata) and not key.startswith("rng/"):
            prefix, _, span = key.rpartition("/")
            start, stop = span.split(":")
            found.setdefault(prefix + "/", []).append((int(start), int(stop)))
    return {prefix: sorted(spans) for prefix, spans in found.items()}


def _parts(boundary: Boundary, groups: Groups):
    """(prefix, start, flat view) of every tensor that this rank holds."""
    for piece in boundary.state():
        for kind, tensor in piece.tensors.items():
            yield _prefix(piece.name, kind, piece.param, groups), piece.start, tensor


def _overlapping(stored: dict[str, Any], boundary: Boundary, groups: Groups) -> list[str]:
    """Keys of the stored pieces that cover what this rank holds. Raises CheckpointError where they leave a hole."""
    ranges = _ranges(stored)
    keys: dict[str, None] = {}  # ordered, without repeats
    for prefix, start, tensor in _parts(boundary, groups):
        position, stop = start, start + tensor.numel()
        for low, high in ranges.get(prefix, []):
            if low <= position < high and position < stop:
                keys[f"{prefix}{low}:{high}"] = None
                position = high
        if position < stop:
            raise CheckpointError(f"the checkpoint lacks elements {position} to {stop} of {prefix.rstrip('/')}")
    return list(keys)


def _fill(boundary: Boundary, groups: Groups, read: dict[str, torch.Tensor]) -> None:
    ranges = _ranges({key: TensorStorageMetadata(None, t.size(), []) for key, t in read.items()})  # type: ignore[arg-type]
    for prefix, start, tensor in _parts(boundary, groups):
        stop = start + tensor.numel()
        for low, high in ranges.get(prefix, []):
            first, last = max(low, start), min(high, stop)
            if first < last:
                tensor[first - start : last - start].copy_(read[f"{prefix}{low}:{high}"][first - low : last - low])


# --- random states ---------------------------------------------------------------------------------------------------


def _rng(groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's random states, keyed by its place, so that only the same place takes them up again."""
    place = f"rng/pp{groups.pp.rank()}/dp{groups.dp_cp.rank()}/tp{groups.tp.rank()}/"
    return {place + name: state for name, state in rng.snapshot().items()}


# --- files -----------------------------------------------------------------------------------------------------------


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(aside: Path, target: Path, progress: Progress, keep_last: int) -> None:
    _write(aside / "state.json", json.dumps({"format": FORMAT} | asdict(progress), indent=1))
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    _write(target.parent / "latest", target.name + "\n")
    old = sorted(p for p in target.parent.glob("step_*") if p.is_dir() and p.suffix != ".tmp" and p != target)
    for folder in old[: max(0, len(old) - keep_last + 1)] if keep_last > 0 else []:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one, never a part."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _read_state(current: Path) -> dict[str, Any]:
    try:
        state = json.loads((current / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{current}/state.json cannot be read: {error}") from error
    if state.pop("format", None) != FORMAT:
        raise CheckpointError(f"{current} was written in another format than {FORMAT}")
    return state


def _on_rank0(action, failure: str) -> None:
    """Run `action` on global rank 0, and raise its failure on every rank."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = [f"{failure}: {error.strerror or error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise CheckpointError(problem[0])


def _reason(error: BaseException, folder: str | os.PathLike, step: int) -> str:
    try:
        current = latest(folder)
    except CheckpointError:
        current = None
    still = f"the last good checkpoint is {current}" if current else "there is no earlier checkpoint"
    return f"the checkpoint of step {step} could not be written: {_first_line(error)}; {still}"


def _first_line(error: BaseException) -> str:
    """The cause that a reader can act on, out of torch's collected tracebacks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
