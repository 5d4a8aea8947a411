"""The micro-batches of one call: their source, and their number, lengths and weights as far as known in advance. And
the open step that takes those of several calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import tee
from typing import Any

import torch

from megaaccum.config.batch import BatchPlan
from megaaccum.errors import ConfigError
from megaaccum.step.loss import Divisor, ForwardStepFunc, Tally


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """This rank's micro-batches of one call of `forward_backward`.

    data: a list of them, which can be run again when a step goes wrong; or an iterator, or one per chunk, as Megatron's
    loops have them. count: their number. first: index of the first in the step. tokens: per micro-batch, the tokens
    that a stage computes, masked ones included; of `routed_tokens`, without padding. weights: of each, where they are
    known before the forward. token_weights: what a token's loss is multiplied by inside the micro-batch's sum (1, or 1
    / tokens for a mean). expected: a weight to expect if none is known. dummies: indices in this call of micro-batches
    that only pad it. lengths: tokens per sequence of each, where they differ. total_weight: N of the step that has no
    others, over all ranks, if ranks have told each other.
    """

    forward_step_func: ForwardStepFunc
    data: Sequence[Any] | Iterator[Any] | list[Iterator[Any] | None]
    count: int
    first: int = 0
    tokens: Sequence[float]
    weights: Sequence[float] | None = None
    token_weights: Sequence[float] | None = None
    expected: float | None = None
    dummies: frozenset[int] = field(default_factory=frozenset)
    lengths: Sequence[int] | None = None
    total_weight: float | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def can_run_again(self) -> bool:
        return isinstance(self.data, Sequence) and not are_iterators(self.data)

    def iterators(self, chunks: int) -> list[Iterator[Any] | None]:
        """One per model chunk, as Megatron's schedules take them."""
        if self.can_run_again:
            return [iter(self.data) for _ in range(chunks)]
        if isinstance(self.data, Sequence):
            return list(self.data)
        return [self.data] if chunks == 1 else list(tee(self.data, chunks))  # each chunk reads every micro-batch

    def part(self, start: int, stop: int) -> Microbatches:
        """The micro-batches from `start` to `stop`, for a flush of their own."""
        if (start, stop) == (0, self.count):
            return self
        assert self.can_run_again, "an iterator is run in one flush"
        cut = {name: value[start:stop] for name in _PER_MICROBATCH if (value := getattr(self, name)) is not None}
        return replace(
            self,
            data=self.data[start:stop],  # type: ignore[index]
            count=stop - start,
            first=self.first + start,
            dummies=frozenset(index - start for index in self.dummies if start <= index < stop),
            **cut,
        )

    def without(self, replaced: Mapping[int, Any], other_length: Mapping[int, int] | None = None) -> Microbatches:
        """These micro-batches with others, of weight zero, in place of some: {index in the step: what replaces it}.
        other_length: by the same index, the length of what replaces it, where that is another."""
        mine = {index - self.first: each for index, each in replaced.items() if 0 <= index - self.first < self.count}
        if not mine:
            return self
        data = [mine.get(index, each) for index, each in enumerate(self.data)]
        others = other_length or {}
        lengths = self.lengths and [others.get(self.first + i, length) for i, length in enumerate(self.lengths)]
        weights = self.weights and [0.0 if index in mine else each for index, each in enumerate(self.weights)]
        return replace(self, data=data, lengths=lengths, weights=weights, dummies=self.dummies | mine.keys())

    @cached_property
    def differ(self) -> bool:
        """Whether side losses of some micro-batch have another scale than those of the first."""
        scales = {
            (self.expected_weight(index), self.tokens[index], self.token_weight(index), index in self.dummies)
            for index in range(self.count)
        }
        return len(scales) > 1

    def expected_weight(self, index: int) -> float:
        if self.weights is not None:
            return self.weights[index]
        return self.tokens[index] if self.expected is None else self.expected

    def token_weight(self, index: int) -> float:
        return 1.0 if self.token_weights is None else self.token_weights[index]


