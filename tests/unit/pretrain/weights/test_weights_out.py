"""The files beside the weights of an export: the tokenizer of a run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.data.tokenizer import read_tokenizer
from megaaccum.pretrain.weights.weights_out import Export
from tests.support.configs import plan

TEXT = "Call me Ishmael. <|endoftext|>"


def written(aside: Path, **keys: Any) -> Any:
    """The configuration of a run, whose export beside its weights is in `aside`."""
    import torch

    config = plan(**keys).config
    aside.mkdir()
    export = Export(
        checkpoint=aside,
        config=config,
        vocab_size=64,
        family="llama",
        dtype=torch.float32,
        content={"model_type": "llama"},
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
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    written(tmp_path / "bare", data_path=[str(tmp_path / "ids")])
    assert not list((tmp_path / "bare").glob("token*"))
