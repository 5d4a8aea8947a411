"""The most memory that a step held, by kind, on this rank. lab/planner/footprint.py predicts it.

What a backend holds is looked at where it is most: when a chunk's last backward begins, before and after the reduction,
and when the optimizer starts. Looking adds up the storages of the backend's own tensors, which takes microseconds per
parameter, so that steps are looked at until two in a row held the same, and then each tenth; layers that come and go
count themselves. What autograd keeps is counted tensor by tensor in the first step,
whose shapes are those of every step; on a GPU it is what the allocator held beyond everything else.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from megaaccum.platform import cpu

if TYPE_CHECKING:
    import torch

KINDS = (
    "parameters",
    "parameters_whole",
    "parameters_shard",
    "gradients",
    "gradients_whole",
    "gradients_shard",
    "optimizer",
    "buffers",
    "activations",
    "p2p",
    "host",
)
"""What bytes are of. parameters, gradients: whole ones and this rank's shards (for gradients, accumulators too) at one
moment, each kind alone. optimizer: master weights and moments. buffers: of reductions. activations: kept for
backwards. p2p: receive buffers that are posted and not taken. host: what is kept off the device, of an
offloaded optimizer and of cold experts' gradients.
"""

SUMS = {
    "parameters": ("parameters_whole", "parameters_shard"),
    "gradients": ("gradients_whole", "gradients_shard"),
}
"""Kinds that are the sum of others at one moment."""

_STEPS_APART = 10
"""From a step that is looked at to the next one, where the last two of them held the same."""

Memory = dict[str, int]
"""Bytes by kind. Each is a high-water mark of its own: they need not have been reached together."""


def bytes_by_kind(memory: Memory) -> dict[str, int]:
    """{`memory_gradients_whole_bytes`: bytes, ...}, for the log."""
    return {f"memory_{kind}_bytes": count for kind, count in memory.items()}


@dataclass
class HighWater:
    """High-water marks of one step after the other, in bytes."""

    peaks: Memory = field(default_factory=dict)
    _now: Memory = field(default_factory=dict)
    _looked_at: set[str] = field(default_factory=set)
    _found: Memory = field(default_factory=dict)
    """Of what was looked at, the marks of the last step in which anything was."""
    _not_looking: int = 0
    """Steps, this one included, that have the marks of `_found`."""

    def note(self, kind: str, num_bytes: int) -> None:
        """`num_bytes` of `kind` are held now."""
        self._now[kind] = num_bytes
        self.raise_to(kind, num_bytes)
        whole = kind.split("_")[0]
        if whole != kind:
            self.raise_to(whole, sum([self._now.get(part, 0) for part in SUMS[whole]]))

    def raise_to(self, kind: str, num_bytes: int) -> None:
        """The mark of `kind` is at least `num_bytes`."""
        if num_bytes > self.peaks.get(kind, 0):
            self.peaks[kind] = num_bytes

    def look(self, tensors: Callable[[], Mapping[str, Iterable[torch.Tensor]]]) -> None:
        """Note the storages of these tensors, by kind; one that two kinds share counts for the first. In most steps
        that are like the ones before them nothing is done."""
        if self._not_looking:
            return
        seen: set[tuple[int, int]] = set()
        held = {kind: _storage_bytes(of_kind, seen) for kind, of_kind in tensors().items()}
        self._now |= held
        for kind, num_bytes in held.items():
            self.note(kind, num_bytes)
            self._looked_at |= {kind, kind.split("_")[0]}

    @property
    def on_device(self) -> int:
        """The marks of the device added up, parts of a sum once: at one moment, as the allocator counts."""
        parts = {part for parts in SUMS.values() for part in parts}
        return sum(size for kind, size in self.peaks.items() if kind not in parts | {"host", "p2p", "activations"})

    def take(self) -> Memory:
        """The marks since the last call: a step ends."""
        peaks = {kind: self.peaks[kind] for kind in KINDS if kind in self.peaks}
        if self._not_looking:
            self._not_looking -= 1
        else:
            before, self._found = self._found, {kind: peaks[kind] for kind in self._looked_at if kind in peaks}
            if self._found and self._found == before:
                self._not_looking = _STEPS_APART - 1
        self.peaks = dict(self._found) if self._not_looking else {}
        return peaks


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[int, int]]) -> int:
    """Of the storages that are not `seen`, which then are. Each is its address and its bytes: empty ones share one."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    found = {(storage.data_ptr(), storage.nbytes()) for storage in storages} - seen
    seen |= found
    return sum([size for _, size in found])


