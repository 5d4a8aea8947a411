"""Checkpoints that Megatron and DeepSpeed wrote, read into other layouts: the weights are theirs, bit by bit."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaaccum.errors import CheckpointError, MegaaccumError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import VOCAB, Case

BATCH = "--global_batch_size 8 --micro_batch_size 1 "
DENSE = "--num_layers 4 --swiglu --num_query_groups 2 --qk_layernorm --untie_embeddings_and_output_weights "
MIXED = (
    "--num_layers 2 --num_experts 4 --no_add_bias_linear --swiglu --moe_router_score_function sigmoid "
    "--moe_router_enable_expert_bias --untie_embeddings_and_output_weights --moe_layer_freq [0,1] "
)
SPARSE = MIXED.replace("--moe_layer_freq [0,1] ", "")
Digests = dict[str, str]


def digests(engine: Any) -> Digests:
    """SHA-256 of each whole tensor."""
    return {name: _digest(tensor) for name, tensor in engine.whole_weights()}


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def spoiled(engine: Any) -> None:
    """Other weights than any file has."""
    import torch

    engine.load_weights((name, torch.full_like(tensor, 7.0)) for name, tensor in engine.whole_weights())


def write_megatron(cells: list[tuple[Case, str]]) -> list[Digests]:
    """Checkpoints by Megatron's own library, in iter_0000003 below each folder; the digests of the weights."""
    import torch
    from megatron.core import dist_checkpointing

    from tests.support.engines import engine_of

    found = []
    for case, folder in cells:
        engine, place = engine_of(case), Path(folder) / "iter_0000003"
        place.mkdir(parents=True, exist_ok=True)
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("3")
        with engine.groups.current():
            state = {f"model{i}" if i else "model": chunk.sharded_state_dict() for i, chunk in enumerate(engine.chunks)}
            dist_checkpointing.save(state | {"iteration": 3, "checkpoint_version": 3.0}, str(place))
        torch.distributed.barrier()
        found.append(digests(engine))
    return found


def read_foreign(cells: list[tuple[Case, str]]) -> list[Digests | str]:
    """The digests of the weights that engines of the cases have after a load; a text if it raised one."""
    from megaaccum.pretrain.weights import foreign
    from tests.support.engines import engine_of

    found: list[Digests | str] = []
    for case, folder in cells:
        engine = engine_of(case)
        spoiled(engine)
        try:
            assert foreign.is_foreign(Path(folder))
            foreign.load(engine, Path(folder), vocab_size=VOCAB)
            found.append(digests(engine))
        except MegaaccumError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


MEGATRON = {
    "dense": ("--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --backend ddp ", DENSE),
    "mixed": ("--expert_model_parallel_size 2 --pipeline_model_parallel_size 2 --backend ddp ", MIXED),
    "sparse": ("--expert_model_parallel_size 4 --backend ddp ", SPARSE),
}
INTO = {
    "dense": ["", "--pipeline_model_parallel_size 2 --schedule zbv ", "--tensor_model_parallel_size 4 --zero_stage 1 "],
    "mixed": [
        "--sync streaming ",
        "--tensor_model_parallel_size 2 --expert_tensor_parallel_size 1 --sequence_parallel ",
    ],
    "sparse": ["--pipeline_model_parallel_size 2 ", "--backend fsdp2 "],
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Digests]]:
    """The folder of Megatron's checkpoints, and the digests of what they hold."""
    top = tmp_path_factory.mktemp("megatron")
    cells = [(Case(4, BATCH + layout, model), str(top / name)) for name, (layout, model) in MEGATRON.items()]
    return top, dict(zip(MEGATRON, run_ranks(write_megatron, 4, cells, timeout=120)[0], strict=True))


def test_megatrons_checkpoints_are_read_into_any_layout(megatron):
    top, written = megatron
    wanted = [(name, layout) for name, layouts in INTO.items() for layout in layouts]
    cells = [(Case(4, BATCH + layout, MEGATRON[name][1]), str(top / name)) for name, layout in wanted]
    for rank in run_ranks(read_foreign, 4, cells, timeout=200):
        for (name, layout), found in zip(wanted, rank, strict=True):
            assert found == written[name], (name, layout, found if isinstance(found, str) else "")


