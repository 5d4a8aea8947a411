"""The most memory that a step held, by kind, on this rank. lab/planner predicts it: footprint.py a backend's tensors,
activations.py the activations.

A backend's tensors are measured when they are most: when a chunk's last backward begins, before and after the
reduction, and when the optimizer starts. A measurement adds up the storages of the backend's tensors, which takes
microseconds per parameter, so that steps are measured until two in a row held the same, and then each tenth; layers
that are gathered and released count themselves. Tensors that autograd saves are counted one by one in the first step,
whose shapes are those of every step; on a GPU activations are what the allocator held beyond everything else.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from megaaccum.platform import cpu
from megaaccum.platform.replacing import replaced

if TYPE_CHECKING:
    import torch

KINDS = (
    "parameters parameters_whole parameters_shard gradients gradients_whole gradients_shard"
    " optimizer buffers activations p2p host"
).split()
"""Kinds of bytes. parameters, gradients: whole ones and this rank's shards (for gradients, accumulators too) at one
moment, each kind alone. optimizer: master weights and moments. buffers: of reductions. activations: saved for
backwards. p2p: receive buffers that are posted and not read yet. host: in host memory, of an offloaded optimizer and of
cold experts' gradients.
"""

SUMS = {"parameters": ("parameters_whole", "parameters_shard"), "gradients": ("gradients_whole", "gradients_shard")}
"""Kinds that are the sum of others at one moment."""

RETRIED = (
    "megaaccum: the GPU's memory is nearly full: the allocator gave its cache back and tried again. The host then waits"
    " for the whole device, which costs time, and under a V schedule a step hangs if two ranks do so at once: lower"
    " micro_batch_size, or set recompute_granularity"
)

_STEPS_APART = 10
"""Steps from one measurement of a backend's tensors to the next, if the last two found the same."""

Memory = dict[str, int]
"""Bytes by kind. Each is a high-water mark of its own: they need not have been reached together."""


@dataclass
class HighWater:
    """High-water marks of one step after the other, in bytes."""

    peaks: Memory = field(default_factory=dict)
    _now: Memory = field(default_factory=dict)
    _measured_kinds: set[str] = field(default_factory=set)
    _measured: Memory = field(default_factory=dict)
    """Marks of `_measured_kinds` in the last step that was measured."""
    _steps_left: int = 0
    """Steps, this one included, that repeat `_measured`."""

    def note(self, kind: str, num_bytes: int) -> None:
        """Note that `num_bytes` of `kind` are held now."""
        self._now[kind] = num_bytes
        self.raise_to(kind, num_bytes)
        whole = kind.split("_")[0]
        if whole != kind:
            self.raise_to(whole, sum([self._now.get(part, 0) for part in SUMS[whole]]))

    def raise_to(self, kind: str, num_bytes: int) -> None:
        """Raise the mark of `kind` to at least `num_bytes`."""
        if num_bytes > self.peaks.get(kind, 0):
            self.peaks[kind] = num_bytes

    def measure(self, tensors: Callable[[], Mapping[str, Iterable[torch.Tensor]]]) -> None:
        """Note the storages of these tensors, by kind; one that two kinds share counts for the first. Does nothing in
        most steps that are like the ones before them."""
        if self._steps_left:
            return
        seen: set[tuple[int, int]] = set()
        held = {kind: _storage_bytes(of_kind, seen) for kind, of_kind in tensors().items()}
        self._now |= held
        for kind, num_bytes in held.items():
            self.note(kind, num_bytes)
            self._measured_kinds |= {kind, kind.split("_")[0]}

    @property
    def on_device(self) -> int:
        """The marks of the device added up, parts of a sum once: at one moment, as the allocator counts."""
        parts = {part for parts in SUMS.values() for part in parts}
        return sum(size for kind, size in self.peaks.items() if kind not in parts | {"host", "p2p", "activations"})

    def pop(self) -> Memory:
        """The marks since the last call; the next step begins."""
        peaks = {kind: self.peaks[kind] for kind in KINDS if kind in self.peaks}
        if self._steps_left:
            self._steps_left -= 1
        else:
            before, self._measured = self._measured, {k: n for k, n in peaks.items() if k in self._measured_kinds}
            if self._measured and self._measured == before:
                self._steps_left = _STEPS_APART - 1
        self.peaks = dict(self._measured) if self._steps_left else {}
        return peaks


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[int, int]]) -> int:
    """Bytes of the storages that are not in `seen`, to which they are added. A storage is its address and its bytes:
    empty ones share an address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    found = {(storage.data_ptr(), storage.nbytes()) for storage in storages} - seen
    seen |= found
    return sum([size for _, size in found])


# --- activations -----------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """Counts the storages that autograd saves for backwards while `watching`; parameters are not counted.

    A forward that takes derivatives by torch.func, which refuses hooks on saved tensors, ends the count.

    now, peak: bytes.

    A parameter is saved by reference, since a backend may release it between forward and backward: a saved alias would
    hold it. A hook before each module's forward notes which storages are parameters.
    """

    now: int = 0
    peak: int = 0
    _live: Counter[int] = field(default_factory=Counter)
    _parameters: dict[int, torch.nn.Parameter] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Context that counts what the forwards of `chunks` save for their backwards."""
        import torch

        with contextlib.ExitStack() as stack:
            stack.callback(self._parameters.clear)
            for chunk in chunks:
                for module in (each for each in chunk.modules() if each._parameters):
                    stack.enter_context(module.register_forward_pre_hook(self._noting_parameters(chunk, module)))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, attrgetter("tensor")))
            disable = torch.autograd.graph.disable_saved_tensors_hooks

            def end_and_disable(message: str) -> contextlib.AbstractContextManager[None]:
                stack.close()
                return disable(message)

            stack.enter_context(replaced(torch.autograd.graph, disable_saved_tensors_hooks=end_and_disable))
            yield

    def _noting_parameters(self, chunk: torch.nn.Module, module: torch.nn.Module) -> Callable[..., None]:
        """Hook that notes the storages of a module's parameters. A module whose own weight is None is given one from
        elsewhere: the head with tied embeddings."""
        borrows = module._parameters.get("weight", module) is None

        def note(*_: object) -> None:
            # Not parameters(recurse=False), whose walk takes 2 % of a small step.
            for param in chunk.parameters() if borrows else module._parameters.values():
                if param is not None and not hasattr(param, "to_local") and param.untyped_storage().nbytes():  # whole
                    self._parameters[param.untyped_storage().data_ptr()] = param

        return note

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor | _SavedParameter:
        param = self._parameters.get(tensor.untyped_storage().data_ptr())
        if param is not None and param.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            if tensor.dtype is param.dtype and not (tensor.is_conj() or tensor.is_neg()):  # strides tell of neither
                return _SavedParameter(param, tensor)
        return _SavedTensor(self, tensor)

    def add(self, key: int, size: int) -> None:
        """Count one more saved tensor of the storage at address `key`, of `size` bytes."""
        self._live[key] += 1
        if self._live[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)

    def drop(self, key: int, size: int) -> None:
        """Count one saved tensor of that storage less."""
        self._live[key] -= 1
        if not self._live[key]:
            self.now -= size


