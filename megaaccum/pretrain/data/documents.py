"""Documents of text and JSONL files, plain or gzip, one after the other in the order in which the files are named."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megaaccum.errors import DataError, shortened
from megaaccum.pretrain.data.files import disk_errors
from megaaccum.texts import parse_json, regular_file

_GZIP_MAGIC = b"\x1f\x8b"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

Format = Literal["auto", "text", "jsonl"]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files to read documents from. Iterating twice gives the same documents twice."""

    files: list[Path]
    """Text or JSONL files; gzip is recognised by its first bytes."""
    format: Format = "auto"
    """Their format; auto: JSONL by the end of the name (.jsonl, .ndjson, .json, also before .gz), else text."""
    json_key: str = "text"
    """Key of the text in a line of JSONL."""
    whole_files: bool = False
    """A text file is one document, rather than documents separated by empty lines."""

    def check(self) -> int:
        """The size of all files in bytes, as they lie on the disk.

        Raises:
            DataError: one is missing, no file, or not readable; or an option is for files of the other format.
        """
        if self.json_key != "text" and not any(map(self._is_jsonl, self.files)):
            raise DataError(f"--json-key {self.json_key}: no file is JSONL: add --format jsonl, or leave it out")
        if self.whole_files and all(map(self._is_jsonl, self.files)):
            raise DataError("--one-document-per-file: every file is JSONL, whose lines are documents: leave it out")
        total = 0
        for path in self.files:
            with disk_errors("cannot read", path), open(path, "rb", opener=regular_file):
                total += path.stat().st_size
        return total

    def documents(self, progress: Progress | None = None) -> Iterator[str]:
        """Documents that hold more than white space. `progress` is called with the bytes read from the disk.

        Raises:
            DataError: a file cannot be read or is damaged gzip; a line is no UTF-8, no JSON object, or lacks the key.
                File and line are named.
        """
        for path in self.files:
            read = self._read_jsonl if self._is_jsonl(path) else self._read_text
            for text in read(path, _lines(path, progress)):
                if text.strip():
                    yield text

    def _is_jsonl(self, path: Path) -> bool:
        name = path.name.lower().removesuffix(".gz")
        return self.format == "jsonl" or (self.format == "auto" and name.endswith(_JSON_SUFFIXES))

    def _read_text(self, path: Path, lines: Iterator[bytes]) -> Iterator[str]:
        """The documents of a text file: runs of lines between empty ones, or all lines. A document keeps its inner line
        ends."""
        held: list[str] = []
        for number, raw in enumerate(lines, start=1):
            line = _decode(raw, path, number)
            if self.whole_files or line.strip():
                held.append(line)
            elif held:
                yield "".join(held).rstrip("\r\n")
                held = []
        yield "".join(held) if self.whole_files else "".join(held).rstrip("\r\n")

    def _read_jsonl(self, path: Path, lines: Iterator[bytes]) -> Iterator[str]:
        for where, record in _records(path, lines):
            if self.json_key not in record:
                raise DataError(f"{where}: no key {self.json_key!r}; the line has {sorted(record)}. Set --json-key")
            yield self._checked(record[self.json_key], where)

    def _checked(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise DataError(f"{where}: {self.json_key!r} must be a string, not {shortened(json.dumps(text), 80)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{where}: {self.json_key!r} holds half a surrogate pair, which is no text") from None
        return text


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line number, object) of each line of a JSONL file, plain or gzip. Raises DataError, naming file and
    line, for one that is no JSON object."""
    return _records(path, _lines(path, None))


def _records(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, raw in enumerate(lines, start=1):
        line, where = _decode(raw, path, number), f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error}): {shortened(line.strip(), 80)}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: a line must be a JSON object, not {shortened(line.strip(), 80)}")
        yield where, record


def _lines(path: Path, progress: Progress | None) -> Iterator[bytes]:
    """Lines of a file with their line ends, unpacked if it is gzip."""
    with disk_errors("cannot read", path), open(path, "rb") as raw:
        is_gzip = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        told = 0
        for line in _unpacked(raw, path) if is_gzip else raw:
            yield line
            if progress and raw.tell() > told:
                progress(raw.tell() - told)
                told = raw.tell()


def _unpacked(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        yield from gzip.GzipFile(fileobj=raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged gzip: {error}") from error


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise DataError(
            f"{path}, line {number}: byte 0x{byte:02x} at column {error.start + 1} is not UTF-8. Convert the file "
            f"first (for example: iconv -f latin1 -t utf-8)"
        ) from error
