"""Gradients of experts that few tokens reach, kept in host memory until they are reduced (`cold_expert_offload`).

A whole FP32 gradient is as large for an expert that saw one token as for one that saw a million, and Megatron's experts
get one, of zeros, for no token at all. An expert is cold in a step if fewer than `cold_expert_tokens` tokens came to it
on this rank in the last `cold_expert_steps` steps. What a micro-batch adds to its gradients is taken off the device as
it arrives and added up in host memory, by the same additions in the same order; what is all zero is dropped. On a GPU
the host is some gradients ahead: it waits for one only when a few more have come, and copies run on a stream of
their own, so that the device has work while the host waits. Each gradient is back on the device when its turn in the
reduction comes, so nothing that ranks do together changes, and each rank may find other experts cold.

Counts are not part of a checkpoint: after a start or a resume no expert is cold for `cold_expert_steps` steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from megaaccum.config import Plan
from megaaccum.platform import cpu
from megaaccum.upstream import pytorch

_OF_ONE_EXPERT = re.compile(r"local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$")
"""Names inside an experts module: experts one by one, or the grouped ones of Transformer Engine."""


@dataclass(eq=False)
class ExpertLayer:
    """One layer's routed experts on this rank, and the tokens that came to each.

    params: by local expert. past: tokens by local expert of each of the last steps, int64, where Megatron counts them.
    """

    params: list[list[torch.nn.Parameter]]
    past: deque[torch.Tensor]
    _now: torch.Tensor | None = None

    def count(self, experts: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook of Megatron's experts, which are called with (tokens, tokens_per_expert, probs).
        Evaluations do not count, nor does a forward that a backward computes again."""
        if experts.training and not pytorch.in_backward():
            routed = args[1].to(torch.int64)
            self._now = routed if self._now is None else self._now + routed

    def forget(self) -> None:
        """Drop the counts since the last `commit`: they belong to no step."""
        self._now = None

    def commit(self) -> None:
        """Make the counts a step's."""
        self.past.append(torch.zeros(len(self.params), dtype=torch.int64) if self._now is None else self._now)
        self._now = None

    def with_fewer_than(self, tokens: int) -> list[list[torch.nn.Parameter]]:
        """Parameters of the experts that had fewer in the last steps; none before there were that many steps."""
        if len(self.past) < (self.past.maxlen or 0):
            return []
        sums = torch.stack([each.to(self.past[-1].device, non_blocking=True) for each in self.past]).sum(dim=0)
        return [params for params, count in zip(self.params, sums.tolist(), strict=True) if count < tokens]


_AHEAD = 4
"""Gradients of which it is not known yet whether they are zero, and as many that are being copied: both kinds still
take memory of the device."""


class Departures:
    """Gradients on their way from a GPU into pinned host memory, in the order in which they came. `add` gets (key,
    gradient in host memory) of each that is not all zero, when it has arrived."""

    def __init__(self, add: Callable[[int, torch.Tensor], None]):
        self._add = add
        self._stream = torch.cuda.Stream()
        self._looked_at: deque[tuple[int, torch.Tensor, torch.Tensor, torch.cuda.Event]] = deque()
        self._copied: deque[tuple[int, torch.Tensor, torch.cuda.Event]] = deque()

    def start(self, key: int, grad: torch.Tensor) -> None:
        """Take a gradient that the current stream makes."""
        is_any = torch.empty((), dtype=torch.bool, pin_memory=True)
        is_any.copy_(grad.any(), non_blocking=True)
        self._looked_at.append((key, grad, is_any, torch.cuda.current_stream().record_event()))
        self.finish(_AHEAD)

    def drop(self) -> None:
        """Forget them. torch keeps the memory of copies that still run from others until they are done."""
        self._looked_at.clear()
        self._copied.clear()

    def finish(self, ahead: int = 0) -> None:
        """Wait for all of them but the last `ahead`."""
        while len(self._looked_at) > ahead:
            key, grad, is_any, seen = self._looked_at.popleft()
            seen.synchronize()
            if is_any:
                self._copy(key, grad)
        while len(self._copied) > ahead:
            key, host, arrived = self._copied.popleft()
            arrived.synchronize()
            self._add(key, host)

    def _copy(self, key: int, grad: torch.Tensor) -> None:
        """Start the copy of a gradient that is made: the host has waited for it."""
        host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(grad, non_blocking=True)
        grad.record_stream(self._stream)  # its memory is no other tensor's before the copy is done
        self._copied.append((key, host, self._stream.record_event()))

    def tensors(self) -> Iterator[torch.Tensor]:
        """In host memory, whole or in part."""
        yield from (host for _, host, _ in self._copied)


