"""Training data: corpus and indexed files, Megatron's datasets over them, and the loader of micro-batches.

Nothing here imports torch or Megatron before it is needed; `megaaccum data build` needs neither.
"""

from typing import Any

__all__ = ["document_mask", "pack"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from megaaccum.pretrain.data import packing

        return getattr(packing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
