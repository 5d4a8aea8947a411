"""Private names of torch's modules, autograd and torch.distributed (torch 2.13).

Its methods of process groups have no types, and each watched one has arguments of its own: `Any` here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megaaccum.upstream.lookup import pickled

CHECKPOINT_METADATA_CLASSES = pickled("checkpoint_metadata")
CHECKPOINT_PLAN_CLASSES = pickled("checkpoint_plan")
"""(module, name) of the classes in the `.metadata` of a checkpoint of plain tensors (torch 2.13), beside dtypes, and of
those that Megatron's hold besides."""


def on_device(found: Any, device: torch.device) -> Any:
    """Lists, dicts and tuples with their tensors on `device`."""
    return tree_map_only(torch.Tensor, lambda each: each.to(device), found)


def compile_nothing_of(*packages: str) -> None:
    """Have torch.compile trace no function of `packages`: hooks on a module that it compiles run as they are, and break
    its graph (torch 2.13: `_dynamo.trace_rules`). A process that has compiled nothing so far is left as it is."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    for package in packages if rules is not None else ():
        if not any(path.endswith(f"/{package}/") for path in rules.SKIP_DIRS):
            rules.add(package)


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the buffers in `module.state_dict()`, which itself, under FSDP2, reshards the parameters."""
    unsaved = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in unsaved)


def held_by(modules: Sequence[torch.nn.Module]) -> tuple[list[int], dict[int, tuple[bool, torch.dtype, bool]]]:
    """The identity of every child of these modules; by that of each parameter, whether it is trained, its dtype, and
    whether it loses hooks. In less time than Module.parameters takes, which also looks for names and for modules that
    are there twice."""
    children = [id(child) for module in modules for child in module._modules.values()]
    params = [param for module in modules for param in module._parameters.values() if param is not None]
    return children, {id(param): (param.requires_grad, param.dtype, loses_hooks(param)) for param in params}


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of which one changes when one of `tensors` is written to in place, except through its `data`."""
    return [tensor._version for tensor in tensors]


def part_of_file(file: BinaryIO, offset: int, length: int) -> Any:
    """A part of a file as a file, as torch.distributed.checkpoint reads its own (torch 2.13: `_create_file_view`)."""
    from torch.distributed.checkpoint import utils

    return utils._create_file_view(file, offset, length)  # type: ignore[arg-type]


def tame_gloo() -> None:
    """Let all gloo groups of this process share one device, and keep their threads from preempting others on waking.

    torch 2.13 gives each group its own device, a thread that wakes up a hundred times a second: the twenty groups of a
    rank take 2 % of a core while nothing happens. Megatron-core makes the groups, and new_group cannot pass a device on
    (distributed_c10d: `_new_process_group_helper`).

    A thread that sends holds its connection's lock. If the message wakes a thread that takes the sender's core, the
    sender's own device thread polls for that lock until the sender runs again: with more ranks than cores this is most
    of the processor time of an all-reduce. A second call does nothing.
    """
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d
    plain = module.ProcessGroupGloo
    if plain.__name__ == "OnSharedDevice":
        return

    @functools.cache  # made when the first group is: a process without groups has no thread
    def devices() -> list[Any]:
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        return [plain.create_device(interface=name) for name in names] or [plain.create_default_device()]

    def init(self: Any, store: Any, rank: int, size: int, timeout: Any, **more: Any) -> None:
        options = plain._Options()
        with _patient_threads():
            options._timeout, options._devices = timeout, devices()
            for name, value in more.items():  # torch 2.15: enable_reconfigure
                setattr(options, name, value)
            plain.__init__(self, store, rank, size, options)

    module.ProcessGroupGloo = type("OnSharedDevice", (plain,), {"__init__": init})


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Context in which threads start under SCHED_BATCH, so that they preempt no other when they wake. This thread gets
    its own policy back."""
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:  # chosen for this process
        yield
        return
    with contextlib.suppress(OSError):  # a container may forbid it: then gloo is only slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))


def note_failure(key: str, text: str) -> None:
    """Store `text` for the other ranks, unless one was there first. The store of the rendezvous has no public name in
    torch 2.13, and no collective can be used once ranks are out of step."""
    with contextlib.suppress(Exception):  # the store ends with rank 0; the error itself is raised in any case
        torch.distributed.distributed_c10d._get_default_store().compare_set(key, "", text)


def noted_failure(key: str) -> str | None:
    """The text that `note_failure` left under `key`, if it can be read."""
    with contextlib.suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.check([key]):
            return store.get(key).decode()
    return None


