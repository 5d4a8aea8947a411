"""Which rows of which tensors of a Hugging Face model are the rows of a parameter of ours. No torch.

A mapping moves rows and keeps the numbers, so it is its own inverse read the other way: `rows_of` gives the rows of
theirs that lie one below the other in ours, and both directions go by that list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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
    heights, found = dict[str, int](), dict[str, tuple[int, ...]]()
    for each in rows:
        heights[each.name] = max(each.stop, heights.get(each.name, 0))
        size = (heights[each.name], *shape[1:])
        stack = (each.stacked,) if each.stacked else ()
        found[each.name] = (*stack, *(size[::-1] if each.transposed else size))
    found.pop("", None)
    return found


Model = Mapping[str, Any]
"""The keys of a model, by which names and rows are counted."""


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
    return tuple(Row(row[0], row[1], tuple(row[2:])) for name in names for row in families()["tables"][name])


_INNER = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.(.+)")
"""The decoder layer in a layer that predicts further tokens; in theirs these are counted on from the decoder's."""
_PLACES = {"layer": r"\d+", "mtp": r"\d+", "expert": r"\d+", "leaf": "weight|bias"}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for place, values in _PLACES.items():
        text = text.replace(f"<{place}>", f"(?P<{place}>{values})")
    return re.compile(text)


def rows_of(family: str, name: str, num_rows: int, model: Model) -> list[Rows] | None:
    """The rows of theirs that make parameter `name` of ours, which has `num_rows` rows (a vector has one per element);
    None if the family has no such parameter. model: all keys of it (`config_json.model_keys`)."""
    if inner := _INNER.fullmatch(name):
        name = f"decoder.layers.{model['num_layers'] + int(inner[1])}.{inner[2]}"
    for row in table(family):
        if match := _pattern(row.ours).fullmatch(name):
            numbers = match.groupdict()
            if "mtp" in numbers:  # theirs are counted on from the decoder's layers
                numbers["mtp"] = str(model["num_layers"] + int(numbers["mtp"]))
            theirs = [each.replace("<", "{").replace(">", "}").format(**numbers) for each in row.theirs]
            operation = row.operation.removesuffix("_t")
            transposed = operation != row.operation and numbers.get("leaf") != "bias"
            stacked = model["num_experts"] if "expert" in numbers and "<expert>" not in row.theirs[0] else 0
            expert = int(numbers["expert"]) if stacked else 0
            found = OPERATIONS[operation](theirs, num_rows, model)
            return [Rows(*span, transposed=transposed, stacked=stacked, expert=expert) for span in found]
    return None


Spans = Iterator[tuple[str, int, int, int]]
"""Name of theirs, first row, row after the last, step between rows."""


def _same(theirs: list[str], num_rows: int, model: Model) -> Spans:
    yield theirs[0], 0, num_rows, 1


def _vocabulary(theirs: list[str], num_rows: int, model: Model) -> Spans:
    yield theirs[0], 0, model["vocab_size"], 1
    if num_rows > model["vocab_size"]:
        yield "", 0, num_rows - model["vocab_size"], 1


def _gate_up(theirs: list[str], num_rows: int, model: Model) -> Spans:
    for name in theirs:
        yield name, 0, num_rows // 2, 1


def _interleaved(theirs: list[str], num_rows: int, model: Model) -> Spans:
    """Even rows, then odd ones: gate and up."""
    for start in range(2):
        yield theirs[0], start, num_rows, 2


def _qkv(theirs: list[str], num_rows: int, model: Model) -> Spans:
    """Rows group by group, of three tensors or of one that has them one below the other."""
    groups, channels = model["num_query_groups"], model["kv_channels"]
    queries = model["num_attention_heads"] // groups * channels
    widths = (queries, channels, channels)
    starts = (0, 0, 0)
    if len(theirs) == 1:
        theirs = theirs * 3
        starts = (0, queries * groups, (queries + channels) * groups)
    for group in range(groups):
        for name, start, width in zip(theirs, starts, widths, strict=True):
            yield name, start + group * width, start + (group + 1) * width, 1


OPERATIONS: dict[str, Callable[[list[str], int, Model], Spans]] = {
    "same": _same, "vocabulary": _vocabulary, "gate_up": _gate_up, "interleaved": _interleaved, "qkv": _qkv,
}  # fmt: skip
