"""Megatron-Bridge's mapping of weights, for `megaaccum export --via bridge`. It is no dependency."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.pretrain.weights.rows import ROWS_ARE_TOKENS, Model
from megaaccum.pretrain.weights.torch_dist import fused_names


class Bridge:
    """Bridge's mapping for the model of the config.json in `source`, which has the keys `model`. In one process, of
    whole tensors, it gathers nothing. Raises ConfigError if Bridge or that file is not there, or Bridge does not know
    the model."""

    def __init__(self, source: Path | None, model: Model):
        if source is None:
            raise ConfigError("--via bridge: the run did not begin with a model's folder: name one with --like DIR")
        try:
            import transformers

            importlib.import_module("megatron.bridge")  # registers the models that it knows
            from megatron.bridge.models.conversion.model_bridge import get_model_bridge
        except ImportError as error:
            raise ConfigError(
                f"--via bridge needs Megatron-Bridge and transformers ({error}): install megatron-bridge, or leave"
                " --via out"
            ) from error
        found = transformers.AutoConfig.from_pretrained(source)
        (architecture, *_) = found.architectures or [""]
        try:
            bridge = get_model_bridge(getattr(transformers, architecture, architecture), hf_config=found)
        except (NotImplementedError, LookupError) as error:
            raise ConfigError(f"--via bridge: Megatron-Bridge does not know {architecture} of {source}") from error
        shape = SimpleNamespace(**model, num_moe_experts=model["num_experts"])
        self._module = SimpleNamespace(config=shape, tensor_model_parallel=False)
        self._registry, self._vocabulary = bridge.mapping_registry(), model["vocab_size"]

    def to_theirs(self, ours: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of theirs, of a whole parameter of ours. Raises CheckpointError if Bridge does not map it."""
        grouped = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.\w+)$", r"experts.\2\1", ours)
        names = [*fused_names(ours), grouped]  # of local layers, and of Transformer Engine's
        mapping = next(filter(None, map(self._registry.megatron_to_hf_lookup, names)), None)
        if mapping is None:
            raise CheckpointError(f"Megatron-Bridge's mapping for this model has no {ours}")
        if getattr(mapping, "is_grouped_export", False):
            raise CheckpointError(f"{ours}: Megatron-Bridge stacks the experts of this model: leave --via out")
        whole = tensor[: self._vocabulary] if ours in ROWS_ARE_TOKENS else tensor
        for theirs, each in mapping.megatron_to_hf(whole, self._module).items():
            yield theirs, each.contiguous()
