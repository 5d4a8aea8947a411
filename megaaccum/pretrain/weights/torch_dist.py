"""Megatron's `torch_dist` checkpoints: tensors of the whole model, whatever layout wrote them. No code in them runs.

Names of ours and Megatron's differ in three things (megatron-core 0.19): layers of one kind lie in one tensor, one
after the other, and so do the experts of a layer; a norm before a matrix has the name that Transformer Engine gives it.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaaccum.checkpoint.untrusted_reader import listing
from megaaccum.errors import CheckpointError
from megaaccum.model.names import FUSED_NORMS
from megaaccum.platform.files import open_regular
from megaaccum.upstream import pytorch

LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common_state/shard_0_1"
"""The key of what is no tensor."""
_LAYER = re.compile(r"(?P<block>decoder|mtp)\.layers\.(?P<layer>\d+)\.(?P<inner>mtp_model_layer\.)?(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a checkpoint, or with `index` its part under the first indices."""

    key: str
    index: tuple[int, ...] = ()


def fused_names(name: str) -> list[str]:
    """The name of a parameter, and if it is of a norm those where it is part of the matrix after it."""
    return [name, *(name.replace(local, fused) for fused, local in FUSED_NORMS.items() if local in name)]


def places_of(name: str, *, together: bool) -> Iterator[Place]:
    """Yield the places where a parameter of ours may lie, by the kinds of layers that Megatron has. together: the
    layers of the decoder lie in one tensor."""
    if (match := _LAYER.fullmatch(name)) is None:
        yield Place(name)
        return
    block, layer, rest = match["block"], int(match["layer"]), match["rest"]
    inner = "transformer_layer." if match["inner"] else ""
    inside: tuple[int, ...] = ()
    if expert := _EXPERT.fullmatch(rest):
        rest, inside = f"mlp.experts.experts.{expert['rest']}", (int(expert["expert"]),)
    for each in fused_names(rest):
        if together and block == "decoder":
            yield Place(f"{block}.layers.{each}", (layer, *inside))
        else:
            yield Place(f"{block}.layers.{layer}.{inner}{each}", inside)


def _every_place(name: str) -> list[Place]:
    return [*places_of(name, together=False), *places_of(name, together=True)]


