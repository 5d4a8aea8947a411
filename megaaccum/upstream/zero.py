"""DeepSpeed's ZeRO under hooks of our own: its reducer, partitions and optimizer (deepspeed 0.19.8).

Why private names at all: ZeRO's own hooks assume that each backward follows its forward. They trace the order of
modules, gather and release per module, and count gradients per backward; in a pipeline several micro-batches are in
flight and all three go wrong (the first root forward even waits for ranks of another stage). The reducer, the
partitions and the optimizer under those hooks are sound, and those are what is driven here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megaaccum.upstream.adam import optimizer_tensors, set_adam_step, views

_STAGE3 = (
    "_get_norm_groups",
    "check_overflow",
    "_reassign_or_swap_out_partitioned_parameters",
    "independent_gradient_partition_epilogue",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "set_gradient_accumulation_boundary",
    "_finalize_offload_gradient_accumulation",
)


_ACCUMULATORS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


_STAGE12 = (
    "check_overflow",
    "independent_gradient_partition_epilogue",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "set_gradient_accumulation_boundary",
    "setup_buckets",
    "update_lp_params",
    "_fill_param_grad_accum_attribute",
)


_STAGE3_ATTRIBUTES = (
    "_grad_acc_hooks",
    "parameter_offload",
    "micro_step_id",
    "averaged_gradients",
    "grad_position",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "_offload_boundary_param_ids",
    "__param_id_to_grad_partition",
)


_STAGE12_ATTRIBUTES = (
    "compute_grad_norm",
    "_grad_acc_hooks",
    "averaged_gradients",
    "params_in_partition",
    "use_grad_accum_attribute",
    "grad_start_offset",
    "grad_partition_insertion_offset",
    "grad_position",
    "single_partition_of_fp32_groups",
)


def check() -> list[str]:
    """Names that this version of DeepSpeed lacks, as sentences; empty when all is well."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    problems = [] if hasattr(_deepspeed_backend(), "build_shm_op") else ["deepspeed.comm.torch.build_shm_op is missing"]
    for cls, methods, attributes in (
        (DeepSpeedZeroOptimizer_Stage3, _STAGE3, _STAGE3_ATTRIBUTES),
        (DeepSpeedZeroOptimizer, _STAGE12, _STAGE12_ATTRIBUTES),
        (DeepSpeedZeRoOffload, ("_remove_module_hooks",), ()),
    ):
        source = inspect.getsource(cls)
        problems += [f"{cls.__name__}.{name} is missing" for name in methods if not hasattr(cls, name)]
        problems += [f"{cls.__name__}.{name} is missing" for name in attributes if f"self.{name}" not in source]
    return problems + _check_experts()


def _check_experts() -> list[str]:
    """Check what `place_experts` leans on."""
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.utils import groups

    names = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")
    problems = [f"deepspeed.utils.groups.{name} is missing" for name in names if not hasattr(groups, name)]
    if "ds_zero_partition_process_group" not in inspect.getsource(partition_parameters.Init):
        problems.append("zero.Init does not read ds_zero_partition_process_group")
    if "autoep_expert" not in inspect.getsource(DeepSpeedZeroOptimizer_Stage3):
        problems.append("ZeRO-3 does not know the placement family autoep_expert")
    return problems


def _deepspeed_backend() -> Any:
    """The module deepspeed.comm.torch; as an attribute of deepspeed.comm that name is the torch library itself."""
    return importlib.import_module("deepspeed.comm.torch")


def without_shared_memory_operator() -> None:
    """Keep DeepSpeed from compiling its shared-memory sum at every start on a CPU.

    Only `inference_all_reduce` uses it (deepspeed/comm/torch.py); for training it is half a minute of C++ at the first
    start, 70 MB of /dev/shm per rank, and, when a start is killed while it compiles, a lock file on which every later
    start waits for ever.
    """
    _deepspeed_backend().build_shm_op = lambda: None


_EXPERTS = "megaaccum_experts"


def place_experts(
    params: list[torch.nn.Parameter],
    expert_parallel: torch.distributed.ProcessGroup,
    expert_data_parallel: torch.distributed.ProcessGroup,
) -> None:
    """Have ZeRO-3 cut and reduce `params` over `expert_data_parallel`, and divide the sum by the whole data-parallel
    size. Before deepspeed.initialize.

    DeepSpeed 0.19 does that for experts of its own layers (AutoEP), which it knows by these attributes and by groups
    under a name (deepspeed.utils.groups); zero.Init reads the group of a parameter from it, and the reduction
    the divisor from its family.
    """
    from deepspeed.utils import groups

    groups._EXPERT_PARALLEL_GROUP[_EXPERTS] = expert_parallel
    groups._EXPERT_DATA_PARALLEL_GROUP[_EXPERTS] = expert_data_parallel
    for param in params:
        marks: Any = param
        marks.group_name = _EXPERTS
        marks.ds_zero_placement_family = "autoep_expert"
        marks.ds_zero_partition_group_name = _EXPERTS
        marks.ds_zero_partition_process_group = expert_data_parallel


