"""Comparison of a Hugging Face folder with its digests, with the run it came from, and with transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaaccum.errors import ConfigError
from megaaccum.pretrain.weights import config_json, foreign, inference
from megaaccum.pretrain.weights.safetensors_folder import Weights
from megaaccum.pretrain.weights.weights_out import Export

TOLERANCE = 1e-5
"""The largest relative distance between logits of the same model in FP32."""
_SEQUENCES, _LENGTH = 2, 64


def altered(folder: Path, run: Path | None) -> list[str]:
    """Texts on tensors of `folder` that are not what was exported, by its digests, or not what the run of output_dir
    `run` has now. Raises CheckpointError for files that cannot be read as its index and headers say."""
    weights = Weights(folder)
    texts = weights.altered()
    if run is None:
        return texts
    export = Export.of_run(run, family=config_json.family_of(config_json.read_json(folder)), dtype="fp32")
    layout, seen = export.layout(), dict[str, int]()
    for name, tensor in export:
        rows = slice(seen.get(name, 0), seen.get(name, 0) + len(tensor))  # experts' tensors come in pieces
        seen[name] = rows.stop
        if name not in weights.files:
            texts.append(f"{folder} has no {name}, but the run has")
        elif weights.shape(name) != layout[name][0]:
            texts.append(f"{name} in {weights.files[name]} is {weights.shape(name)}, but {layout[name][0]} in the run")
        elif not torch.equal(weights.read(name, rows), tensor.to(weights.dtype(name))):
            texts.append(f"{name} in {weights.files[name]} differs from the run")
    texts += [f"{name} in {weights.files[name]} is not of the run" for name in sorted(weights.files.keys() - seen)]
    return list(dict.fromkeys(texts))


def logits_distance(folder: Path) -> float:
    """The relative distance between the logits of one batch of random tokens: of transformers' model of `folder`, and
    of the model that a run with init_from has, on one rank, both in FP32. Raises ConfigError without transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("verify --weights compares with transformers, which is not installed: install it") from error
    content = config_json.read_json(folder)
    keys = config_json.keys_from(content) | {"make_vocab_size_divisible_by": 1, "params_dtype": "fp32"}
    length = min(keys["max_position_embeddings"], _LENGTH)
    config = inference.config_of(keys | {"seq_length": length}, str(folder))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, content["vocab_size"], (_SEQUENCES, length), generator=generator)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        theirs = model(rows).logits
        del model
        engine = inference.engine_of(config, world_size=1, vocab_size=content["vocab_size"])
        foreign.load(engine, folder, vocab_size=content["vocab_size"])
        chunk: Any = engine.chunks[0].eval()
        on_device = (each.to(next(chunk.parameters()).device) for each in (rows, torch.arange(length).expand_as(rows)))
        ours = chunk(*on_device, None)[..., : content["vocab_size"]].float().cpu()
    return float((ours - theirs).norm() / theirs.norm())
