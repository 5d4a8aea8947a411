"""From a Hugging Face folder through a run to another one, by the commands; and folders that are not what they say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megaaccum.errors import CheckpointError, MegaaccumError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support import huggingface as hf
from tests.support.chats import write_tokenizer
from tests.support.data_samples import write_pair
from tests.support.whole_runs import LAUNCHER

FAMILY = "qwen3_moe"


def call(commands: list[list[str]]) -> None:
    """Run commands one after the other, as in a terminal."""
    from megaaccum import cli

    for name in LAUNCHER:
        os.environ.pop(name, None)
    for words in commands:
        print(f"$ {' '.join(words)}", flush=True)
        print("exit code", cli.main(words), flush=True)


def test_a_model_is_trained_exported_and_verified_by_commands(tmp_path):
    import torch
    import transformers
    from safetensors.torch import load_file

    folder = hf.write("qwen2", tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    write_pair(tmp_path / "corpus", [[(7 * i + j) % hf.VOCAB for j in range(50)] for i in range(40)], hf.VOCAB)
    plan = hf.plan_of(folder, 1)  # writes the file that `megaaccum config` prints
    assert plan.config.run.init_from == str(folder)
    (yaml,) = tmp_path.glob("*.yaml")
    words = f"--seq_length {hf.SEQ} --lr 1e-2 --train_iters 6 --micro_batch_size 1 --global_batch_size 8 --bf16"
    words += f" --data_path {tmp_path / 'corpus'} --split 100,0,0 --eval_interval 0 --output_dir {tmp_path / 'run'}"
    words += " --pipeline_model_parallel_size 2 --nproc_per_node 2 --num_threads 1"
    run, out, megatron, weights = (str(tmp_path / name) for name in ("run", "out", "megatron", "weights"))
    longer = ["train", str(yaml), *words.split(), "--train_iters", "7", "--lr_decay_iters", "6"]
    longer += ["--output_dir", str(tmp_path / "longer"), "--pipeline_model_parallel_size", "1", "--load"]
    (rank,) = try_ranks(
        call, 1,
        [
            ["config", "--from-hf", str(folder)],
            ["train", str(yaml), *words.split()],
            ["export", run, "--hf", out, "--max_shard_size", "20000"],
            ["verify", "--weights", out, "--run", run],
            ["export", run, "--consolidated", str(tmp_path / "one")],
            ["export", run, "--hf", out],
            ["export", run, "--hf", str(tmp_path / "other"), "--family", "llama"],
            ["export", run, "--megatron", weights, "--only_weights"],
            [*longer, weights],
            [*longer, weights, "--no_load_optim", "true"],
            ["export", run, "--megatron", megatron],
            [*longer, megatron],
        ],
        init=False, timeout=200,
    )  # fmt: skip
    assert not rank.failed, f"{rank.error}\n{rank.stack}\n{rank.output}"
    shown = yaml.read_text()
    assert shown in rank.output and f"weights of {folder}" in rank.output
    codes = [line for line in rank.output.splitlines() if line.startswith("exit code")]
    assert codes == [f"exit code {code}" for code in (0, 0, 0, 0, 0, 1, 2, 0, 1, 0, 0, 0)], rank.output
    assert f"continues from {megatron}: step 6, 48 samples" in rank.output
    assert "no optimizer state in the shapes of the model" in rank.output
    assert f"{out} exists and is not empty" in rank.output
    assert "this is no model of llama" in rank.output and not (tmp_path / "other").exists()
    assert "all tensors agree" in rank.output and "logits: " in rank.output
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.bfloat16" and (Path(out) / "tokenizer_config.json").exists()
    assert len(list(Path(out).glob("*.safetensors"))) > 2
    one = load_file(tmp_path / "one" / SINGLE)
    assert torch.equal(one["decoder.final_layernorm.weight"].bfloat16(), model.model.norm.weight)
    assert {tensor.dtype for tensor in one.values()} == {torch.float32} and len(one) == 4 * 7 + 2
    assert hf.loss_of(Path(out)) != pytest.approx(hf.loss_of(folder), rel=1e-3)


def test_a_run_whose_tokenizer_is_gone_is_not_exported_without_it(tmp_path):
    tokenizer, out = tmp_path / "model" / "tokenizer.json", tmp_path / "out"
    write_tokenizer(tokenizer.parent)
    words = "train --num_layers 2 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 1 --lr 1e-2"
    words += f" --mock_data --vocab_size 259 --tokenizer_model {tokenizer} --micro_batch_size 1 --global_batch_size 1"
    words += " --position_embedding_type rope --normalization RMSNorm --swiglu --add_bias_linear false --eval_iters 0"
    words += f" --output_dir {tmp_path / 'run'} --nproc_per_node 1 --num_threads 1"
    (rank,) = try_ranks(call, 1, [words.split()], init=False, timeout=200)
    assert not rank.failed and "exit code 0" in rank.output, rank.output
    tokenizer.parent.rename(tmp_path / "moved")
    export = ["export", str(tmp_path / "run"), "--hf", str(out)]
    (rank,) = try_ranks(call, 1, [export], init=False, timeout=200)
    assert f"tokenizer_model {tokenizer} of the run is not there" in rank.output and not out.exists()
    (tmp_path / "moved").rename(tokenizer.parent)
    (rank,) = try_ranks(call, 1, [export], init=False, timeout=200)
    assert (out / "tokenizer.json").exists(), rank.output


# --- altered files ---------------------------------------------------------------------------------------------------

Tensors = dict[str, Any]
SINGLE = "model.safetensors"


def in_file(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Change the tensors of a folder of one file."""

    def altered(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE, {"format": "pt"})

    return altered


