"""Tensors of Megatron's checkpoints: of several layers and experts together, in parts, and what a run lacks or adds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights import torch_dist_out
from megaaccum.pretrain.weights.torch_dist import COMMON, LATEST, TorchDist
from megaaccum.pretrain.weights.torch_dist_out import _Streamed, _training
from tests.support.configs import make, plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FC2 = torch.arange(24.0).view(2, 3, 4)
"""A matrix of each of two layers."""
EXPERTS = torch.arange(100.0, 124.0).view(2, 3, 2, 2)
"""One of each of three experts in each layer."""
WORDS = torch.arange(200.0, 210.0).view(5, 2)
PARTS = [
    # key, whole, first indices and sizes of each part; layers are cut in columns or rows as tp cuts them
    ("decoder.layers.mlp.linear_fc2.weight", FC2, [((n, 0, c), (1, 3, 2)) for n in (1, 0) for c in (2, 0)]),
    ("decoder.layers.mlp.experts.experts.linear_fc1.weight", EXPERTS,
     [((n, e, r, 0), (1, 1, 1, 2)) for n in range(2) for e in range(3) for r in range(2)]),
    ("embedding.word_embeddings.weight", WORDS, [((0, 0), (3, 2)), ((3, 0), (2, 2))]),
]  # fmt: skip


class Planner(dcp.DefaultSavePlanner):
    """Writes parts of whole tensors, and one object."""

    def __init__(self, parts: list, common: object):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items, self._contents = [], dict[tuple, object]()
        for key, whole, cuts in parts:
            for offsets, sizes in cuts:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                facts = TensorWriteData(chunk, TensorProperties(whole.dtype), whole.shape)
                index = MetadataIndex(key, torch.Size(offsets))
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=facts))
                place = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                self._contents[key, offsets] = whole[place].clone()
        file = io.BytesIO()
        torch.save([common], file)
        self._items.append(WriteItem(MetadataIndex(COMMON), WriteItemType.BYTE_IO))
        self._contents[COMMON, ()] = file

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, item: WriteItem):
        return self._contents[item.index.fqn, tuple(item.index.offset or ())]


def written(folder: Path, parts: list | None = None, common: object = None) -> Path:
    inside = folder / "iter_0000007"
    dcp.save({}, storage_writer=dcp.FileSystemWriter(inside), planner=Planner(parts or PARTS, common), no_dist=True)
    (inside / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / LATEST).write_text("7\n")
    return folder


SHAPES = {
    "embedding.word_embeddings.weight": (5, 2),
    **{f"decoder.layers.{n}.mlp.linear_fc2.weight": (3, 4) for n in range(2)},
    **{f"decoder.layers.{n}.mlp.experts.local_experts.{e}.linear_fc1.weight": (2, 2) for n in (0, 1) for e in range(3)},
}


def whole_of(name: str) -> torch.Tensor:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return WORDS if not numbers else FC2[numbers[0]] if len(numbers) == 1 else EXPERTS[numbers[0], numbers[1]]


def test_each_layer_and_expert_is_joined_of_its_own_parts(tmp_path):
    there = TorchDist(written(tmp_path))
    for name, shape in SHAPES.items():
        assert torch.equal(there.whole(name, "param", shape), whole_of(name)), name
    assert there.rest(SHAPES) == []
    for lacking in SHAPES:
        (left,) = there.rest({name: shape for name, shape in SHAPES.items() if name != lacking})
        assert left.split(".")[-2] in lacking
    for name in (
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
    ):
        with pytest.raises(CheckpointError, match="it has no part"):
            there.whole(name, "param", (1,))
    with pytest.raises(CheckpointError, match=r"has no decoder\.final_layernorm\.weight \(param\)"):
        there.whole("decoder.final_layernorm.weight", "param", (1,))


def test_masters_come_before_weights_and_each_moment_is_itself(tmp_path):
    key, whole, cuts = PARTS[2]
    kinds = {
        "": 0.0,
        "optimizer.state.fp32_param.": 1.0,
        "optimizer.state.exp_avg.": 2.0,
        "optimizer.state.exp_avg_sq.": 3.0,
    }
    parts = [(f"chained_1.{kind}{key}" if kind else key, whole + more, cuts) for kind, more in kinds.items()]
    groups = [{"params": []}, {"step": 5}]
    common = {"iteration": 7, "optimizer": {0: {"optimizer": {"param_groups": groups}}}}
    there = TorchDist(written(tmp_path, parts, common))
    for kind, more in (("param", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
        assert torch.equal(there.whole(key, kind, (5, 2)), whole + more), kind
    assert there.reached(True) == (7, 5, None) and there.reached(False) == (7, 7, None)
    assert there.rest({key: (5, 2)}) == []


def test_a_tensor_that_is_not_all_there_is_refused(tmp_path):
    key, whole, cuts = PARTS[0]
    there = TorchDist(written(tmp_path, [(key, whole, cuts[1:])], {"iteration": 7}))
    assert torch.equal(there.whole("decoder.layers.0.mlp.linear_fc2.weight", "param", (3, 4)), FC2[0])
    with pytest.raises(CheckpointError, match="is not whole: 6 elements"):
        there.whole("decoder.layers.1.mlp.linear_fc2.weight", "param", (3, 4))
    with pytest.raises(CheckpointError, match="no optimizer state in the shapes of the model"):
        there.reached(True)
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight \(exp_avg\)"):
        there.whole("decoder.layers.0.mlp.linear_fc2.weight", "exp_avg", (3, 4))


def test_predictions_have_names_of_their_own(tmp_path):
    whole = [((0, 0), (5, 2))]
    keys = "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", "mtp.layers.0.eh_proj.weight"
    there = TorchDist(written(tmp_path, [(key, WORDS + number, whole) for number, key in enumerate(keys)]))
    names = "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight", "mtp.layers.0.eh_proj.weight"
    for number, name in enumerate(names):
        assert torch.equal(there.whole(name, "param", (5, 2)), WORDS + number), name
    assert there.rest(dict.fromkeys(names, (5, 2))) == []


def test_each_group_of_megatrons_optimizer_has_its_own_rates_and_decay():
    """Megatron finds a group of a load by these numbers, and its schedule moves between max_lr and min_lr."""
    keys = dict(lr=1e-2, min_lr=1e-3, decoupled_lr=4e-2, decoupled_min_lr=2e-3, weight_decay=0.1)
    config = plan(**keys, lr_mult=["*.weight=0.5"], wd_mult=["*.bias=3"], max_position_embeddings=512).config
    progress: Any = SimpleNamespace(num_updates=5, consumed_samples=40, lr_schedule={"num_steps": 40})
    made = _training(config, progress)
    groups = made["optimizer"]["optimizer"]["param_groups"]
    found = {(g["max_lr"], g["min_lr"], g["lr"], g["weight_decay"], g["wd_mult"], g["is_decoupled_lr"]) for g in groups}
    assert found == {
        (peak * by_lr, end * by_lr, peak * by_lr, 0.1 * decays * by_wd, decays * by_wd, decoupled)
        for peak, end, decoupled in ((1e-2, 1e-3, False), (4e-2, 2e-3, True))
        for by_lr in (1.0, 0.5) for decays in (1.0, 0.0) for by_wd in (1.0, 3.0)
    }  # fmt: skip
    assert {g["step"] for g in groups} == {5} and {g["is_expert_parallel"] for g in groups} == {False}
    assert all(g["default_config"] == (g["max_lr"] == 1e-2 and not g["is_decoupled_lr"]) for g in groups)
    assert made["opt_param_scheduler"] == {"num_steps": 40} and made["args"].consumed_train_samples == 40
    assert made["args"].max_position_embeddings == 512


def test_weights_are_written_in_the_dtype_that_is_asked_for_and_all_else_in_fp32():
    """Biases of experts move by steps that 16 bits would round away."""
    shapes = {"decoder.layers.0.mlp.router.weight": (4, 8), "decoder.layers.0.mlp.router.expert_bias": (4,)}
    whole: Any = SimpleNamespace(
        shapes=lambda: shapes, is_buffer=lambda name: name.endswith("bias"), has=lambda name, kind: "weight" in name,
        read=lambda name, kind: torch.full(shapes[name], 1 + 2.0**-12),
    )  # fmt: skip
    planner = _Streamed(whole, torch.bfloat16, together=True, with_optimizer=True)
    items = [each for each in planner.create_local_plan().items if each.tensor_data is not None]
    found = {}
    for each in items:
        content = planner.resolve_data(each)
        assert content.dtype == each.tensor_data.properties.dtype
        found[each.index.fqn] = content.dtype, bool((content.double() == 1 + 2.0**-12).all())
    weight = "decoder.layers.mlp.router.weight"
    assert found == {
        weight: (torch.bfloat16, False),
        "decoder.layers.mlp.router.expert_bias": (torch.float32, True),
    } | {f"optimizer.state.{kind}.{weight}": (torch.float32, True) for kind in ("param", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(
    ("frequency", "experts", "apart"), [(1, 4, False), ([0, 1], 4, True), ([0, 1], None, False), (2, 4, True)]
)
def test_layers_of_several_kinds_are_written_apart(tmp_path, monkeypatch, frequency, experts, apart):
    shapes = {f"decoder.layers.{n}.input_layernorm.weight": (8,) for n in range(2)}
    whole = SimpleNamespace(
        shapes=lambda: shapes, is_buffer=lambda name: False, has=lambda name, kind: False,
        read=lambda name, kind: torch.ones(8),
    )  # fmt: skip
    monkeypatch.setattr(torch_dist_out, "WholeCheckpoint", lambda folder: whole)
    config = make()
    config.model.moe_layer_freq, config.model.num_experts = frequency, experts
    assert torch_dist_out.write(tmp_path / "out", config, Path("step_0000007"), only_weights=True) == 7
    keys = dcp.FileSystemReader(tmp_path / "out" / "iter_0000007").read_metadata().state_dict_metadata
    layers = {key for key in keys if key.endswith("norm.weight")}
    together = {
        f"decoder.layers.{name}" for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    }
    assert apart != bool(layers & together), layers
    assert apart == any(key.startswith("decoder.layers.1.") for key in layers)
