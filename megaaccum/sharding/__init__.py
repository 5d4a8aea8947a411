"""Sharding backends: what reduces the gradients of an accumulated step, and when.

| module | holds |
| --- | --- |
| `base` | a backend: Megatron's five hooks, and what the step asks |
| `deepspeed`, `streaming` | ZeRO-1, -2, -3 `resident`; ZeRO-3 `streaming` |
| `fsdp2`, `megatron`, `ddp` | the other engines |
| `experts`, `expert_turns`, `cold_experts` | ranks of experts, turns of their reduction, their sums in host memory |
| `agreed_order` | reductions in one order on all ranks, whichever gradients come |
| `reduction`, `fp32_sums` | sums over ranks; sums into FP32 on one rank |
| `sum_tree`, `in_one_order` | sums in one order (`reproducible: layout`, `deterministic`) |
| `ownership`, `owner_sums` | whole matrices on their owners (Muon), and the sums of their gradients there |
| `released_linear` | a linear layer whose weight comes and goes |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import FlushError
from megaaccum.executor import blocks
from megaaccum.model.attention import prepare_latent_attention
from megaaccum.optim.owners import COSTS
from megaaccum.sharding.base import GradShard, ShardingBackend, fill_hooks
from megaaccum.sharding.ownership import MatrixUpdates
from megaaccum.upstream import pytorch

__all__ = ["DRIVEN", "GradShard", "ShardingBackend", "build", "fill_hooks"]

_END = "the end"

DRIVEN: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Modules with parameters that a backend drives, and trained parameters as they were given, by identity: its hooks and
partitions stay on them."""


def build(
    plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> ShardingBackend:
    """The backend that `plan.config.sharding.backend` names, its hooks filled into the chunks' configuration."""
    kind = _kind(plan)
    trained = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
    for chunk in chunks:
        # Schedules and Megatron's DDP then divide nothing: Divisor does. Without it every gradient is 1 / N of its own.
        chunk.config.calculate_per_token_loss = True  # type: ignore[union-attr]
        for param in chunk.parameters():
            param.data = param.data.contiguous()  # flattened, it is cut
    prepare_latent_attention(chunks)
    sharding = plan.config.sharding
    if (columns := sharding.reproducible_tensor_blocks or 1) > 1:
        blocks.cut_columns(chunks, columns, groups.tp)
    if (sequences := sharding.reproducible_context_blocks or 1) > 1:
        blocks.cut_sequences(chunks, sequences, groups.collection.cp)
    backend = raise_on_all_ranks(kind, plan, groups, chunks, optimizer)  # which may refuse one stage alone
    if plan.config.optimizer.optimizer in COSTS:
        backend.matrices = MatrixUpdates(plan, groups, chunks, backend)
    fill_hooks(backend, chunks)
    if streamed := set(backend.streamed_modules()):
        backend.observers = [_EveryModule(chunks, streamed)]
    modules = (module for chunk in chunks for module in chunk.modules() if module._parameters)
    DRIVEN.update({id(each): each for each in (*trained, *modules)})
    optimizer.register_step_pre_hook(lambda *_: backend.memory.measure(backend.tensors))
    return backend


def _kind(plan: Plan) -> Callable[..., ShardingBackend]:
    """The class of the plan's backend; a module is imported if its backend is asked for."""
    sharding = plan.config.sharding
    module = "streaming" if (sharding.backend, sharding.sync) == ("deepspeed", "streaming") else sharding.backend
    name = {
        "ddp": "DdpBackend", "deepspeed": "DeepSpeedBackend", "fsdp2": "Fsdp2Backend", "megatron": "MegatronBackend",
        "streaming": "StreamingBackend",
    }[module]  # fmt: skip
    kind: Callable[..., ShardingBackend] = getattr(importlib.import_module(f"megaaccum.sharding.{module}"), name)
    return kind


class _EveryModule:
    """Raises FlushError in a call of a forward step function that runs other modules of `streamed` than its first one
    did, or in another order, before it gathers one, and at the end of one that calls no part of its chunk. They are
    gathered and reduced one by one, in collectives that would mix up those of ranks which run others, or wait for this
    rank's until their timeout."""

    def __init__(self, chunks: list[torch.nn.Module], streamed: set[torch.nn.Module]):
        self._function: object = None
        self._first: dict[tuple[int, bool], list[str]] = {}
        """Modules that the first call ran, and its end, by chunk, and whether it was to have a backward."""
        self._called, self._ran = False, [_END]
        for path, module in (each for chunk in chunks for each in chunk.named_modules()):
            if module in streamed:
                module.register_forward_pre_hook(lambda *_, path=path: self._run(path), prepend=True)
            if path.count(".") < 3:  # a forward step may call children or layers of a module of one's own one by one
                module.register_forward_pre_hook(lambda *_: setattr(self, "_called", True))

    def begin_flush(self, function: object) -> None:
        """A flush of this forward step function begins; another one may run another part of the model."""
        if function != self._function:
            self._function, self._first = function, {}

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        self._called, self._ran, self._kind = False, [], (chunk, torch.is_grad_enabled())

    def _run(self, module: str) -> None:
        if pytorch.in_backward() or self._ran[-1:] == [_END]:  # one alone, after a forward
            return
        self._ran.append(module)
        then = self._first.get(self._kind, self._ran)[len(self._ran) - 1]
        if module != then:
            raise FlushError(
                f"sync streaming: micro-batches run other layers of this chunk ({module} in place of {then}), so that"
                " ranks would mix up their parameters: let every micro-batch run every layer, as often and in one order"
                " (times 0, if it is not to count), or set sync to resident"
            )

    def end_forward(self, chunk: int, microbatch: int, output: object) -> None:
        if not self._called:
            raise FlushError(
                f"sync streaming: the forward step of micro-batch {microbatch} does not call the model, and other ranks"
                " would wait for its layers: call it (times 0, if it is not to count), or set sync to resident"
            )
        self._run(_END)
        self._first.setdefault(self._kind, self._ran)
