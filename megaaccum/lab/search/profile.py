"""Costs of a model's layers, and what a cut of them into stages makes of them.

A profile says of every kind of layer how long a micro-batch's forward, input gradient and weight gradient take, and how
many bytes it holds; and which kinds the model's layers are, in order. A cut is a tuple of layers per stage.

In a file it is JSON:

    {"pattern": "ETTTTL",
     "kinds": {"T": {"name": "transformer layer", "forward": 1.7e-3, "input_grad": 2e-3, "weight_grad": 1.1e-3,
                     "activation": 67108864, "deferred": 33554432, "state": 1610612736}, ...}}

Durations are seconds, the rest bytes: `activation` from a forward until its input gradient is done, `deferred` from
then until its weight gradient is done, `state` for parameters, gradients and optimizer. Bytes may be left out
everywhere; memory is then counted in micro-batches of a whole rank. SimPipe's format (`pattern`, `forward_ms`,
`backward_ms`, `weight_ms`) is read too.

A layer with experts may have `exchange`, seconds of one all-to-all, of which its forward and its input gradient include
two each, and `experts`, the share of their other seconds that lies between the two. Fused pairs hide what
`schedule.exchange` says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megaaccum.errors import ScheduleError
from megaaccum.schedule.exchange import Layer
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.simulate import Costs
from megaaccum.texts import parse_json, read_text, write_text

EMBEDDING, DENSE, EXPERTS, PREDICTION, HEAD = "E", "T", "X", "P", "L"
"""Kinds of layers: the embedding, first; with an MLP; with experts; multi-token prediction; final norm, head and loss,
last. A profile may have others."""
Cut = tuple[int, ...]
"""Layers of each stage, in model order."""
_SECONDS, _BYTES = ("forward", "input_grad", "weight_grad"), ("activation", "deferred", "state")
_SIMPIPE = {"forward": "forward_ms", "input_grad": "backward_ms", "weight_grad": "weight_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One micro-batch on one layer: seconds of its three passes, bytes, and the all-to-all (module's docstring)."""

    name: str = ""
    forward: float
    input_grad: float
    weight_grad: float
    activation: float = 0.0
    deferred: float = 0.0
    state: float = 0.0
    exchange: float = 0.0
    experts: float = 0.5

    @property
    def seconds(self) -> float:
        """Seconds of all three passes."""
        return self.forward + self.input_grad + self.weight_grad

    @property
    def lanes(self) -> Layer:
        """Its compute and its all-to-all apart."""
        computed = (self.forward - 2 * self.exchange, self.input_grad - 2 * self.exchange)
        forward, input_grad = ((each * (1 - self.experts), each * self.experts) for each in computed)
        return Layer(forward, input_grad, self.exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The layers of a model. pattern: a kind per layer, in model order. kinds: the cost of each kind."""

    pattern: str
    kinds: Mapping[str, LayerCost]

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ScheduleError(problems)

    @property
    def layers(self) -> list[LayerCost]:
        """The cost of each layer, in model order."""
        return [self.kinds[kind] for kind in self.pattern]

    @property
    def has_bytes(self) -> bool:
        """Whether it knows what layers hold."""
        return any(cost.activation for cost in self.kinds.values())

    def costs(self, cut: Cut, *, p2p: float = 0.0) -> Costs:
        """Durations of the stages of `cut`."""
        self.check_cut(cut)
        layers = None
        if any(cost.exchange for cost in self.kinds.values()):
            each = iter(layer.lanes for layer in self.layers)
            layers = tuple(tuple(islice(each, count)) for count in cut)
        return Costs(**{name: self._sums(cut, name) for name in _SECONDS}, p2p=p2p, layers=layers)

    def memory(self, cut: Cut, *, chunks: int) -> Memory:
        """Holdings of the stages of `cut`, `chunks` of them on a rank: bytes, or (where the profile knows none)
        micro-batches of a whole rank (`Memory.counted`)."""
        self.check_cut(cut)
        if not self.has_bytes:
            return Memory.counted(len(cut), chunks=chunks)
        return Memory(**{name: self._sums(cut, name) for name in _BYTES})

    def check_cut(self, cut: Cut) -> None:
        """Raises ScheduleError if `cut` is not one of this model's layers."""
        if sum(cut) != len(self.pattern) or min(cut) < 0:
            raise ScheduleError(
                f"cut {'-'.join(map(str, cut))} has {sum(cut)} layers, but the profile has {len(self.pattern)}"
                " (embedding and head count as a layer each)"
            )

    def _sums(self, cut: Cut, name: str) -> tuple[float, ...]:
        each = (getattr(layer, name) for layer in self.layers)
        return tuple(math.fsum(islice(each, count)) for count in cut)


def _problems(profile: Profile) -> Iterator[str]:
    if missing := sorted(set(profile.pattern) - set(profile.kinds)):
        yield f"profile: the model has layers of kind {', '.join(missing)}, for which kinds has no costs: measure them"
    if not profile.pattern:
        yield "profile: pattern is empty: give a letter per layer"
    for kind, cost in profile.kinds.items():
        for name in _SECONDS + _BYTES:
            value = getattr(cost, name)
            if not 0 <= value <= 1e15:
                yield f"profile: {name} of kind {kind} is {value}: give a number from 0 to 1e15"
        if not (0 <= cost.exchange <= min(cost.forward, cost.input_grad) / 2 and 0 <= cost.experts <= 1):
            yield (
                f"profile: kind {kind} has exchange {cost.exchange} and experts {cost.experts}: give seconds of which"
                " forward and input_grad include two each, and a share from 0 to 1"
            )
        if not cost.seconds > 0:
            yield f"profile: kind {kind} takes no time at all: give forward, input_grad or weight_grad above 0"


def with_one_head(profile: Profile) -> Profile:
    """`profile` with the prediction of further tokens counted for the head: Megatron has both in one stage."""
    further = profile.pattern.count(PREDICTION)
    if not further or HEAD not in profile.pattern:
        return profile
    head, more = profile.kinds[HEAD], profile.kinds[PREDICTION]
    names = [field.name for field in fields(LayerCost) if field.name not in ("name", "experts")]
    joined = replace(head, **{name: getattr(head, name) + further * getattr(more, name) for name in names})
    kinds = {kind: cost for kind, cost in profile.kinds.items() if kind != PREDICTION}
    return Profile(pattern=profile.pattern.replace(PREDICTION, ""), kinds=kinds | {HEAD: joined})


def even_cut(profile: Profile, num_stages: int) -> Cut:
    """The layers between embedding and head shared out evenly (where they do not divide, earlier stages have one
    more), embedding on the first stage and head on the last, where they may be alone. Raises ScheduleError for fewer
    layers than stages."""
    first, last = profile.pattern[0] == EMBEDDING, profile.pattern[-1] == HEAD
    layers = len(profile.pattern) - first - last
    if len(profile.pattern) < num_stages:
        raise ScheduleError(
            f"{layers} layers cannot be cut into {num_stages} stages: lower pipeline_model_parallel_size or the chunks"
            f" per rank until they make at most {len(profile.pattern)}, with embedding and head as layers"
        )
    share, more = divmod(layers, num_stages)
    cut = [share + (stage < more) for stage in range(num_stages)]
    if num_stages - layers > last:  # the embedding is alone
        cut = [0, *cut[:-1]]
    cut[0] += first
    cut[-1] += last
    return tuple(cut)


def read_profile(path: str | Path) -> Profile:
    """The profile in a JSON file. Raises ScheduleError, with the file, if it is none."""
    try:
        content = parse_json(read_text(path))
    except OSError as error:
        raise ScheduleError(f"profile {path}: the file cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ScheduleError(f"profile {path}: it is not JSON: {error}") from error
    try:
        return _from_content(content)
    except (KeyError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
        if isinstance(error, ScheduleError):
            raise ScheduleError(f"{path}: {error}") from error
        raise ScheduleError(f"profile {path}: {error!r}: it needs pattern and kinds (docs/guides/search.md)") from error


def _from_content(content: dict[str, Any]) -> Profile:
    """The profile of a file of ours, or of simpipe's: milliseconds by pass and kind; a pass that takes no time is
    written as 0.0001."""
    theirs = {
        kind: {name: content[key][kind] / 1e3 for name, key in _SIMPIPE.items()}
        for kind in content.get("forward_ms", ())
    }
    kinds = {kind: LayerCost(**cost) for kind, cost in (theirs or content["kinds"]).items()}
    return Profile(pattern=content["pattern"], kinds=kinds)


def write_profile(profile: Profile, path: str | Path, **notes: Any) -> None:
    """Write `profile` as JSON. notes: further keys (device, versions), which readers leave alone."""
    kinds = {kind: asdict(cost) for kind, cost in profile.kinds.items()}
    write_text(path, json.dumps(notes | {"pattern": profile.pattern, "kinds": kinds}, indent=1) + "\n")


_MEGATRON = {EMBEDDING: "E", DENSE: "t", EXPERTS: "t", PREDICTION: "m", HEAD: "L"}


def layout_of_cut(profile: Profile, cut: Cut) -> str:
    """The cut in Megatron's notation (pipeline_model_parallel_layout). Raises ScheduleError for a kind of layer that it
    has no letter for."""
    if unknown := sorted(set(profile.pattern) - _MEGATRON.keys()):
        raise ScheduleError(f"kind {', '.join(unknown)}: Megatron's layouts have {', '.join(_MEGATRON)} alone")
    return "".join(_MEGATRON.get(letter, letter) for letter in describe_cut(profile, cut))


def describe_cut(profile: Profile, cut: Sequence[int]) -> str:
    """The kinds of each stage's layers between bars: `ETT|TTT|TTL`."""
    kinds = iter(profile.pattern)
    return "|".join("".join(islice(kinds, count)) for count in cut)
