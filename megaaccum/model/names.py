"""Names of tensors in the whole model, the same under every layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def over_stages(chunk: GPTModel, local_name: str) -> str:
    """A name in a chunk with its layer numbered over all stages, and nothing else changed. A chunk of a user's own may
    bring a `name_in_model` ("stages.3."), put before names that a layer's number does not tell apart."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name)
    layer = chunk.decoder.layers[int(match[1])] if match else None
    if match is None or not hasattr(layer, "layer_number"):
        return getattr(chunk, "name_in_model", "") + local_name
    return f"decoder.layers.{layer.layer_number - 1}.{match[2]}"  # type: ignore[union-attr]