class Zero3:
    """The parts of a ZeRO-3 engine that the boundary drives: gather, reduce, and this rank's gradient partitions."""

    def __init__(self, engine):
        self.optimizer = engine.optimizer
        self.params = [param for param in engine.module.parameters() if param.requires_grad]
        self._frozen = [param for param in engine.module.parameters() if not param.requires_grad]
        remove_hooks(self.optimizer)
        leave_verdict_to_us(self.optimizer)
        self.optimizer.parameter_offload._remove_module_hooks()
        self._handed_over: set[int] = set()
        self._own = {id(param): _own_part(param) for param in self.params}
        self._ahead: tuple[list[torch.nn.Parameter], Any] = [], _Nothing()
        """Parameters that are on their way, and what `wait` is called on."""

    def apart(self) -> list[torch.nn.Parameter]:
        """Parameters that are not whole on this rank, those on their way included."""
        ahead = {id(param) for param in self._ahead[0]}
        every = (*self.params, *self._frozen)
        return [param for param in every if id(param) in ahead or not self.is_whole(param)]

    def gather(self, params: list[torch.nn.Parameter]) -> None:
        """Make `params` whole on this rank: one all-gather over the data-parallel group for all that are not yet."""
        self._arrive()
        self.start_gather(params).wait()

    def gather_ahead(self, params: list[torch.nn.Parameter]) -> None:
        """Begin to make `params` whole: the next `gather` or `release` waits for it."""
        self._arrive()
        self._ahead = [param for param in params if not self.is_whole(param)], self.start_gather(params)

    def _arrive(self) -> None:
        (_, coming), self._ahead = self._ahead, ([], _Nothing())
        coming.wait()

    def begin_reduction(self) -> None:
        """Let the next gradients start a new sum (`micro_step_id` 0 copies into the partitions, above 0 adds)."""
        self._handed_over.clear()
        self.optimizer.micro_step_id = 0
        self.optimizer.set_gradient_accumulation_boundary(True)

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Hand `param.grad` to the bucket; a full bucket is reduce-scattered and averaged over the group."""
        self._handed_over.add(id(param))
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads(param)

    def handed_over(self) -> set[int]:
        """ids of the parameters whose gradient was handed over since begin_reduction."""
        return self._handed_over

    def discard(self) -> None:
        """Drop this step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.averaged_gradients = {}

    def finish_reduction(self) -> None:
        """Reduce the last bucket and give the optimizer its partitions."""
        self.optimizer.independent_gradient_partition_epilogue()
        wait_for_copies(self.optimizer.offload_optimizer)
        for param, shard, _ in self._padded_shards():
            # DeepSpeed pads the last rank's share with uninitialised memory, which its own norm and Adam then read.
            if shard.numel() > (count := self._own[id(param)][1]):
                shard[count:].zero_()

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(parameter, this rank's part of its reduced gradient as a flat view, offset of that part in elements)."""
        for param, shard, start in self._padded_shards():
            yield param, shard[: self._own[id(param)][1]], start

    def state(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """(parameter, offset of this rank's part, flat views {"param": FP32 master, "exp_avg": ..., "exp_avg_sq": ...})
        of everything that training changes. Moments that do not exist yet are made, as zeros. Of a frozen parameter,
        {"param": weight}."""
        for param in self.params:
            group, position, _ = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
            flat, (start, count) = self.optimizer.fp32_partitioned_groups_flat[group], self._own[id(param)]
            yield param, start, views(self.optimizer.optimizer, flat, position, count)
        for param in self._frozen:
            start, count = _own_part(param)
            yield param, start, {"param": param.ds_tensor.detach().view(-1)[:count]}  # type: ignore[attr-defined]

    def adopt_state(self, num_steps: int) -> None:
        """Take what was written into the views of `state` as the weights after `num_steps` optimizer steps."""
        self.release([param for param in (*self.params, *self._frozen) if self.is_whole(param)])  # of before
        set_adam_step(self.optimizer.optimizer, self.optimizer.fp32_partitioned_groups_flat, num_steps)
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def start_gather(self, params: list[torch.nn.Parameter]):
        """Begin to make `params` whole, those that are not yet, by one all-gather. Returns what `wait` is called on."""
        missing = [param for param in params if not self.is_whole(param)]
        return missing[0].all_gather_coalesced(missing) if missing else _Nothing()  # type: ignore[attr-defined]

    @staticmethod
    def is_whole(param: torch.nn.Parameter) -> bool:
        """Whether the parameter is gathered, or about to be."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        return param.ds_status != ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]

    def release(self, params: list[torch.nn.Parameter]) -> None:
        """Free what is whole of `params`; this rank's partitions stay."""
        self._arrive()
        if params:
            params[0].partition(params)  # type: ignore[attr-defined]

    def accumulator(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's flat partition of the parameter's gradient, padded, in grad_accum_dtype. (With the optimizer in
        host memory it reads another one, which exists after `finish_accumulation`.)"""
        return getattr(self.optimizer, _ACCUMULATORS)[param.ds_id]  # type: ignore[attr-defined]

    def add_gradient(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add `grad` to `param.grad`, also while the parameter is released: its data has no elements then (DeepSpeed
        0.19), and torch takes only a gradient of the data's shape, so it is shown one element in the whole shape."""
        grad = grad.to(param.grad_dtype or param.dtype)
        if param.grad is not None:
            param.grad.add_(grad)
            return
        data = param.data
        param.data = data.new_empty(()).expand(param.ds_shape)  # type: ignore[attr-defined]
        param.grad = grad
        param.data = data

    def begin_accumulation(self) -> None:
        """Empty the accumulators; what is then added to them by hand replaces DeepSpeed's own reduction."""
        self.optimizer.grad_partitions_flat_buffer.zero_()
        self.optimizer.set_gradient_accumulation_boundary(True)

    @property
    def accumulated_bytes(self) -> int:
        """Of all accumulators."""
        return self.optimizer.grad_partitions_flat_buffer.nbytes

    def finish_accumulation(self) -> None:
        """Give the optimizer the accumulators as this step's gradient."""
        if self.optimizer.offload_optimizer:
            self.optimizer._offload_boundary_param_ids.update(p.ds_id for p in self.params)  # type: ignore[attr-defined]
            self.optimizer._finalize_offload_gradient_accumulation()
        self.optimizer.independent_gradient_partition_epilogue()
        wait_for_copies(self.optimizer.offload_optimizer)

    def _padded_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """Where DeepSpeed's `_get_fp32_grad_state_partition` finds them, without its wait for the reduction stream in
        each call: the epilogue has waited."""
        for param in self.params:
            if self.optimizer.offload_optimizer:
                group, position, count = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
                shard = self.optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, position, count)
            else:
                shard = self.accumulator(param)
            yield param, shard.view(-1), self._own[id(param)][0]

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Bytes that the engine holds now, by kind. DeepSpeed's step makes the flat gradients of a sub-group that
        its optimizer reads (`flat.grad`), beside the partitions."""
        zero = self.optimizer
        flats = [*zero.fp32_partitioned_groups_flat]
        averaged = [grad for grads in (zero.averaged_gradients or {}).values() for grad in grads or ()]
        state = [*flats, *optimizer_tensors(zero.optimizer)]
        grads = [flat.grad for flat in flats if flat.grad is not None]
        return {
            # First: a gathered parameter that no other rank shares is a view of its shard.
            "parameters_shard": [param.ds_tensor for param in self.params],  # type: ignore[attr-defined]
            "parameters_whole": self.params,
            # Before gradients: those that were put into a bucket are views of it.
            "buffers": [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None],
            "gradients_whole": [param.grad for param in self.params if param.grad is not None],
            "gradients_shard": [
                zero.grad_partitions_flat_buffer,
                *averaged,
                *([] if zero.offload_optimizer else grads),
            ],
            "host" if zero.offload_optimizer else "optimizer": state + (grads if zero.offload_optimizer else []),
        }

    @staticmethod
    def numel(param: torch.nn.Parameter) -> int:
        return param.ds_numel  # type: ignore[attr-defined]


class _Nothing:
    """A gather that is done."""

    def wait(self) -> None:
        pass


def _own_part(param) -> tuple[int, int]:
    """Offset and number of the elements of this rank's part of a ZeRO-3 parameter, padding left out."""
    start = torch.distributed.get_rank(param.ds_process_group) * param.partition_numel()
    return start, max(0, min(param.partition_numel(), param.ds_numel - start))


def wait_for_copies(offloaded: bool) -> None:
    """DeepSpeed's copies of gradients to pinned host memory go on when its epilogue returns, and only its own step
    would wait for them: the norm, the loss scale and clipping read them before."""
    if offloaded:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize()


def remove_hooks(optimizer) -> None:
    """Take DeepSpeed's gradient hooks off: the boundary's own decide in which backward a gradient is final."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()


def leave_verdict_to_us(optimizer) -> None:
    """Let `optimizer.step()` step, whatever it thinks of the gradients.

    megaaccum has taken the norm and the verdict by then, over all ranks at once. DeepSpeed's own come from one pass
    more over the gradients and several small collectives, and what it remembers of a gradient that was dropped
    (`inf_or_nan_tracker` of stage 3, `local_overflow` of stages 1 and 2 with offload) would skip a later, good step.
    """
    optimizer.check_overflow = lambda partition_gradients=True: None
    optimizer._get_norm_groups = lambda: [0.0]  # stage 3; a tensor would be read, and the host wait for it
    optimizer.compute_grad_norm = False  # stages 1 and 2
