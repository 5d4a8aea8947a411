"""Megatron-Bridge's mapping of weights, for `megaaccum export --via bridge`. It is no dependency."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.pretrain.weights.rows import ROWS_ARE_TOKENS, Model
from megaaccum.pretrain.weights.torch_dist import fused_names


@dataclass(frozen=True, slots=True)
class Bridge:
    """Bridge's registry of mappings for a model, and what a mapping reads of a module of Megatron's. In one process, of
    whole tensors, it gathers nothing."""

    registry: Any
    module: Any
    vocabulary: int

    @classmethod
    def of(cls, source: Path | None, model: Model) -> Self:
        """The mapping for the model of the config.json in `source`, which has the keys `model`. Raises ConfigError if
        Bridge or that file is not there, or Bridge does not know the model."""
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
        module = SimpleNamespace(config=shape, tensor_model_parallel=False)
        return cls(bridge.mapping_registry(), module, model["vocab_size"])

    def to_theirs(self, ours: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of theirs, of a whole parameter of ours. Raises CheckpointError if Bridge does not map it."""
        mapping = next(filter(None, map(self.registry.megatron_to_hf_lookup, _names(ours))), None)
        if mapping is None:
            raise CheckpointError(f"Megatron-Bridge's mapping for this model has no {ours}")
        if getattr(mapping, "is_grouped_export", False):
            raise CheckpointError(f"{ours}: Megatron-Bridge stacks the experts of this model: leave --via out")
        whole = tensor[: self.vocabulary] if ours in ROWS_ARE_TOKENS else tensor
        for theirs, each in mapping.megatron_to_hf(whole, self.module).items():
            yield theirs, each.contiguous()


def _names(ours: str) -> Iterator[str]:
    """Yield the names under which Bridge may have a parameter: of local layers, and of Transformer Engine's."""
    yield from fused_names(ours)
    yield re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.\w+)$", r"experts.\2\1", ours)