def smallest_device() -> float | None:
    """Bytes that are free on the device of the rank with the fewest; None on CPUs. Collective over the world."""
    if not cpu.has_accelerator():
        return None
    import torch

    free = torch.tensor(torch.cuda.mem_get_info()[0], dtype=torch.int64, device=cpu.device())
    torch.distributed.all_reduce(free, op=torch.distributed.ReduceOp.MIN)
    return float(free)


# --- activations -----------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """Counts the storages that autograd keeps for backwards while `watching`; parameters are not counted.

    now, peak: bytes.

    A parameter is kept by reference, since a backend may release it between forward and backward: a saved alias would
    hold it. Modules tell which storages are parameters, right before they compute.
    """

    now: int = 0
    peak: int = 0
    _live: Counter[int] = field(default_factory=Counter)
    _sizes: dict[int, int] = field(default_factory=dict)
    _parameters: dict[int, torch.nn.Parameter] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Count what the forwards of `chunks` inside leave for their backwards."""
        import torch

        handles = [
            module.register_forward_pre_hook(self._learn(chunk, module))
            for chunk in chunks
            for module in chunk.modules()
            if module._parameters
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._parameters.clear()

    def _learn(self, chunk: torch.nn.Module, module: torch.nn.Module) -> Callable[..., None]:
        """A module whose own weight is None is given one from elsewhere: the head with tied embeddings."""
        borrows = module._parameters.get("weight", module) is None

        def learn(*_: object) -> None:
            owner = chunk if borrows else module
            for param in owner.parameters(recurse=borrows):
                if not hasattr(param, "to_local") and param.untyped_storage().nbytes():  # whole, and here
                    self._parameters[param.untyped_storage().data_ptr()] = param

        return learn

    def _pack(self, tensor: torch.Tensor) -> _Kept | _OfParameter:
        storage = tensor.untyped_storage()
        param = self._parameters.get(storage.data_ptr())
        if param is not None and param.untyped_storage().data_ptr() == storage.data_ptr():
            return _OfParameter(param, tensor)
        return _Kept(self, tensor)

    @staticmethod
    def _unpack(kept: _Kept | _OfParameter) -> torch.Tensor:
        return kept.tensor

    def _add(self, key: int, size: int) -> None:
        self._live[key] += 1
        if self._live[key] == 1:
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self._live[key] -= 1
        if not self._live[key]:
            self.now -= self._sizes.pop(key)


class Activations:
    """Storages that a step's flushes hold beside the backend's tensors, noted as `activations`.

    On a CPU: what autograd keeps, counted in the first step only and noted in each; of experts, whose share of the
    tokens varies, it is the first step's. On a GPU: the allocator's peak less all that was looked at, of the last step
    whose flushes raised that peak; it is reset before the first step alone, since it is the user's too.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self._chunks = chunks
        self._counted: int | None = None

    @contextlib.contextmanager
    def watching(self, marks: HighWater) -> Iterator[None]:
        """Note in `marks` what the flushes inside hold."""
        if cpu.has_accelerator():
            with self._allocated(marks):
                yield
        elif self._counted is None:
            ledger = Ledger()
            with ledger.watching(self._chunks):
                yield
            self._counted = ledger.peak
            marks.note("activations", ledger.peak)
        else:
            marks.note("activations", self._counted)
            yield

    @contextlib.contextmanager
    def _allocated(self, marks: HighWater) -> Iterator[None]:
        import torch

        if self._counted is None:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        yield
        peak = torch.cuda.max_memory_allocated()
        if self._counted is None or peak > before:
            self._counted = max(0, peak - marks.on_device)
        marks.note("activations", self._counted)


class _Kept:
    """A tensor in autograd's keeping: counted from its making to its end, once per storage."""

    def __init__(self, ledger: Ledger, tensor: torch.Tensor):
        self.tensor, self._ledger = tensor, ledger
        storage = tensor.untyped_storage()
        self._key = storage.data_ptr()
        ledger._add(self._key, storage.nbytes())

    def __del__(self) -> None:
        self._ledger._drop(self._key)


class _OfParameter:
    """A parameter, or a view of one, in autograd's keeping: whatever its data are when the backward asks."""

    def __init__(self, param: torch.nn.Parameter, tensor: torch.Tensor):
        self._param = param
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset() - param.storage_offset()

    @property
    def tensor(self) -> torch.Tensor:
        shape, stride, offset = self._view
        whole = self._param.detach()
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)


class Holder(Protocol):
    """Whatever keeps tensors of a step: a sharding backend."""

    memory: HighWater

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """The tensors it holds now, by kind."""