def test_another_model_is_named(megatron):
    top, _ = megatron
    cells = [
        (Case(1, BATCH, DENSE.replace("--num_layers 4", "--num_layers 5")), str(top / "dense")),
        (Case(1, BATCH, DENSE.replace("--qk_layernorm ", "")), str(top / "dense")),
        (Case(1, BATCH, DENSE.replace("--swiglu ", "")), str(top / "dense")),
        (Case(1, BATCH, DENSE), str(top / "mixed")),
    ]
    deeper, fewer, narrower, dense = run_ranks(read_foreign, 1, cells, timeout=100)[0]
    assert "it has no part (4,)" in deeper
    assert "decoder.layers.self_attention.k_layernorm.bias" in fewer and "which the model does not have" in fewer
    assert "decoder.layers.0.mlp.linear_fc2.weight is 32 x 64, but 32 x 128 in the model" in narrower
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in dense


class _Command:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path(self.path), "ran"))


def test_nothing_in_a_megatron_checkpoint_runs(tmp_path):
    from megaaccum.pretrain.weights.torch_dist import TorchDist

    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Command(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointError, match="it could run commands"):
        TorchDist(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="of the kind zarr, but only torch_dist is read"):
        TorchDist(tmp_path)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def write_deepspeed(folder: str, stage: int, make: Callable[[], Any]) -> Digests:
    """A checkpoint of a module that DeepSpeed trained for a step; the digests of its FP32 weights, by their names."""
    import deepspeed
    import torch

    model = make()
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.arange(8)[None] + torch.distributed.get_rank()
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = _digest(deepspeed.utils.safe_get_full_fp32_param(param))
    return found


def llama() -> Any:
    """A small model of transformers' own class."""
    from tests.support.huggingface import model_of

    return model_of("qwen3").train()


def read_llama(folders: list[str], layout: str) -> list[Digests | str]:
    """The digests of the weights under their Hugging Face names, after a load into a layout."""
    from megaaccum.pretrain.weights import config_json, foreign, weights_out
    from megaaccum.pretrain.weights.rows import rows_of
    from tests.support import huggingface as hf

    found: list[Digests | str] = []
    for folder in folders:
        plan = hf.plan_of(Path(folder).parent / "qwen3", 2, *layout.split())
        engine = hf.engine_of(plan)
        spoiled(engine)
        try:
            foreign.load(engine, Path(folder), vocab_size=hf.VOCAB)
        except MegaaccumError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        theirs = {}
        for name, tensor in engine.whole_weights():
            rows = rows_of("qwen3", name, tensor.shape[0], config_json.sizes_of(plan.config, hf.VOCAB))
            theirs |= {each: _digest(part) for each, part in weights_out.to_theirs(rows or [], tensor)}
        found.append(theirs)
    return found


def to_universal(folder: str, out: str) -> None:
    """DeepSpeed's own conversion."""
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    latest = (Path(folder) / "latest").read_text().strip()
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(Path(folder) / latest), output_folder=out, num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def test_deepspeeds_checkpoints_are_read(tmp_path):
    from tests.support import huggingface as hf

    hf.write("qwen3", tmp_path)
    written = {}
    for stage in (1, 2, 3):
        written[stage] = run_ranks(write_deepspeed, 3, str(tmp_path / str(stage)), stage, llama, timeout=100)[0]
    folders = [str(tmp_path / str(stage)) for stage in written]
    run_ranks(to_universal, 1, folders[2], str(tmp_path / "universal"), timeout=100)
    for layout in ("--pipeline_model_parallel_size 2", "--sync streaming"):
        for found in run_ranks(read_llama, 2, [*folders, str(tmp_path / "universal")], layout, timeout=100):
            for each, expected in zip(found, [*written.values(), written[3]], strict=True):
                assert each == expected, each if isinstance(each, str) else layout


def test_nothing_in_a_deepspeed_checkpoint_runs(tmp_path):
    import torch

    from megaaccum.config.schema import Config
    from megaaccum.pretrain.weights.deepspeed_folder import DeepSpeedFolder

    content = {"optimizer_state_dict": {"zero_stage": 1, "partition_count": 1}, "x": _Command(str(tmp_path / "ran"))}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError, match="it could run commands"):
        DeepSpeedFolder(tmp_path, Config(), 64)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="ds_to_universal"):
        DeepSpeedFolder(tmp_path, Config(), 64)