def layer(name: str) -> str:
    return f"model.layers.2.{name}"


def swap(one: str, other: str) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return in_file(change)


def put(name: str, made: Callable[[Any], Any]) -> Callable[[Path], None]:
    return in_file(lambda tensors: tensors.update({name: made(tensors[name])}))


def config(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def content(made: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).write_bytes(made((folder / SINGLE).read_bytes())) and None


def index(made: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Add an index of the one file, changed."""

    def change(folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / SINGLE, "pt") as file:
            listed = dict.fromkeys(file.keys(), SINGLE)
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": made(listed) or listed}))

    return change


def interleaved(tensor: Any) -> Any:
    """Rows in the order of rotation by neighbouring channels."""
    return tensor.view(-1, 2, 8, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


EXPERT = layer("mlp.experts.{}.{}_proj.weight")
Q, PROJ, DOWN = layer("self_attn.q_proj.weight"), layer("self_attn.o_proj.weight"), EXPERT.format(0, "down")
ALTERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "two experts": (swap(EXPERT.format(0, "up"), EXPERT.format(1, "up")), EXPERT.format(0, "up")),
    "two experts' down": (swap(EXPERT.format(2, "down"), EXPERT.format(3, "down")), EXPERT.format(2, "down")),
    "gate and up": (swap(EXPERT.format(1, "gate"), EXPERT.format(1, "up")), EXPERT.format(1, "gate")),
    "k and v": (swap(layer("self_attn.k_proj.weight"), layer("self_attn.v_proj.weight")), layer("self_attn.k_proj")),
    "two layers": (swap(Q, Q.replace("layers.2", "layers.3")), Q),
    "two norms": (swap(layer("input_layernorm.weight"), layer("post_attention_layernorm.weight")), "input_layernorm"),
    "head and embedding": (swap("lm_head.weight", "model.embed_tokens.weight"), "lm_head.weight"),
    "interleave": (put(Q, interleaved), Q),
    "transposed": (put(PROJ, lambda tensor: tensor.t()), f"{PROJ} in .* is 64 x 32, but config.json makes it 32 x 64"),
    "transposed expert": (put(DOWN, lambda tensor: tensor.t()), f"{DOWN} in .* is 16 x 32"),
    "vocabulary": (put("model.embed_tokens.weight", lambda tensor: tensor[:60]), "embed_tokens.weight in .* is 60"),
    "longer vocabulary": (put("lm_head.weight", lambda tensor: tensor.repeat(2, 1)), "lm_head.weight in .* is 128"),
    "half precision": (put(Q, lambda tensor: tensor.half()), f"{Q} in .* is float16, but config.json says float32"),
    "quantized": (put(Q, lambda tensor: tensor.char()), f"{Q} is I8, but only"),
    "rounded": (put(Q, lambda tensor: tensor.bfloat16().float()), Q),
    "scaled": (put(layer("input_layernorm.weight"), lambda tensor: tensor * 1.001), "input_layernorm"),
    "not a number": (put(Q, lambda tensor: tensor.index_fill(0, tensor.new_tensor([3]).long(), float("nan"))), Q),
    "router": (put(layer("mlp.gate.weight"), lambda tensor: tensor.flip(0)), layer("mlp.gate.weight")),
    "missing tensor": (in_file(lambda tensors: tensors.pop(Q)), f"has no {Q}, of which"),
    "further tensor": (in_file(lambda tensors: tensors.update(x=tensors[Q].clone())), rf"has x \({SINGLE}\), which"),
    "renamed tensor": (in_file(lambda tensors: tensors.update({f"{Q}s": tensors.pop(Q)})), f"has no {Q}, of which"),
    "byte": (content(lambda text: text[:-100] + bytes([text[-100] ^ 1]) + text[-99:]), r"model\.\S+ in .* is not what"),
    "cut short": (content(lambda text: text[:-100]), "model.safetensors is no whole safetensors file"),
    "longer": (content(lambda text: text + b"\0"), "model.safetensors is no whole safetensors file"),
    "no header": (content(lambda text: b"\xff" * 8 + text[8:]), "model.safetensors is no whole safetensors file"),
    "empty": (content(lambda text: b""), "model.safetensors is no whole safetensors file"),
    "missing shard": (index(lambda listed: listed | {Q: "model-2.safetensors"}), "model-2.safetensors is missing"),
    "index with more": (index(lambda listed: listed | {"x": SINGLE}), f"says that x is in {SINGLE}, which does not"),
    "index with less": (index(lambda listed: listed.pop(Q) and None), f"has {Q}, which .* does not list"),
    "index outside": (index(lambda listed: listed | {Q: "../model.safetensors"}), "files that are not in its folder"),
    "pickle": (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin") and None, "pickles are not read"),
    "other width": (config(hidden_size=64), "hidden_size is 32 in the configuration, but 64"),
    "other rotation": (config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "but 500000 in config"),
    "other scaling": (config(norm_topk_prob=False), "moe_router_pre_softmax is False in the configuration, but True"),
}  # fmt: skip


def exported(folder: Path, target: Path) -> None:
    """A folder as an export leaves it, with digests."""
    from megaaccum.pretrain.weights import safetensors_folder
    from megaaccum.pretrain.weights.safetensors_folder import Weights

    weights = Weights(folder)
    tensors = {name: weights.read(name) for name in weights.files}
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with safetensors_folder.written_aside(target) as aside:
        safetensors_folder.write(aside, layout, [tensors.items], max_shard_bytes=10**9)
        shutil.copy(folder / "config.json", aside)


def said_of(source: str, folders: dict[str, str]) -> dict[str, str]:
    """The words that the import, or else `verify --weights`, says of each folder in a run that begins with `source`."""
    from megaaccum.pretrain.weights import compare, foreign

    plan = hf.plan_of(Path(source), 1, "--backend", "ddp")
    engine = hf.engine_of(plan)
    found = {}
    for name, folder in folders.items():
        try:
            foreign.load(engine, Path(folder), vocab_size=hf.VOCAB)
            found[name] = "\n".join(compare.altered(Path(folder), None))
        except MegaaccumError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("altered")
    exported(hf.write(FAMILY, home / "source"), home / "whole")
    folders = {"whole": str(home / "whole")}
    for name, (change, _) in ALTERED.items():
        folder = home / name.replace(" ", "_")
        shutil.copytree(home / "whole", folder)
        change(folder)
        folders[name] = str(folder)
    (found,) = run_ranks(said_of, 1, str(home / "whole"), folders, timeout=120)
    return found


def test_a_folder_as_it_was_exported_is_taken(said):
    assert said["whole"] == ""


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_folder_is_named(name, said):
    import re

    assert re.search(ALTERED[name][1], said[name]), said[name]


def test_there_are_thirty_of_them():
    assert len(ALTERED) >= 30


# --- mistakes in the mapping -----------------------------------------------------------------------------------------


def distances(folders: dict[str, str]) -> dict[str, float]:
    """The distance of logits from transformers' with a table of weights, or an operation, that is wrong."""
    from megaaccum.pretrain.weights import rows

    def with_operation(operation: str, made: Callable[..., Any]) -> dict[str, Any]:
        right = rows.OPERATIONS[operation]
        return {operation: lambda *args: made(list(right(*args)))}

    cases = {
        "right": ("llama", {}),
        "queries after values": ("llama", with_operation("qkv", lambda spans: [*spans[1:], spans[0]])),
        "up before gate": ("llama", with_operation("gate_up", lambda spans: spans[::-1])),
        "groups the other way round": ("qwen3", with_operation("qkv", lambda spans: spans[3:] + spans[:3])),
        "gpt2 right": ("gpt2", {}),
        "gpt2 values as keys": (
            "gpt2",
            with_operation("qkv", lambda s: [s[i ^ 3 if i % 3 else i] for i in range(3)] + s[3:]),
        ),
    }
    found = {}
    for name, (family, wrong) in cases.items():
        with patch.dict(rows.OPERATIONS, wrong):
            found |= logits_distances({name: folders[family]})
    return found


def test_a_wrong_mapping_is_seen_by_its_logits(tmp_path):
    folders = {family: str(hf.write(family, tmp_path)) for family in ("llama", "qwen3", "gpt2")}
    (found,) = run_ranks(distances, 1, folders, timeout=120)
    right = {name for name, distance in found.items() if distance < 1e-5}
    assert right == {"right", "gpt2 right"}, found
    assert all(distance > 1e-2 for name, distance in found.items() if name not in right), found


def logits_distances(folders: dict[str, str]) -> dict[str, float]:
    """The distance of logits from transformers', of the model in each folder, by its name."""
    from megaaccum.distributed import groups
    from megaaccum.pretrain.weights import compare

    found = {}
    for family, folder in folders.items():
        groups.destroy()
        found[family] = compare.logits_distance(Path(folder))
    return found


def test_the_logits_of_every_family_are_those_of_transformers(tmp_path):
    """1e-5 of their norm, in FP32."""
    folders = {family: str(hf.write(family, tmp_path)) for family in hf.MODELS}
    (found,) = run_ranks(logits_distances, 1, folders, timeout=120)
    assert len(found) >= 8 and all(distance <= 1e-5 for distance in found.values()), found


# --- an export that is interrupted -----------------------------------------------------------------------------------


def test_an_interrupted_export_leaves_nothing_and_replaces_nothing(tmp_path):
    import torch

    target = tmp_path / "model"
    layout = {"one": ((4,), torch.float32), "two": ((4,), torch.float32)}

    def tensors():
        yield "one", torch.ones(4)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_into(target, layout, tensors())
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_into(target, layout, tensors())
    assert (target / "mine").read_text() == "kept" and list(tmp_path.iterdir()) == [target]


def write_into(target: Path, layout: dict, tensors: Any) -> None:
    from megaaccum.pretrain.weights import safetensors_folder

    with safetensors_folder.written_aside(target) as aside:
        safetensors_folder.write(aside, layout, [lambda: tensors], max_shard_bytes=10**9)
        (aside / "config.json").write_text("{}")
