"""The files beside the weights of an export, such as the tokenizer of a run's data, and the dtypes of these weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.data.tokenizer import read_tokenizer
from megaaccum.pretrain.weights.weights_out import Export
from tests.support.chats import CHATML, write_tokenizer
from tests.support.configs import make, plan

TEXT = "Call me Ishmael. <|endoftext|>"
BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def written(aside: Path, content: Any = None, source: Path | None = None, **keys: Any) -> Any:
    """The configuration of a run, whose export beside its weights is in `aside`."""
    config = plan(**keys).config
    aside.mkdir()
    export = Export(
        checkpoint=aside,
        config=config,
        vocab_size=64,
        family="llama",
        dtype=torch.float32,
        content=content,
        source=source,
    )
    export._write_json(aside)
    return config


def test_the_tokenizer_of_the_embedded_text_is_that_of_transformers(tmp_path, texts):
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    config = written(tmp_path / "out", data_path=["embedded"], data_cache_path=str(texts))
    wanted = read_run_tokenizer(config, "a test").encode(TEXT).ids
    assert read_tokenizer(tmp_path / "out").encode(TEXT).ids == wanted
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("Call me Ishmael. ")["input_ids"] == wanted[: len(theirs("Call me Ishmael. ")["input_ids"])]
    assert theirs.eos_token == "<|endoftext|>"


def test_a_folder_of_a_tokenizer_is_copied_and_ids_alone_have_none(tmp_path):
    (folder := tmp_path / "given").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "weights.bin"):
        (folder / name).write_text("{}")
    written(tmp_path / "out", data_path=[str(tmp_path / "ids")], tokenizer_model=str(folder))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    written(tmp_path / "bare", data_path=[str(tmp_path / "ids")])
    assert not list((tmp_path / "bare").glob("token*"))


@pytest.mark.parametrize("end", ["<|im_end|>", None])
def test_text_ends_where_the_tokenizer_of_the_run_says(tmp_path, end):
    """Not with token 2, which is LlamaConfig's, and not with none, as with a generation config that names none."""
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    folder, ids = write_tokenizer(tmp_path / "given"), {"<|im_end|>": 258, None: 256}  # <|endoftext|>
    if end is None:
        (folder / "tokenizer_config.json").unlink()
    written(out := tmp_path / "out", data_path=[str(tmp_path / "ids")], tokenizer_model=str(folder))
    assert transformers.AutoConfig.from_pretrained(out).eos_token_id == ids[end]
    assert not (out / "generation_config.json").exists()  # transformers makes one of config.json then
    written(bare := tmp_path / "bare", data_path=[str(tmp_path / "ids")])
    assert transformers.AutoConfig.from_pretrained(bare).eos_token_id is None


def test_text_ends_where_the_model_that_was_trained_further_says(tmp_path):
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    given = {"model_type": "llama", "bos_token_id": 7, "eos_token_id": [5, 6]}
    written(out := tmp_path / "out", given, source := write_tokenizer(tmp_path / "source"), data_path=["ids"])
    read = transformers.AutoConfig.from_pretrained(out)
    assert (read.bos_token_id, read.eos_token_id) == (7, [5, 6])
    assert not (out / "generation_config.json").exists()
    (source / "generation_config.json").write_text('{"eos_token_id": 4}')
    written(out := tmp_path / "another", None, source, data_path=["ids"])  # its config.json is not taken
    assert transformers.AutoConfig.from_pretrained(out).eos_token_id == 258
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 4


@pytest.mark.parametrize(
    ("turn", "known", "wanted"),
    [("<|im_end|>\n", 256, [256, 258]), ("\n<|im_start|>x", [256, 258], [256, 258, 257]), ("\n", 256, 256)],
)  # fmt: skip
def test_a_model_that_learned_chats_stops_where_its_template_ends_a_turn(tmp_path, turn, known, wanted):
    """A base model's end of text is another token, which it does not write after a response."""
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    source = write_tokenizer(tmp_path / "source", CHATML.replace("<|im_end|>\n", turn))
    (source / "tokenizer_config.json").write_text(json.dumps(BASE))
    content = {"model_type": "llama", "eos_token_id": known}
    keys: Any = dict(sft=True, data_path=["chats.jsonl"], tokenizer_model=str(source / "tokenizer.json"))
    written(out := tmp_path / "out", content, source, **keys)
    assert transformers.AutoConfig.from_pretrained(out).eos_token_id == wanted
    assert not (out / "generation_config.json").exists()
    (source / "generation_config.json").write_text('{"eos_token_id": 256, "top_p": 0.5}')
    written(out := tmp_path / "another", content, source, **keys)
    read = transformers.GenerationConfig.from_pretrained(out)
    assert (read.eos_token_id, read.top_p) == (wanted if known == 256 else [256, 257], 0.5)
    written(out := tmp_path / "pretrained", content, source, tokenizer_model=str(source), data_path=["ids"])
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 256


def test_the_tokenizer_of_the_run_goes_with_its_weights(tmp_path):
    """Not that of the model it began from, which may lack the template in which it was trained."""
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    base, own = write_tokenizer(tmp_path / "base", None), write_tokenizer(tmp_path / "own")
    (base / "generation_config.json").write_text('{"eos_token_id": 256}')
    content = {"model_type": "llama", "eos_token_id": 256}
    written(out := tmp_path / "out", content, base, sft=True, data_path=["chats.jsonl"], tokenizer_model=str(own))
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == CHATML
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [256, 258]


def test_biases_of_experts_are_exported_in_fp32_beside_weights_of_16_bits(tmp_path):
    exact = 1 + 2.0**-12
    export = Export(checkpoint=tmp_path, config=make(), vocab_size=64, family="", dtype=torch.bfloat16)
    vars(export)["_whole"] = SimpleNamespace(
        shapes=lambda: {"w": (2,), "expert_bias": (2,)}, is_buffer=lambda name: name == "expert_bias",
        read=lambda name: torch.full((2,), exact),
    )  # fmt: skip
    found = {name: (tensor.dtype, tensor.double().tolist()) for name, tensor in export}
    assert found == {"w": (torch.bfloat16, [1.0] * 2), "expert_bias": (torch.float32, [exact] * 2)}
    assert {name: dtype for name, (_, dtype) in export.layout().items()} == {name: found[name][0] for name in found}
