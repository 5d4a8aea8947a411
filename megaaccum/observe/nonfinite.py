"""Values that are not finite: set to 0 before the reduction (`nonfinite: zero`), or looked for.

A step that overflows is found by its norm, which costs nothing but says only that something overflowed somewhere. To
say what, the same micro-batches run again on the same weights and random states, without a reduction, and after each
backward every gradient is looked at. That costs the time of one step, in the steps that need it, and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megaaccum.distributed.agreement import MOST_SHOWN, gathered
from megaaccum.distributed.groups import Groups
from megaaccum.errors import listed
from megaaccum.model import names
from megaaccum.upstream import fsdp2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """One place in which a micro-batch was not finite, on one rank.

    dp_rank: whose micro-batch, among the data-parallel ranks. microbatch: its index in the step. backward: in a
    gradient (else in what a stage computed forward). distance: stages between this one and where the pass began.
    tokens_of: data-parallel ranks whose tokens it was computed from, for a spread expert more than `dp_rank`.
    """

    dp_rank: int
    microbatch: int
    backward: bool
    distance: int
    stage: int
    rank: int
    what: str
    tokens_of: tuple[int, ...]

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        whose = f"data-parallel rank {self.dp_rank}"
        if len(self.tokens_of) > 1:
            whose = f"one of the data-parallel ranks {', '.join(map(str, self.tokens_of))}"
        return (
            f"micro-batch {self.microbatch} of {whose}: first in the {way} of stage"
            f" {self.stage} (rank {self.rank}), {self.what}"
        )


class Probe:
    """Looks at every micro-batch of a step while the schedule runs it again.

    Gradients that are not finite are noted and count as zero, so that the next micro-batch is seen for itself. A
    context manager: hooks on the parameters of `chunks` live inside it. The schedule must not put weight gradients off,
    so that each belongs to the backward that runs. Construction is collective over the expert-parallel group.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: Groups):
        self._chunks = list(chunks)
        self._groups = groups
        self._current = (0, 0)
        self._experts_tokens_of = tuple(sorted(set(gathered(groups.dp.rank(), groups.collection.ep))))
        """Data-parallel ranks that send this rank's experts tokens, in order."""
        self._found: dict[tuple[int, int, bool, tuple[int, ...]], Finding] = {}
        self._inside = ExitStack()

    def __enter__(self) -> Probe:
        for name, param in whole_parameters(self._chunks):
            if param.requires_grad:
                # Before the gradient is added to others or handed to a backend, each of which takes it from the param.
                whose = self._experts_tokens_of if names.is_expert(param) else (self._groups.dp.rank(),)
                handle = param.register_hook(lambda grad, of=(name, whose): self._check(grad, *of))
                self._inside.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def end_forward(self, chunk: int, microbatch: int, output: torch.Tensor) -> None:
        """Look at what a chunk computed from a micro-batch (its index in the step)."""
        if not torch.isfinite(output.detach()).all():
            what = f"its output holds {_kinds(output.detach())}"
            self._note((chunk, microbatch), backward=False, what=what, tokens_of=(self._groups.dp.rank(),))

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        self._current = chunk, microbatch

    def _check(self, grad: torch.Tensor | None, name: str, tokens_of: tuple[int, ...]) -> torch.Tensor | None:
        """grad: None where a function gives none (torch calls hooks all the same)."""
        if grad is None or torch.isfinite(grad).all():
            return grad
        what = f"the gradient of {name} holds {_kinds(grad)}"
        self._note(self._current, backward=True, what=what, tokens_of=tokens_of)
        return torch.zeros_like(grad)

    def _note(self, at: tuple[int, int], *, backward: bool, what: str, tokens_of: tuple[int, ...]) -> None:
        """Keep the first finding of a chunk, micro-batch, direction and owners."""
        chunk, microbatch = at
        stage, stages = self._groups.stage(chunk), len(self._chunks) * self._groups.pp.size()
        finding = Finding(
            dp_rank=self._groups.dp.rank(), microbatch=microbatch, backward=backward, stage=stage, rank=dist.get_rank(),
            distance=stages - 1 - stage if backward else stage, what=what, tokens_of=tokens_of,
        )  # fmt: skip
        self._found.setdefault((chunk, microbatch, backward, tokens_of), finding)

    def gather(self) -> Findings:
        """The finds of all ranks, the same on each; collective over the world."""
        return Findings([finding for findings in gathered(list(self._found.values())) for finding in findings])