class TorchDist:
    """The tensors of a checkpoint's folder, or of the latest one in it. Raises CheckpointError for another kind."""

    def __init__(self, folder: Path):
        self.folder = _checkpoint_in(folder)
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        """The parts of each tensor: where they begin in it, and where their bytes are."""
        self._read_list(self.folder / ".metadata")

    def reached(self, with_optimizer: bool) -> tuple[int, int, int | None]:
        """(iterations of its run, updates among them, samples if it says so). Raises CheckpointError if it does not say
        how many, or with_optimizer has no moments that another layout can read."""
        if with_optimizer and not any(key.startswith("optimizer.state.exp_avg.") for key in self._sizes):
            raise CheckpointError(
                f"{self.folder} has no optimizer state in the shapes of the model: write it with"
                " --dist-ckpt-optim-fully-reshardable, or set no_load_optim or finetune to true"
            )
        try:
            (state,) = self._content(self._chunks[COMMON][0][1], COMMON)
            groups = _groups(state["optimizer"]) if with_optimizer else [{"step": state["iteration"]}]
            samples = getattr(state.get("args"), "consumed_train_samples", None)
            return int(state["iteration"]), int(next(each["step"] for each in groups if "step" in each)), samples
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.folder} does not say how many steps its run made ({error!r})") from error

    def whole(self, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter of ours or a moment, whole; `shape` is that of the run. Raises CheckpointError if a part of it is
        missing."""
        kinds = [f"optimizer.state.{kind}.", *(["optimizer.state.fp32_param.", ""] if kind == "param" else [])]
        found = (Place(first + place.key, place.index) for place in _every_place(name) for first in kinds)
        place = next((place for place in found if place.key in self._sizes), None)
        if place is None:
            raise CheckpointError(f"{self.folder} has no {name} ({kind}), under any name that Megatron gives it")
        depth, size = len(place.index), self._sizes[place.key]
        if any(at >= most for at, most in zip(place.index, size, strict=False)):
            raise CheckpointError(f"{place.key} in {self.folder} is {size}: it has no part {place.index}")
        whole, filled = torch.empty(0), 0
        for offsets, info in self._chunks.get(place.key, []):
            if offsets[:depth] != place.index:
                continue
            part = self._content(info, place.key)
            if not isinstance(part, torch.Tensor) or part.dim() != len(size) or set(part.shape[:depth]) - {1}:
                raise CheckpointError(f"{info.relative_path} holds no part of {place.key} of one layer or expert")
            part = part.reshape(part.shape[depth:])
            whole = whole if filled else torch.empty(size[depth:], dtype=part.dtype)
            whole[tuple(slice(at, at + n) for at, n in zip(offsets[depth:], part.shape, strict=True))] = part
            filled += part.numel()
        if filled != torch.Size(size[depth:]).numel():
            raise CheckpointError(f"{place.key} in {self.folder} is not whole: {filled} elements of {size[depth:]}")
        return whole

    def rest(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors of the model, and layers and experts in them, that are none of these parameters."""
        places = [place for name in shapes for place in _every_place(name)]
        used, depths = Counter(place.key for place in places), {place.key: len(place.index) for place in places}
        return sorted(
            key
            for key, size in self._sizes.items()
            if not key.startswith(("optimizer", "rng_state")) and "_extra_state" not in key
            if used[key] < torch.Size(size[: depths.get(key, 0)]).numel()
        )

    def _content(self, info: Any, key: str) -> Any:
        path = self.folder / info.relative_path
        try:
            with open_regular(path) as file:
                file.seek(info.offset)
                return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # bytes that are cut off or made up can raise anything
            raise CheckpointError(f"{path} holds no {key} ({type(error).__name__}: {error})") from error

    def _read_list(self, path: Path) -> None:
        with open_regular(path) as file:
            found: Any = listing(file.read(), path, pytorch.CHECKPOINT_PLAN_CLASSES)
        try:
            for key, table in found.state_dict_metadata.items():
                if type(table).__name__ == "TensorStorageMetadata":
                    self._sizes[_unchained(key)] = _numbers(table.size)
            for index, info in found.storage_data.items():
                key = _unchained(index.fqn)
                if key not in self._sizes and key != COMMON:
                    continue
                if Path(info.relative_path).name != info.relative_path:
                    raise ValueError(f"the file {info.relative_path!r} is not in its folder")
                offsets = () if key == COMMON else _numbers(index.offset)
                self._chunks.setdefault(key, []).append((offsets, info))
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no list of tensors ({error})") from error


def _unchained(key: str) -> str:
    """The key of a tensor without the number of the optimizer that has it: Megatron steps experts by another one."""
    return re.sub(r"^chained_\d+\.", "", key)


def _groups(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The groups of an optimizer's state, or of several optimizers', by number."""
    states = [state] if "optimizer" in state else state.values()
    return [group for each in states for group in each["optimizer"]["param_groups"]]


def _numbers(size: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in size.args[0])


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is, or names as its latest, a checkpoint that Megatron wrote."""
    return (folder / LATEST).is_file() or (folder / "metadata.json").is_file()


def _checkpoint_in(folder: Path) -> Path:
    if (folder / LATEST).is_file():
        text = (folder / LATEST).read_text(encoding="utf-8").strip()
        folder = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    try:
        kind: Mapping[str, Any] = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no torch_dist checkpoint ({error}): older formats are not read") from error
    if kind.get("sharded_backend") != "torch_dist":
        raise CheckpointError(f"{folder} is of the kind {kind.get('sharded_backend')}, but only torch_dist is read")
    return folder
