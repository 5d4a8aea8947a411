"""DeepSpeed's ZeRO under hooks of our own: its reducer, partitions and optimizer (deepspeed 0.19.8).

Why private names at all: ZeRO's own hooks assume that each backward follows its forward. They trace the order of
modules, gather and release per module, and count gradients per backward; in a pipeline several micro-batches are in
flight and all three go wrong (the first root forward even waits for ranks of another stage). The reducer, the
partitions and the optimizer under those hooks are sound; they are driven here.

DeepSpeed has no types: its engine and its optimizer are `Any`.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from megaaccum.upstream.adam import moments, optimizer_tensors, set_adam_step, views
from megaaccum.upstream.zero_partitions import Gather, partitioned, reduce_scatter, release, start_gather

_ACCUMULATORS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def tame_deepspeed() -> None:
    """Keep DeepSpeed from what it does at every start for nothing: its shared-memory sum, which it compiles on a CPU,
    and the text of ZeRO-3's arguments, with every parameter's numbers, that it makes and does not print (deepspeed
    0.19: `print_rank_0(f"... {locals()}", force=False)`), a third of a small model's start.

    Only `inference_all_reduce` uses the sum (deepspeed/comm/torch.py); for training it is half a minute of C++ at the
    first start, 70 MB of /dev/shm per rank, and, when a start is killed while it compiles, a lock file on which every
    later start waits for ever.
    """
    # As an attribute of deepspeed.comm, `torch` is the library itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    for name in ("stage3", "parameter_offload"):
        vars(importlib.import_module(f"deepspeed.runtime.zero.{name}"))["locals"] = dict  # hides Python's own there


EXPERTS = "megaaccum_experts"
"""The name of the experts' groups in DeepSpeed."""


def set_expert_ranks(
    params: list[torch.nn.Parameter],
    expert_parallel: torch.distributed.ProcessGroup,
    expert_data_parallel: torch.distributed.ProcessGroup,
) -> None:
    """Have ZeRO cut and reduce `params` over `expert_data_parallel`, and divide the sum by the whole data-parallel
    size. Call it before deepspeed.initialize.

    DeepSpeed 0.19 does that for experts of its own layers (AutoEP), which it knows by these attributes and by groups
    under a name (deepspeed.utils.groups); zero.Init reads the group of a parameter from it, and the reduction
    the divisor from its family. ZeRO-1 and -2 read the name alone (and zero12.separate_experts).
    """
    from deepspeed.utils import groups

    groups._EXPERT_PARALLEL_GROUP[EXPERTS] = expert_parallel
    groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS] = expert_data_parallel
    for param in params:
        marks: Any = param
        marks.group_name = EXPERTS
        marks.ds_zero_placement_family = "autoep_expert"
        marks.ds_zero_partition_group_name = EXPERTS
        marks.ds_zero_partition_process_group = expert_data_parallel


_BUCKETS_AHEAD = 3
"""Reductions that the host leaves under way when it has waited for one."""


