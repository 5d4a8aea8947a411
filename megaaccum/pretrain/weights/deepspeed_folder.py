"""DeepSpeed's checkpoints: ZeRO-1, -2 and -3 of any world size, and universal ones. No code in them runs.

DeepSpeed's own `zero_to_fp32` finds each parameter's parts, while torch reads tensors and plain objects alone, with the
few classes of DeepSpeed that its files hold. Parameters have the names of the run's model, or those of its Hugging Face
family.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megaaccum.config.schema import Config
from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.pretrain.weights import config_json
from megaaccum.pretrain.weights.rows import Rows, rows_of
from megaaccum.pretrain.weights.weights_out import theirs_of

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
        self._tensors: Mapping[str, Any] = {
            name.removeprefix(_PREFIX): each for name, each in self._listed().items()
        }  # fmt: skip

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter, which has `shape` in the run. Raises CheckpointError if the checkpoint lacks it."""
        if name in self._tensors:
            return self._read(name, shape)
        rows = self._rows_of(name, shape)
        sizes = theirs_of(rows, shape)
        return torch.cat([self._part(each, name, sizes) if each.name else _padding(each, shape) for each in rows])

    def rest(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors that are none of these parameters. Copies that share a tensor count as read."""
        made = shapes.keys() - self._tensors.keys()
        used = {rows.name for name in made for rows in self._rows_of(name, shapes[name])} | shapes.keys()
        read = {id(self._tensors[name]) for name in used & self._tensors.keys()}
        return sorted(name for name in self._tensors.keys() - used if id(self._tensors[name]) not in read)

    def _part(self, rows: Rows, name: str, sizes: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
        if rows.name not in self._tensors:
            raise CheckpointError(f"{self.folder} has neither {name} nor {rows.name}, of which it is made")
        tensor = self._read(rows.name, sizes[rows.name])
        return (tensor.t() if rows.transposed else tensor)[rows.start : rows.stop]

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> list[Rows]:
        sizes = config_json.sizes_of(self._config, self._vocab_size)
        found = rows_of(self._family, name, shape[0], sizes) if self._family else None
        if found is None:
            raise CheckpointError(f"{self.folder} has no {name}")
        return found

    @cached_property
    def _family(self) -> str:
        try:
            return config_json.family_for(self._config, self._vocab_size)
        except ConfigError:
            return ""

    def _listed(self) -> Mapping[str, Any]:
        if (self.folder / "zero").is_dir():
            return {path.parent.name: path for path in sorted(self.folder.glob(f"zero/*/{_UNIVERSAL}"))}
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with _only_tensors(self.folder):
            found: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
                str(self.folder.parent), tag=self.folder.name, lazy_mode=True
            )
        return found

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        each = self._tensors[name]
        if isinstance(each, Path):
            with _only_tensors(each):
                each = torch.load(each, map_location="cpu", weights_only=True)
            each = each["param"] if isinstance(each, dict) else each
            each = each.view(shape) if each.dim() == 1 and each.numel() == torch.Size(shape).numel() else each
        tensor: torch.Tensor = each.contiguous()
        return tensor


def _padding(rows: Rows, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(rows.count, *shape[1:])


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that DeepSpeed wrote."""
    try:
        _checkpoint_in(folder)
    except CheckpointError:
        return False
    return True


def _checkpoint_in(folder: Path) -> Path:
    latest = folder / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else "."
    found = folder / tag if Path(tag).name == tag or tag == "." else folder
    if not any(found.glob("*_optim_states.pt")) and not any(found.glob(f"zero/*/{_UNIVERSAL}")):
        raise CheckpointError(f"{found} holds no checkpoint of DeepSpeed's ZeRO, nor a universal one")
    return found.resolve()


@contextmanager
def _only_tensors(path: Path) -> Iterator[None]:
    """Context in which torch.load reads tensors, plain objects and DeepSpeed's own records, whatever its caller asks
    for. Raises CheckpointError for a file with anything else."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}), torch.serialization.safe_globals(known):
        try:
            yield
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors and DeepSpeed's records, and was not read: it could run commands"
                f" ({str(error).splitlines()[0]})"
            ) from None
        except (KeyError, ValueError, RuntimeError, OSError, EOFError, AssertionError) as error:
            raise CheckpointError(f"{path} is no whole checkpoint of DeepSpeed ({error})") from error