def whole_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) as the backward knows it: fully_shard keeps others, which it puts in place of its shards
    while a unit is gathered. One unit is whole at a time. Collective over the data-parallel ranks, where it gathers."""
    seen: set[int] = set()
    for chunk in chunks:
        units: list[FSDPModule | None] = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
        for unit in units or [None]:
            if unit is not None:
                unit.unshard()
                fsdp2.mark_experts(unit)
            for name, param in names.named_parameters([chunk]):
                if not isinstance(param, DTensor) and id(param) not in seen:
                    seen.add(id(param))
                    yield name, param
            if unit is not None:
                unit.reshard()


class Findings:
    """The finds of a probe on all ranks."""

    def __init__(self, found: Iterable[Finding]):
        self.found = sorted(found)

    def bad_microbatches(self) -> dict[int, list[int]]:
        """{data-parallel rank: indices of its micro-batches that have a gradient that is not finite}.

        A spread expert's gradient holds tokens of several ranks' micro-batches. If no other gradient shows which of
        these micro-batches was bad, all of them count as bad.
        """
        backward = [f for f in self.found if f.backward]
        surely = {(f.dp_rank, f.microbatch) for f in backward if f.tokens_of == (f.dp_rank,)}
        groups = [{(dp_rank, f.microbatch) for dp_rank in f.tokens_of} for f in backward if len(f.tokens_of) > 1]
        bad: dict[int, list[int]] = {}
        for dp_rank, microbatch in sorted(surely.union(*(group for group in groups if not group & surely))):
            bad.setdefault(dp_rank, []).append(microbatch)
        return bad

    def origins(self) -> list[Finding]:
        """For each bad micro-batch where it began: in the forward's first stage, else in the backward's last. A spread
        expert's gradient counts where there is nothing else."""
        first: dict[tuple[int, int], Finding] = {}
        # Sorted: forward before backward, near before far.
        for finding in sorted(self.found, key=lambda found: len(found.tokens_of) > 1):
            first.setdefault((finding.dp_rank, finding.microbatch), finding)
        bad = self.bad_microbatches()
        return [f for (dp_rank, microbatch), f in first.items() if microbatch in bad.get(dp_rank, [])]

    def __str__(self) -> str:
        nowhere = "every micro-batch is finite when it runs again: it did not come from the data or the weights"
        return listed(self.origins(), "; ") or nowhere


def _kinds(tensor: torch.Tensor) -> str:
    """`12 inf and 3 nan`."""
    counts = {"inf": int(torch.isinf(tensor).sum()), "nan": int(torch.isnan(tensor).sum())}
    return " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _is_finite_on_the_host(grad: torch.Tensor) -> bool:
    """Whether the sum of a gradient in host memory is finite, so that all of it is: one pass instead of six."""
    return math.isfinite(grad.sum().item())


# --- nonfinite: zero --------------------------------------------------------------------------------------------------


class ZeroNonFinite:
    """`nonfinite: zero`. Replaces by 0, in place, what is not finite in a rank's own gradients before they are reduced.

    Called by the backend with each whole local gradient. Counts stay on the device: nothing waits in a good step.
    """

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, grad: torch.Tensor) -> None:
        if grad.is_cpu and _is_finite_on_the_host(grad):
            return
        count = torch.count_nonzero(grad - grad)  # inf - inf is nan; isfinite is four kernels on a GPU
        self._counts[name] = self._counts[name] + count if name in self._counts else count
        torch.nan_to_num_(grad, nan=0.0, posinf=0.0, neginf=0.0)

    def total(self) -> torch.Tensor:
        """Elements replaced on this rank since `clear`, float64 scalar on the gradients' device."""
        counts = list(self._counts.values())
        return torch.stack(counts).sum().double() if counts else torch.zeros((), dtype=torch.float64)

    def names(self) -> dict[str, int]:
        """{parameter: elements replaced on this rank since `clear`}, those with some."""
        return {name: int(count) for name, count in self._counts.items() if count}

    def clear(self) -> None:
        self._counts.clear()


def describe(zero: ZeroNonFinite) -> str:
    """A text that lists the replaced elements of all ranks, the same on each; collective over the world. A rank sends
    what may be shown: every rank has a place for the longest list of any, on a GPU in its memory."""
    mine = [f"{count} of {name} on rank {dist.get_rank()}" for name, count in zero.names().items()]
    everyone = gathered((mine[:MOST_SHOWN], len(mine)))
    shown = [text for texts, _ in everyone for text in texts][:MOST_SHOWN]
    more = sum(count for _, count in everyone) - len(shown)
    return listed([*shown, *[f"and {more} more"] * bool(more)], most=MOST_SHOWN + 1)
