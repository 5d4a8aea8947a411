"""Checkpoints that Megatron and DeepSpeed wrote, read into other layouts: the weights are theirs, bit by bit."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
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
LATENT = (
    "--num_layers 2 --swiglu --no_add_bias_linear --multi_latent_attention --kv_lora_rank 16 --q_lora_rank 16 "
    "--qk_head_dim 8 --qk_pos_emb_head_dim 8 --v_head_dim 8 --position_embedding_type rope --qk_layernorm "
    "--normalization RMSNorm --num_experts 4 --mtp_num_layers 1 --untie_embeddings_and_output_weights "
)
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


def write_ours(cells: list[tuple[Case, str]]) -> list[Digests]:
    """Checkpoints of our own in each folder, with exports for Megatron beside them; the digests of the weights."""
    import torch

    from megaaccum.pretrain.weights import torch_dist_out
    from tests.support.engines import engine_of

    found = []
    for case, folder in cells:
        engine = engine_of(case)
        checkpoint = engine.save(folder)
        if torch.distributed.get_rank() == 0:
            torch_dist_out.write(Path(f"{folder}.megatron"), engine.plan.config, checkpoint)
        torch.distributed.barrier()
        found.append(digests(engine))
    return found


def load_by_megatron(cells: list[tuple[Case, str]]) -> list[Digests]:
    """The digests of weights that Megatron's own library has loaded into chunks of the cases."""
    from megatron.core import dist_checkpointing

    from tests.support.engines import engine_of

    found = []
    for case, folder in cells:
        engine = engine_of(case)
        spoiled(engine)
        with engine.groups.current():
            state = {f"model{i}" if i else "model": chunk.sharded_state_dict() for i, chunk in enumerate(engine.chunks)}
            loaded = dist_checkpointing.load(state, str(Path(folder) / "iter_0000000"))
            assert loaded["iteration"] == 0
            for i, chunk in enumerate(engine.chunks):
                chunk.load_state_dict(loaded[f"model{i}" if i else "model"])
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
    "dense": "--pipeline_model_parallel_size 2 --schedule zbv ",
    "mixed": "--tensor_model_parallel_size 2 --expert_tensor_parallel_size 1 --sequence_parallel ",
    "sparse": "--backend fsdp2 ",
}
"""A layout that each is read into; tests/long has more."""


def written_by_megatron(top: Path) -> dict[str, Digests]:
    """Write Megatron's checkpoints below `top`. Returns the digests of what they hold."""
    cells = [(Case(4, BATCH + layout, model), str(top / name)) for name, (layout, model) in MEGATRON.items()]
    return dict(zip(MEGATRON, run_ranks(write_megatron, 4, cells, timeout=120)[0], strict=True))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Digests]]:
    """The folder of Megatron's checkpoints, and the digests of what they hold."""
    top = tmp_path_factory.mktemp("megatron")
    return top, written_by_megatron(top)


def check_read(top: Path, written: dict[str, Digests], wanted: list[tuple[str, str]]) -> None:
    """Checkpoints below `top`, by name, are read bit by bit into layouts."""
    cells = [(Case(4, BATCH + layout, MEGATRON[name][1]), str(top / name)) for name, layout in wanted]
    for rank in run_ranks(read_foreign, 4, cells, timeout=200):
        for (name, layout), found in zip(wanted, rank, strict=True):
            assert found == written[name], (name, layout, found if isinstance(found, str) else "")


def test_megatrons_checkpoints_are_read_into_any_layout(megatron):
    check_read(*megatron, list(INTO.items()))


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


