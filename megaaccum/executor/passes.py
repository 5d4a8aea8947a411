"""How one micro-batch goes through one chunk, forward and backward, and how a fused pair of them does.

`ModulePasses` call the model and autograd; every model has them. `PlanPasses` run Megatron-core's schedule plans (its
combined 1F1B, `overlap_moe_expert_parallel_comm`): a plan is a chunk's forward cut into nodes, so that the two passes
of a pair interleave layer by layer, and the all-to-all of experts of one runs under the compute of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comp_stream, set_streams
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megaaccum.distributed.groups import default_collection
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.upstream import megatron

FusedPass = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs a fused pair: called with two functions that run the forward and the backward, each of which sends its
result when it is done. It has to call both once; it may do so on streams or threads of its own."""

Send = Callable[[torch.Tensor], None]
"""Called with a pass' result, once, as soon as it is there."""


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of a forward_backward_func, by Megatron's names, and the executor's own.

    seq_lengths: tokens per sequence of each micro-batch, on every rank of the pipeline, with `variable_seq_lengths`.
    backend: the sharding backend of these chunks; default: that of chunks that carry one (`sharding_backend`).
    defer_weight_grads: whether weight gradients wait for the schedule's W; false for callers that look at single
    micro-batches. p2p_communicator is not used: messages travel over channels of our own, so that receives can be
    posted ahead.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None]
    model: torch.nn.Module | Sequence[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False
    seq_lengths: Sequence[int] | None = None
    backend: Any = None
    defer_weight_grads: bool = True
    chunks: list[torch.nn.Module] = field(init=False)
    iterators: Sequence[Iterator[Any] | None] = field(init=False)
    config: Any = field(init=False)
    reports: list[Any] = field(default_factory=list, init=False)
    """Reports of the loss functions, in the order of the forwards."""

    def __post_init__(self) -> None:
        self.chunks = [self.model] if isinstance(self.model, torch.nn.Module) else list(self.model)
        self.config = get_model_config(self.chunks[0])
        self.pg_collection = self.pg_collection or default_collection()
        self.backend = self.backend or getattr(self.chunks[0], "sharding_backend", None)
        self.iterators = self.data_iterator if isinstance(self.data_iterator, Sequence) else [self.data_iterator]
        if len(self.iterators) != len(self.chunks):
            raise ConfigError(
                f"{len(self.iterators)} data iterators for {len(self.chunks)} model chunks: give a list, one per chunk"
            )


@dataclass(slots=True, kw_only=True)
class Forward:
    """A forward that can start. received: the stage's input, None on the first. last_stage: its output is the loss,
    which is not sent."""

    chunk: int
    microbatch: int
    received: torch.Tensor | None
    last_stage: bool
    send: Send


@dataclass(slots=True, kw_only=True)
class Saved:
    """Whatever the backward needs of its forward. plan, loss: of PlanPasses, the
    schedule plan and a node that the loss was computed in."""

    received: torch.Tensor | None
    output: torch.Tensor
    plan: Any = None
    loss: Any = None


@dataclass(slots=True, kw_only=True)
class Backward:
    """A backward that can start. grad: of the output, None for the loss. send: takes the gradient of the input; not
    called on the first stage."""

    saved: Saved
    grad: torch.Tensor | None
    send: Send

    def hand_on(self, grad: torch.Tensor | None) -> None:
        """Send the input's gradient. A chunk that does not depend on its input (frozen, or a model's fault) sends
        zeros: others wait for it."""
        if (received := self.saved.received) is not None:
            self.send(torch.zeros_like(received) if grad is None else grad)


Forwarded = tuple[Saved, torch.Tensor | None]
"""The tensors that a forward saves for its backward, and its number of tokens, which only the last stage counts."""


class ModulePasses:
    """Through the module, and back by autograd. at_once: the caller may run a forward and a backward at once."""

    def __init__(self, call: Call, *, at_once: bool):
        self._call, self._at_once = call, at_once
        self._side_losses = megatron.scales_side_losses(call.config)

    def forward(self, at: Forward) -> Forwarded:
        """Megatron's forward_step (megatron-core 0.19), but that the output leaves before anything else is done."""
        call, model = self._call, self._call.chunks[at.chunk]
        if call.config.timers is not None:
            call.config.timers("forward-compute", log_level=2).start()
        get_attr_wrapped_model(model, "set_input_tensor")([at.received])
        dtype = call.config.autocast_dtype
        autocast = torch.autocast("cuda", dtype=dtype) if call.config.enable_autocast else nullcontext()
        with nullcontext() if self._at_once else wgrad.forward_pass(), autocast:
            output, loss_func = call.forward_step_func(call.iterators[at.chunk], model)
        if not at.last_stage:
            at.send(output.detach())
        num_tokens = None
        if at.last_stage or self._side_losses or call.config.timers is not None:
            output, num_tokens = _calc_loss(call, at, output, loss_func)
        return Saved(received=at.received, output=output), num_tokens

    def backward(self, at: Backward) -> None:
        config, output = self._call.config, at.saved.output
        if at.grad is None and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        if output.requires_grad and output.numel() == 1 and config.deallocate_pipeline_outputs:
            schedules.custom_backward(output, at.grad)
        elif output.requires_grad:
            torch.autograd.backward(output, grad_tensors=at.grad)
        at.hand_on(None if at.saved.received is None else at.saved.received.grad)


class PlanPasses:
    """Through Megatron-core's schedule plans (0.19: combined_1f1b). forward_step_func is called with
    `return_schedule_plan=True` and gives (the model's build_schedule_plan(...), loss_func), as Megatron's does.

    Raises ConfigError for a model without schedule plans.
    """

    def __init__(self, call: Call):
        self._call = call
        if any(not hasattr(_unwrapped(model), "build_schedule_plan") for model in call.chunks):
            raise ConfigError(
                "overlap_moe_expert_parallel_comm runs a model's schedule plan, and"
                f" {type(_unwrapped(call.chunks[0])).__name__} has no build_schedule_plan: set it to false"
            )
        megatron.mend_schedules()
        set_streams(high_priority=bool(getattr(call.config, "high_priority_a2a_comm_stream", False)))

    def forward(self, at: Forward) -> Forwarded:
        return cast(Forwarded, self._run(at, None))

    def backward(self, at: Backward) -> None:
        self._run(None, at)

    def pair(self, forward: Forward, backward: Backward) -> Forwarded:
        """Both at once, layer by layer."""
        return cast(Forwarded, self._run(forward, backward))

    def _run(self, forward: Forward | None, backward: Backward | None) -> Any:
        plan: Any = None
        past: dict[str, Any] = {"b_schedule_plan": None}
        if forward is not None:
            plan, loss_func = self._plan(forward)
        if backward is not None:
            past = {
                "b_schedule_plan": backward.saved.plan, "b_grad": self._grad(backward),
                "post_backward": lambda grad, _: backward.hand_on(grad),
            }  # fmt: skip
        output = type(plan or backward.saved.plan).run(  # type: ignore[union-attr]
            plan,
            **past,
            post_forward=None if forward is None or forward.last_stage else lambda it, _: forward.send(it.detach()),
        )
        return None if forward is None else self._output(forward, plan, loss_func, output)

    def _plan(self, at: Forward) -> Any:
        """The micro-batch's forward as a plan, and its loss function."""
        call, model = self._call, cast(Any, self._call.chunks[at.chunk])
        get_attr_wrapped_model(model, "set_input_tensor")([at.received])
        return call.forward_step_func(call.iterators[at.chunk], _unwrapped(model), return_schedule_plan=True)

    def _output(self, at: Forward, plan: Any, loss_func: Callable[..., Any], output: torch.Tensor) -> Forwarded:
        # A node of its own: a plan's backward starts at the output of its last node, and does not know the loss.
        node = ScheduleNode(loss_func, get_comp_stream, plan.event, name="loss_func")
        result, num_tokens = _calc_loss(self._call, at, output, node.forward)
        return Saved(received=at.received, output=result, plan=plan, loss=node), num_tokens

    def _grad(self, at: Backward) -> torch.Tensor:
        """The gradient of the plan's output: the received one, or the loss' own."""
        if at.grad is not None:
            return at.grad
        scale, loss = self._call.config.grad_scale_func, at.saved.output
        torch.autograd.backward(loss if scale is None else scale(loss))
        return cast(torch.Tensor, at.saved.loss.get_grad())


def announce(call: Call, chunk: int, microbatch: int, *, first: bool) -> None:
    """Tell a chunk which micro-batch comes; its input need not be there yet. first: in the flush."""
    model: Any = call.chunks[chunk]
    is_first = schedules.check_first_val_step(call.first_val_step, call.forward_only, first)
    if is_first and hasattr(model, "set_is_first_microbatch"):
        model.set_is_first_microbatch()
    schedules.set_current_microbatch(model, microbatch)


def _calc_loss(
    call: Call, at: Forward, output: torch.Tensor, loss_func: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss on the last stage, where it is reported, and its tokens; the scales of side losses on every one."""
    model = call.chunks[at.chunk]
    return cast(tuple[torch.Tensor, torch.Tensor], schedules.forward_step_calc_loss(
        model, output, loss_func, call.config, getattr(model, "vp_stage", None), call.collect_non_loss_data,
        call.num_microbatches, call.reports, call.pg_collection.cp.size(), at.last_stage,
    ))  # fmt: skip


def _unwrapped(model: Any) -> Any:
    """The module that has the schedule plan, inside its wrappers (Megatron's Float16Module,
    DistributedDataParallel)."""
    while not hasattr(model, "build_schedule_plan") and hasattr(model, "module"):
        model = model.module
    return model