class ZeroDriver(ABC):
    """A DeepSpeed engine's optimizer without DeepSpeed's hooks.

    optimizer: DeepSpeed's ZeRO optimizer. params: the trained parameters of this rank, in the module's order.
    """

    masters: list[torch.Tensor]
    """FP32 master weights of this rank, a flat tensor per group that the optimizer updates at once."""

    def __init__(self, engine: Any):
        self.optimizer = engine.optimizer
        self._offloads = bool(engine.zero_cpu_offload())
        """Whether the optimizer is in host memory."""
        self.params: list[torch.nn.Parameter] = [p for p in engine.module.parameters() if p.requires_grad]
        # The backend's own hooks decide in which backward a gradient is final.
        # Those of "leaf modules", which DeepSpeed makes of the experts of Mixtral and Qwen-MoE, hand all of a module's
        # gradients over in every backward.
        for hooks in (self.optimizer._grad_acc_hooks, getattr(self.optimizer, "_leaf_module_hooks", [])):
            for hook in hooks:
                hook.remove()
            hooks.clear()
        # `step` steps, whatever it thinks of the gradients: megaaccum has taken the norm and the verdict by then, over
        # all ranks at once. DeepSpeed's own come from one more pass over the gradients and several small collectives,
        # and its memory of a gradient that was dropped (`inf_or_nan_tracker` of stage 3, `local_overflow` of stages 1
        # and 2 with offload) would skip a later, good step.
        self.optimizer.check_overflow = lambda partition_gradients=True: None
        self.optimizer._get_norm_groups = lambda: [0.0]  # stage 3; a tensor would be read, and the host wait for it
        self.optimizer.compute_grad_norm = False  # stages 1 and 2

    @staticmethod
    def numel(param: torch.nn.Parameter) -> int:
        """Elements of the whole parameter."""
        return int(getattr(param, "ds_numel", param.numel()))

    def copied(self) -> list[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(parameter, tensor that an update makes from its master, offset of that in the flattened parameter)."""
        return [(param, param, 0) for param in self.params]

    def begin_reduction(self) -> None:  # noqa: B027 - nothing to do
        """Let the next gradients start a new sum."""

    def finish_reduction(self) -> None:
        """Reduce the last bucket and give the optimizer its partitions."""
        self.optimizer.independent_gradient_partition_epilogue()
        if self._offloads:
            # DeepSpeed copies gradients to pinned host memory in the background, and only its own step waits for the
            # copies; the norm, the loss scale and clipping read them before.
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Tensors that the engine holds now, by kind (observe/memory.py); one of two kinds counts for the first.
        DeepSpeed's step makes the flat gradients of a sub-group that its optimizer reads (`flat.grad`), beside the
        partitions."""
        averaged = [grad for grads in (self.optimizer.averaged_gradients or {}).values() for grad in grads or ()]
        state = [*self.masters, *optimizer_tensors(self.optimizer.optimizer)]
        # Those of ZeRO-1 and -2 may be added up beside `param.grad`.
        whole = [each for param in self.params for each in (param.grad, getattr(param, "grad_accum", None))]
        grads = [flat.grad for flat in self.masters if flat.grad is not None]
        shards, kept = ([], [*state, *grads]) if self._offloads else (grads, state)
        return {
            **self._held_parameters(),
            # Before gradients: those that were put into a bucket are views of it.
            "buffers": self._held_buckets(),
            "gradients_whole": [grad for grad in whole if grad is not None],
            "gradients_shard": [*self._held_accumulators(), *averaged, *shards],
            "host" if self._offloads else "optimizer": kept,
        }

    @abstractmethod
    def begin_partitions(self) -> None:
        """Empty this rank's partitions of the gradients, to be filled by hand instead of by DeepSpeed's reduction."""

    @abstractmethod
    def give_partitions(self) -> None:
        """Give the optimizer the partitions as this step's gradient."""

    @abstractmethod
    def _held_parameters(self) -> dict[str, Iterable[torch.Tensor]]: ...

    @abstractmethod
    def _held_buckets(self) -> list[torch.Tensor]: ...

    def _held_accumulators(self) -> list[torch.Tensor]:
        """Partitions of gradients that the optimizer does not have yet."""
        return []


class Zero3(ZeroDriver):
    """A ZeRO-3 engine under hooks of our own: gathers, reductions, and this rank's gradient partitions."""

    def __init__(self, engine: Any):
        from deepspeed.runtime.zero import parameter_offload, stage3

        super().__init__(engine)
        self.masters = self.optimizer.fp32_partitioned_groups_flat
        self._frozen = [param for param in engine.module.parameters() if not param.requires_grad]
        self.optimizer.parameter_offload._remove_module_hooks()
        for module in engine.module.modules():  # DeepSpeed's dict serves these hooks too, and breaks compiled graphs
            module._parameters = dict(module._parameters)
        parameter_offload.FWD_MODULE_STACK.remove(engine.module)  # for these hooks alone: it would keep every model
        self.optimizer.max_param_reduce_events = sys.maxsize  # `reduce` waits for them
        self.optimizer._partition_all_parameters = self.release_all  # DeepSpeed walks over all modules three times
        stage3.reduce_scatter_coalesced = reduce_scatter
        self._own = {id(param): _own_part(param) for param in self.params}
        accumulators = getattr(self.optimizer, _ACCUMULATORS)
        self._accumulators: dict[int, torch.Tensor] = {id(p): accumulators[partitioned(p).ds_id] for p in self.params}
        self.accumulated_bytes = int(self.optimizer.grad_partitions_flat_buffer.nbytes)
        """Bytes of all accumulators."""
        self._on_device = [] if self._offloads else list(self._padded_shards())
        self._coming = start_gather([])

    # --- parameters ---

    def copied(self) -> list[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """Whole parameters, which may be released, and partitions, into which DeepSpeed's GatheredParameters writes."""
        params = (*self.params, *self._frozen)
        parts = [(param, partitioned(param).ds_tensor, _own_part(param)[0]) for param in params]
        return [*((param, param, 0) for param in params), *parts]

    def apart(self) -> list[torch.nn.Parameter]:
        """Parameters that are not whole on this rank, those on their way included."""
        return [param for param in (*self.params, *self._frozen) if partitioned(param).ds_status.name != "AVAILABLE"]

    def gather(self, params: list[torch.nn.Parameter]) -> None:
        """Make `params` whole on this rank: one all-gather over the data-parallel group for all that are not yet."""
        self._coming.wait()
        self.start_gather(params).wait()

    def gather_ahead(self, params: list[torch.nn.Parameter]) -> None:
        """Begin to make `params` whole: the next `gather` or `release` waits for it."""
        self._coming.wait()
        self._coming = self.start_gather(params)

    def start_gather(self, params: list[torch.nn.Parameter]) -> Gather:
        """Begin to make `params` whole, those that are not yet. All ranks name the same ones in the same order."""
        return start_gather([param for param in params if not self.is_whole(param)])

    @staticmethod
    def is_whole(param: torch.nn.Parameter) -> bool:
        """Whether the parameter is gathered, or about to be."""
        return bool(partitioned(param).ds_status.name != "NOT_AVAILABLE")

    def release(self, params: list[torch.nn.Parameter]) -> None:
        """Free `params`; this rank's partitions stay."""
        self._coming.wait()
        release(params)

    def release_all(self) -> None:
        """Free every parameter that is whole."""
        self.release([param for param in (*self.params, *self._frozen) if self.is_whole(param)])

    # --- gradients ---

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Hand `param.grad` to the bucket; a full bucket is reduce-scattered and averaged over the group. The host
        waits once for three buckets, and stays three ahead; DeepSpeed's own wait is one for each."""
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads(param)
        under_way = self.optimizer.param_reduce_events
        if len(under_way) >= 2 * _BUCKETS_AHEAD:
            *_, last = [under_way.popleft() for _ in range(_BUCKETS_AHEAD)]
            last.synchronize()

    def discard(self) -> None:
        """Drop this step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish_reduction(self) -> None:
        """Reduce the last bucket and give the optimizer its partitions, with zeros as padding."""
        super().finish_reduction()
        for *_, padding in self._on_device or self._padded_shards():
            # DeepSpeed pads the last rank's share with uninitialised memory, which its own norm and Adam then read.
            if padding.numel():
                padding.zero_()

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(parameter, this rank's part of its reduced gradient as a flat view, offset of that part in elements)."""
        for param, shard, start, _ in self._on_device or self._padded_shards():
            yield param, shard, start

    def _padded_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, torch.Tensor]]:
        """Shards, and what pads them. They lie where DeepSpeed's `_get_fp32_grad_state_partition` finds them; that
        would wait for the reduction stream in each call, which the epilogue has done. On the device they are the same
        views in each step (`_on_device`)."""
        read = self._read_on_host if self._offloads else self.accumulator
        for param in self.params:
            start, count = self._own[id(param)]
            shard, padding = read(param).tensor_split((count,))
            yield param, shard, start, padding

    def _read_on_host(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The gradient that an optimizer in host memory reads, flat and padded."""
        group, position, count = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
        grad = self.masters[group].grad
        assert grad is not None, "the epilogue has made it"
        return cast("torch.Tensor", grad.narrow(0, position, count).view(-1))

    def accumulator(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's flat partition of the parameter's gradient, padded, in grad_accum_dtype. (With the optimizer in
        host memory it reads another one, which exists after `give_partitions`.)"""
        return self._accumulators[id(param)]

    def add_gradient(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add `grad` to `param.grad`, also while the parameter is released: its data has no elements then (DeepSpeed
        0.19), and torch accepts only a gradient of the data's shape, so it is shown one element in the whole shape."""
        if param.grad is not None:
            param.grad.add_(grad)
            return
        grad = grad.to(param.grad_dtype or grad.dtype)
        data = param.data
        param.data = data.new_empty(()).expand(partitioned(param).ds_shape)
        param.grad = grad
        param.data = data

    def begin_partitions(self) -> None:
        """Empty the accumulators; what is then added to them by hand replaces DeepSpeed's own reduction."""
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def give_partitions(self) -> None:
        """Give the optimizer the accumulators as this step's gradient."""
        if self._offloads:
            self.optimizer._offload_boundary_param_ids.update(partitioned(param).ds_id for param in self.params)
            self.optimizer._finalize_offload_gradient_accumulation()
        super().finish_reduction()

    # --- state ---

    def state(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """(parameter, offset of this rank's part, flat views {"param": FP32 master, "exp_avg": ..., "exp_avg_sq": ...})
        of everything that training changes. Moments that do not exist yet are made, as zeros. A frozen parameter has
        {"param": weight}."""
        for param in self.params:
            group, position, _ = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
            start, count = self._own[id(param)]
            master, adam = self.masters[group], self.optimizer.optimizer
            yield param, start, views(adam, master, moments(adam, param), position, count)
        for param in self._frozen:
            start, count = _own_part(param)
            yield param, start, {"param": partitioned(param).ds_tensor.detach().view(-1)[:count]}

    def adopt_state(self, num_steps: int) -> None:
        """Make the contents of the views of `state` the weights after `num_steps` optimizer steps."""
        self.release_all()  # of before
        set_adam_step(self.optimizer.optimizer, self.masters, num_steps)
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def _held_parameters(self) -> dict[str, Iterable[torch.Tensor]]:
        # Shards first: a gathered parameter that no other rank shares is a view of its shard.
        shards = [partitioned(param).ds_tensor for param in self.params]
        return {"parameters_shard": shards, "parameters_whole": self.params}

    def _held_buckets(self) -> list[torch.Tensor]:
        return [bucket.buffer for bucket in self.optimizer.ipg_buckets.values() if bucket.buffer is not None]

    def _held_accumulators(self) -> list[torch.Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]


def _own_part(param: torch.nn.Parameter) -> tuple[int, int]:
    """Start and number of the elements of this rank's part of a ZeRO-3 parameter, without padding."""
    marks = partitioned(param)
    start = torch.distributed.get_rank(marks.ds_process_group) * marks.partition_numel()
    return start, max(0, min(marks.partition_numel(), marks.ds_numel - start))