def seen_apart(folder: str) -> list[str]:
    """The errors for a folder of Megatron's that rank 0 alone sees, and for a name that no file can have."""
    import torch.distributed as dist

    from megaaccum.pretrain.weights import foreign

    here, said = Path(folder) if dist.get_rank() == 0 else Path(folder, "unseen"), []
    for place in (here, Path("x" * 300)):
        try:
            said.append(str(foreign.is_foreign(place)))
        except MegaaccumError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_ranks_that_see_different_folders_all_end(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    for apart, too_long in run_ranks(seen_apart, 2, str(tmp_path), timeout=40):
        assert apart.startswith("RankDisagreement: ranks disagree about whether") and "hosts have to share it" in apart
        assert too_long.endswith("File name too long")


MODELS = {"dense": DENSE, "mixed": MIXED, "sparse": SPARSE, "latent": LATENT}
FROM = {"dense": "--pipeline_model_parallel_size 2 --schedule zbv ", "sparse": "--expert_model_parallel_size 2 "}


def check_written(top: Path, names: list[str]) -> None:
    """Megatron's own library loads, cut over tp 2 x pp 2, what is written for it of models."""
    cells = [(Case(4, BATCH + FROM.get(name, ""), MODELS[name]), str(top / name)) for name in names]
    written = run_ranks(write_ours, 4, cells, timeout=200)[0]
    into = "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel --backend ddp "
    cells = [(Case(4, BATCH + into, MODELS[name]), str(top / f"{name}.megatron")) for name in names]
    for rank in run_ranks(load_by_megatron, 4, cells, timeout=200):
        for name, found, expected in zip(names, rank, written, strict=True):
            assert found == expected, name


def test_megatron_reads_what_is_written_for_it(tmp_path):
    check_written(tmp_path, ["dense", "latent"])


# --- runs that continue ----------------------------------------------------------------------------------------------

Weights = dict[str, Any]
STEPS = 2


def two_steps(engine: Any) -> Weights:
    """The whole weights after two steps on the samples that come next."""
    from tests.support.parity import microbatches

    for _ in range(STEPS):
        engine.train_step(microbatches(engine.plan, engine.groups.dp.rank(), engine.consumed_samples))
    return {name: tensor.clone() for name, tensor in engine.whole_weights()}


def train_by_megatron(case: Case, folder: str) -> Weights:
    """The weights of a run of Megatron's DDP and distributed optimizer, which its own library saves half-way."""
    from megatron.core import dist_checkpointing

    from tests.support.engines import engine_of

    engine, place = engine_of(case), Path(folder) / "iter_0000002"
    two_steps(engine)
    place.mkdir(parents=True, exist_ok=True)
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    with engine.groups.current():
        state = {"model": engine.chunks[0].sharded_state_dict()}
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        state["optimizer"] = engine.backend.optimizer.sharded_state_dict(state["model"], metadata=metadata)
        dist_checkpointing.save(state | {"iteration": STEPS, "checkpoint_version": 3.0}, str(place))
    return two_steps(engine)


def continue_runs(cells: list[tuple[Case, str, str]]) -> list[Weights]:
    """The weights of runs that continue from a folder, with a mistake made on purpose."""
    from megaaccum.pretrain.weights import foreign
    from tests.support.engines import engine_of

    found = []
    for case, folder, mistake in cells:
        engine = engine_of(case)
        spoiled(engine)
        foreign.resume(engine, Path(folder), vocab_size=VOCAB)
        assert (engine.step, engine.consumed_samples) == (STEPS, 8 * STEPS)
        if mistake == "moments":
            for piece in engine.backend.state():
                piece.tensors["exp_avg"].zero_()
        if mistake in ("moments", "updates"):
            engine.backend.adopt_state(0 if mistake == "updates" else STEPS)
        if mistake == "schedule":
            engine.lr_schedule.load_state_dict(engine.lr_schedule.state_dict() | {"num_steps": 0})
        found.append(two_steps(engine))
    return found


def apart(found: Weights, expected: Weights) -> float:
    """The relative distance between whole models."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - expected[name]).double().pow(2).sum()) for name in expected)
    return (squares / sum(float(each.double().pow(2).sum()) for each in expected.values())) ** 0.5


MISTAKES = ("moments", "updates", "schedule")


def check_megatron_continues(top: Path, layouts: list[str]) -> None:
    """A run of Megatron's continues in its own layout to the bit and in others, and with each mistake it is another.
    Adam's epsilon is far above the gradients, so that rounding of small ones stays small."""
    model = DENSE + "--lr_warmup_iters 4 --adam_eps 1e-3 "
    megatron = Case(4, BATCH + "--backend megatron --tensor_model_parallel_size 2 ", model)
    expected = run_ranks(train_by_megatron, 4, megatron, str(top), timeout=100)[0]
    cells = [(Case(4, BATCH + layout, model), str(top), "") for layout in layouts]
    cells += [(cells[0][0], str(top), mistake) for mistake in MISTAKES] + [(megatron, str(top), "")]
    cells.append((replace(megatron, model=f"{model}--load_step {STEPS} "), str(names_a_later(top, "iter_0000002")), ""))
    distances = []
    for (case, _, mistake), found in zip(cells, run_ranks(continue_runs, 4, cells, timeout=200)[0], strict=True):
        distances.append(distance := apart(found, expected))
        assert distance > 1e-3 if mistake else distance < 1e-7, (case.layout, mistake, distance)
    assert distances[-2:] == [0.0, 0.0]


def names_a_later(top: Path, checkpoint: str) -> Path:
    """A folder that has this checkpoint, and names one of step 5 as its latest."""
    folder = top / "later"
    folder.mkdir()
    (folder / checkpoint).symlink_to(top / checkpoint)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def test_a_run_of_megatron_continues_in_another_layout(tmp_path):
    check_megatron_continues(tmp_path, ["--pipeline_model_parallel_size 2 "])


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
            rows = rows_of("qwen3", name, tensor.shape[0], config_json.model_keys(plan.config, hf.VOCAB))
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


def check_deepspeed(top: Path, stages: list[int], layouts: list[str]) -> None:
    """Checkpoints of these stages and a universal one of the last are read bit by bit into layouts."""
    from tests.support import huggingface as hf

    hf.write("qwen3", top)
    folders = {str(top / str(stage)): stage for stage in stages}
    written = [run_ranks(write_deepspeed, 3, folder, stage, llama, timeout=100)[0] for folder, stage in folders.items()]
    run_ranks(to_universal, 1, [*folders][-1], str(top / "universal"), timeout=100)
    for layout in layouts:
        for found in run_ranks(read_llama, 2, [*folders, str(top / "universal")], layout, timeout=100):
            for each, expected in zip(found, [*written, written[-1]], strict=True):
                assert each == expected, each if isinstance(each, str) else layout


def test_deepspeeds_checkpoints_are_read(tmp_path):
    check_deepspeed(tmp_path, [2, 3], ["--pipeline_model_parallel_size 2"])


AS_THERE = "--adam_beta2 0.999 --adam_eps 1e-3 --weight_decay 0 --lr_decay_style constant "


def train_by_deepspeed(folder: str, stage: int) -> Weights:
    """The weights, by their Hugging Face names, of a run of DeepSpeed in FP32 that it saves half-way."""
    import deepspeed
    import torch

    from tests.support import huggingface as hf

    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=llama(), config=config)
    rows = hf.batch().chunk(2)[torch.distributed.get_rank()]
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(folder)
        logits = engine(input_ids=rows[:, :-1]).logits
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        engine.step()
    named = engine.module.named_parameters()
    return {name: deepspeed.utils.safe_get_full_fp32_param(param).clone() for name, param in named}


