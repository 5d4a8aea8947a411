"""Comparison of a Hugging Face folder with its digests, with the run it came from, and with transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaaccum.config import Plan, resolve
from megaaccum.config.keys import all_keys
from megaaccum.config.schema import Config
from megaaccum.distributed import groups
from megaaccum.distributed.start import start_together
from megaaccum.engine import initialize
from megaaccum.errors import ConfigError
from megaaccum.model import gpt
from megaaccum.pretrain.weights import config_json, weights_in
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
    left = set(weights.files)
    for name, tensor in export:
        left.discard(name)
        if name not in weights.files:
            texts.append(f"{folder} has no {name}, but the run has")
        elif weights.shape(name) != tuple(tensor.shape):
            texts.append(
                f"{name} in {weights.files[name]} is {weights.shape(name)}, but {tuple(tensor.shape)} in the run"
            )
        elif not torch.equal(weights.whole(name), tensor.to(weights.dtype(name))):
            texts.append(f"{name} in {weights.files[name]} differs from the run")
    return texts + [f"{name} in {weights.files[name]} is not of the run" for name in sorted(left)]


def logits_distance(folder: Path) -> float:
    """The relative distance between the logits of one batch of random tokens: of transformers' model of `folder`, and
    of the model that a run with init_from has, on one rank, both in FP32. Raises ConfigError without transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("verify --weights compares with transformers, which is not installed: install it") from error
    content = config_json.read_json(folder)
    plan = _plan(content)
    rows = torch.randint(0, content["vocab_size"], (_SEQUENCES, plan.config.model.seq_length), generator=_generator())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        theirs = model(rows).logits
    del model
    ours = _logits(plan, folder, rows, content["vocab_size"])
    return float((ours - theirs).norm() / theirs.norm())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _plan(content: config_json.Keys) -> Plan:
    """The plan of one rank in FP32 for the model of a config.json."""
    keys = config_json.keys_from(content)
    length = min(keys["max_position_embeddings"], _LENGTH)
    keys |= dict(seq_length=length, make_vocab_size_divisible_by=1, backend="ddp", lr=1.0, train_iters=1)
    keys |= dict(micro_batch_size=1, global_batch_size=1, attention_dropout=0.0, hidden_dropout=0.0)
    config = Config()
    for name, value in keys.items():
        if name in all_keys():
            setattr(getattr(config, all_keys()[name].section), name, value)
            config.origin[name] = "config.json"
        else:
            config.megatron[name] = value
    return resolve(config, world_size=1)


def _logits(plan: Plan, folder: Path, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    start_together(plan)
    built = groups.build(plan.layout, timeout_minutes=1)
    engine = initialize(plan, gpt.build_chunks(plan, built, vocab_size=vocab_size), groups=built)
    weights_in.load(engine, folder, vocab_size=vocab_size)
    chunk: Any = engine.chunks[0].eval()
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    device = next(chunk.parameters()).device
    with torch.no_grad():
        logits: torch.Tensor = chunk(rows.to(device), positions.to(device), None)
    return logits[..., :vocab_size].float().cpu()
