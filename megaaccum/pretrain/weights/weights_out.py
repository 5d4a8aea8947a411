"""A checkpoint of a run as a folder of Hugging Face's, by one process that holds two parameters at a time."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from megaaccum.checkpoint.folders import latest, read_progress
from megaaccum.checkpoint.pieces import Cut, Piece, StoredPieces
from megaaccum.checkpoint.untrusted_reader import CheckpointReader
from megaaccum.checkpoint.whole import copy_runs
from megaaccum.config.schema import Config
from megaaccum.errors import CheckpointError, ConfigError, DataError
from megaaccum.model import names
from megaaccum.pretrain.data.chats import ChatTokenizer
from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.data.tokenizer import end_of_document, tokenizer_file
from megaaccum.pretrain.data.vocabulary import read_vocabulary
from megaaccum.pretrain.metrics import receipts
from megaaccum.pretrain.weights import config_json, safetensors_folder
from megaaccum.pretrain.weights.bridge import Bridge
from megaaccum.pretrain.weights.rows import Rows, rows_of

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_GENERATION = "generation_config.json"
_BUFFER = "buffer/"
_SHARED = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}
"""Tensors that each layer that predicts further tokens has once more, and their names there."""


def current_of(run: Path, checkpoint: Path | None) -> tuple[Config, Path]:
    """(the configuration of a run by its output_dir, its current checkpoint unless another is given). Raises
    MegaaccumError if it has none."""
    config = receipts.config_of(receipts.read_all(run)[-1], run)
    checkpoint = checkpoint or latest(str(config.run.save))
    if checkpoint is None:
        raise CheckpointError(f"{config.run.save} holds no checkpoint: give --checkpoint the folder of one")
    return config, checkpoint


def consolidate(run: Path, folder: Path, *, checkpoint: Path | None = None, dtype: str = "fp32") -> None:
    """Write a run's weights, under their names in the whole model, into one safetensors file in `folder`, which appears
    when all of it is there: what `Engine.load_weights` takes. Raises MegaaccumError."""
    config, checkpoint = current_of(run, checkpoint)
    export = Export(checkpoint=checkpoint, config=config, vocab_size=0, family="", dtype=names.DTYPES[dtype])
    with safetensors_folder.written_aside(folder) as aside:
        export.write_weights(aside, max_shard_bytes=sys.maxsize)


class WholeCheckpoint:
    """The whole tensors of the checkpoint in a folder, whatever layout wrote it; each is read when it is asked for."""

    def __init__(self, folder: Path):
        self._reader = CheckpointReader(folder, read_progress(folder).metadata_sha256)
        stored = self._reader.stored.items()
        sizes = {key: tensor.size for key, tensor in stored if not key.startswith(("rng/", _BUFFER))}
        self._stored = StoredPieces(sizes)
        buffers = {key.removeprefix(_BUFFER) for key, _ in stored if key.startswith(_BUFFER)}
        self._buffers = {name for name in buffers if not name.startswith("fp8/")}
        self._reader.check_files(sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter and trained buffer, in the order of the model."""
        shapes = {name: self._stored.shape(name) or () for name in self._stored.names}
        shapes |= {name: tuple(self._reader.stored[_BUFFER + name].size) for name in self._buffers}
        return {name: shapes[name] for name in sorted(shapes, key=_place)}

    def is_buffer(self, name: str) -> bool:
        return name in self._buffers

    def has(self, name: str, kind: str) -> bool:
        """Whether there is a tensor of the optimizer's for a parameter."""
        return self._stored.has(name, kind)

    def read(self, name: str, kind: str = "param") -> torch.Tensor:
        """The whole tensor `name`, or the optimizer's of that kind for it. Raises DamagedCheckpoint if its bytes are
        not those that were written."""
        if name in self._buffers:
            return self._reader.read([_BUFFER + name])[_BUFFER + name]
        shape = self._stored.shape(name) or ()
        wanted = Piece(name, kind, shape, Cut(torch.Size(shape).numel()), 0, torch.Size(shape).numel())
        whole: torch.Tensor | None = None
        for piece, start, stop in self._stored.overlapping(wanted):
            part = self._reader.read([piece.key])[piece.key]
            if whole is None:
                whole = torch.empty(shape, dtype=part.dtype)
            part = part[start - piece.start : stop - piece.start]
            copy_runs(part, whole.view(-1), replace(piece, start=start, stop=stop), into_whole=True)
            del part  # before the next one is read
        assert whole is not None, name
        return whole


