"""Activations and gradients at the borders of stages: whether a step goes wrong in the forward, in the backward, or
after both.

A border is named after the layer before it. One process has that layer too, and so the border's activation and
gradient of every micro-batch. Gradients are those of the micro-batch's sum of losses, before any division. Under
context parallelism a rank has two pieces of a sequence, and nothing is noted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed.agreement import gathered
from megaaccum.lab.verification.relations import factor_of
from megaaccum.model.names import over_stages

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.lab.verification.records import Observed, Reference

SENT, RECEIVED = "sends", "receives"
_LAYER = re.compile(r"(?:|.*\.)layers\.\d+")


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor at a border, as a rank has it.

    stage: that sends or receives it. way: SENT or RECEIVED. is_gradient: else an activation. after: the layer before
    the border, in the whole model. microbatch: its number in the global batch. values: float64, of an activation
    [sequence, batch, hidden] this rank's run of the sequence, number `part` of `parts`."""

    stage: int
    way: str
    is_gradient: bool
    after: str
    microbatch: int
    values: torch.Tensor
    part: int
    parts: int


@contextmanager
def watching(plan: Plan, groups: Groups, chunks: list[Any], scale: Callable[[], float]) -> Iterator[list[Crossing]]:
    """Record what this rank's chunks send and receive in one step, in the list that is entered. scale: the factor in
    gradients that arrive. Collective over the pipeline."""
    watch = _Watch(plan, groups, scale)
    with ExitStack() as stack:
        if plan.layout.num_stages > 1 and groups.collection.cp.size() == 1:
            after = _last_layers(plan, groups, chunks)
            for stage, chunk in zip(plan.layout.stages(torch.distributed.get_rank()), chunks, strict=True):
                if stage in after:
                    stack.enter_context(chunk.register_forward_hook(watch.sending(stage, after[stage])))
                if stage - 1 in after:
                    chunk.set_input_tensor = watch.receiving(stage, after[stage - 1], chunk.set_input_tensor)
                    stack.callback(delattr, chunk, "set_input_tensor")
        yield watch.found


class _Watch:
    def __init__(self, plan: Plan, groups: Groups, scale: Callable[[], float]):
        self.found: list[Crossing] = []
        self._plan, self._groups, self._scale = plan, groups, scale
        is_cut = plan.config.parallel.sequence_parallel
        self._part = (groups.tp.rank(), groups.tp.size()) if is_cut else (0, 1)

    def sending(self, stage: int, after: str) -> Callable[..., None]:
        """A forward hook of a chunk."""
        numbers = itertools.count()

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._note(output, next(numbers), after, stage, SENT, RECEIVED)

        return hook

    def receiving(self, stage: int, after: str, take: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function in place of `take`, a chunk's `set_input_tensor`."""
        numbers = itertools.count()

        def note(given: Any) -> None:
            self._note(given[0] if isinstance(given, list) else given, next(numbers), after, stage, RECEIVED, SENT)
            take(given)

        return note

    def _note(self, tensor: Any, index: int, after: str, stage: int, way: str, back: str) -> None:
        """The activation, and its gradient, which goes the other way."""
        place = self._plan.batch.sample_index(index, self._groups.dp.rank(), in_runs=self._plan.in_runs)

        def crossing(way: str, is_gradient: bool, values: torch.Tensor) -> Crossing:
            return Crossing(stage, way, is_gradient, after, place, values.detach().double().cpu().clone(), *self._part)

        self.found.append(crossing(way, False, tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.found.append(crossing(back, True, grad / self._scale())))


def _last_layers(plan: Plan, groups: Groups, chunks: list[Any]) -> dict[int, str]:
    """Names in the whole model of each stage's last layer, without the last stage and stages without layers. Collective
    over the pipeline."""
    mine = {}
    for stage, chunk in zip(plan.layout.stages(torch.distributed.get_rank()), chunks, strict=True):
        layers = [name for name, _ in chunk.named_modules() if _LAYER.fullmatch(name)]
        if layers and stage < plan.layout.num_stages - 1:
            mine[stage] = over_stages(chunk, f"{layers[-1]}.").removesuffix(".")
    return {stage: name for each in gathered(mine, groups.pp) for stage, name in each.items()}


# --- in one process ---------------------------------------------------------------------------------------------------


@contextmanager
def of_layers(model: torch.nn.Module, divided_by: float) -> Iterator[dict[str, list[torch.Tensor]]]:
    """{layer: [output, gradient of it / divided_by]} of one forward and backward of a whole model; float64."""
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                found[name] = [tensor.detach().double().cpu().clone()]
                tensor.register_hook(lambda grad: found[name].append(grad.detach().double() / divided_by))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if _LAYER.fullmatch(name):
                stack.enter_context(module.register_forward_hook(note(name.removeprefix("module."))))
        yield found


# --- the first that is wrong ------------------------------------------------------------------------------------------


def first_wrong(ranks: list[Observed], reference: Reference, close: float) -> str:
    """Describe the first wrong tensor at a border, in the order of a step; empty if there is no border."""
    crossings = [crossing for rank in ranks for crossing in rank.crossings if _true(reference, crossing) is not None]
    if not crossings:
        return ""
    for crossing in sorted(crossings, key=_order):
        true = _true(reference, crossing)
        assert true is not None
        distance = float((crossing.values - true).norm()) / max(float(true.norm()), 1e-300)
        if not distance <= close:
            r, left = factor_of(crossing.values, true)
            kind = "gradient" if crossing.is_gradient else "activation"
            return (
                f"in the {'backward' if crossing.is_gradient else 'forward'}: the {kind} of micro-batch"
                f" {crossing.microbatch} that stage {crossing.stage} {crossing.way}, at the border after"
                f" {crossing.after}, is {f'x {r:.6g}' if r and left <= close else f'off by {distance:.1e}'}"
            )
    return "activations and gradients at the borders of stages are right: inside a stage, or after the backward"


def _order(crossing: Crossing) -> tuple[Any, ...]:
    """Sort key of a step: forwards from the first stage, then backwards from the last; sent, then received."""
    at = crossing.stage if not crossing.is_gradient else -crossing.stage
    return crossing.is_gradient, at + 0.5 * (crossing.way == SENT), crossing.microbatch


def _true(reference: Reference, crossing: Crossing) -> torch.Tensor | None:
    if crossing.microbatch >= len(reference.layers):
        return None
    tensors = reference.layers[crossing.microbatch].get(crossing.after, [])
    if len(tensors) <= crossing.is_gradient:
        return None
    true = tensors[crossing.is_gradient].chunk(crossing.parts)[crossing.part]
    return true if true.shape == crossing.values.shape else None
