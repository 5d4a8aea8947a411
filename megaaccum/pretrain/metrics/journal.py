"""The journal log.jsonl: one JSON object per line for each start of the run, optimizer step, evaluation, and end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaaccum.errors import MegaaccumError
from megaaccum.texts import parse_json, regular_file

Record = dict[str, Any]

KINDS = ("train", "valid", "text_comparisons", "sample", "start", "end")
"""Values of a record's `kind`: an optimizer step, an evaluation, the text comparisons, a sampled text, a start that
continues after `step` (0: a fresh run), the end of a start that was not killed."""
_FORMER_KINDS = ("core_metric",)
"""Kinds that journals of earlier versions hold."""


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
        try:
            if path.exists() and start_step == 0:
                set_aside(path)
            if path.exists():
                _cut_torn_end(path)
            # Line buffering: each record reaches the operating system in one write.
            self._file = path.open("a", buffering=1, encoding="utf-8")
            self.append({"kind": "start", "step": start_step, **(start or {})})
        except OSError as error:
            raise unwritable(path, error) from error

    def append(self, record: Record) -> None:
        """Append one line. Raises MegaaccumError if it cannot be written, for example on a full disk."""
        try:
            self._file.write(json.dumps(strict(record), allow_nan=False) + "\n")
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        """Close the file; closing twice is harmless. Raises MegaaccumError if buffered lines cannot be written."""
        try:
            self._file.close()
        except OSError as error:
            raise unwritable(self.path, error) from error


def read(path: Path) -> list[Record]:
    """The steps and evaluations of a journal, in order, without those that a later start repeated. A torn end
    (unreadable lines after the last good one) is left out.

    Raises MegaaccumError, with the line's number, if an unreadable line is before a good one.
    """
    return kept(lines(path))


def kept(records: Iterable[Record]) -> list[Record]:
    """The records that `read` returns, of all those of `lines`."""
    found: list[Record] = []
    for record in records:
        if record["kind"] == "start":
            found = [each for each in found if each["step"] <= record["step"]]
        elif record["kind"] != "end":
            found.append(record)
    return found


def lines(path: Path) -> list[Record]:
    """Every record of a journal, in order, including starts, ends and repeated steps. Raises MegaaccumError as `read`
    does."""
    records: list[Record] = []
    unreadable: tuple[int, bytes] | None = None
    with open(path, "rb", opener=regular_file) as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is None:
                unreadable = unreadable or (number, line)
            elif unreadable is not None:
                raise MegaaccumError(
                    f"{path} is damaged: line {unreadable[0]} is not a record of a run: {unreadable[1][:60]!r}.\n"
                    f"Move the file away and start again: the run resumes from its checkpoint, with a new log."
                )
            else:
                records.append(record)
    return records


def strict(record: Record) -> Record:
    """The record in strict JSON: NaN and infinities become null, and `nonfinite` holds their names."""
    nonfinite = {key: str(value) for key, value in record.items() if _is_nonfinite(value)}
    if not nonfinite:
        return record
    return {key: None if key in nonfinite else value for key, value in record.items()} | {"nonfinite": nonfinite}


def set_aside(path: Path) -> Path:
    """Rename `name.ext` to the first free of `name.1.ext`, `name.2.ext`, ...; returns the new path."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


def _cut_torn_end(path: Path) -> None:
    """Truncate the file after its last good line."""
    lines(path)  # raises where it is damaged in the middle
    end = position = 0
    with open(path, "rb", opener=regular_file) as file:
        for line in file:
            position += len(line)
            end = position if _parse(line) is not None else end
    if end < path.stat().st_size:
        os.truncate(path, end)


def _parse(line: bytes) -> Record | None:
    """The record on a line; None if there is none. A last line without its newline was torn, even if it parses."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and record.get("kind") in KINDS + _FORMER_KINDS
    return record if is_record and isinstance(record.get("step"), int) else None


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def unwritable(path: Path, error: OSError) -> MegaaccumError:
    """The error of a run whose file `path` cannot be written."""
    return MegaaccumError(
        f"{path} cannot be written: {error.strerror or error}. Free the place or set output_dir to another folder; "
        f"the run resumes from its last checkpoint."
    )
