"""Reading a checkpoint that may come from anywhere: nothing in it is run.

torch.distributed.checkpoint stores the list of a checkpoint's tensors, `.metadata`, as a pickle, and a pickle can call
any function by name. Here only the classes that such a list is made of may be named. The tensors themselves torch
reads with `weights_only`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megaaccum import upstream
from megaaccum.errors import CheckpointError


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader of the checkpoint in folder `path`, with a `.metadata` that is read once, before anything else.

    Raises CheckpointError when `.metadata` is missing or damaged, names something that no list of tensors holds, or a
    file outside the folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._metadata = read_metadata(Path(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list read at construction. torch reads it again on every load, each time with its own unpickler."""
        return self._metadata

    def check_files(self, keys: Collection[str]) -> None:
        """Hold that the files in which `keys` lie are there and long enough. Raises CheckpointError."""
        ends: dict[str, int] = {}
        for index, storage in self._metadata.storage_data.items():
            if index.fqn in keys:
                end = storage.offset + storage.length
                ends[storage.relative_path] = max(end, ends.get(storage.relative_path, 0))
        for name, end in ends.items():
            path = Path(self.path) / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            if size < end:
                raise CheckpointError(f"{path} is cut short: {size:,} bytes, where .metadata says at least {end:,}")


def read_metadata(folder: Path) -> Metadata:
    """The list of tensors of the checkpoint in `folder`. Raises CheckpointError as CheckpointReader."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except _Refused as error:
        raise CheckpointError(
            f"{path} names {error}, which no checkpoint of megaaccum holds, and was read no further: it could run "
            "commands. Take the checkpoint from a source that you trust"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(metadata).__name__}, not a list of tensors")
    for storage in metadata.storage_data.values():
        file = str(getattr(storage, "relative_path", ""))
        if not file or Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file!r}, which is not in its folder")
    metadata.storage_meta = StorageMeta()
    return metadata


class _Refused(Exception):
    """A name that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in upstream.CHECKPOINT_METADATA_CLASSES or _is_dtype(module, name):
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
