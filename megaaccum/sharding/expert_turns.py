"""Experts' gradients reduced in the same order on every rank, although ranks route tokens to different experts.

An expert may see no token on a rank, so that its gradient does not come there, and which experts see none differs from
rank to rank. Reductions that began as gradients come would begin in different orders. A backward goes through layers
from the last to the first, and through a layer's modules likewise: once a gradient of a parameter before a layer's
experts has come (its norm, its attention), theirs have come or will not. The experts are reduced then, in the order of
the model, with zeros for those that saw nothing. Dense parameters have their turn when they come (agreed_order).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

from megaaccum.errors import FlushError
from megaaccum.executor import wgrad
from megaaccum.model import names


class ExpertTurns:
    """Calls `complete(param)` once for each trained parameter of the chunks in a reduction, when its gradient is
    complete on this rank: for a dense one that has come, for experts when a gradient of what is before them in their
    layer has. The caller completes those that are left at the end, in one order on all ranks.

    splits: backwards are split, so that gradients of matrices come in W, all others in I. in_pieces: a layer's backward
    is several calls of autograd (Megatron's schedule plans), which bring a gradient for each use of a parameter; those
    outside of layers, which may have several, wait for the end.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        complete: Callable[[torch.nn.Parameter], None],
        *,
        splits: bool,
        in_pieces: bool,
    ):
        self._complete, self._splits, self._in_pieces = complete, splits, in_pieces
        self._turns: list[list[tuple[int, list[torch.nn.Parameter]]]] = []
        """By chunk, the last module first: the place of the module's first parameter, and its experts'."""
        self._place: dict[int, tuple[int, int]] = {}
        """Chunk, and place in it, of each parameter of a layer that is no expert's."""
        self._experts: set[int] = set()
        self._names: dict[int, str] = {}
        for number, chunk in enumerate(chunks):
            self._add_chunk(number, chunk)
        self._done: set[int] = set()
        self._next: dict[tuple[int, bool], int] = {}
        """How many of a chunk's turns are over, of gradients that come in I (or are not split) and in W."""

    def _add_chunk(self, number: int, chunk: torch.nn.Module) -> None:
        starts: dict[str, int] = {}
        turns: dict[str, tuple[int, list[torch.nn.Parameter]]] = {}
        for place, (name, param) in enumerate(chunk.named_parameters()):
            self._names[id(param)] = name
            if (module := _module_in_layer(name)) is None:
                continue
            starts.setdefault(module, place)
            if names.is_expert(param) or ".experts." in name:
                if param.requires_grad:
                    turns.setdefault(module, (starts[module], []))[1].append(param)
                    self._experts.add(id(param))
            else:
                self._place[id(param)] = number, place
        self._turns.append(list(reversed(turns.values())))

    def begin(self) -> None:
        """Begin a reduction."""
        self._done.clear()
        self._next.clear()

    def came(self, param: torch.nn.Parameter) -> None:
        """Take note of a parameter's final gradient. Raises FlushError if it was complete without it."""
        if id(param) in self._done:
            raise FlushError(
                f"a gradient of {self._names.get(id(param), 'a parameter')} came after its reduction had begun: let a"
                " layer list its modules in the order in which its forward runs them, and let all uses of a parameter"
                " be in one backward"
            )
        if id(param) not in self._experts and (id(param) in self._place or not self._in_pieces):
            if self._experts:
                self.finish_before(param)
            self.finish(param)

    def finish(self, param: torch.nn.Parameter) -> None:
        """Complete a parameter, unless it is."""
        if id(param) not in self._done:
            self._done.add(id(param))
            self._complete(param)

    def finish_before(self, param: torch.nn.Parameter) -> None:
        """Complete the experts whose gradients come before that of `param`, in the same kind of pass."""
        if id(param) not in self._place:
            return
        chunk, place = self._place[id(param)]
        late = self._splits and wgrad.is_put_off(param)
        for start, experts in self._turns[chunk][self._next.get((chunk, late), 0) :]:
            if start <= place:
                break
            for expert in experts:
                if (self._splits and wgrad.is_put_off(expert)) == late:
                    self.finish(expert)
            self._next[chunk, late] = self._next.get((chunk, late), 0) + 1


def before_experts(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of layers that come before the experts of their layer: their gradients come after these."""
    found: list[torch.nn.Parameter] = []
    layer = ""
    before: list[tuple[str, torch.nn.Parameter]] = []
    for name, param in chunk.named_parameters():
        module = _module_in_layer(name) or ""
        if (of := module.rpartition(".")[0]) != layer:
            layer, before = of, []
        if names.is_expert(param) or ".experts." in name:
            found += [each for other, each in before if other != module]
            before = []
        else:
            before.append((module, param))
    return found


def _module_in_layer(name: str) -> str | None:
    """The path of the module of a layer that a parameter belongs to: a layer's child, or what holds its experts. None
    for a parameter of the layer itself, which its forward may use anywhere."""
    if ".experts." in name:
        return name.split(".experts.")[0]
    match = re.match(r"(?:.*\.)?layers\.\d+\.\w+(?=\.)", name)
    return match[0] if match else None
