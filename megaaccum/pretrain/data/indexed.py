"""Megatron's indexed pair: PREFIX.bin holds token ids back to back, PREFIX.idx holds where each document lies.

Layout of the .idx, little endian, as megatron.core.datasets.indexed_dataset (0.19) reads it: magic (9 bytes), version
(uint64, 1), code of the id type (uint8), number of sequences n (uint64), number of document bounds d (uint64), then n
lengths in tokens (int32), n offsets in bytes into the .bin (int64) and d bounds in sequences (int64; first 0, last n).
Written here with numpy alone, because importing Megatron takes ten seconds; a test holds the bytes against Megatron's.
"""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaaccum.errors import DataError
from megaaccum.pretrain.data.files import disk_errors, with_suffix
from megaaccum.texts import regular_file

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_ID_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {name: code for code, name in _ID_TYPES.items()}
_UINT16_VOCABULARY = 65500
"""Megatron's own limit: smaller vocabularies are stored as uint16, larger ones as int32."""

Ids = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPair:
    """The header of an .idx, found to agree with the sizes of both files. Make one with `open_pair`."""

    prefix: Path
    """Path of the pair without .bin / .idx."""
    dtype: np.dtype[Any]
    """Type of a token id in the .bin."""
    num_sequences: int
    """Sequences; with megaaccum's builder, and for GPT datasets in general, one per document."""
    num_bounds: int
    """Entries of the document bounds: documents + 1."""
    num_tokens: int
    """Token ids in the .bin."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence, shape [num_sequences]; mapped from the file."""
        return self._table(np.int32, self.num_sequences, 0)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte in the .bin at which each sequence starts, shape [num_sequences]; mapped from the file."""
        return self._table(np.int64, self.num_sequences, 4 * self.num_sequences)

    @property
    def bounds(self) -> npt.NDArray[np.int64]:
        """Sequence at which each document starts, and num_sequences, shape [num_bounds]; mapped from the file."""
        return self._table(np.int64, self.num_bounds, 12 * self.num_sequences)

    @property
    def ids(self) -> Ids:
        """All token ids, shape [num_tokens]; mapped from the file."""
        return np.memmap(with_suffix(self.prefix, ".bin"), dtype=self.dtype, mode="r", shape=(self.num_tokens,))

    def _table(self, dtype: type, count: int, offset: int) -> npt.NDArray[Any]:
        path = with_suffix(self.prefix, ".idx")
        return np.memmap(path, dtype=dtype, mode="r", offset=_HEADER.size + offset, shape=(count,))

    def tokens_between(self, first: int, end: int) -> int:
        """Tokens of the sequences [first, end): two reads, for an index of any size."""
        offsets, total = self.offsets, self.num_tokens * self.dtype.itemsize
        start, stop = (int(offsets[i]) if i < self.num_sequences else total for i in (first, end))
        return (stop - start) // self.dtype.itemsize


def open_pair(prefix: str | Path) -> IndexedPair:
    """Read the header of a pair and compare it with the sizes of both files, in constant time.

    Raises:
        DataError: a file is missing; the .idx is not Megatron's, of another version, of no integer type or cut short;
            the .bin is shorter or longer than the .idx says; or there is no token in it.
    """
    prefix = Path(prefix)
    idx_bytes, bin_bytes = (_size(prefix, suffix) for suffix in (".idx", ".bin"))
    path = with_suffix(prefix, ".idx")
    with disk_errors("cannot read dataset", path), open(path, "rb", opener=regular_file) as stream:
        head = stream.read(_HEADER.size)
    dtype, sequences, bounds = _read_header(path, head, idx_bytes)
    pair = IndexedPair(
        prefix=prefix, dtype=dtype, num_sequences=sequences, num_bounds=bounds, num_tokens=bin_bytes // dtype.itemsize
    )
    _check_sizes(pair, bin_bytes)
    return pair


def _size(prefix: Path, suffix: str) -> int:
    path = with_suffix(prefix, suffix)
    try:
        return path.stat().st_size
    except FileNotFoundError:
        other = with_suffix(prefix, ".bin" if suffix == ".idx" else ".idx")
        have = f"{other} is there alone" if other.exists() else f"{other} is missing too"
        raise DataError(
            f"dataset {prefix}: {path} does not exist ({have}). data_path takes the prefix of a .bin/.idx pair; "
            f"`megaaccum data build` makes one"
        ) from None
    except OSError as error:
        raise DataError(f"dataset {prefix}: cannot read {path}: {error.strerror}") from error


def _read_header(path: Path, head: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """Type of the ids, sequences and document bounds, once the header and the size of the .idx agree."""
    if len(head) < _HEADER.size:
        raise DataError(f"{path} is cut short: {size} bytes, and its header alone takes {_HEADER.size}. Build it again")
    magic, version, code, sequences, bounds = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise DataError(f"{path} is not an index of Megatron: it starts with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise DataError(f"{path} has version {version}; only version {_VERSION} is known")
    if code not in _ID_TYPES:
        raise DataError(f"{path} has ids of type code {code}; integer types are {_ID_TYPES}")
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    with_modes = expected + sequences
    if size not in (expected, with_modes):
        raise DataError(
            f"{path} is {size:,} bytes, but its {sequences:,} sequences and {bounds:,} document bounds take "
            f"{expected:,}. It is cut short or damaged; build it again"
        )
    return np.dtype(_ID_TYPES[code]), sequences, bounds


def _check_sizes(pair: IndexedPair, bin_bytes: int) -> None:
    """The end of the last sequence is the end of the .bin."""
    if pair.num_sequences == 0 or bin_bytes == 0:
        raise DataError(f"dataset {pair.prefix} is empty: {pair.num_sequences} sequences, a .bin of {bin_bytes} bytes")
    expected = int(pair.offsets[-1]) + int(pair.lengths[-1]) * pair.dtype.itemsize
    if bin_bytes != expected:
        what = "truncated" if bin_bytes < expected else "too long"
        raise DataError(
            f"{with_suffix(pair.prefix, '.bin')} is {what}: {bin_bytes:,} bytes, where "
            f"{with_suffix(pair.prefix, '.idx')} says {expected:,} ({pair.num_sequences:,} sequences of {pair.dtype} "
            f"ids). The two are not of one build; build or copy them again"
        )


def check_tables(pair: IndexedPair) -> None:
    """Check the whole .idx: every length, offset and document bound must follow from the ones before it.

    Raises:
        DataError: one does not; it is named with its place and value.
    """
    path = with_suffix(pair.prefix, ".idx")
    lengths = pair.lengths
    _refuse_first(lengths < 0, lengths, path, "length {} of sequence {} is negative")
    expected = _offsets(lengths, pair.dtype)
    _refuse_first(
        pair.offsets != expected, pair.offsets, path, "offset {} of sequence {} is not the end of the one before"
    )
    bounds = pair.bounds
    if pair.num_bounds < 1 or bounds[0] != 0 or bounds[-1] != pair.num_sequences:
        ends = [int(bounds[0]), int(bounds[-1])] if pair.num_bounds else []
        raise DataError(
            f"{path}: document bounds run {ends}, not from 0 to {pair.num_sequences} sequences; build it again"
        )
    _refuse_first(np.diff(bounds) < 0, bounds, path, "document bound {} at {} is larger than the next one")


def _refuse_first(wrong: npt.NDArray[np.bool_], values: npt.NDArray[Any], path: Path, text: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(f"{path}: {text.format(int(values[at]), at)}. The file is damaged; build it again")


def check_ids(pair: IndexedPair, vocab_size: int, *, num_blocks: int = 64, block_tokens: int = 1 << 18) -> None:
    """Looks for an id that the vocabulary has no row for, in `num_blocks` blocks spread evenly over the .bin.

    That is all of a .bin of up to num_blocks * block_tokens (16.8 million) tokens, else its first and last block and
    those between. The loader checks every batch, so an id that is not met here is still named before it does harm.

    Raises:
        DataError: an id is negative or at least `vocab_size`.
    """
    ids = pair.ids
    last_start = max(0, pair.num_tokens - block_tokens)
    starts = np.unique(np.linspace(0, last_start, num_blocks).astype(np.int64))
    if num_blocks * block_tokens >= pair.num_tokens:
        starts = np.arange(0, pair.num_tokens, block_tokens)
    for start in starts:
        block = ids[start : start + block_tokens]
        wrong = (block < 0) | (block >= vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{with_suffix(pair.prefix, '.bin')}: token {int(start) + at:,} has id {int(block[at])}, but the "
                f"vocabulary has {vocab_size} entries. The dataset was built with another tokenizer: name it in "
                f"tokenizer_model"
            )


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The type in which Megatron stores ids of a vocabulary of this size: uint16 while they fit, else int32."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)


class PairWriter:
    """Writer of a pair, one document after the other. A context manager: the .idx is written at the end of its block.

    When the block raises, the .bin is closed and no .idx is written. Every method lets an OSError of the disk through.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]):
        self._prefix = prefix
        self._dtype = dtype
        self._lengths = array("i")
        self._bin = open(with_suffix(prefix, ".bin"), "wb")  # noqa: SIM115 - __exit__ closes it

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, ids: Ids, lengths: list[int]) -> None:
        """Appends documents: `ids` holds their ids back to back, `lengths` the tokens of each."""
        assert len(ids) == sum(lengths), (len(ids), sum(lengths))
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self._lengths.extend(lengths)

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._bin.close()
            self._write_index()
            return
        with suppress(OSError):  # the last bytes may not fit either; the error on its way says so already
            self._bin.close()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        bounds = np.arange(len(lengths) + 1, dtype=np.int64)
        header = _HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype.name], len(lengths), len(bounds))
        with open(with_suffix(self._prefix, ".idx"), "wb") as stream:
            for part in (header, lengths.tobytes(), _offsets(lengths, self._dtype).tobytes(), bounds.tobytes()):
                stream.write(part)


def _offsets(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
    """Byte at which each sequence starts, when they lie back to back."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * dtype.itemsize