def continue_llama(cells: list[tuple[str, str, str]]) -> list[Weights]:
    """The weights, by their Hugging Face names, of runs that continue from a folder in a layout, with a mistake."""
    from megaaccum.pretrain.weights import config_json, foreign, weights_out
    from megaaccum.pretrain.weights.rows import rows_of
    from tests.support import huggingface as hf

    found = []
    for folder, layout, mistake in cells:
        plan = hf.plan_of(Path(folder).parent / "qwen3", 2, *AS_THERE.split(), *layout.split())
        engine = hf.engine_of(plan)
        foreign.resume(engine, Path(folder), vocab_size=hf.VOCAB)
        assert (engine.step, engine.consumed_samples) == (STEPS, 8 * STEPS)
        if mistake:
            engine.backend.adopt_state(0)
        for _ in range(STEPS):
            engine.train_step(hf.own_microbatches(engine))
        theirs = {}
        for name, tensor in engine.whole_weights():
            rows = rows_of("qwen3", name, tensor.shape[0], config_json.model_keys(plan.config, hf.VOCAB))
            theirs |= {each: part.clone() for each, part in weights_out.to_theirs(rows or [], tensor)}
        found.append(theirs)
    return found


def check_deepspeed_continues(top: Path, stages: list[int], layouts: list[str]) -> None:
    """Runs continue in layouts from checkpoints of these stages, and from a universal one of the last."""
    from tests.support import huggingface as hf

    hf.write("qwen3", top)
    folders = {str(top / str(stage)): stage for stage in stages}
    expected = {
        folder: run_ranks(train_by_deepspeed, 2, folder, stage, timeout=100)[0] for folder, stage in folders.items()
    }
    last, universal = [*folders][-1], str(top / "universal")
    run_ranks(to_universal, 1, last, universal, timeout=100)
    expected[universal] = expected[last]
    cells = [(folder, layout, "") for folder in expected for layout in layouts]
    cells.append((universal, layouts[0], "updates"))
    for (folder, layout, mistake), found in zip(
        cells, run_ranks(continue_llama, 2, cells, timeout=200)[0], strict=True
    ):
        distance = apart(found, expected[folder])
        assert distance > 1e-4 if mistake else distance < 1e-6, (folder, layout, mistake, distance)


def test_a_run_of_deepspeed_continues(tmp_path):
    check_deepspeed_continues(tmp_path, [1, 3], ["--pipeline_model_parallel_size 2"])


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
