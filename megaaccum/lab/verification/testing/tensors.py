"""Pickling of results: torch CPU tensors travel as plain bytes."""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def dumps(value: Any) -> bytes:
    """`value` pickled; each tensor in it as its elements, dtype and shape, without graph and without the rest of its
    storage.

    torch's own way names a function of Megatron's once Megatron is imported (megatron/core/safe_globals.py replaces
    torch.storage._load_from_bytes), so that the process which loads the result would import Megatron too.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return rebuild, (elements, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def rebuild(elements: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
    """The tensor again, on the CPU."""
    import torch

    return torch.tensor(elements).view(getattr(torch, dtype)).reshape(shape)
