"""DeepSpeed's checkpoints: ZeRO-1, -2 and -3 of any world size, and universal ones. No code in them runs.

DeepSpeed's own `zero_to_fp32` finds each parameter's parts, while torch reads tensors and plain objects alone, with the
few classes of DeepSpeed that its files hold. Parameters have the names of the run's model, or those of its Hugging Face
family.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megaaccum.config.schema import Config
from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.platform.replacing import environment, replaced
from megaaccum.pretrain.weights import config_json
from megaaccum.pretrain.weights.rows import Rows, rows_of, theirs_of

_UNIVERSAL = "fp32.pt"
_PREFIX = "module."


class DeepSpeedFolder:
    """The weights of a checkpoint in FP32: of a folder with the file `latest`, or of one checkpoint in it. Raises
    CheckpointError for one that model parallelism has cut."""

    def __init__(self, folder: Path, config: Config, vocab_size: int):
        self.folder = _checkpoint_in(folder)
        self._config, self._vocab_size = config, vocab_size
        if len(cut := sorted(self.folder.glob("mp_rank_*_model_states.pt"))) > 1 or any(self.folder.glob("layer_*")):
            raise CheckpointError(
                f"{self.folder} was written with tensor or pipeline parallelism ({len(cut)} model files): convert it"
                " with DeepSpeed's ds_to_universal first"
            )
        self._tensors = self._listed("param")
        self._by_kind = {"param": self._tensors}

    def whole(self, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter or moment, which has `shape` in the run. Raises CheckpointError if it is not there."""
        if kind not in self._by_kind:
            self._by_kind[kind] = self._listed(kind)
        if name in self._tensors:
            return self._read(name, kind, shape)
        rows, parts = self._rows_of(name, shape), []
        sizes = theirs_of(rows, shape)
        for each in rows:
            if not each.name:
                parts.append(torch.zeros(each.count, *shape[1:]))
            elif each.name in self._tensors:
                parts.append(each.of(self._read(each.name, kind, sizes[each.name])))
            else:
                raise CheckpointError(f"{self.folder} has neither {name} nor {each.name}, of which it is made")
        return torch.cat(parts)

    def reached(self, with_optimizer: bool) -> tuple[int, int, int | None]:
        """(steps of its run, updates among them, samples). Raises CheckpointError if it does not say how many."""
        path = next(iter(sorted(self.folder.glob("*_model_states.pt"))), self.folder / "mp_rank_00_model_states.pt")
        with _only_tensors(path):
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            steps, samples = int(state["global_steps"]), int(state["global_samples"])
            return steps, steps - int(state["skipped_steps"]), samples

    def rest(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors that are none of these parameters. Copies that share a tensor count as read."""
        made = shapes.keys() - self._tensors.keys()
        used = {rows.name for name in made for rows in self._rows_of(name, shapes[name])} | shapes.keys()
        read = {id(self._tensors[name]) for name in used & self._tensors.keys()}
        return sorted(name for name in self._tensors.keys() - used if id(self._tensors[name]) not in read)

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> list[Rows]:
        model = config_json.model_keys(self._config, self._vocab_size)
        found = rows_of(self._family, name, shape[0], model) if self._family else None
        if found is None:
            raise CheckpointError(f"{self.folder} has no {name}")
        return found

    @cached_property
    def _family(self) -> str:
        try:
            return config_json.family_for(self._config, self._vocab_size)
        except ConfigError:
            return ""

    def _listed(self, kind: str) -> Mapping[str, Any]:
        """Each parameter's tensor of a kind, as a file or as what DeepSpeed joins when it is read."""
        if (self.folder / "zero").is_dir():
            name = _UNIVERSAL if kind == "param" else f"{kind}.pt"
            return {path.parent.name.removeprefix(_PREFIX): path for path in sorted(self.folder.glob(f"zero/*/{name}"))}
        from deepspeed.utils import zero_to_fp32

        is_moment, parse = kind != "param", zero_to_fp32.parse_optim_states
        if is_moment:
            parse = partial(_moments, parse, kind)
        with _only_tensors(self.folder), replaced(zero_to_fp32, parse_optim_states=parse):
            found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                str(self.folder.parent), self.folder.name, exclude_frozen_parameters=is_moment, lazy_mode=True
            )
        return {name.removeprefix(_PREFIX): each for name, each in found.items()}

    def _read(self, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        if (each := self._by_kind[kind].get(name)) is None:
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        if isinstance(each, Path):
            with _only_tensors(each):
                each = torch.load(each, map_location="cpu", weights_only=True)
            each = each["param"] if isinstance(each, dict) else each
            each = each.view(shape) if each.dim() == 1 and each.numel() == torch.Size(shape).numel() else each
        tensor: torch.Tensor = each.contiguous()
        return tensor


def _moments(parse: Callable[..., tuple[Any, ...]], kind: str, files: list[str], folder: str) -> tuple[Any, ...]:
    """DeepSpeed's `parse_optim_states` with the moments of each rank's parts in place of its masters."""
    stage, count, masters, *more = parse(files, folder)
    moments = []
    for file, mine in zip(files, masters, strict=True):
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)["optimizer_state_dict"]
        state = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        of_groups = state["state"] if isinstance(state, dict) else state
        moments.append([of_groups[number][kind][: master.numel()] for number, master in enumerate(mine)])
    return stage, count, moments, *more


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that DeepSpeed wrote."""
    found = _checkpoint_in(folder)
    return any(found.glob("*_optim_states.pt")) or any(found.glob(f"zero/*/{_UNIVERSAL}"))


def _checkpoint_in(folder: Path) -> Path:
    latest = folder / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else "."
    return (folder / tag if Path(tag).name == tag else folder).resolve()


@contextmanager
def _only_tensors(path: Path) -> Iterator[None]:
    """Context in which torch.load reads tensors, plain objects and DeepSpeed's own records, whatever its caller asks
    for. Raises CheckpointError for a file with anything else."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with environment({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}), torch.serialization.safe_globals(known):
        try:
            yield
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors and DeepSpeed's records, and was not read: it could run commands"
                f" ({str(error).splitlines()[0]})"
            ) from None
        except (KeyError, ValueError, RuntimeError, OSError, EOFError, AssertionError) as error:
            raise CheckpointError(f"{path} is no whole checkpoint of DeepSpeed ({error})") from error
