"""The journal log.jsonl: one JSON object per line for each start of the run, optimizer step, evaluation, and end.

A file that has grown to PART_BYTES is renamed to `log.jsonl.1`, then `log.jsonl.2`, and so on, and a new one begun.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from megaaccum.errors import MegaaccumError
from megaaccum.platform.files import open_regular, set_aside
from megaaccum.texts import parse_json

Record = dict[str, Any]

PART_BYTES = 1 << 30
MOST_AT_ONCE = 100_000
"""Records held in memory at a time."""
TOTALS = "totals"
"""The field of some records that holds sums over the run up to them: a resume reads no record before it."""

KINDS = ("train", "valid", "text_comparisons", "sample", "start", "end")
"""Values of a record's `kind`: an optimizer step, an evaluation, the text comparisons, a sampled text, a start that
continues after `step` (0: a fresh run), the end of a start that was not killed."""
_FORMER_KINDS = ("core_metric",)
"""Kinds that journals of earlier versions hold."""
_GOOD_STEP = re.compile(rb'\{"kind": "train", "step": (\d+),(?!.*"skipped": true)')
"""The line of a step that was not skipped."""


class Journal:
    """The journal, open for appending on one rank.

    Each line reaches the operating system whole as soon as it is written: killing the process loses none. If the
    machine fails, at most the end of the file is torn, which the next start removes.
    """

    def __init__(self, path: Path, *, start_step: int, start: Record | None = None):
        """Open the journal of a run that continues after step `start_step`; 0 is a fresh run.

        The first line of each start is of kind `start`, with the fields of `start`. A resume appends: earlier lines of
        steps after `start_step` remain, although those steps were repeated. A fresh run moves an earlier run's journal
        aside (`log.1.jsonl`, ...) and never overwrites it. Raises MegaaccumError if a line in the middle is no record,
        or the file cannot be written.
        """
        self.path = path
        with writable(path):
            if os.path.lexists(path) and (start_step == 0 or path.is_symlink()):
                before, aside = parts(path)[:-1], set_aside(path)
                for part in before:
                    part.rename(aside.with_name(aside.name + part.suffix))
            elif path.exists():
                _cut_torn_end(path)
            self._file = self._open()
        self.append({"kind": "start", "step": start_step, **(start or {})})

    def _open(self) -> TextIO:
        # Line buffering: each record reaches the operating system in one write.
        return self.path.open("a", buffering=1, encoding="utf-8")

    def append(self, record: Record) -> None:
        """Append one line. Raises MegaaccumError if it cannot be written, for example on a full disk."""
        with writable(self.path):
            if self._file.tell() >= PART_BYTES:
                self._file.close()
                self.path.rename(self.path.with_name(f"{self.path.name}.{len(parts(self.path))}"))
                self._file = self._open()
            self._file.write(json.dumps(strict(record), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file; closing twice is harmless. Raises MegaaccumError if buffered lines cannot be written."""
        with writable(self.path):
            self._file.close()


def read(path: Path) -> list[Record]:
    """The steps and evaluations of a journal, in order, without those that a later start repeated. A torn end
    (unreadable lines after the last good one) is left out.

    Raises MegaaccumError, with the line's number, if an unreadable line is before a good one.
    """
    return [record for record, is_kept in kept(path) if is_kept]


def kept(path: Path, wanted: Callable[[int], bool] | None = None) -> Iterator[tuple[Record, bool]]:
    """Every record of `lines`, with whether `read` returns it. Holds one record at a time."""
    starts = [parse(line) for _, _, line in _forwards(path) if b'"start"' in line]
    steps = [record["step"] for record in starts if record is not None and record["kind"] == "start"]
    # The last step that no later start repeats; the first start's is at the end.
    lasts = [*accumulate(reversed(steps), min, initial=math.inf)]
    for record in lines(path, wanted):
        if record["kind"] == "start" and len(lasts) > 1:  # a run that continues may have begun another since
            lasts.pop()
        yield record, record["kind"] not in ("start", "end") and record["step"] <= lasts[-1]


