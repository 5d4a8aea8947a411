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
        _remove_hooks(self.optimizer)
        _leave_verdict_to_us(self.optimizer)
        self.optimizer.parameter_offload._remove_module_hooks()
        self._handed_over: set[int] = set()
        self._own = {id(param): _own_part(param) for param in self.params}

    def apart(self) -> list[torch.nn.Parameter]:
        """Parameters that are not whole on this rank."""
        return [param for param in (*self.params, *self._frozen) if not self.is_whole(param)]

    def gather(self, params: list[torch.nn.Parameter]) -> None:
        """Make `params` whole on this rank: one all-gather over the data-parallel group for all that are not yet."""
        self.start_gather(params).wait()

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
        _wait_for_copies(self.optimizer.offload_optimizer)
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
        self.release([param for param in self._frozen if self.is_whole(param)])
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

    def finish_accumulation(self) -> None:
        """Give the optimizer the accumulators as this step's gradient."""
        if self.optimizer.offload_optimizer:
            self.optimizer._offload_boundary_param_ids.update(p.ds_id for p in self.params)  # type: ignore[attr-defined]
            self.optimizer._finalize_offload_gradient_accumulation()
        self.optimizer.independent_gradient_partition_epilogue()
        _wait_for_copies(self.optimizer.offload_optimizer)

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


class Zero12:
    """The same for ZeRO-1 and ZeRO-2, whose parameters are whole on every rank."""

    def __init__(self, engine, accumulate_in: torch.dtype):
        self.optimizer = engine.optimizer
        self.params = [param for param in engine.module.parameters() if param.requires_grad]
        self._handed_over: set[int] = set()
        self.optimizer.gradient_accumulation_dtype = accumulate_in  # see zero1_config
        self._group_of = {id(p): i for i, group in enumerate(self.optimizer.bit16_groups) for p in group}
        _remove_hooks(self.optimizer)
        _leave_verdict_to_us(self.optimizer)
        if self.optimizer.gradient_accumulation_dtype != self.optimizer.dtype:
            # Stage 2 would round the FP32 sum of the micro-batches to 16 bit on its way into the bucket; stage 1 keeps
            # it in `grad_accum`, and stage 2 does the same when told to.
            self.optimizer.use_grad_accum_attribute = True
            for param in self.params:
                param.grad_accum = None  # type: ignore[attr-defined]

    def apart(self) -> list[torch.nn.Parameter]:
        """None: parameters are whole on every rank."""
        return []

    def release(self, params: list[torch.nn.Parameter]) -> None:
        """Nothing to do."""

    def gather(self, params: list[torch.nn.Parameter]) -> None:
        """Nothing to do: ZeRO-1 and -2 gather the new parameters at the end of the optimizer's step."""

    def begin_reduction(self) -> None:
        self._handed_over.clear()
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.setup_buckets()

    def handed_over(self) -> set[int]:
        """ids of the parameters whose gradient was handed over since begin_reduction."""
        return self._handed_over

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Hand `param.grad` to the bucket; a full bucket is reduced to its owner and averaged over the group."""
        self._handed_over.add(id(param))
        if self.optimizer.use_grad_accum_attribute:
            self.optimizer._fill_param_grad_accum_attribute(param)
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, self._group_of[id(param)])

    def finish_reduction(self) -> None:
        self.optimizer.independent_gradient_partition_epilogue()
        _wait_for_copies(self.optimizer.cpu_offload)

    def cuts(self, param: torch.nn.Parameter) -> list[tuple[int, int]]:
        """[start, stop) of the part of the flattened parameter that each data-parallel rank owns."""
        group, key = self._group_of[id(param)], self.optimizer.get_param_id(param)
        found, width = [], self.optimizer.partition_size[group]
        for rank, starts in self.optimizer.grad_start_offset[group].items():
            start = int(starts.get(key, param.numel()))
            position = int(self.optimizer.grad_partition_insertion_offset[group][rank].get(key, width))
            found.append((start, min(param.numel(), start + width - position)))
        return found

    def begin_partitions(self) -> None:
        """Make this rank's partitions of the gradients, as zeros; what is put into `place` replaces DeepSpeed's own
        reduction."""
        dtype = self.optimizer.gradient_accumulation_dtype
        self._partitions = [flat.new_zeros(flat.numel(), dtype=dtype) for flat in self._masters]

    def place(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's part of the parameter in the partitions of the gradients, flat; empty if it owns none."""
        group, key = self._group_of[id(param)], self.optimizer.get_param_id(param)
        rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
        start, stop = self.cuts(param)[rank]
        position = self.optimizer.grad_partition_insertion_offset[group][rank].get(key, 0)
        return self._partitions[group].narrow(0, int(position), stop - start)

    def give_partitions(self) -> None:
        """Give the optimizer the partitions as this step's gradient: a piece per parameter, and what pads them."""
        for group, flat in enumerate(self._partitions):
            pieces: list[torch.Tensor] = []
            end = 0
            for param in self.optimizer.params_in_partition[group]:
                piece = self.place(param)
                pieces += [_padding(flat[end : piece.storage_offset()]), piece]
                end = int(piece.storage_offset()) + piece.numel()
            self.optimizer.averaged_gradients[group] = [*pieces, _padding(flat[end:])]
            self.optimizer.all_grad_tensors[group] = None

    @property
    def _masters(self) -> list[torch.Tensor]:
        return self.optimizer.single_partition_of_fp32_groups

    def discard(self) -> None:
        """Drop this step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.optimizer.cpu_offload:
            self.optimizer.reset_cpu_buffers()
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None
            self.optimizer.all_grad_tensors[group] = None

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """As Zero3.shards. A rank owns a contiguous run of each parameter group, so most parameters are whole on one
        rank and absent on the others."""
        read = self._offloaded if self.optimizer.cpu_offload else self._on_device
        for group in range(len(self.optimizer.bit16_groups)):
            yield from read(group)

    def state(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """As Zero3.state, of what is trained; frozen parameters are whole on every rank."""
        for group, flat in enumerate(self.optimizer.single_partition_of_fp32_groups):
            rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
            starts = self.optimizer.grad_start_offset[group][rank]
            positions = self.optimizer.grad_partition_insertion_offset[group][rank]
            for param in self.optimizer.params_in_partition[group]:
                key = self.optimizer.get_param_id(param)
                start, position = int(starts[key]), int(positions[key])
                count = min(param.numel() - start, flat.numel() - position)
                yield param, start, views(self.optimizer.optimizer, flat, position, count)

    def adopt_state(self, num_steps: int) -> None:
        """As Zero3.adopt_state; gathers the new weights over the data-parallel ranks."""
        set_adam_step(self.optimizer.optimizer, self.optimizer.single_partition_of_fp32_groups, num_steps)
        self.optimizer.update_lp_params()

    def _on_device(self, group: int) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        pieces = [g for g in self.optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
        rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
        starts = self.optimizer.grad_start_offset[group][rank]
        for param, piece in zip(self.optimizer.params_in_partition[group], pieces, strict=False):
            yield param, piece.view(-1), int(starts[self.optimizer.get_param_id(param)])

    def _offloaded(self, group: int) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        flat = self.optimizer.single_partition_of_fp32_groups[group].grad
        for param in self.optimizer.params_in_partition[group]:
            _, start, position, count = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
            yield param, flat.view(-1).narrow(0, int(position), int(count)), int(start)

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """As Zero3.tensors. The parameters are views of flat groups."""
        zero = self.optimizer
        flats = [*zero.single_partition_of_fp32_groups]
        averaged = [grad for grads in zero.averaged_gradients.values() for grad in grads or ()]
        whole = [param.grad for param in self.params if param.grad is not None]
        whole += [grad for param in self.params if (grad := getattr(param, "grad_accum", None)) is not None]
        state = [*flats, *optimizer_tensors(zero.optimizer)]
        grads = [flat.grad for flat in flats if flat.grad is not None]
        return {
            "parameters_whole": [*zero.bit16_groups_flat, *self.params],
            # First: gradients that have been put into a bucket are views of it.
            "buffers": [buffer for bucket in zero.ipg_buckets.values() for buffer in bucket.buffer],
            "gradients_whole": whole,
            "gradients_shard": [*averaged, *([] if zero.cpu_offload else grads)],
            "host" if zero.cpu_offload else "optimizer": state + (grads if zero.cpu_offload else []),
        }

    @staticmethod
    def numel(param: torch.nn.Parameter) -> int:
        return param.numel()


def _padding(flat: torch.Tensor) -> torch.Tensor:
    """`flat`, marked as DeepSpeed marks what pads a partition."""
    flat._zero_padding = True  # type: ignore[attr-defined]
    return flat


def _wait_for_copies(offloaded: bool) -> None:
    """DeepSpeed's copies of gradients to pinned host memory go on when its epilogue returns, and only its own step
    would wait for them: the norm, the loss scale and clipping read them before."""
    if offloaded:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize()


def _remove_hooks(optimizer) -> None:
    """Take DeepSpeed's gradient hooks off: the boundary's own decide in which backward a gradient is final."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()


