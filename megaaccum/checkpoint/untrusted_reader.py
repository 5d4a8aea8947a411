"""Reading a checkpoint from an untrusted source: no code in it runs, and damage is detected.

torch.distributed.checkpoint stores the list of a checkpoint's tensors, `.metadata`, as a pickle, and a pickle can call
any function by name, or change any class that it can name. The unpickler here accepts only the names of which such a
list consists, and makes inert objects in place of theirs. Tensors are read with `weights_only`. `.metadata` holds the
SHA-256 of each stored tensor, state.json that of `.metadata`, and its own.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from pickle import _Unpickler  # pickle.Unpickler, written in C, has no table of instructions that could be restricted
from typing import Any, BinaryIO, ClassVar

import torch

from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.errors import CheckpointError
from megaaccum.platform.files import open_regular
from megaaccum.upstream import pytorch

_MOST = 1 << 60
"""Sizes, offsets and lengths of this value or above are refused."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its size, and where its bytes are."""

    size: tuple[int, ...]
    file: str
    offset: int
    length: int
    sha256: str


class CheckpointReader:
    """The tensors of the checkpoint in folder `path`. metadata_sha256: SHA-256 of its `.metadata`, from state.json.

    Raises DamagedCheckpoint if `.metadata` is missing or damaged, and CheckpointError if it names a class that no list
    of tensors holds, or a file outside the folder.
    """

    def __init__(self, path: Path, metadata_sha256: str):
        self._path = path
        self.stored = _read_metadata(path / ".metadata", metadata_sha256)
        """The tensors, by key."""

    def check_files(self, keys: Collection[str]) -> None:
        """Check that the files of `keys` exist and are long enough. Raises DamagedCheckpoint."""
        ends: dict[str, int] = {}
        for key in keys:
            stored = self.stored[key]
            ends[stored.file] = max(stored.offset + stored.length, ends.get(stored.file, 0))
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
        for key in sorted(keys, key=lambda key: self.stored[key].offset):
            by_file.setdefault(self.stored[key].file, []).append(key)
        read: dict[str, torch.Tensor] = {}
        for name, inside in by_file.items():
            path = self._path / name
            try:
                with open_regular(path) as file:
                    read |= {key: self._tensor(file, key) for key in inside}
            except OSError as error:
                raise _unreadable(path, error) from error
        return read

    def _tensor(self, file: BinaryIO, key: str) -> torch.Tensor:
        stored = self.stored[key]
        part = pytorch.part_of_file(file, stored.offset, stored.length)
        if hashlib.file_digest(part, "sha256").hexdigest() != stored.sha256:
            raise DamagedCheckpoint(f"{file.name} is damaged: {key} is not what was written (SHA-256)")
        part.seek(0)
        try:
            tensor = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # bytes that were made up can raise anything
            raise CheckpointError(f"{file.name} holds no tensor for {key} ({_what(error)})") from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != stored.size:
            raise CheckpointError(f"{file.name} does not hold {key} in the size {stored.size} that .metadata says")
        return tensor


def _unreadable(path: Path, error: OSError) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}")


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _read_metadata(path: Path, sha256: str) -> dict[str, StoredTensor]:
    """The list of a checkpoint's tensors. Raises the errors of CheckpointReader."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedCheckpoint(f"{path} is damaged: it is not what was written (SHA-256)")
    metadata = listing(content, path)
    try:
        storage = _Entries()
        for index, info in metadata.storage_data.items():
            storage[index.fqn] = info
        stored = {key: _stored(it.size.args[0], storage[key]) for key, it in metadata.state_dict_metadata.items()}
    except Exception as error:  # a pickle that was tampered with can raise anything
        raise CheckpointError(f"{path} is no list of tensors ({_what(error)})") from error
    for each in stored.values():
        if not each.file or Path(each.file).name != each.file:
            raise CheckpointError(f"{path} names the file {each.file[:200]!r}, which is not in its folder")
    return stored


def listing(content: bytes, path: Path, more: Collection[tuple[str, str]] = ()) -> Any:
    """The list of tensors in the bytes of a `.metadata`, as objects without methods. more: classes, by module and name,
    that it may hold beside those of our own checkpoints. Raises CheckpointError."""
    try:
        metadata = _Restricted(io.BytesIO(content), more).load()
    except _Refused as error:
        raise CheckpointError(
            f"{path} names {error}, which no list of tensors holds, and was read no further: it could run commands."
            " Take the checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # a pickle that was tampered with can raise anything
        raise CheckpointError(f"{path} is no list of tensors ({_what(error)})") from error
    if type(metadata).__name__ != "Metadata":
        kind = "dict" if isinstance(metadata, dict) else type(metadata).__name__
        raise CheckpointError(f"{path} holds a {kind}, not a list of tensors")
    return metadata


def _stored(size: Any, info: Any) -> StoredTensor:
    """A tensor's entry. Raises ValueError if a part of it has another type, or a number is negative."""
    numbers = (info.offset, info.length, *size)
    texts = (info.relative_path, info.sha256)
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers) or set(map(type, texts)) != {str}:
        raise ValueError("the entry of a tensor has a number or a file name that is not valid")
    return StoredTensor(tuple(size), info.relative_path, info.offset, info.length, info.sha256)


class _Refused(Exception):
    """A pickle names a class that is not on the list."""


class _Inert:
    """An object of a pickle: the arguments that its class was called with, and its state as attributes."""

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


_CODES = [getattr(pickle, name)[0] for name in (
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET SHORT_BINUNICODE BINUNICODE BININT BININT1"
    " BININT2 LONG1 NONE NEWTRUE NEWFALSE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT"
    " SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD"
).split()]  # fmt: skip
"""Instructions of pickle's protocols 2 to 5 that a list of tensors needs."""


class _Restricted(_Unpickler):
    """Reads a pickle in time and memory that grow with its length: made of few instructions, keys that are cheap to
    hash, and classes of its own, so that nothing outside of it changes."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code: _Unpickler.dispatch[code] for code in _CODES}

    def __init__(self, file: BinaryIO, more: Collection[tuple[str, str]] = ()):
        super().__init__(file)
        self._allowed = {*pytorch.CHECKPOINT_METADATA_CLASSES, *more}
        self._classes: dict[tuple[str, str], type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self._allowed:
            raise _Refused(f"{module[:80]}.{name[:80]}")
        return self._classes.setdefault((module, name), type(name, (_Inert,), {}))

    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Entries())


class _Entries(dict[Any, Any]):
    """A dictionary whose keys are texts and objects: the hash of a nested tuple may take exponentially long."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | _Inert):
            raise ValueError(f"a {type(key).__name__} as key")
        super().__setitem__(key, value)
