"""The weights of a Hugging Face folder, of which each rank reads the bytes of its own pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaaccum.errors import CheckpointError, ConfigError, as_product
from megaaccum.pretrain.weights import config_json
from megaaccum.pretrain.weights.rows import Model, Rows, rows_of, theirs_of
from megaaccum.pretrain.weights.safetensors_folder import DTYPES, Weights

if TYPE_CHECKING:
    from megaaccum.checkpoint.pieces import Piece
    from megaaccum.config.schema import Config

_NOT_READ = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")
"""Tensors of older files that are computed, not trained."""
_SHARED = {"lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"}
_COPY = re.compile(r"lm_head\.weight|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
"""Tensors that others share, and names under which some programs write one of them twice."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Mapped:
    """A parameter of ours in files of theirs, of which parts can be read. shape: of the parameter."""

    name: str
    shape: tuple[int, ...]
    rows: list[Rows]
    weights: Weights

    def check(self, dtype: torch.dtype | None) -> None:
        """Check that the files have all of it, in its shape and at least the precision `dtype`. Raises CheckpointError,
        naming tensor and file."""
        for theirs, expected in theirs_of(self.rows, self.shape).items():
            if theirs not in self.weights.files:
                remedy = ": leave mtp_num_layers out" if self.name.startswith("mtp.") else ""
                raise CheckpointError(f"{self.weights.folder} has no {theirs}, of which {self.name} is made{remedy}")
            here, file = self.weights.shape(theirs), self.weights.files[theirs]
            if here != expected:
                sizes = f"{as_product(here)}, but config.json makes it {as_product(expected)}"
                raise CheckpointError(f"{theirs} in {file} is {sizes}")
            kind = self.weights.dtype(theirs)
            if dtype is not None and torch.finfo(kind).eps > torch.finfo(dtype).eps:
                raise CheckpointError(f"{theirs} in {file} is {_short(kind)}, but config.json says {_short(dtype)}")

    def read(self, piece: Piece, target: torch.Tensor) -> None:
        """Copy the elements of `piece` into `target`, which is flat. Whole rows that hold them are read, of a
        column's part only these columns."""
        width = torch.Size(self.shape[1:]).numel()
        run = piece.cut.numel // piece.cut.rows // piece.cut.runs
        across, tall, columns = width, run // width, slice(0, width)
        if run % width:  # a part of each row
            across, tall, columns = run, self.shape[0], slice(piece.cut.run * run, piece.cut.run * run + run)
        first, last = piece.start // across, -(-piece.stop // across)
        borders = [first, *range((first // tall + 1) * tall, last, tall), last]
        at = first * across - piece.start  # in the target: its first row may begin before it
        for start, stop in pairwise(borders):
            begin = piece.cut.index(start * across) // width
            for part in self._rectangle(begin, begin + stop - start, columns):
                low, high = max(at, 0), min(at + part.numel(), len(target))
                target[low:high] = part.reshape(-1)[low - at : high - at]
                at += part.numel()

    def _rectangle(self, start: int, stop: int, columns: slice) -> Iterator[torch.Tensor]:
        """These columns of rows `start` to `stop` of ours."""
        at = 0
        for rows in self.rows:
            low, high = max(start, at), min(stop, at + rows.count)
            if low < high:
                yield self._part(rows, rows.part(low - at, high - at), columns)
            at += rows.count

    def _part(self, rows: Rows, part: slice, columns: slice) -> torch.Tensor:
        if not rows.name:
            return torch.zeros(part.stop - part.start, columns.stop - columns.start)
        around = slice(part.start, part.stop)  # files are read without a step
        index = [columns, around] if rows.transposed else [around, columns]
        stack = [slice(rows.expert, rows.expert + 1)] if rows.stacked else []
        found = self.weights.read(rows.name, *stack, *index)
        found = found[0] if stack else found
        return (found.t() if rows.transposed else found)[:: part.step]


class HuggingFaceFolder:
    """A folder of Hugging Face's as a source of weights for a run of `config` (resolved). Raises ConfigError if its
    config.json is of another model."""

    def __init__(self, folder: Path, config: Config, vocab_size: int):
        content, model = config_json.read_json(folder), config.model
        if problems := config_json.differences(config, content, vocab_size):
            raise ConfigError([f"{folder} has another model:", *problems])
        self.folder, self._weights = folder, Weights(folder)
        self._family, self._model = config_json.family_of(content), config_json.model_keys(config, vocab_size)
        text = f"torch.{content.get('dtype') or content.get('torch_dtype')}"
        self._dtype = next((dtype for dtype in DTYPES.values() if str(dtype) == text), None)
        further = 0 if model.mtp_num_layers else content.get("num_nextn_predict_layers") or 0
        self._left_out = range(model.num_layers, model.num_layers + further)

    def whole(self, name: str, kind: str, shape: tuple[int, ...]) -> Mapped:
        """A parameter of ours, which has `shape` in the run. Raises CheckpointError if the family does not have it."""
        return mapped(self._family, name, shape, self._model, self._weights)

    def rest(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors that are none of these parameters, with their files, but layers that the run leaves out. Raises
        CheckpointError if the files lack one of them, or have another shape or less than the precision they say."""
        made = [self.whole(name, "param", shape) for name, shape in shapes.items()]
        for each in made:
            each.check(self._dtype)
        rest = unread(self._weights, {rows.name for each in made for rows in each.rows})
        rest = [name for name in rest if not (layer := _LAYER.match(name)) or int(layer[1]) not in self._left_out]
        return [f"{name} ({self._weights.files[name].name})" for name in rest]


def mapped(family: str, name: str, shape: tuple[int, ...], model: Model, weights: Weights) -> Mapped:
    """A parameter of ours in files of theirs. Raises CheckpointError if the family does not have it."""
    if (rows := rows_of(family, name, shape[0], model)) is None:
        raise CheckpointError(f"models of the family {family} have no {name}: leave out of the run what makes it")
    for number, each in enumerate(rows):  # the names of a bare model lack the first part
        if each.name not in weights.files and (bare := each.name.partition(".")[2]) in weights.files:
            rows[number] = replace(each, name=bare)
    return Mapped(name, shape, rows, weights)


def unread(weights: Weights, read: set[str]) -> list[str]:
    """Tensors of the files that are not among `read`, but copies of one that is and what is computed."""
    rest = sorted(name for name in weights.files.keys() - read if not _NOT_READ.fullmatch(name))
    if any(map(_COPY.fullmatch, rest)):
        shared = {weights.digest(name) for name in _SHARED & read}
        rest = [name for name in rest if not (_COPY.fullmatch(name) and weights.digest(name) in shared)]
    return rest


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