class ColdExperts:
    """The gradients of cold experts between their micro-batches. Local to this rank.

    layers: of which experts may be cold; without any, nothing ever is. fewer_than: tokens. params: ids of the
    parameters of those that are, in this step.
    """

    def __init__(self, layers: list[ExpertLayer], *, fewer_than: int):
        self._layers, self._fewer_than = layers, fewer_than
        self.params: set[int] = set()
        self._sums: dict[int, torch.Tensor] = {}
        self._departures = Departures(self._add) if layers and cpu.has_accelerator() else None

    @classmethod
    def from_plan(cls, plan: Plan, chunks: list[torch.nn.Module]) -> ColdExperts:
        """Cold experts of a rank's chunks by the configuration; none without `cold_expert_offload`."""
        sharding = plan.config.sharding
        layers = _layers(chunks, sharding.cold_expert_steps) if sharding.cold_expert_offload else []
        return cls(layers, fewer_than=sharding.cold_expert_tokens)

    def begin_step(self) -> None:
        """Find the cold experts by the steps before this one, whose counts the device has long finished, and drop what
        an attempt that was given up has left."""
        if self._departures is not None:
            self._departures.drop()
        self._sums.clear()
        self.params.clear()
        for layer in self._layers:
            layer.forget()
            self.params |= {id(param) for params in layer.with_fewer_than(self._fewer_than) for param in params}

    def end_step(self) -> None:
        """The step's last forward is done. (A step that is attempted again counts as another.)"""
        for layer in self._layers:
            layer.commit()

    @torch.no_grad()
    def offload(self, param: torch.nn.Parameter) -> None:
        """If `param` is a cold expert's, move what a backward has left in its gradient to host memory."""
        if id(param) not in self.params:
            return
        grad, param.grad = param.grad, None
        assert grad is not None, "called for a gradient that has come"
        if self._departures is not None:
            self._departures.start(id(param), grad)
        elif grad.any():
            self._add(id(param), grad.clone())

    def _add(self, key: int, grad: torch.Tensor) -> None:
        """Add to a parameter's sum in host memory; `grad` is this object's from then on."""
        if key in self._sums:
            self._sums[key].add_(grad)
        else:
            self._sums[key] = grad

    def bring_back(self, param: torch.nn.Parameter) -> None:
        """Make the sum the parameter's gradient on its device; None stays where no token came."""
        if self._departures is not None:
            self._departures.finish()
        if (total := self._sums.pop(id(param), None)) is not None:
            param.grad = total.to(param.device, non_blocking=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """In host memory now."""
        yield from self._sums.values()
        if self._departures is not None:
            yield from self._departures.tensors()


def _layers(chunks: list[torch.nn.Module], steps: int) -> list[ExpertLayer]:
    """Each layer of experts of the chunks, which from now on counts tokens over `steps` steps."""
    layers = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, SequentialMLP | TEGroupedMLP):
            layers.append(ExpertLayer(_by_expert(module, module.num_local_experts), deque(maxlen=steps)))
            module.register_forward_pre_hook(layers[-1].count)
    return layers


def _by_expert(experts: torch.nn.Module, count: int) -> list[list[torch.nn.Parameter]]:
    """The parameters of each of `count` local experts."""
    params: list[list[torch.nn.Parameter]] = [[] for _ in range(count)]
    for name, param in experts.named_parameters():
        match = _OF_ONE_EXPERT.search(name)
        assert match, f"{name} is not one expert's"
        params[int(match[1] or match[2])].append(param)
    return params
