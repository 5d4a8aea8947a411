"""The safetensors files of a model's folder: read in byte ranges, and written so that all appear or none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megaaccum.errors import CheckpointError
from megaaccum.platform.files import sync
from megaaccum.texts import parse_json, read_text, regular_file

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""The dtypes of weights, by their names in a safetensors file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DIGESTS = "tensors.sha256"
"""Beside the weights of an export: SHA-256 of each tensor's bytes, with its file and name."""


class Weights:
    """The tensors in the safetensors files of a folder. Headers are read when it is built, and compared with the index;
    bytes when they are asked for. Raises CheckpointError, naming file and tensor, if index and files do not agree."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        self._slices: dict[str, Any] = {}
        listed = _index(folder)
        for file in sorted(set(listed.values())) if listed else [SINGLE]:
            self._open(folder / file)
        for name, file in listed.items():
            if self.files.get(name) != folder / file:
                raise CheckpointError(f"{folder / INDEX} says that {name} is in {file}, which does not have it")
        if extra := sorted(self.files.keys() - listed.keys()) if listed else []:
            raise CheckpointError(f"{self.files[extra[0]]} has {extra[0]}, which {folder / INDEX} does not list")

    def _open(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path} is missing, which {path.parent / INDEX} names")
        try:
            os.close(regular_file(path))  # the library would wait for the writer of a pipe
            opened: Any = safe_open(path, framework="pt")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None
        for name, each in slices.items():
            if each.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name} is {each.get_dtype()}, but only {', '.join(DTYPES)} are read: convert a quantized"
                    " model first"
                )
            if name in self.files:
                raise CheckpointError(f"{name} is in {self.files[name]} and in {path}")
            self.files[name], self._slices[name] = path, each

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._slices[name].get_dtype()]

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A part of a tensor, by slices of its first axes; those beyond its axes are left out. Only its bytes are
        read."""
        part: torch.Tensor = self._slices[name][index[: len(self.shape(name))]]
        return part

    def digest(self, name: str) -> str:
        """SHA-256 of a tensor's bytes."""
        return hashlib.sha256(_bytes_of(self.read(name))).hexdigest()

    def altered(self) -> list[str]:
        """Texts on tensors whose bytes are not those that an export wrote; none if the folder has no digests."""
        try:
            lines = read_text(self.folder / DIGESTS).splitlines()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            return [f"{self.folder / DIGESTS} cannot be read: {error}"]
        if len(lines) != len(self.files):
            return [f"{self.folder / DIGESTS} lists {len(lines):,} tensors, but the files have {len(self.files):,}"]
        texts = []
        for line in lines:
            digest, file, name = (*line.split(maxsplit=2), "", "", "")[:3]
            if self.files.get(name) != self.folder / file:
                texts.append(f"{name} is missing in {self.folder / file}")
            elif self.digest(name) != digest:
                texts.append(f"{name} in {self.folder / file} is not what was exported (SHA-256)")
        return texts


def _index(folder: Path) -> Mapping[str, str]:
    """The file of each tensor by the index; empty for a folder of one file."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}; weights that are pickles are not read: save the model with"
                " safetensors"
            )
        return {}
    try:
        listed = parse_json(read_text(path))["weight_map"]
        if not listed or any(Path(file).name != file or not 0 < len(file.encode()) < 256 for file in listed.values()):
            raise ValueError("it names files that are not in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error}") from error
    return {str(name): str(file) for name, file in listed.items()}


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place when the block ends without an error. Raises
    CheckpointError if there is something in `folder` already, or the disk refuses."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty: name another folder, or remove it")
    aside = folder.parent / f"{folder.name}.incomplete"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        aside.rename(folder)  # in place of an empty one
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor, in the order in which they are written."""


Maker = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Makes tensors, or pieces of them, with their names."""


def write(aside: Path, layout: Layout, makers: Iterable[Maker], *, max_shard_bytes: int) -> None:
    """Write what `makers` make into safetensors files of at most `max_shard_bytes`, an index if there are several, and
    their digests. Two makers work at a time, each in a thread and with one piece in memory. A tensor may come in
    several pieces, its first rows first, all from one maker."""
    shards, places = _shards(layout, max_shard_bytes), dict[str, tuple[str, int]]()
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= _write_header(aside / file, shard)
    digests, left = {name: hashlib.sha256() for name in layout}, {name: nbytes(layout[name]) for name in layout}

    def work(make: Maker) -> None:
        for name, tensor in make():
            file, start = places[name]
            assert (tuple(tensor.shape[1:]), tensor.dtype) == (layout[name][0][1:], layout[name][1]), name
            content = _bytes_of(tensor)
            digests[name].update(content)
            with (aside / file).open("r+b") as target:
                target.seek(start + nbytes(layout[name]) - left[name])
                target.write(content)
                target.flush()
                # The disk begins at once, and not when all is written: it works while the next tensor is made.
                os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left[name] -= tensor.nbytes
            del tensor, content  # before the next one is made

    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(work, makers):
            pass
    assert not any(left.values()), left
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(nbytes, layout.values()))}}
        weight_map = {name: places[name][0] for name in sorted(layout)}
        (aside / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
    lines = [f"{digests[name].hexdigest()}  {places[name][0]}  {name}\n" for name in layout]
    (aside / DIGESTS).write_text("".join(lines), encoding="utf-8")
    for file in {file for file, _ in places.values()}:
        sync(aside / file)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def nbytes(facts: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Bytes of a tensor of this shape and dtype."""
    return torch.Size(facts[0]).numel() * facts[1].itemsize


def _shards(layout: Layout, most: int) -> list[Layout]:
    """The tensors of each file."""
    shards, size = list[Layout]([{}]), 0
    for name, facts in layout.items():
        if shards[-1] and size + nbytes(facts) > most:
            shards.append({})
            size = 0
        shards[-1][name] = facts
        size += nbytes(facts)
    return shards


def _write_header(path: Path, layout: Layout) -> dict[str, tuple[str, int]]:
    """Create a file of these tensors without their bytes. Returns its name and each tensor's position."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in layout.items():
        size = nbytes((shape, dtype))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: (path.name, 8 + len(text) + header[name]["data_offsets"][0]) for name in layout}
