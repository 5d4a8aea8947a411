"""Which rows of which tensors of a Hugging Face model are the rows of a parameter of ours. No torch.

A mapping moves rows and keeps the numbers, so it is its own inverse read the other way: `rows_of` gives the rows of
theirs that lie one below the other in ours, and both directions go by that list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

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


@cache
def families() -> dict[str, Any]:
    """The content of families.yaml."""
    return cast("dict[str, Any]", packaged_yaml("megaaccum.pretrain.weights", "families.yaml"))


@cache
def table(family: str) -> list[list[str]]:
    """The weights of a family: rows of the name of ours and the operation, before the names of theirs."""
    names = families()["families"][family]["weights"]
    return [row for name in names for row in families()["tables"][name]]


_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(mtp_model_layer\.)?(.+)")
"""Layers that predict further tokens, with a decoder layer in each; theirs are counted on from the decoder's."""
_PLACES = {"layer": r"\d+", "expert": r"\d+", "leaf": "weight|bias"}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for place, values in _PLACES.items():
        text = text.replace(f"<{place}>", f"(?P<{place}>{values})")
    return re.compile(text)


def rows_of(family: str, name: str, num_rows: int, model: Model) -> list[Rows] | None:
    """The rows of theirs that make parameter `name` of ours, which has `num_rows` rows (a vector has one per element);
    None if the family has no such parameter. model: all keys of it (`config_json.model_keys`)."""
    if found := _PREDICTION.fullmatch(name):
        name = f"{'decoder' if found[2] else 'mtp'}.layers.{model['num_layers'] + int(found[1])}.{found[3]}"
    for ours, operation, *theirs in table(family):
        if match := _pattern(ours).fullmatch(name):
            numbers = match.groupdict()
            transposed = operation.endswith("_t") and numbers.get("leaf") != "bias"
            stacked = model["num_experts"] if "expert" in numbers and "<expert>" not in theirs[0] else 0
            expert = int(numbers["expert"]) if stacked else 0
            filled = [each.replace("<", "{").replace(">", "}").format(**numbers) for each in theirs]
            spans = OPERATIONS[operation.removesuffix("_t")](filled, num_rows, model)
            return [Rows(*span, transposed=transposed, stacked=stacked, expert=expert) for span in spans]
    return None


Spans = Iterable[tuple[str, int, int, int]]
"""Name of theirs, first row, row after the last, step between rows."""


def _vocabulary(theirs: list[str], num_rows: int, model: Model) -> Spans:
    yield theirs[0], 0, model["vocab_size"], 1
    if num_rows > model["vocab_size"]:
        yield "", 0, num_rows - model["vocab_size"], 1


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
    "same": lambda theirs, num_rows, _: [(theirs[0], 0, num_rows, 1)],
    "vocabulary": _vocabulary,
    "gate_up": lambda theirs, num_rows, _: [(name, 0, num_rows // 2, 1) for name in theirs],
    # Even rows, then odd ones: gate and up.
    "interleaved": lambda theirs, num_rows, _: [(theirs[0], start, num_rows, 2) for start in range(2)],
    "qkv": _qkv,
}
