"""Weights of a Hugging Face folder into an engine: each rank reads the bytes of its own pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaaccum.checkpoint.pieces import held_pieces
from megaaccum.distributed.agreement import distinct_values, raise_on_all_ranks
from megaaccum.errors import CheckpointError, ConfigError, as_product, listed
from megaaccum.pretrain.weights import config_json
from megaaccum.pretrain.weights.rows import Rows, Sizes, rows_of, theirs_of
from megaaccum.pretrain.weights.safetensors_folder import DTYPES, Weights

if TYPE_CHECKING:
    from megaaccum.checkpoint.pieces import Piece
    from megaaccum.config.schema import Config
    from megaaccum.engine import Engine

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
        """Copy the elements of `piece` into `target`, which is flat. Whole rows that hold them are
        read, of a column's part only these columns."""
        width = torch.Size(self.shape[1:]).numel()
        run = piece.cut.numel // piece.cut.rows // piece.cut.runs
        by_columns = run % width != 0
        across = run if by_columns else width
        columns = slice(piece.cut.run * run, piece.cut.run * run + run) if by_columns else slice(0, width)
        tall = 1 if by_columns else run // width
        first, last = piece.start // across, -(-piece.stop // across)
        borders = [first, *range((first // tall + 1) * tall, last, tall), last]
        at = first * across - piece.start  # in the target: its first row may begin before it
        for start, stop in pairwise(borders):
            begin = start if by_columns else piece.cut.index(start * width) // width
            for part in self._rectangle(begin, begin + stop - start, columns):
                low, high = max(at, 0), min(at + part.numel(), len(target))
                if high - low == part.numel():
                    target[low:high].view(part.shape).copy_(part)
                else:
                    target[low:high].copy_(part.reshape(-1)[low - at : high - at])
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


def load(engine: Engine, folder: Path, *, vocab_size: int) -> None:
    """Replace the engine's weights by those of the model in `folder`. vocab_size: of the run, before padding.
    Collective over the world. Raises ConfigError on every rank if the configuration is of another model, and
    CheckpointError for what its files lack or have besides."""
    mapped = raise_on_all_ranks(_mapped, engine, folder, vocab_size)
    everyone = distinct_values(sorted({rows.name for each in mapped for rows in each.rows}), engine.groups.host)
    raise_on_all_ranks(_check_rest, folder, set().union(*everyone), _left_out(engine.plan.config, folder))
    engine.load_weights((each.name, each) for each in mapped)


def _mapped(engine: Engine, folder: Path, vocab_size: int) -> list[Mapped]:
    """Everything that this rank holds a part of, checked against the files."""
    config, content = engine.plan.config, config_json.read_json(folder)
    if problems := config_json.differences(config, content, vocab_size):
        raise ConfigError([f"{folder} has another model:", *problems])
    weights = Weights(folder)
    held = {p.name: p.shape for p, _, _ in held_pieces(engine.backend, engine.groups, only_weights=True)}
    held |= {name: tuple(buffer.shape) for name, buffer in engine.trained_buffers.items()}
    family, sizes = config_json.family_of(content), config_json.sizes_of(config, vocab_size)
    text = str(content.get("dtype") or content.get("torch_dtype") or "")
    dtype = next((dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{text}"), None)
    found = list(mapped(family, held.items(), sizes, weights))
    for each in found:
        each.check(dtype)
    return found


def mapped(
    family: str, held: Iterable[tuple[str, tuple[int, ...]]], sizes: Sizes, weights: Weights
) -> Iterator[Mapped]:
    """Parameters of ours, given by name and shape, in files of theirs. Raises CheckpointError for one that the family
    does not have."""
    for name, shape in held:
        rows = rows_of(family, name, shape[0], sizes)
        if rows is None:
            raise CheckpointError(f"models of the family {family} have no {name}: leave out of the run what makes it")
        yield Mapped(name, shape, [_as_written(each, weights) for each in rows], weights)


def _as_written(rows: Rows, weights: Weights) -> Rows:
    """These rows under the name that the files have: those of a bare model lack the first part of each name."""
    _, _, bare = rows.name.partition(".")
    if rows.name in weights.files or bare not in weights.files:
        return rows
    return replace(rows, name=bare)


def _left_out(config: Config, folder: Path) -> range:
    """Layers of the files that predict further tokens, if the run has none of them."""
    model, count = config.model, config_json.read_json(folder).get("num_nextn_predict_layers") or 0
    return range(model.num_layers, model.num_layers + (0 if model.mtp_num_layers else count))


def _check_rest(folder: Path, read: set[str], left_out: range) -> None:
    """Check that the files hold nothing that no rank reads, but these layers. Raises CheckpointError."""
    weights = Weights(folder)
    rest = [name for name in weights.files.keys() - read if not _NOT_READ.fullmatch(name)]
    rest = [name for name in rest if not (layer := _LAYER.match(name)) or int(layer[1]) not in left_out]
    if any(map(_COPY.fullmatch, rest)):
        shared = {weights.digest(name) for name in _SHARED & read}
        rest = [name for name in rest if not (_COPY.fullmatch(name) and weights.digest(name) in shared)]
    rest.sort()
    if rest:
        raise CheckpointError(
            f"{weights.files[rest[0]]} has {listed(rest)}, which the model of config.json does not have"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