def _place(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A key by which the embedding comes first, and layer 10 after layer 9."""
    parts = re.split(r"(\d+)", name)
    return not name.startswith("embedding."), [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Export:
    """An export of `checkpoint`, written by a run of `config` (resolved) with `vocab_size` tokens before padding.
    family: of families.yaml, empty for our own names; dtype: of the weights; content: config.json, default made of the
    configuration; source: a model whose generation config and tokenizer are taken, default the tokenizer of the run's
    data; bridge: the mapping of weights in place of the family's."""

    checkpoint: Path
    config: Config
    vocab_size: int
    family: str
    dtype: torch.dtype
    content: config_json.Keys | None = None
    source: Path | None = None
    bridge: Bridge | None = None

    @classmethod
    def of_run(
        cls,
        run: Path,
        *,
        checkpoint: Path | None = None,
        family: str | None = None,
        dtype: str | None = None,
        like: Path | None = None,
        via_bridge: bool = False,
    ) -> Self:
        """The export of a run by its output_dir. checkpoint: default the current one; family: default the first that
        has this model; dtype: default the run's; like: a model's folder, default the run's init_from; via_bridge: by
        Megatron-Bridge's mapping for that model. Raises MegaaccumError if the run lacks receipt or checkpoint, and
        ConfigError if no family has its model."""
        (config, checkpoint), vocab_size = current_of(run, checkpoint), receipts.read_all(run)[-1]["data"]["vocab_size"]
        began = Path(config.run.init_from) if config.run.init_from else None
        source = like or (began if began and (began / "config.json").is_file() else None)
        if like is not None and tokenizer_file(like).is_file():
            config.data.tokenizer_model = str(like)
        beside = source and not config.data.sft  # then the tokenizer of the model is the run's
        for name in ["chat_template_path"] if beside else ["chat_template_path", "tokenizer_model"]:
            if (path := getattr(config.data, name)) and not Path(path).exists():
                raise ConfigError(f"{name} {path} of the run is not there: put it back (a tokenizer: or give --like)")
        content = None if source is None else config_json.read_json(source)
        bridge = Bridge(source, config_json.model_keys(config, vocab_size)) if via_bridge else None
        there = None if bridge or content is None else config_json.family_of(content)
        if bridge is None and (
            content is None or family not in (None, there) or config_json.differences(config, content, vocab_size)
        ):  # another family is asked for, or the run has set keys of the model otherwise
            content, there = None, config_json.family_for(config, vocab_size, family and [family])
        return cls(
            checkpoint=checkpoint,
            config=config,
            vocab_size=vocab_size,
            family=there or "",
            dtype=names.DTYPES[dtype or config.sharding.params_dtype or "fp32"],
            content=content,
            source=source,
            bridge=bridge,
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of theirs, one parameter of ours after the other; of a tensor of all experts, a piece for each
        of them."""
        return self._made_of(self._whole.shapes())

    def _made_of(self, ours: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ours:
            yield from self._theirs(name, self._whole.read(name))  # gone before the next parameter is read

    def layout(self) -> safetensors_folder.Layout:
        """Shape and dtype of each tensor of theirs."""
        found: safetensors_folder.Layout = {}
        for name, shape in self._whole.shapes().items():
            for theirs, piece in self._theirs(name, torch.empty(shape, device="meta")):
                above = found[theirs][0][0] if theirs in found else 0
                found[theirs] = ((above + len(piece), *piece.shape[1:]), piece.dtype)
        return found

    def write(self, folder: Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write the model into `folder`, which appears when all of it is there. Raises CheckpointError."""
        with safetensors_folder.written_aside(folder) as aside:
            self.write_weights(aside, max_shard_bytes=max_shard_bytes)
            self._write_json(aside)  # last: without a config.json no program takes what a killed export leaves

    def write_weights(self, aside: Path, *, max_shard_bytes: int) -> None:
        """Write the safetensors files into `aside`."""
        together: dict[str, list[str]] = {}  # parameters of ours that fill one tensor of theirs
        for name, shape in self._whole.shapes().items():
            theirs, _ = next(self._theirs(name, torch.empty(shape, device="meta")))
            together.setdefault(theirs, []).append(name)
        makers = [partial(self._made_of, ours) for ours in together.values()]
        safetensors_folder.write(aside, self.layout(), makers, max_shard_bytes=max_shard_bytes)

    @cached_property
    def _whole(self) -> WholeCheckpoint:
        return WholeCheckpoint(self.checkpoint)

    @cached_property
    def _model(self) -> config_json.Keys:
        return config_json.model_keys(self.config, self.vocab_size)

    def _theirs(self, ours: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        pieces: Iterable[tuple[str, torch.Tensor]] = [(ours, tensor)]
        if self.bridge is not None:
            pieces = self.bridge.to_theirs(ours, tensor)
        elif self.family:
            rows = rows_of(self.family, ours, tensor.shape[0], self._model)
            if rows is None:
                raise CheckpointError(f"{self.checkpoint} has {ours}, which models of the family {self.family} lack")
            pieces = to_theirs(rows, tensor)
        for theirs, piece in pieces:
            piece = piece.to(torch.float32 if self._whole.is_buffer(ours) else self.dtype)
            yield theirs, piece
            for number in range(self._model["mtp_num_layers"] or 0) if theirs in _SHARED else ():
                yield f"model.layers.{self._model['num_layers'] + number}.{_SHARED[theirs]}", piece

    def _write_json(self, aside: Path) -> None:
        content = dict(self.content or config_json.json_from(self.config, self.family, self.vocab_size))
        if "num_nextn_predict_layers" in content:
            content["num_nextn_predict_layers"] = self.config.model.mtp_num_layers or 0
        content |= dict.fromkeys(("dtype", "torch_dtype"), str(self.dtype).removeprefix("torch."))
        given, folder = self.config.data.tokenizer_model, self.source
        if given and (own := tokenizer_file(given).with_name("tokenizer_config.json")).is_file():
            folder = own.parent  # the run's ids are its own, whatever its weights began from
        for place, name in ((self.source or folder, _GENERATION), *((folder, each) for each in _TOKENIZER)):
            if place is not None and (place / name).is_file():
                shutil.copyfile(place / name, aside / name)
        with suppress(DataError):  # of ids alone there is no tokenizer
            if folder is None:
                _write_tokenizer(read_run_tokenizer(self.config, "--hf"), aside)
            if self.content is None:
                content["eos_token_id"] = read_vocabulary(aside, "HuggingFaceTokenizer").eod
        files = {"config.json": content}
        if self.config.data.sft:  # a base model ends texts, and not turns
            stops = ChatTokenizer(replace(self.config.data, tokenizer_model=str(folder or given))).stops
            if (aside / _GENERATION).is_file():
                files[_GENERATION] = config_json.read_object(aside / _GENERATION)
            for each in files.values():
                ends = [*(known := config_json.end_ids(each)), *sorted(stops.difference(known))]
                each["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        for name, each in files.items():
            (aside / name).write_text(json.dumps(each, indent=2) + "\n", encoding="utf-8")
        if self.config.data.chat_template_path is not None:  # in which the model was trained
            shutil.copyfile(self.config.data.chat_template_path, aside / "chat_template.jinja")


def _write_tokenizer(tokenizer: tokenizers.Tokenizer, aside: Path) -> None:
    """Write a tokenizer as transformers and other programs read it."""
    tokenizer.save(str(aside / "tokenizer.json"))
    end, facts = end_of_document(tokenizer), {"tokenizer_class": "PreTrainedTokenizerFast"}
    facts |= {} if end is None else {"eos_token": str(tokenizer.id_to_token(end))}
    (aside / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def to_theirs(rows: list[Rows], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of theirs, of a whole parameter of ours; of a tensor of all experts, the part of this one."""
    parts = tensor.split([each.count for each in rows])
    for name in dict.fromkeys(each.name for each in rows if each.name):
        found = [(each, part) for each, part in zip(rows, parts, strict=True) if each.name == name]
        first, whole = found[0]
        if len(found) > 1:
            whole = tensor.new_empty(sum(each.count for each, _ in found), *tensor.shape[1:])
            for each, part in found:
                whole[each.part(0, each.count)] = part
        whole = whole.t().contiguous() if first.transposed else whole
        yield name, whole[None] if first.stacked else whole