class Activations:
    """Storages that a step's flushes hold beside the backend's tensors, noted as `activations`.

    On a CPU: the tensors that autograd saves, counted in the first step only and noted in each; for experts, whose
    share of the tokens varies, the first step's. On a GPU: the allocator's peak less all other marks, of the last step
    whose flushes raised that peak; it is reset before the first step alone, since it is the user's too.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self._chunks = chunks
        self._counted: int | None = None

    @contextlib.contextmanager
    def watching(self, marks: HighWater) -> Iterator[None]:
        """Context of flushes; records in `marks` the bytes that they hold."""
        import torch

        if not cpu.has_accelerator():
            if self._counted is None:
                ledger = Ledger()
                with ledger.watching(self._chunks):
                    yield
                self._counted = ledger.peak
            else:
                yield
            marks.note("activations", self._counted)
            return
        if self._counted is None:
            torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats_as_nested_dict
        before, retried = torch.cuda.max_memory_allocated(), stats().get("num_alloc_retries", 0)
        yield
        peak = torch.cuda.max_memory_allocated()
        if stats().get("num_alloc_retries", 0) > retried:
            warnings.warn(RETRIED, stacklevel=2)
        if self._counted is None or peak > before:
            self._counted = max(0, peak - marks.on_device)
        marks.note("activations", self._counted)


class _SavedTensor:
    """A tensor that autograd saves: counted as long as it lives, once per storage."""

    def __init__(self, ledger: Ledger, tensor: torch.Tensor):
        # A schedule empties an output that was sent; the operation that made it may have saved it.
        self._alias, self._version, self._ledger = tensor.detach(), tensor._version, ledger
        self._storage = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        ledger.add(*self._storage)

    @property
    def tensor(self) -> torch.Tensor:
        if self._alias._version != self._version:  # torch compares them where there are no hooks
            raise RuntimeError("a tensor that the backward needs has been changed in place")
        return self._alias

    def __del__(self) -> None:
        self._ledger.drop(*self._storage)


class _SavedParameter:
    """A parameter, or a view of one, that autograd saves: the backward reads the data that it has then."""

    def __init__(self, param: torch.nn.Parameter, tensor: torch.Tensor):
        self._param = param
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset() - param.storage_offset()

    @property
    def tensor(self) -> torch.Tensor:
        shape, stride, offset = self._view
        whole = self._param.detach()
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)


class Holder(Protocol):
    """A sharding backend, as the holder of a step's tensors."""

    memory: HighWater

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Its tensors at this moment, by kind."""
