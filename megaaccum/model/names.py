"""Names of tensors in the whole model, the same under every layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def over_stages(chunk: GPTModel, local_name: str) -> str:
    """A name in a chunk with its layer numbered over all stages, and nothing else changed."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name)
    if not match:
        return local_name
    layer = chunk.decoder.layers[int(match[1])]
    return f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
