"""Weights of other programs into an engine: of checkpoints of Megatron and DeepSpeed one whole parameter at a time, of
Hugging Face's folders the parts that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megaaccum.checkpoint.folders import Progress, latest
from megaaccum.checkpoint.pieces import held_pieces
from megaaccum.config.schema import Config
from megaaccum.distributed.agreement import assert_same_on_ranks, distinct_values, raise_on_all_ranks
from megaaccum.engine import Engine
from megaaccum.errors import CheckpointError, listed
from megaaccum.pretrain.weights.deepspeed_folder import DeepSpeedFolder, is_deepspeed
from megaaccum.pretrain.weights.rows import ROWS_ARE_TOKENS
from megaaccum.pretrain.weights.torch_dist import TorchDist, is_torch_dist
from megaaccum.pretrain.weights.weights_in import HuggingFaceFolder, Mapped

Source = TorchDist | DeepSpeedFolder | HuggingFaceFolder
"""Weights of another program under our names: `whole` gives a parameter, `rest` what is none of these parameters."""


def holds_foreign(folder: Path) -> bool:
    """Whether this rank sees a checkpoint of Megatron or DeepSpeed in a folder, and none of ours."""
    return latest(folder) is None and (is_torch_dist(folder) or is_deepspeed(folder))


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of Megatron or DeepSpeed, and none of ours. Collective over the world. Raises
    RankDisagreement on every rank if hosts see different folders."""
    found = raise_on_all_ranks(holds_foreign, folder)
    assert_same_on_ranks(f"whether {folder} is a checkpoint of another program; hosts have to share it", str(found))
    return found


def load(engine: Engine, folder: Path, *, vocab_size: int) -> None:
    """Replace the engine's weights by those of the checkpoint or Hugging Face model in `folder`. vocab_size: of the
    run, before padding. Collective over the world. Raises CheckpointError on every rank for what it lacks or has
    besides, and ConfigError if its config.json is of another model."""
    source = raise_on_all_ranks(_open, folder, engine.plan.config, vocab_size)
    _load(engine, source, vocab_size, num_updates=None)


def resume(engine: Engine, folder: Path, *, vocab_size: int) -> None:
    """Continue the run of the checkpoint in `folder`, as load_step, finetune, no_load_optim and reset_iteration say:
    its weights, the optimizer's state, then its steps and samples. Collective over the world; raises as `load` does."""
    run, ramp = engine.plan.config.run, engine.plan.ramp
    source = raise_on_all_ranks(_open, folder, engine.plan.config, vocab_size, run.load_step)
    assert not isinstance(source, HuggingFaceFolder)
    with_optimizer = not (run.finetune or run.no_load_optim)
    if not with_optimizer and (run.finetune or run.reset_iteration):
        return _load(engine, source, vocab_size, num_updates=None)
    step, updates, samples = raise_on_all_ranks(source.reached, with_optimizer)
    _load(engine, source, vocab_size, num_updates=updates if with_optimizer else None)
    if run.reset_iteration:
        return None
    schedule = {} if engine.lr_schedule is None else engine.lr_schedule.state_dict()
    progress = Progress(
        step=step,
        consumed_samples=ramp.samples_after(step) if samples is None else samples,
        lr_schedule=schedule | {"num_steps": ramp.samples_after(updates)},
        data={},
        shape=engine.shape,
        transaction={"num_updates": updates, "skipped_steps": step - updates},
        batch_ramp=engine.plan.ramp_state(),
    )
    return engine.resume(progress, with_optimizer=with_optimizer)


def _load(engine: Engine, source: Source, vocab_size: int, num_updates: int | None) -> None:
    pieces = held_pieces(engine.backend, engine.groups, only_weights=num_updates is None)
    held = {(piece.name, piece.kind): piece.shape for piece, _, _ in pieces}
    held |= {(name, "param"): tuple(buffer.shape) for name, buffer in engine.trained_buffers.items()}
    everyone = distinct_values(sorted({(name, shape) for (name, _), shape in held.items()}), engine.groups.host)
    raise_on_all_ranks(_check_rest, source, dict(pair for each in everyone for pair in each))
    engine.load_weights(_tensors(source, held, vocab_size), num_updates=num_updates)


def _open(folder: Path, config: Config, vocab_size: int, step: int | None = None) -> Source:
    if is_torch_dist(folder):
        return TorchDist(_of_step(folder, "iter_", step, digits=7))
    if is_deepspeed(folder):
        return DeepSpeedFolder(_of_step(folder, "global_step", step), config, vocab_size)
    return HuggingFaceFolder(folder, config, vocab_size)


def _of_step(folder: Path, prefix: str, step: int | None, digits: int = 1) -> Path:
    """The checkpoint of `step` in a folder; without `step` the folder, which names its latest. Raises CheckpointError
    if it has none of that step."""
    if step is None:
        return folder
    if (found := folder / f"{prefix}{step:0{digits}}").is_dir():
        return found
    there = sorted((path.name for path in folder.glob(f"{prefix}*")), key=lambda name: (len(name), name))
    raise CheckpointError(f"load_step {step}: {folder} holds no {found.name}, but: {', '.join(there) or 'none'}")


def _check_rest(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if rest := source.rest(shapes):
        raise CheckpointError(f"{source.folder} has {listed(rest)}, which the model does not have")


def _tensors(
    source: Source, held: Mapping[tuple[str, str], tuple[int, ...]], vocab_size: int
) -> Iterator[tuple[str, torch.Tensor | Mapped]]:
    for (name, kind), shape in held.items():
        tensor = source.whole(name, kind, shape)
        if isinstance(tensor, torch.Tensor) and name in ROWS_ARE_TOKENS and tensor.shape[0] != shape[0]:
            if min(tensor.shape[0], shape[0]) >= vocab_size:
                padded = torch.zeros(shape, dtype=tensor.dtype)  # rows of padding belong to a layout, not to the model
                padded[:vocab_size] = tensor[:vocab_size]
                tensor = padded
        yield name if kind == "param" else f"{name}/{kind}", tensor
