"""A checkpoint of a run as one of Megatron's `torch_dist` kind, by one process that holds one parameter at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megaaccum.checkpoint.folders import step_of
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError
from megaaccum.model import names
from megaaccum.pretrain.weights import safetensors_folder
from megaaccum.pretrain.weights.torch_dist import COMMON, LATEST, Place, places_of
from megaaccum.pretrain.weights.weights_out import WholeCheckpoint


def write(folder: Path, config: Config, checkpoint: Path, *, dtype: str | None = None) -> int:
    """Write the weights of the checkpoint of a run of `config` (resolved) into `folder`, which appears when all of it
    is there, as Megatron's `--load` takes them: under any layout, by its local layers and those of Transformer Engine.
    dtype: default the run's. Returns the iteration. Raises MegaaccumError."""
    if "hybrid_layer_pattern" in config.megatron:
        raise ConfigError("hybrid_layer_pattern: Megatron's names of state-space layers are not written, only of GPT's")
    whole, step = WholeCheckpoint(checkpoint), max(step_of(checkpoint), 0)
    planner = _Streamed(whole, names.DTYPES[dtype or config.sharding.params_dtype or "fp32"], _lies_together(config))
    planner.add_object(COMMON, {"iteration": step, "checkpoint_version": 3.0})
    with safetensors_folder.written_aside(folder) as aside:
        inside = aside / f"iter_{step:07d}"
        dcp.save({}, storage_writer=dcp.FileSystemWriter(inside), planner=planner, no_dist=True)
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (inside / "metadata.json").write_text(json.dumps(kind), encoding="utf-8")
        (aside / LATEST).write_text(str(step), encoding="utf-8")
    return step


def _lies_together(config: Config) -> bool:
    """Whether Megatron stores the layers of the decoder in one tensor: it does not if they may be of several kinds."""
    return config.model.moe_layer_freq == 1 or config.model.num_experts is None


class _Streamed(dcp.DefaultSavePlanner):
    """Plans to write whole parameters, each of which is read when its turn comes."""

    def __init__(self, whole: WholeCheckpoint, dtype: torch.dtype, together: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        shapes, lengths = whole.shapes(), dict[str, Place]()
        places = [(name, place) for name in shapes for place in places_of(name, together=together)]
        for _, place in places:  # layers and experts come in order: the last place has the largest indices
            lengths[place.key] = place
        self._contents: dict[tuple[str, tuple[int, ...]], Callable[[], torch.Tensor | io.BytesIO]] = {}
        self._items: list[WriteItem] = []
        for name, place in places:
            kind = torch.float32 if whole.is_buffer(name) else dtype
            offsets = torch.Size((*place.index, *(0 for _ in shapes[name])))
            sizes = torch.Size((*(1 for _ in place.index), *shapes[name]))
            count = tuple(last + 1 for last in lengths[place.key].index)
            length = torch.Size((*count, *shapes[name]))
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(kind), length)
            self._items.append(WriteItem(MetadataIndex(place.key, offsets), WriteItemType.SHARD, tensor_data=data))
            self._contents[place.key, offsets] = partial(_read, whole, name, kind, sizes)
            for module in _modules(place.key):
                at, of = (".".join(map(str, each)) for each in (place.index or (0,), count or (1,)))
                self.add_object(f"{module}._extra_state/shard_{at}_{of}", None)

    def add_object(self, key: str, content: object) -> None:
        """Write `content` besides, as Megatron writes what is no tensor."""
        file = io.BytesIO()
        torch.save([content], file)
        self._items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        self._contents[key, ()] = lambda: file

    def create_local_plan(self) -> SavePlan:
        """The tensors, in the order of the model."""
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The content of an item, read now."""
        return self._contents[write_item.index.fqn, tuple(write_item.index.offset or ())]()


def _modules(key: str) -> Iterator[str]:
    """Yield the modules with the weight `key` for which a load asks for a state of FP8's, empty here."""
    if key.endswith(".weight"):
        yield key.removesuffix(".weight")
        if key.endswith(".linear_proj.weight"):
            yield key.replace("linear_proj.weight", "core_attention")


def _read(whole: WholeCheckpoint, name: str, dtype: torch.dtype, sizes: torch.Size) -> torch.Tensor:
    return whole.read(name).to(dtype).view(sizes)