def without_base[T](output: T) -> T:
    """A chunk's or layer's output, if it is a view or a leaf, as a tensor in its memory and its graph that is neither:
    its data may be replaced. Megatron's schedules empty an output that was sent, and refuse a view, as torch's own
    Linear returns one, and each operation on a subclass of Tensor, of which this makes a plain one; a leaf is what the
    stage has received, and whose gradient it sends back."""
    if isinstance(output, torch.Tensor) and (output._base is not None or (output.is_leaf and output.requires_grad)):
        return cast("T", torch.ops.aten._unsafe_view(output.as_subclass(torch.Tensor), output.shape))
    return output


def add_by_autograd(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Add `grad` to the gradient of `leaf`, with precision (`grad_dtype`) and hooks on gradients as in a backward.

    A schedule does so for every weight and micro-batch, and torch.autograd.backward spends most of its time on checks
    of its arguments. Megatron-core calls the engine alike (custom_backward).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((leaf,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def sum_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """The precision in which gradients of `param` are added up: that of its gradient where `grad_dtype` allows any."""
    if param.grad_dtype is None and param.grad is not None:
        return param.grad.dtype
    return param.grad_dtype or param.dtype


def leaves_in_graph(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves in the graph of `roots`, each as often as functions give it a gradient."""
    found: list[torch.Tensor] = []
    nodes: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if hasattr(node, "variable"):
                found.append(node.variable)
            elif node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
    return found


def ddp_expect_gradients(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Prepare torch DDP's reducer for the backward that computes the final gradients.

    DDP does that in its forward, which is long over when a pipeline runs its last backward. (Read in torch 2.13:
    torch.distributed.pipelining does the same.)
    """
    ddp.reducer.prepare_for_backward([])


def num_hooks(tensor: torch.Tensor) -> int:
    """How many hooks look at the gradient of `tensor` (`register_hook`) when autograd brings one."""
    hooks: Any = tensor._backward_hooks
    return len(hooks or ())


def has_hooks(param: torch.nn.Parameter) -> bool:
    """Whether hooks look at the gradient of `param`, or at its sum."""
    return num_hooks(param) > 0 or bool(param._post_accumulate_grad_hooks)


def loses_hooks(param: torch.nn.Parameter) -> bool:
    """Whether `param` has hooks and is a shard of fully_shard's, of which autograd sees the whole one (torch 2.13)."""
    return isinstance(param, DTensor) and has_hooks(param)


def weakly(method: Callable[..., object]) -> Callable[..., object]:
    """A bound method as a hook on a parameter, which does nothing once its object is gone. C++ holds such hooks, and
    often the parameter too, so Python's collector would not see that an object and its hooks hold only each other."""
    held = weakref.WeakMethod(method)
    return lambda *args: None if (found := held()) is None else found(*args)


class OnGradient:
    """Hooks that call `call(param)` whenever autograd has added to `param.grad`. Autograd visits every input of a
    function whose backward it runs, and (torch 2.13) runs the hooks of the addition even if the function gave no
    gradient, as a layer does that computes its weight gradient later. The hook on the gradient itself tells, which then
    is None."""

    def __init__(self, param: torch.nn.Parameter, call: Callable[[torch.nn.Parameter], object]):
        self._call, self._came = call, False
        self._handles = (param.register_hook(self._comes), param.register_post_accumulate_grad_hook(self._added))

    def _comes(self, grad: torch.Tensor | None) -> None:
        self._came = grad is not None

    def _added(self, param: torch.nn.Parameter) -> None:
        if self._came:
            self._call(param)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (activation recompute runs forwards inside one). Read in
    torch 2.13: torch.utils.checkpoint asks the same."""
    return backward_under_way() != -1


def backward_under_way() -> int:
    """Identifies the backward that autograd runs in this thread, the innermost of several; -1 outside."""
    return torch._C._current_graph_task_id()


_COLLECTIVES = {
    method: (collective, position)
    for collective, position, methods in (
        ("all_gather", 0, "_allgather_base all_gather_single allgather allgather_coalesced"),
        ("all_gather", 0, "all_gather_single_coalesced allgather_into_tensor_coalesced"),
        ("reduce_scatter", 1, "_reduce_scatter_base reduce_scatter reduce_scatter_single"),
        ("reduce_scatter", 1, "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced"),
        ("all_to_all", 0, "all_to_all_single alltoall alltoall_base"),
        ("all_reduce", 0, "allreduce allreduce_coalesced"),
        *((name, 0, name) for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv")),
    )
    for method in methods.split()
}
"""Methods of torch's ProcessGroup, which torch.distributed and deepspeed.comm call: the collective's name, and the
position of the argument that holds the elements of all ranks (of an all-to-all, those that come)."""

Heard = tuple[str, torch.distributed.ProcessGroup, torch.dtype, int]
"""Collective, group, dtype and bytes of a tensor."""


Note = Callable[[str, torch.distributed.ProcessGroup, torch.dtype, int, float, int], None]
"""A listener to collectives: takes what was heard, the host's seconds, and how many calls it counts as."""

_listeners: list[Note] = []
unwatched: set[Any] = set()
"""Process groups whose collectives listeners are not told of: those of another thread, which belong to no step."""
_waited: dict[int, Heard] = {}
"""First tensor of each call that a listener has heard, by the id of its handle."""


@contextlib.contextmanager
def watched_collectives(note: Note) -> Iterator[None]:
    """Context in which `note` is called for each tensor that a collective over more than one rank is given (with the
    bytes in it that other ranks send, for an all-to-all); then, as no further call, for the seconds that the host
    waited for it. torch has no public function that all of them pass (a dispatch mode sees every operator, and slows
    each one down)."""
    _replace_collectives()
    _listeners.append(note)
    try:
        yield
    finally:
        _listeners.remove(note)
        if not _listeners:
            _waited.clear()


@functools.cache
def _replace_collectives() -> None:
    """Have torch's methods of collectives tell the listeners. They stay replaced: Python forgets where it found the
    attributes of a class that changes, which cost a small step 1 % when each step replaced them and put them back."""
    from torch.distributed import ProcessGroup, Work

    for name in _COLLECTIVES:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, noting(getattr(ProcessGroup, name), *_COLLECTIVES[name]))
    plain_wait = Work.wait
    gives_one_handle = functools.cache(lambda group: torch.distributed.get_backend(group) == "nccl")

    def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain_wait(work, *args, **kwargs)
        finally:
            # NCCL gives one handle for a batch of messages. A thread that saves may wait at the same time.
            others = [] if id(work) in _waited else [*_waited.items()]
            for key in (id(work), *(key for key, (_, group, *_) in others if gives_one_handle(group))):
                if (heard := _waited.pop(key, None)) is not None:
                    seconds = time.perf_counter() - start if key == id(work) else 0.0
                    for note in _listeners:
                        note(*heard, seconds, 0)

    setattr(Work, "wait", wait)  # noqa: B010


def noting(method: Callable[..., Any], collective: str, position: int) -> Callable[..., Any]:
    """`method` of a ProcessGroup, telling the listeners of its tensors. While there are any, an all-reduce over one
    rank does nothing: Megatron's cross entropy makes three for each micro-batch also without tensor parallelism, and on
    gloo each takes 0.1 ms."""

    def call(group: torch.distributed.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not _listeners or group.size() == 1 or group in unwatched:
            skips = _listeners and group.size() == 1 and collective == "all_reduce" and _keeps_one(args[-1])
            return _done(args[0]) if skips else method(group, *args, **kwargs)
        start = time.perf_counter()
        work = method(group, *args, **kwargs)
        seconds = time.perf_counter() - start
        # Sizes alone, and no tensor: a send on NCCL is polled, and may never be waited for.
        heard: list[Heard] = [(collective, group, each.dtype, each.nbytes) for each in _flat(args[position])]
        if collective == "all_to_all":
            sizes = _from_others([size for *_, size in heard], group, args[2] if len(heard) == 1 else None)
            heard = [(*each[:3], size) for each, size in zip(heard, sizes, strict=True)]
        for note in _listeners:
            for number, each in enumerate(heard):
                note(*each, 0.0 if number else seconds, 1)
        if work is not None and heard:
            _waited[id(work)] = heard[0]
        return work

    return call


def _keeps_one(options: Any) -> bool:
    """Whether an all-reduce with these options leaves the tensor of a single rank as it is; a product by a factor
    (PREMUL_SUM) does not."""
    operators = torch.distributed.ReduceOp
    kept = operators.SUM, operators.AVG, operators.MAX, operators.MIN
    return any(getattr(options, "reduceOp", None) == each for each in kept)


def _done(tensors: Any) -> torch.distributed.Work:
    """The handle of a collective that is done (torch 2.13: `_create_work_from_future`)."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return cast("torch.distributed.Work", vars(torch._C._distributed_c10d)["_create_work_from_future"](future))


def _from_others(sizes: list[int], group: torch.distributed.ProcessGroup, splits: Sequence[int] | None) -> list[int]:
    """Bytes that other ranks send, of the tensors that an all-to-all fills. splits: rows that each rank sends into the
    one tensor, empty if all send as many; None: a tensor per rank."""
    own = group.rank()
    if splits is None:
        return [0 if rank == own else size for rank, size in enumerate(sizes)]
    splits = splits or [1] * group.size()
    return [size * (sum(splits) - splits[own]) // max(sum(splits), 1) for size in sizes]


def _flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors in a tensor, or in a sequence of sequences of them."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [one for each in tensors for one in _flat(each)]