def _leave_verdict_to_us(optimizer) -> None:
    """Let `optimizer.step()` step, whatever it thinks of the gradients.

    megaaccum has taken the norm and the verdict by then, over all ranks at once. DeepSpeed's own come from one pass
    more over the gradients and several small collectives, and what it remembers of a gradient that was dropped
    (`inf_or_nan_tracker` of stage 3, `local_overflow` of stages 1 and 2 with offload) would skip a later, good step.
    """
    optimizer.check_overflow = lambda partition_gradients=True: None
    optimizer._get_norm_groups = lambda: [0.0]  # stage 3; a tensor would be read, and the host wait for it
    optimizer.compute_grad_norm = False  # stages 1 and 2


def zero1_config(config: dict, params_dtype: torch.dtype) -> dict:
    """`config` so that DeepSpeed builds its ZeRO optimizer at stage 1 too.

    With BF16 parameters and FP32 accumulation it would take BF16_Optimizer, which keeps a second copy of the gradients
    and its own accumulation. It decides by this key alone; Zero12 sets the precision back right after.
    """
    if config["zero_optimization"]["stage"] == 1 and params_dtype is torch.bfloat16:  # type: ignore[index]
        return config | {"data_types": {**config.get("data_types", {}), "grad_accum_dtype": "bf16"}}
    return config


def deepspeed_parts(engine, accumulate_in: torch.dtype) -> Zero3 | Zero12:
    """The driver that fits the engine's ZeRO stage. accumulate_in: precision in which gradients are added up."""
    return Zero3(engine) if engine.zero_optimization_stage() == 3 else Zero12(engine, accumulate_in)
