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
from functools import partial
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import gathered
from megaaccum.distributed.groups import Groups
from megaaccum.lab.verification.records import RECEIVED, SENT, Crossing
from megaaccum.model.names import over_stages

_LAYER = re.compile(r"(?:|.*\.)layers\.\d+")


@contextmanager
def watching(plan: Plan, groups: Groups, chunks: list[Any], scale: Callable[[], float]) -> Iterator[list[Crossing]]:
    """Record what this rank's chunks send and receive in one step, in the list that is entered. scale: the factor in
    gradients that arrive. Collective over the pipeline."""
    found: list[Crossing] = []
    part = (groups.tp.rank(), groups.tp.size()) if plan.config.parallel.sequence_parallel else (0, 1)

    def noting(stage: int, after: str, way: str) -> Callable[..., None]:
        """A function that notes its last argument, the activation of the next micro-batch, and its gradient, which goes
        the other way: a forward hook of a chunk, or called before its `set_input_tensor`."""
        numbers, back = itertools.count(), RECEIVED if way == SENT else SENT

        def note(*given: Any) -> None:
            tensor = given[-1][0] if isinstance(given[-1], list) else given[-1]
            place = plan.batch.sample_index(next(numbers), groups.dp.rank(), in_runs=plan.in_runs)

            def add(way: str, is_gradient: bool, values: torch.Tensor) -> None:
                values = values.detach().double().cpu().clone()
                found.append(Crossing(stage, way, is_gradient, after, place, values, *part))

            add(way, False, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: add(back, True, grad / scale()))

        return note

    with ExitStack() as stack:
        if plan.layout.num_stages > 1 and groups.collection.cp.size() == 1:
            after = _last_layers(plan, groups, chunks)
            for stage, chunk in zip(plan.layout.stages(torch.distributed.get_rank()), chunks, strict=True):
                if stage in after:
                    stack.enter_context(chunk.register_forward_hook(noting(stage, after[stage], SENT)))
                if stage - 1 in after:
                    note = noting(stage, after[stage - 1], RECEIVED)
                    chunk.set_input_tensor = _after(note, chunk.set_input_tensor)
                    stack.callback(delattr, chunk, "set_input_tensor")
        yield found


def _after(note: Callable[[Any], None], take: Callable[[Any], None]) -> Callable[[Any], None]:
    def both(given: Any) -> None:
        note(given)
        take(given)

    return both


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

    def note(name: str, tensors: list[torch.Tensor]) -> None:
        if _LAYER.fullmatch(name) and tensors and tensors[0].requires_grad:
            kept = found[name.removeprefix("module.")] = [tensors[0].detach().double().cpu().clone()]
            tensors[0].register_hook(lambda grad: kept.append(grad.detach().double() / divided_by))

    with noting_outputs(model, note):
        yield found


@contextmanager
def noting_outputs(model: torch.nn.Module, note: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """Call `note` with the name and the tensors of each module's output, innermost first."""

    def hook(name: str, _module: Any, _inputs: Any, output: Any) -> None:
        every = output if isinstance(output, tuple | list) else [output]
        note(name, [each for each in every if isinstance(each, torch.Tensor)])

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(partial(hook, name)))
        yield