def parts(path: Path) -> list[Path]:
    """The files of a journal, in order; `path` is the last one."""
    found = path.parent.glob(f"{path.name}.*")
    before = [each for each in found if each.stem == path.name and each.suffix[1:].isdecimal()]
    return [*sorted(before, key=lambda each: int(each.suffix[1:])), path]


def lines(path: Path, wanted: Callable[[int], bool] | None = None) -> Iterator[Record]:
    """Every record of a journal, in order, including starts, ends and repeated steps. wanted: of a step's number; other
    steps that were not skipped are passed over, in a tenth of the time. Raises MegaaccumError as `read` does."""
    unreadable: tuple[Path, int, bytes] | None = None
    for part, number, line in _forwards(path):
        if wanted is not None and (head := _GOOD_STEP.match(line)) and not wanted(int(head[1])):
            continue
        record = parse(line)
        if record is None:
            unreadable = unreadable or (part, number, line)
        elif unreadable is not None:
            raise MegaaccumError(
                f"{unreadable[0]} is damaged: line {unreadable[1]} is not a record of a run:"
                f" {unreadable[2][:60]!r}.\nMove the file away and start again: the run resumes from its"
                " checkpoint, with a new log."
            )
        else:
            yield record


def _forwards(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """(file, number in it, line) of each line of a journal, in order."""
    for part in parts(path):
        with open_regular(part) as file:
            for number, line in enumerate(file, start=1):
                yield part, number, line


def since_totals(path: Path) -> Iterable[Record]:
    """The records of a journal from the last one on that holds the totals of all steps which later ones do not repeat;
    every record if none does. Raises MegaaccumError as `read` does."""
    found: list[Record] = []
    lowest = math.inf
    for line in _backwards(path):
        record = parse(line)
        if record is None or len(found) == MOST_AT_ONCE:
            return lines(path)
        found.append(record)
        if record["kind"] == "start":
            lowest = min(lowest, record["step"])
        elif TOTALS in record and record["step"] <= lowest:
            break
    return found[::-1]


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a journal, the last one first."""
    for part in reversed(parts(path)):
        with open_regular(part) as file:
            end = os.fstat(file.fileno()).st_size
            if end == 0:
                continue
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                while end > 0:
                    begin = content.rfind(b"\n", 0, end - 1) + 1
                    yield content[begin:end]
                    end = begin


def strict(record: Record) -> Record:
    """The record in strict JSON: NaN and infinities become null, and `nonfinite` holds their names."""
    nonfinite = {key: str(each) for key, each in record.items() if isinstance(each, float) and not math.isfinite(each)}
    if not nonfinite:
        return record
    return {key: None if key in nonfinite else value for key, value in record.items()} | {"nonfinite": nonfinite}


def _cut_torn_end(path: Path) -> None:
    """Truncate the file after its last good line. Raises MegaaccumError if a line before it, and after the last totals,
    is no record."""
    torn = 0
    for line in _backwards(path):
        if parse(line) is not None:
            break
        torn += len(line)
    if torn:
        os.truncate(path, max(0, path.stat().st_size - torn))
    deque(since_totals(path), maxlen=0)


def parse(line: bytes) -> Record | None:
    """The record on a line; None if there is none. A last line without its newline was torn, even if it parses."""
    if not line.endswith(b"\n") or line.isspace():  # before json, whose errors take time
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and record.get("kind") in KINDS + _FORMER_KINDS
    return record if is_record and isinstance(record.get("step"), int) else None


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Context in which a run's file `path` is written. Raises MegaaccumError if the system refuses that."""
    try:
        yield
    except OSError as error:
        raise MegaaccumError(
            f"{path} cannot be written: {error.strerror or error}. Free the place or set output_dir to another folder; "
            f"the run resumes from its last checkpoint."
        ) from error
