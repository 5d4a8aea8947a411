"""Training data: corpus and indexed files, Megatron's datasets over them, and the loader of micro-batches.

Nothing here imports torch or Megatron before it is needed; `megaaccum data build` needs neither.

| module | holds |
| --- | --- |
| `loader` | which samples each rank's micro-batches hold |
| `shared` | one reader for the ranks of a model-parallel group |
| `dataset`, `sources`, `train_valid_split` | Megatron's datasets over `data_path` |
| `order`, `fim` | the order of samples; fill in the middle |
| `indexed`, `files` | .bin and .idx pairs |
| `build`, `documents`, `encode` | text to pairs |
| `tokenizer`, `vocabulary` | the tokenizer |
| `chats`, `chat_rows` | conversations for fine-tuning |
| `packing` | documents of several lengths in a budget of tokens |
| `corpus` | the embedded text |
"""

from typing import Any

__all__ = ["document_mask", "pack"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from megaaccum.pretrain.data import packing

        return getattr(packing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