@dataclass
class OpenStep:
    """A step between its first flush and its end.

    step: its number. restore: puts random states and FP8 scales back as they were before it. tally: what its loss
    functions returned. expert_counts: tokens of each expert. calls: its micro-batches, by call. told: N, if the caller
    has said it. reduced: the last flush was to reduce. note: what was unusual about it before its verdict.
    """

    step: int
    restore: Callable[[], None]
    divisor: Divisor = field(init=False)
    expert_counts: torch.Tensor = field(init=False)
    tally: Tally = field(default_factory=Tally)
    calls: list[Microbatches] = field(default_factory=list)
    told: float | None = None
    reduced: bool = False
    note: str = ""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank so far."""
        return sum(map(len, self.calls))


_PER_MICROBATCH = ("tokens", "weights", "token_weights", "lengths")


def read_batch(
    function: ForwardStepFunc,
    data: Any,
    plan: BatchPlan,
    *,
    first: int,
    count: int | None = None,
    weights: Sequence[float] | None = None,
    expected: float | None = None,
    lengths: Sequence[int] | None = None,
) -> Microbatches:
    """`data` as a step of `plan` takes it; the other fields as in Microbatches. If the forward step function has
    `weights`, `token_weights` and `routed_tokens`, they say what is known of the micro-batches in advance. Raises
    ConfigError."""
    # A stage in the middle may give an empty list.
    listed = isinstance(data, Sequence) and not are_iterators(data) and (count is None or len(data) > 0)
    if count is None and not listed:
        raise ConfigError("data comes from an iterator: give num_microbatches with it")
    count = len(data) if count is None else count
    if listed and len(data) < count:
        raise ConfigError(f"num_microbatches is {count}, but the list has {len(data)}")
    data = data[:count] if listed else data
    tokens = [rows * length for rows, length in shapes_of(data)] if listed else []
    if lengths is not None:
        tokens = [plan.micro_batch_size * length for length in lengths]
    told: dict[str, Any] = {"weights": weights, "token_weights": None, "routed_tokens": None}
    for name, each in told.items():
        told[name] = _numbers(name, _told(function, name, data) if listed and each is None else each)
    if not all(0.0 <= weight < float("inf") for weight in told["weights"] or ()):
        raise ConfigError(f"weights has one that is negative or not finite: {told['weights']}")
    for name, each in {"lengths": lengths, **told}.items():
        if each is not None and len(each) != count:
            raise ConfigError(f"{name} has {len(each)} numbers for {count} micro-batches: give one for each")
    return Microbatches(
        forward_step_func=function,
        data=data,
        count=count,
        first=first,
        tokens=told["routed_tokens"] or tokens or [plan.micro_batch_size * plan.seq_length] * count,
        weights=told["weights"],
        token_weights=told["token_weights"],
        expected=None if expected is None else float(expected),
        lengths=lengths,
    )


def _numbers(name: str, given: Any) -> list[float] | None:
    """`given`, a list, array or tensor, as numbers. Raises ConfigError."""
    if given is None:
        return None
    try:
        return [float(each) for each in (given.flatten() if hasattr(given, "flatten") else given)]
    except (TypeError, ValueError, RuntimeError) as error:  # of complex numbers, too
        raise ConfigError(f"{name} has to be a list of real numbers, one per micro-batch: {error}") from error


def _told(function: ForwardStepFunc, method: str, data: Any) -> Any:
    """The answer of a method of the user's forward step function about the micro-batches, None if it has no such
    method. Raises ConfigError."""
    try:
        return getattr(function, method)(data) if hasattr(function, method) else None
    except Exception as error:
        raise ConfigError(f"{method} of the forward step function raises {error!r}") from error


def are_iterators(data: Sequence[Any]) -> bool:
    """Megatron's list of iterators, one per chunk; None on stages that read nothing."""
    return bool(data) and all(each is None or (hasattr(each, "__next__")) for each in data)


def shapes_of(data: Sequence[Any]) -> list[tuple[int, int]]:
    """(sequences, tokens per sequence) of each micro-batch, where it says so: dicts with `tokens` (or `input_ids`)."""
    tokens: list[Any] = [
        each.get("tokens", each.get("input_ids")) if isinstance(each, Mapping) else None for each in data
    ]
    says_so = all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in tokens)
    return [(each.shape[0], each.shape[1]) for each in tokens] if says_so else []
