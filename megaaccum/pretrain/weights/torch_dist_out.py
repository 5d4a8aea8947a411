"""A checkpoint of a run as one of Megatron's `torch_dist` kind, by one process that holds one parameter at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megaaccum.checkpoint.folders import Progress, read_progress, step_of
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError
from megaaccum.model import names
from megaaccum.optim.adamw import decoupled_rates, hidden_rates
from megaaccum.optim.by_pattern import factors
from megaaccum.pretrain.weights import safetensors_folder
from megaaccum.pretrain.weights.torch_dist import COMMON, LATEST, Place, places_of
from megaaccum.pretrain.weights.weights_out import WholeCheckpoint


def write(
    folder: Path, config: Config, checkpoint: Path, *, dtype: str | None = None, only_weights: bool = False
) -> int:
    """Write the checkpoint of a run of `config` (resolved) into `folder`, which appears when all of it is there, as
    Megatron's `--load` takes it: under any layout, by its local layers and those of Transformer Engine, with the
    optimizer's state in its form `fully_reshardable` unless `only_weights`.

    dtype: of the weights, default the run's; the optimizer's are FP32 masters and moments. Returns the iteration.
    Raises MegaaccumError.
    """
    if "hybrid_layer_pattern" in config.megatron:
        raise ConfigError("hybrid_layer_pattern: Megatron's names of state-space layers are not written, only of GPT's")
    if (chosen := config.optimizer.optimizer) != "adam" and not only_weights:
        raise ConfigError(f"optimizer {chosen}: Megatron's form of its state is not written: add --only_weights")
    whole, step = WholeCheckpoint(checkpoint), max(step_of(checkpoint), 0)
    # Megatron stores the layers of the decoder in one tensor if all are of one kind.
    together = config.model.moe_layer_freq == 1 or config.model.num_experts is None
    kind = names.DTYPES[dtype or config.sharding.params_dtype or "fp32"]
    planner = _Streamed(whole, kind, together=together, with_optimizer=not only_weights)
    common: dict[str, Any] = {"iteration": step, "checkpoint_version": 3.0}
    if not only_weights:
        common |= _training(config, read_progress(checkpoint))
    planner.add_object(COMMON, common)
    with safetensors_folder.written_aside(folder) as aside:
        inside = aside / f"iter_{step:07d}"
        dcp.save({}, storage_writer=dcp.FileSystemWriter(inside), planner=planner, no_dist=True)
        form = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (inside / "metadata.json").write_text(json.dumps(form), encoding="utf-8")
        (aside / LATEST).write_text(str(step), encoding="utf-8")
    return step


def _training(config: Config, progress: Progress) -> dict[str, Any]:
    """Megatron's record of a training (0.19): groups of its optimizer, which it finds by their rates, of all pairs of
    lr_mult and wd_mult, and with those of use_mup; schedule, and the arguments that it compares or continues from.
    Experts that are spread have an optimizer of their own there."""
    keys, model = config.optimizer, config.model
    plain: dict[str, Any] = {"betas": (keys.adam_beta1, keys.adam_beta2), "eps": keys.adam_eps, "bias_correction": True}
    plain |= {"max_lr": keys.lr, "min_lr": keys.min_lr}
    plain |= {"lr_mult": 1.0, "step": progress.num_updates, "amsgrad": False, "maximize": False}
    rates = [(True, decoupled_rates(config)), (False, hidden_rates(config))]
    ends = [(False, plain), *((is_decoupled, plain | each) for is_decoupled, each in rates if each is not None)]
    by_lr, by_wd = ({1.0, *factors(key, getattr(keys, key)).values()} for key in ("lr_mult", "wd_mult"))
    kinds = [*product(ends, by_lr, (1.0, 0.0), by_wd)]

    def optimizer(is_expert: bool) -> dict[str, Any]:
        groups = [
            end | dict(
                lr=end["max_lr"] * factor, max_lr=end["max_lr"] * factor, min_lr=end["min_lr"] * factor,
                wd_mult=decays * share, weight_decay=keys.weight_decay * decays * share, is_decoupled_lr=is_decoupled,
                is_expert_parallel=is_expert, default_config=end["max_lr"] * factor == keys.lr and not is_decoupled,
            )
            for (is_decoupled, end), factor, decays, share in kinds
        ]  # fmt: skip
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": _FORM}

    is_spread = model.num_experts is not None and config.parallel.expert_model_parallel_size > 1
    arguments = SimpleNamespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        add_position_embedding=model.position_embedding_type == "learned_absolute",
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        consumed_train_samples=progress.consumed_samples,
        consumed_valid_samples=0,
        no_save_rng=True,
    )
    return {
        "optimizer": {number: optimizer(bool(number)) for number in range(2)} if is_spread else optimizer(False),
        "opt_param_scheduler": progress.lr_schedule,  # Megatron's numbers, which count samples too, and ours
        "args": arguments,
        "content_metadata": {"distrib_optim_sharding_type": _FORM, "chained_optim_avoid_prefix": True},
    }


_FORM = "fully_reshardable"


class _Streamed(dcp.DefaultSavePlanner):
    """Plans to write whole parameters, each of which is read when its turn comes. with_optimizer: the masters and
    moments of all trained ones too."""

    def __init__(self, whole: WholeCheckpoint, dtype: torch.dtype, *, together: bool, with_optimizer: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._whole, self._shapes = whole, whole.shapes()
        places = [(name, place) for name in self._shapes for place in places_of(name, together=together)]
        # Layers and experts come in order: the last place has the largest indices.
        self._lengths = {place.key: tuple(last + 1 for last in place.index) for _, place in places}
        self._contents: dict[tuple[str, tuple[int, ...]], Callable[[], torch.Tensor | io.BytesIO]] = {}
        self._items: list[WriteItem] = []
        for name, place in places:
            self._add(name, place, "param", torch.float32 if whole.is_buffer(name) else dtype)
            for kind in ("param", "exp_avg", "exp_avg_sq") if with_optimizer and whole.has(name, "exp_avg") else ():
                self._add(name, place, kind, torch.float32, before=f"optimizer.state.{kind}.")
            for module in _modules(place.key):
                at, of = ".".join(map(str, place.index)) or "0", ".".join(map(str, self._lengths[place.key])) or "1"
                self.add_object(f"{module}._extra_state/shard_{at}_{of}", None)

    def _add(self, name: str, place: Place, kind: str, dtype: torch.dtype, before: str = "") -> None:
        key, shape = before + place.key, self._shapes[name]
        offsets = torch.Size((*place.index, *(0 for _ in shape)))
        sizes = torch.Size((*(1 for _ in place.index), *shape))
        length = torch.Size((*self._lengths[place.key], *shape))
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), length)
        self._items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        self._contents[key, offsets] = lambda: self._whole.read(name, kind).to(dtype).view(sizes)

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
