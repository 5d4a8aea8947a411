"""What was not finite, and where: the step's micro-batches once more, looked at one by one.

A step that overflows is found by its norm, which costs nothing but says only that something overflowed somewhere. To
say what, the same micro-batches run again on the same weights and random states, without a reduction, and after each
backward every gradient is looked at. That costs the time of one step, in the steps that need it, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaaccum import model, private

if TYPE_CHECKING:
    from megaaccum.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """One place in which a micro-batch was not finite, on one rank.

    dp_rank: whose micro-batch, among the data-parallel ranks. microbatch: its index in the step. backward: in a
    gradient (else in what a stage computed forward). distance: stages between this one and where the pass began.
    """

    dp_rank: int
    microbatch: int
    backward: bool
    distance: int
    stage: int
    rank: int
    what: str

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return (
            f"micro-batch {self.microbatch} of data-parallel rank {self.dp_rank}: first in the {way} of stage"
            f" {self.stage} (rank {self.rank}), {self.what}"
        )


class Probe:
    """Looks at every micro-batch of a step while the schedule runs it again.

    `watch` each chunk's output in the forward. Gradients that are not finite are noted and dropped, so that the next
    micro-batch is seen for itself. A context manager: hooks on the parameters of `chunks` live inside it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: Groups):
        self._chunks = list(chunks)
        self._groups = groups
        self._current = (0, 0)
        self._found: dict[tuple[int, int, bool], Finding] = {}
        self._handles: list = []

    def __enter__(self) -> Probe:
        for name, param in model.named_parameters(self._chunks):  # type: ignore[arg-type]
            if param.requires_grad:
                self._handles.append(private.on_gradient(param, lambda p, name=name: self._look_at(p, name)))  # type: ignore[misc]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, chunk: torch.nn.Module, microbatch: int, output: torch.Tensor) -> None:
        """Look at what `chunk` computed from `microbatch` (its index in the step), and follow its backward."""
        place = (next(i for i, each in enumerate(self._chunks) if each is chunk), microbatch)
        if not torch.isfinite(output.detach()).all():
            self._note(place, backward=False, what=f"its output holds {_kinds(output.detach())}")
        if output.requires_grad:
            output.register_hook(lambda _grad: self._enter_backward(place))

    def _enter_backward(self, place: tuple[int, int]) -> None:
        self._current = place

    def _look_at(self, param: torch.nn.Parameter, name: str) -> None:
        assert param.grad is not None
        if torch.isfinite(param.grad).all():
            return
        self._note(self._current, backward=True, what=f"the gradient of {name} holds {_kinds(param.grad)}")
        param.grad = None

    def _note(self, place: tuple[int, int], *, backward: bool, what: str) -> None:
        """Keep the first finding of a chunk, micro-batch and direction."""
        chunk, microbatch = place
        pp = self._groups.pp.size()
        stage = chunk * pp + self._groups.pp.rank()
        finding = Finding(
            dp_rank=self._groups.dp.rank(),
            microbatch=microbatch,
            backward=backward,
            distance=len(self._chunks) * pp - 1 - stage if backward else stage,
            stage=stage,
            rank=dist.get_rank(),
            what=what,
        )
        self._found.setdefault((chunk, microbatch, backward), finding)

    def gather(self) -> Findings:
        """What all ranks found, the same on each; collective over the world."""
        everyone: list[list[Finding] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(self._found.values()))
        return Findings([finding for findings in everyone for finding in findings or []])


class Findings:
    """What a probe found on all ranks."""

    def __init__(self, found: Iterable[Finding]):
        self.found = sorted(found)

    def bad_microbatches(self) -> dict[int, list[int]]:
        """{data-parallel rank: indices of its micro-batches of which some gradient is not finite}."""
        bad: dict[int, list[int]] = {}
        for dp_rank, microbatch in sorted({(f.dp_rank, f.microbatch) for f in self.found if f.backward}):
            bad.setdefault(dp_rank, []).append(microbatch)
        return bad

    def origins(self) -> list[Finding]:
        """For each bad micro-batch where it began: in the forward's first stage, else in the backward's last."""
        first: dict[tuple[int, int], Finding] = {}
        for finding in self.found:  # sorted: forward before backward, near before far
            first.setdefault((finding.dp_rank, finding.microbatch), finding)
        bad = self.bad_microbatches()
        return [f for (dp_rank, microbatch), f in first.items() if microbatch in bad.get(dp_rank, [])]

    def __str__(self) -> str:
        origins = self.origins()
        if not origins:
            return "every micro-batch is finite when it runs again: it did not come from the data or the weights"
        shown = "; ".join(map(str, origins[:MOST_SHOWN]))
        return shown + (f"; and {len(origins) - MOST_SHOWN} more" if len(origins) > MOST_SHOWN else "")


MOST_SHOWN = 4
"""Micro-batches that a message names."""


def _kinds(tensor: torch.Tensor) -> str:
    """`12 inf and 3 nan`."""
    counts = {"inf": int(torch.isinf(tensor).sum()), "nan": int(torch.isnan(tensor).sum())}
    return " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
