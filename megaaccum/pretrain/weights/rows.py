"""Which rows of which tensors of a Hugging Face model are the rows of a parameter of ours. No torch.

A mapping moves rows and keeps the numbers, so it is its own inverse read the other way: `rows_of` gives the rows of
theirs that lie one below the other in ours, and both directions go by that list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from megaaccum.texts import packaged_yaml

ROWS_ARE_TOKENS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters of ours that have rows of padding after those of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Every `step`-th of rows `start` to `stop` of tensor `name` of theirs, of its transpose if `transposed`; no name:
    rows of padding. stacked: experts that lie in the tensor along its first axis, of which this one is `expert`."""

    name: str
    start: int
    stop: int
    step: int = 1
    transposed: bool = False
    stacked: int = 0
    expert: int = 0

    @property
    def count(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def part(self, low: int, high: int) -> slice:
        """Rows `low` to `high` of these, as they lie in the tensor."""
        part = range(self.start, self.stop, self.step)[low:high]
        return slice(part.start, part.stop, part.step)

    def of(self, tensor: Any) -> Any:
        """These rows of the whole tensor."""
        tensor = tensor[self.expert] if self.stacked else tensor
        return (tensor.t() if self.transposed else tensor)[self.part(0, self.count)]


def theirs_of(rows: list[Rows], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of theirs that a parameter of ours of this shape makes, or is a part of."""
    heights: dict[str, int] = {}
    for each in rows:
        heights[each.name] = max(each.stop, heights.get(each.name, 0))
    found = {}
    for each in rows:
        size = (heights[each.name], *shape[1:])
        stack = (each.stacked,) if each.stacked else ()
        found[each.name] = (*stack, *(size[::-1] if each.transposed else size))
    found.pop("", None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model on which names and operations depend. channels: of one head."""

    layers: int
    heads: int
    groups: int
    channels: int
    vocabulary: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: the names of `ours` and `theirs` with places for numbers, and the operation between them."""

    ours: str
    operation: str
    theirs: tuple[str, ...]


@cache
def families() -> dict[str, Any]:
    """The content of families.yaml."""
    content: dict[str, Any] = packaged_yaml("megaaccum.pretrain.weights", "families.yaml")
    return content


@cache
def table(family: str) -> tuple[Row, ...]:
    """The weights of a family."""
    names = families()["families"][family]["weights"]
    rows = [row for name in names for row in families()["tables"][name]]
    if "prediction" in names:
        rows += [
            [each.replace(*_INNER).replace("<layer>", "<mtp>") for each in row]
            for row in rows
            if "decoder.layers." in row[0]
        ]
    return tuple(Row(row[0], row[1], tuple(row[2:])) for row in rows)


_INNER = ("decoder.layers.<layer>.", "mtp.layers.<mtp>.mtp_model_layer.")
"""The start of the names of a decoder layer, and of the one in a layer that predicts further tokens."""
_PLACES = {"layer": r"\d+", "mtp": r"\d+", "expert": r"\d+", "leaf": "weight|bias"}


_PLACE = re.compile("<(.*?)>")


def _filled(numbers: dict[str, str], place: re.Match[str]) -> str:
    return numbers[place[1]]


@cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for place, values in _PLACES.items():
        text = text.replace(f"<{place}>", f"(?P<{place}>{values})")
    return re.compile(text)


def rows_of(family: str, name: str, num_rows: int, sizes: Sizes) -> list[Rows] | None:
    """The rows of theirs that make parameter `name` of ours, which has `num_rows` rows (a vector has one per element);
    None if the family has no such parameter."""
    for row in table(family):
        if match := _pattern(row.ours).fullmatch(name):
            numbers = match.groupdict()
            if "mtp" in numbers:  # theirs are counted on from the decoder's layers
                numbers["mtp"] = str(sizes.layers + int(numbers["mtp"]))
            theirs = [_PLACE.sub(partial(_filled, numbers), each) for each in row.theirs]
            operation = row.operation.removesuffix("_t")
            transposed = operation != row.operation and numbers.get("leaf") != "bias"
            stacked = sizes.experts if "expert" in numbers and "<expert>" not in row.theirs[0] else 0
            expert = int(numbers["expert"]) if stacked else 0
            found = OPERATIONS[operation](theirs, num_rows, sizes)
            return [Rows(*span, transposed=transposed, stacked=stacked, expert=expert) for span in found]
    return None


Spans = Iterator[tuple[str, int, int, int]]
"""Name of theirs, first row, row after the last, step between rows."""


def _same(theirs: list[str], num_rows: int, sizes: Sizes) -> Spans:
    yield theirs[0], 0, num_rows, 1


def _vocabulary(theirs: list[str], num_rows: int, sizes: Sizes) -> Spans:
    yield theirs[0], 0, sizes.vocabulary, 1
    if num_rows > sizes.vocabulary:
        yield "", 0, num_rows - sizes.vocabulary, 1


def _gate_up(theirs: list[str], num_rows: int, sizes: Sizes) -> Spans:
    for name in theirs:
        yield name, 0, num_rows // 2, 1


def _interleaved(theirs: list[str], num_rows: int, sizes: Sizes) -> Spans:
    """Even rows, then odd ones: gate and up."""
    for start in range(2):
        yield theirs[0], start, num_rows, 2


def _qkv(theirs: list[str], num_rows: int, sizes: Sizes) -> Spans:
    """Rows group by group, of three tensors or of one that has them one below the other."""
    queries = sizes.heads // sizes.groups * sizes.channels
    widths = (queries, sizes.channels, sizes.channels)
    starts = (0, 0, 0)
    if len(theirs) == 1:
        theirs = theirs * 3
        starts = (0, queries * sizes.groups, (queries + sizes.channels) * sizes.groups)
    for group in range(sizes.groups):
        for name, start, width in zip(theirs, starts, widths, strict=True):
            yield name, start + group * width, start + (group + 1) * width, 1


OPERATIONS: dict[str, Callable[[list[str], int, Sizes], Spans]] = {
    "same": _same, "vocabulary": _vocabulary, "gate_up": _gate_up, "interleaved": _interleaved, "qkv": _qkv,
}  # fmt: skip
