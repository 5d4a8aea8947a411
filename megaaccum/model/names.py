"""Names of tensors in the whole model, the same under every layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def over_stages(chunk: torch.nn.Module, local_name: str) -> str:
    """A name in a chunk with its layer numbered over all stages, by the layer's `layer_number` (from 1), and nothing
    else changed. A chunk of a user's own whose layers have none may bring a `name_in_model` ("stages.3.") to begin
    with."""
    match = re.match(r"(|.*\.)layers\.(\d+)\.(.*)", local_name)
    layer = chunk.get_submodule(f"{match[1]}layers.{match[2]}") if match else None
    if match is None or not hasattr(layer, "layer_number"):
        return getattr(chunk, "name_in_model", "") + local_name
    return f"{match[1]}layers.{layer.layer_number - 1}.{match[3]}"  # type: ignore[union-attr, operator]
