"""Reading a checkpoint from an untrusted source: no code in it runs, and damage is detected.

torch.distributed.checkpoint stores the list of a checkpoint's tensors, `.metadata`, as a pickle, and a pickle can call
any function by name. The unpickler here accepts only the classes of which such a list consists. Tensors are read with
`weights_only`. `.metadata` holds the SHA-256 of each stored tensor, state.json that of `.metadata`, and its own.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.errors import CheckpointError
from megaaccum.upstream import pytorch


class CheckpointReader:
    """The tensors of the checkpoint in folder `path`. metadata_sha256: SHA-256 of its `.metadata`, from state.json.

    Raises DamagedCheckpoint if `.metadata` is missing or damaged, and CheckpointError if it names a class that no list
    of tensors holds, or a file outside the folder.
    """

    def __init__(self, path: Path, metadata_sha256: str):
        self._path = path
        metadata = _read_metadata(path / ".metadata", metadata_sha256)
        self.stored: dict[str, TensorStorageMetadata] = {
            key: what for key, what in metadata.state_dict_metadata.items() if isinstance(what, TensorStorageMetadata)
        }
        """Size and dtype of each tensor, by its key."""
        self._storage = {index.fqn: storage for index, storage in metadata.storage_data.items()}

    def check_files(self, keys: Collection[str]) -> None:
        """Check that the files of `keys` exist and are long enough. Raises DamagedCheckpoint."""
        ends: dict[str, int] = {}
        for key in keys:
            storage = self._storage[key]
            end = storage.offset + storage.length
            ends[storage.relative_path] = max(end, ends.get(storage.relative_path, 0))
        for name, end in ends.items():
            path = self._path / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise _unreadable(path, error) from error
            if size < end:
                raise DamagedCheckpoint(f"{path} is cut short: {size:,} bytes, where .metadata says at least {end:,}")

    def read(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """The tensors of `keys`, in host memory. Raises DamagedCheckpoint if a tensor's bytes are not those that were
        written."""
        by_file: dict[str, list[str]] = {}
        for key in sorted(keys, key=lambda key: self._storage[key].offset):
            by_file.setdefault(self._storage[key].relative_path, []).append(key)
        read: dict[str, torch.Tensor] = {}
        for name, inside in by_file.items():
            path = self._path / name
            try:
                with path.open("rb") as file:
                    read |= {key: self._tensor(file, key) for key in inside}
            except OSError as error:
                raise _unreadable(path, error) from error
        return read

    def _tensor(self, file: BinaryIO, key: str) -> torch.Tensor:
        storage = self._storage[key]
        file.seek(storage.offset)
        content = file.read(storage.length)
        if hashlib.sha256(content).hexdigest() != storage.sha256:
            raise DamagedCheckpoint(f"{file.name} is damaged: {key} is not what was written (SHA-256)")
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        assert isinstance(tensor, torch.Tensor)
        return tensor


def _unreadable(path: Path, error: OSError) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}")


def _read_metadata(path: Path, sha256: str) -> Metadata:
    """The list of a checkpoint's tensors. Raises the errors of CheckpointReader."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedCheckpoint(f"{path} is damaged: it is not what was written (SHA-256)")
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except _Refused as error:
        raise CheckpointError(
            f"{path} names {error}, which no checkpoint of megaaccum holds, and was read no further: it could run "
            "commands. Take the checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # a pickle that was tampered with can raise anything
        raise CheckpointError(f"{path} is no list of tensors ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not a list of tensors")
    for storage in metadata.storage_data.values():
        file = str(getattr(storage, "relative_path", ""))
        if not file or Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file!r}, which is not in its folder")
    return metadata


class _Refused(Exception):
    """A pickle names a class that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in pytorch.CHECKPOINT_METADATA_CLASSES:
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")
