"""What becomes of a list of Megatron flags: keys with values, problems, and notes on flags without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.keys import all_keys
from megaaccum.interop.megatron_table import Flag


class Unresolved(str):
    """A word of a script with something in it that only running the script would tell, such as $1.

    The text is as the script writes it; `reasons` says what is missing, one text per piece.
    """

    reasons: tuple[str, ...]

    def __new__(cls, text: str, reasons: tuple[str, ...]) -> Unresolved:
        word = super().__new__(cls, text)
        word.reasons = reasons
        return word


@dataclass(frozen=True, slots=True)
class Given:
    """One flag of the list with the words that follow it."""

    flag: Flag
    written: str
    """The flag as it was spelled."""
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.written, *self.values))


@dataclass(slots=True)
class Reading:
    """Collects the result while flags are read. Everything in it is for the reader of the list."""

    base_dir: Path
    """Folder against which files that flags name are found."""
    beside: Mapping[str, object]
    """Keys that stand beside the list (on the same command line) and that its flags may need, such as
    global_batch_size for --train-samples."""
    given: dict[str, Given] = field(default_factory=dict)
    """Flags of the table that were given, by the table's first name."""
    unresolved: set[str] = field(default_factory=set)
    """Flags of the table that were given with a value which is not known; each is a problem already."""
    values: dict[str, object] = field(default_factory=dict)
    """Typed values by key, and `deepspeed` as a dict."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    writers: dict[str, str] = field(default_factory=dict)
    """The flag, as given, that set each key."""

    def put(self, key: str, value: object, writer: str) -> None:
        """Set a key to a value of its type; a value that does not fit, or contradicts another flag's, is a problem."""
        if isinstance(value, str | list):
            try:
                value = coerce(value, all_keys()[key].annotation)
            except NotOfType as error:
                self.problems.append(f"{writer}: {key} must be {error}.")
                return
        if key in self.values and self.values[key] != value:
            other = self.writers[key]
            self.problems.append(
                f"{other} makes {key} {self.values[key]} and {writer} makes it {value}: keep one of the two."
            )
            return
        self.values[key] = value
        self.writers[key] = writer

    def known(self, key: str) -> object:
        """The value of a key from the list or beside it, typed, or None."""
        if key in self.values:
            return self.values[key]
        value = self.beside.get(key)
        try:
            return None if value is None else coerce(value, all_keys()[key].annotation)
        except NotOfType:
            return None  # whoever holds the key reports its value

    def number(self, name: str) -> int | float | None:
        """The number after a flag, or None if the flag is not given; what is no number is a problem."""
        if name not in self.given:
            return None
        return self.as_number(self.given[name])

    def as_number(self, given: Given) -> int | float | None:
        """The one number after a flag of kind int or float."""
        kind = {"int": int, "float": float}[given.flag.kind]
        try:
            return kind(given.values[0])
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            self.problems.append(f"{given}: {given.written} takes {expected}.")
            return None
