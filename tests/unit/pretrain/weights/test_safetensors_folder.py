"""Folders of safetensors files: shards and index, a head that is written twice, and digests."""

from __future__ import annotations

import json
import os

import pytest
import torch

from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights import safetensors_folder, weights_in
from megaaccum.pretrain.weights.safetensors_folder import Weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def written(folder, tensors, most=10**9):
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with safetensors_folder.written_aside(folder) as aside:
        safetensors_folder.write(aside, layout, [lambda: reversed(tensors.items())], max_shard_bytes=most)
    return Weights(folder)


def test_shards_hold_what_was_given_and_are_read_by_the_library(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        f"t{i}": torch.randn(4, 4).to(kind) for i, kind in enumerate((torch.float32, torch.bfloat16, torch.half))
    }
    weights = written(tmp_path / "model", tensors, most=70)
    index = json.loads((tmp_path / "model" / safetensors_folder.INDEX).read_text())
    assert index["metadata"]["total_size"] == 64 + 32 + 32
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert index["weight_map"] == {"t0": first, "t1": second, "t2": second}, "no file is longer than 70 bytes"
    for file in (first, second):
        assert int.from_bytes((tmp_path / "model" / file).read_bytes()[:8], "little") % 8 == 0, "numbers lie aligned"
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor)
        assert torch.equal(load_file(weights.files[name])[name], tensor)
    assert torch.equal(weights.read("t0", slice(1, 3), slice(2, 4)), tensors["t0"][1:3, 2:4])
    assert weights.altered() == []


def test_a_million_digests_of_two_tensors_are_one_text(tmp_path):
    weights = written(tmp_path / "model", {"a": torch.zeros(8), "b": torch.ones(8)})
    (tmp_path / "model" / safetensors_folder.DIGESTS).write_text("x  model.safetensors  a\n" * 1_000_000)
    (text,) = weights.altered()
    assert text.endswith("lists 1,000,000 tensors, but the files have 2")


@pytest.mark.parametrize("kept", [0, 1])
def test_digests_that_are_cut_short_are_named(tmp_path, kept):
    """The tensors that they lack would otherwise count as compared."""
    weights = written(tmp_path / "model", {"a": torch.zeros(8), "b": torch.ones(8)})
    path = tmp_path / "model" / safetensors_folder.DIGESTS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    assert weights.altered() == [f"{path} lists {kept} tensors, but the files have 2"]


@pytest.mark.parametrize("file", ["a" * 256, "../other.safetensors", "", "\ud800"])
def test_an_index_of_files_that_no_folder_has_is_one_error(tmp_path, file):
    (tmp_path / safetensors_folder.INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    ("said", "text"), [({"a": 2, "b": 1, "c": 2}, "says that a is in"), ({"a": 1, "c": 2}, "has b, which .* does not")]
)
def test_an_index_that_says_otherwise_than_the_files_is_refused(tmp_path, said, text):
    written(tmp_path / "model", {name: torch.zeros(8) for name in "abc"}, most=64)
    index = {"weight_map": {name: f"model-0000{number}-of-00002.safetensors" for name, number in said.items()}}
    (tmp_path / "model" / safetensors_folder.INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=text):
        Weights(tmp_path / "model")


def test_an_altered_tensor_is_named(tmp_path):
    written(tmp_path / "model", {"a": torch.zeros(8), "b": torch.ones(8)})
    assert not (tmp_path / "model" / safetensors_folder.INDEX).exists(), "one file needs none"
    path = tmp_path / "model" / safetensors_folder.SINGLE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert Weights(tmp_path / "model").altered() == [f"b in {path} is not what was exported (SHA-256)"]


def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path):
    written(tmp_path / "model", {"a": torch.zeros(8)})
    path = tmp_path / "model" / safetensors_folder.SINGLE
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        Weights(tmp_path / "model")


def test_a_shared_head_may_be_written_twice_but_not_otherwise(tmp_path):
    embedding = torch.randn(4, 2)
    written(tmp_path / "same", {EMBEDDING: embedding, HEAD: embedding.clone()})
    assert weights_in.unread(Weights(tmp_path / "same"), {EMBEDDING}) == []
    written(tmp_path / "other", {EMBEDDING: embedding, HEAD: embedding + 1})
    assert weights_in.unread(Weights(tmp_path / "other"), {EMBEDDING}) == [HEAD]
