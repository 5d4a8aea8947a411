"""Pipeline schedules as data: per rank, the order of its actions.

An action is one pass of one micro-batch through one of the rank's chunks. Kinds:

    F  forward
    I  input gradient of the backward
    W  weight gradient of the backward
    B  full backward: I, then W

A fused pair `(0F4;1B2)` is a forward and a backward that may overlap, or with `1I2` the backward's input gradient.
Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megaaccum.errors import ScheduleError

Kind = Literal["F", "I", "W", "B"]
Placement = Literal["loop", "v"]


class Action(NamedTuple):
    """One pass of micro-batch `microbatch` through the rank's chunk `chunk`; prints as `0F3`."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    def describe(self) -> str:
        """The action spelled out for an error: `0F3 (forward, chunk 0, micro-batch 3)`."""
        return f"{self} ({NAMES[self.kind]}, chunk {self.chunk}, micro-batch {self.microbatch})"


class Pair(NamedTuple):
    """A forward, and a backward or its input gradient, of different micro-batches that may run at the same time; prints
    as `(0F4;1B2)`."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"

    def describe(self) -> str:
        return f"{self} (fused forward and backward)"


Item = Action | Pair


def passes_of(items: Iterable[Item]) -> Iterator[Action]:
    """The passes of `items`, fused pairs taken apart, forward first."""
    for item in items:
        if len(item) == 2:
            yield from item
        else:
            yield item


def changed(item: Item, change: Callable[[Action], Action]) -> Item:
    """`item`, with each of its passes as `change` makes it."""
    return Pair(*map(change, item)) if isinstance(item, Pair) else change(item)


NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
_ACTION = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)(?:OVERLAP_F_B)?")


def parse(text: str) -> Item:
    """The action or pair that prints as `text`; torch's spelling of a pair, `(0F4;7B2)OVERLAP_F_B`, is read too.

    Raises ScheduleError if it is none.
    """
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]
    if match := _PAIR.fullmatch(text):
        forward, backward = parse(match[1]), parse(match[2])
        if isinstance(forward, Action) and isinstance(backward, Action):
            if forward.kind == "F" and backward.kind in "BI":
                return Pair(forward, backward)
        raise ScheduleError(f"{text!r} is not a fused pair: it needs a forward first and a backward (B or I) second")
    raise ScheduleError(f"{text!r} is not an action: write chunk, F, I, W or B, micro-batch, as in 0F3 or (0F4;1B2)")


def stage_map(placement: Placement, *, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The stage of each [rank][chunk]: `loop` deals stages out in rounds; `v` goes down the ranks with chunk 0 and
    back up with chunk 1, so that rank r holds stages r and 2 * pp - 1 - r."""
    if placement == "v":
        assert chunks == 2, "a V has two chunks per rank"
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(chunk * pp + rank for chunk in range(chunks)) for rank in range(pp))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of actions on every rank of a pipeline, for one flush.

    stages[rank][chunk] is the stage that a rank's chunk is: stage 0 reads tokens and the highest stage makes the loss.
    items[rank] is what the rank does, in order. Nothing is checked here; `validate` does.
    """

    name: str
    pp: int
    num_microbatches: int
    stages: tuple[tuple[int, ...], ...]
    items: tuple[tuple[Item, ...], ...]
    by_megatron: bool = False
    """Whether Megatron's own functions run it. They send an input gradient when the whole backward is done; megaaccum's
    executor sends it before it computes the weight gradient."""

    @property
    def chunks(self) -> int:
        """Model chunks per rank (vpp)."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        owners = {stage: rank for rank, held in enumerate(self.stages) for stage in held}
        return tuple(owners[stage] for stage in range(self.num_stages))

    @cached_property
    def placement(self) -> Placement | None:
        """`v`, `loop`, or None for stages that are placed in another way."""
        if self.chunks == 2 and self.pp > 1 and self.stages == stage_map("v", pp=self.pp, chunks=2):
            return "v"
        return "loop" if self.stages == stage_map("loop", pp=self.pp, chunks=self.chunks) else None

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W, or two passes are fused."""
        return any(action.kind == "W" for rank in range(self.pp) for action in self.actions(rank))

    @cached_property
    def has_pairs(self) -> bool:
        """Whether some forward is fused with a backward."""
        return any(len(item) == 2 for items in self.items for item in items)

    def actions(self, rank: int) -> Iterator[Action]:
        """The rank's passes, fused pairs taken apart, forward first."""
        return passes_of(self.items[rank])

    def stage(self, rank: int, action: Action) -> int:
        return self.stages[rank][action.chunk]


def make_schedule(
    name: str, *, num_microbatches: int, placement: Placement, chunks: int, items: Sequence[Sequence[Item]]
) -> Schedule:
    """A schedule of `items` per rank with stages placed as `placement` says."""
    pp = len(items)
    return Schedule(
        name=name,
        pp=pp,
        num_microbatches=num_microbatches,
        stages=stage_map(placement, pp=pp, chunks=chunks),
        items=tuple(tuple(rank) for rank in items),
    )
