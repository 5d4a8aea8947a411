"""Names of Transformer Engine that it does not document.

Written against transformer-engine 2.20.2; each function states why no public name serves. `check()` looks
every name up. Transformer Engine (TE here) is imported inside functions: most runs have none. It has no types, so that
its modules and states are `Any`.

Why private names at all: TE moves the histories of delayed scaling when the outermost autocast region of the process
ends, and when the first FP8 module of that region has ended its backward, for all modules of the process at once. With
two model chunks on a rank every region of one chunk also rolls a row of zeros into the histories of the other;
recomputed layers open regions of their own; and if backwards do not come in the order of forwards, a layer that is
computed again uses another micro-batch's scales.
"""

from __future__ import annotations

import inspect
import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch

from megaaccum.upstream.lookup import missing

_UPDATE = "reduce_and_update_fp8_tensors"
_RECOMPUTE = "fp8_tensors_recompute_buffer"
_STATES = ("scale", "amax_history")

Scales = deque[Any]
"""TE's queue of the scales with which a module's forwards were made."""
Products = queue.Queue[Any]
"""TE's queue of (operands, product) of weight gradients that are computed later."""


def check() -> list[str]:
    """Names that the installed version of Transformer Engine lacks, as sentences; empty when all is well."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    problems = missing("te")
    if "self.wgrad_store.pop()" not in inspect.getsource(TransformerEngineBaseModule.backward_dw):
        problems.append("TransformerEngineBaseModule.backward_dw does not pop its wgrad_store")
    return problems


def state_manager() -> Any:
    """TE's class that holds the FP8 state of this process."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


# --- histories -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Histories:
    """TE's state of the modules of one chunk: their newest largest values, their histories and their
    scales, in lists by direction and recipe. Field names are those of TE's FP8GlobalState."""

    global_amax_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def use(self) -> None:
        """Let TE see these modules alone: it registers new ones here, and updates no others."""
        state = state_manager().quantization_state
        for each in fields(self):
            setattr(state, each.name, getattr(self, each.name))


def stop_updates() -> Callable[[bool], None]:
    """Stop TE from updating histories and scales. Returns TE's own update, called with `forward` (or
    backward) and works on the modules of the Histories in use; with several ranks it is collective over the group of
    their autocast region (a MAX all-reduce)."""
    manager = state_manager()
    if not hasattr(manager, "_megaaccum_update"):
        manager._megaaccum_update = getattr(manager, _UPDATE)
        setattr(manager, _UPDATE, classmethod(lambda cls, forward=True: None))
    return cast("Callable[[bool], None]", manager._megaaccum_update)


def begin_recompute(like: list[Scales]) -> None:
    """Let TE put the scales of a micro-batch into queues of their own; call it before a forward whose layers may be
    computed again. TE has one queue per module, and would return scales in the order of the forwards."""
    setattr(state_manager().quantization_state, _RECOMPUTE, [deque() for _ in like])


def recompute_queues() -> list[Scales]:
    """The queues that TE uses now: one per module that may be computed again."""
    return cast("list[Scales]", getattr(state_manager().quantization_state, _RECOMPUTE))


def use_recompute(queues: list[Scales]) -> None:
    """Let TE read the scales for layers that are computed again from `queues`; call it before a backward."""
    setattr(state_manager().quantization_state, _RECOMPUTE, queues)


def make_states(chunk: torch.nn.Module) -> None:
    """Make the state of delayed scaling of each module of `chunk`, as its first forward would, so that a checkpoint can
    be read into it. The region is Megatron's own, so recipe and group are those of the forward."""
    from megatron.core.fp8_utils import get_fp8_context

    with get_fp8_context(chunk.config):
        for _, module in _quantizing(chunk):
            module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))


def states(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(MODULE/scale_fwd and so on, tensor) of all that delayed scaling keeps between micro-batches in `chunk`: per
    module, for forward and backward, scale [slots] and amax_history [rows, slots], FP32 on the device. Empty for other
    recipes. The tensors are the same objects as long as the module lives."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    for name, module in _quantizing(chunk):
        for way in ("fwd", "bwd"):
            state = module.fp8_meta.get(f"scaling_{way}")
            if isinstance(state, DelayedScalingRecipeState):
                for kind in _STATES:
                    yield f"{name}/{kind}_{way}", getattr(state, kind)


def _quantizing(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """TE's modules with weights. (Its attention keeps states as well, but quantizes nothing here.)"""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for name, module in chunk.named_modules():
        if isinstance(module, TransformerEngineBaseModule) and any(True for _ in module.parameters(recurse=False)):
            yield name, module


# --- weight gradients ------------------------------------------------------------------------------------------------


def delayed_modules(chunk: torch.nn.Module) -> list[Any]:
    """Modules of `chunk` whose backward leaves the weight gradient to a later `backward_dw()` (delay_wgrad_compute),
    in the order of a backward: the last of the model first."""
    modules: list[Any] = list(chunk.modules())
    found = [module for module in modules if getattr(module, "wgrad_store", None) is not None]
    return [module for module in reversed(found) if hasattr(module, "need_backward_dw") and module.need_backward_dw()]


def pop_delayed(module: Any) -> Products | None:
    """The products that the last backward through `module` left for `backward_dw`, or None; the module starts an empty
    queue. TE has one queue for all micro-batches, so that they could only be worked off in the order of their
    backwards."""
    left: Products = module.wgrad_store.context
    if left.empty():
        return None
    module.wgrad_store.context = queue.Queue()
    return left


def operands_of(left: Products) -> Iterator[torch.Tensor]:
    """The tensors that a result of `pop_delayed` holds."""
    for operands, _ in left.queue:
        yield from (each for each in operands if isinstance(each, torch.Tensor))


def delayed_gradients(module: Any, left: Products) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Compute the gradients of a result of `pop_delayed`. Returns (parameter, gradient) and leaves every `.grad` as it
    was.

    `backward_dw` writes to `.grad` what it computed: over a weight's, and to a bias only where there is none. So both
    are put aside, with the precision that they are held to.
    """
    params = [param for param in module.parameters(recurse=False) if param.requires_grad]
    before = [(param.grad, param.grad_dtype) for param in params]
    waiting = module.wgrad_store.context
    try:
        for param in params:
            param.grad = None
            param.grad_dtype = None  # any
        module.wgrad_store.context = left
        module.backward_dw()
        return [(param, param.grad) for param in params if param.grad is not None]
    finally:
        module.wgrad_store.context = waiting
        for param, (grad, dtype) in zip(params, before, strict=True):
            param.grad = None
            param.grad_dtype = dtype
            param.grad = grad
