"""The one place that touches private names of DeepSpeed, Megatron-core and torch (private_te.py: Transformer Engine's).

Written against deepspeed 0.19.8 and megatron-core 0.19.2. Each function says what it does that no public name does.
`check()` looks every name up, so that another version fails at start with a list instead of in the middle of a step.

Why private names at all: ZeRO's own hooks assume that each backward follows its forward. They trace the order of
modules, gather and release per module, and count gradients per backward; in a pipeline several micro-batches are in
flight and all three go wrong (the first root forward even waits for ranks of another stage). The reducer, the
partitions and the optimizer under those hooks are sound, and those are what is driven here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_STAGE3 = (
    "_get_norm_groups",
    "check_overflow",
    "_get_fp32_grad_state_partition",
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

_DCP = "torch.distributed.checkpoint"
CHECKPOINT_METADATA_CLASSES = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
        *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # looks a torch.layout up by its name
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # the same under Python 3.13
    }
)
"""(module, name) of what torch 2.13 puts into the `.metadata` of a checkpoint of plain tensors, beside dtypes. The
private ones of them are how that file says which tensor lies where."""


def check() -> list[str]:
    """Names that this version of DeepSpeed or Megatron-core lacks, as sentences; empty when all is well."""
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
    return problems + _check_linear() + _check_experts() + _check_te()


def _check_te() -> list[str]:
    """What private_te.py leans on, where Transformer Engine can be imported (the CPU lane hides it)."""
    from megaaccum import private_te

    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return []
    return private_te.check()


def _check_experts() -> list[str]:
    """What `place_experts` leans on."""
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


def _check_linear() -> list[str]:
    """What `set_linear_forward` leans on: each forward calls `self._forward_impl` with these keywords."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    problems = []
    for cls in (ColumnParallelLinear, RowParallelLinear):
        source = inspect.getsource(cls.forward)
        for name in ("self._forward_impl(", "input=", "weight=", "bias=", "allreduce_dgrad=", "sequence_parallel="):
            if name not in source:
                problems.append(f"{cls.__name__}.forward has no {name}")
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


def one_gloo_device() -> None:
    """Let all gloo groups of this process share one device, which is one thread that waits for the network.

    torch 2.13 gives each group its own, and each of those wakes up a hundred times a second: the twenty groups of a
    rank take 2 % of a core while nothing happens. Megatron-core makes the groups, and new_group has no way to hand a
    device on (distributed_c10d: `_new_process_group_helper`).
    """
    from torch.distributed import distributed_c10d

    plain: Any = distributed_c10d.ProcessGroupGloo

    @functools.cache
    def devices() -> list:
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        return [plain.create_device(interface=name) for name in names] or [plain.create_default_device()]  # type: ignore[attr-defined]

    class OnSharedDevice(plain):  # type: ignore[valid-type, misc]
        def __init__(self, store, rank: int, size: int, timeout) -> None:
            options = plain._Options()
            options._timeout, options._devices = timeout, devices()
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]


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


def is_parallel_linear(module: torch.nn.Module) -> bool:
    """Whether this is one of Megatron-core's own (not Transformer Engine's) tensor-parallel linear layers."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return isinstance(module, ColumnParallelLinear | RowParallelLinear)


def set_linear_forward(module: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """Let a parallel linear layer make its product by `forward`. Its own is a method that it calls with keywords
    (megatron-core 0.19: `_forward_impl`); there is no public way to replace the product and keep the layer."""
    module._forward_impl = forward  # type: ignore[assignment]


def linear_forward(*, weight: torch.Tensor, **arguments) -> torch.Tensor:
    """Megatron-core's own product of a parallel linear layer."""
    from megatron.core.tensor_parallel import layers

    if not weight.requires_grad:
        return layers.linear_with_frozen_weight(weight=weight, **arguments)
    return layers.linear_with_grad_accumulation_and_async_allreduce(weight=weight, **arguments)


def note_failure(key: str, text: str) -> None:
    """Leave `text` where the other ranks find it, unless one was there first. The store of the rendezvous has no public
    name in torch 2.13, and no collective can be used once ranks are out of step."""
    with contextlib.suppress(Exception):  # the store ends with rank 0; the error itself is raised in any case
        torch.distributed.distributed_c10d._get_default_store().compare_set(key, "", text)


def noted_failure(key: str) -> str | None:
    """What `note_failure` left under `key`, if it can be read."""
    with contextlib.suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.check([key]):
            return store.get(key).decode()
    return None


class Zero3:
    """The parts of a ZeRO-3 engine that the boundary drives: gather, reduce, and this rank's gradient partitions."""

    def __init__(self, engine):
        self.optimizer = engine.optimizer
        self.params = [param for param in engine.module.parameters() if param.requires_grad]
        _remove_hooks(self.optimizer)
        _leave_verdict_to_us(self.optimizer)
        self.optimizer.parameter_offload._remove_module_hooks()
        self._handed_over: set[int] = set()
        self._own = {id(param): _own_part(param) for param in self.params}

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
        for param, shard, _ in self._padded_shards():
            # DeepSpeed pads the last rank's share with uninitialised memory, which its own norm and Adam then read.
            shard[self._own[id(param)][1] :].zero_()

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(parameter, this rank's part of its reduced gradient as a flat view, offset of that part in elements)."""
        for param, shard, start in self._padded_shards():
            yield param, shard[: self._own[id(param)][1]], start

    def state(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """(parameter, offset of this rank's part, flat views {"param": FP32 master, "exp_avg": ..., "exp_avg_sq": ...})
        of everything that training changes. Moments that do not exist yet are made, as zeros."""
        for param in self.params:
            group, position, _ = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
            flat, (start, count) = self.optimizer.fp32_partitioned_groups_flat[group], self._own[id(param)]
            yield param, start, _views(self.optimizer.optimizer, flat, position, count)

    def adopt_state(self, num_steps: int) -> None:
        """Take what was written into the views of `state` as the weights after `num_steps` optimizer steps."""
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
        host memory `_get_fp32_grad_state_partition` shows another one, which exists after `finish_accumulation`.)"""
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

    def _padded_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        for param in self.params:
            shard, _ = self.optimizer._get_fp32_grad_state_partition(param, release_swap_buffers=True)
            yield param, shard.view(-1), self._own[id(param)][0]

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """What the engine holds now, by kind (memory.py). DeepSpeed's step makes the flat gradients of a sub-group that
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
        """As Zero3.state."""
        for group, flat in enumerate(self.optimizer.single_partition_of_fp32_groups):
            rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
            starts = self.optimizer.grad_start_offset[group][rank]
            positions = self.optimizer.grad_partition_insertion_offset[group][rank]
            for param in self.optimizer.params_in_partition[group]:
                key = self.optimizer.get_param_id(param)
                start, position = int(starts[key]), int(positions[key])
                count = min(param.numel() - start, flat.numel() - position)
                yield param, start, _views(self.optimizer.optimizer, flat, position, count)

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


def _views(adam: torch.optim.Optimizer, flat: torch.Tensor, position: int, count: int) -> dict[str, torch.Tensor]:
    state = adam.state[flat]
    for moment in ("exp_avg", "exp_avg_sq"):
        if moment not in state:
            state[moment] = torch.zeros_like(flat)
    if isinstance(adam, torch.optim.AdamW) and "step" not in state:
        # torch takes a state that is there for whole: a step after a checkpoint of a run that never stepped needs it.
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
    moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    return {name: t.detach().view(-1).narrow(0, position, count) for name, t in ({"param": flat} | moments).items()}


def adam_views(adam: torch.optim.Optimizer, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Flat views of a whole parameter and its moments, made as zeros where they do not exist yet."""
    return _views(adam, param, 0, param.numel())


def optimizer_tensors(adam: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor of a torch optimizer's state, this rank's part where it is sharded."""
    for state in adam.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield _own_tensor(value)


def _own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; of any other tensor, itself. `to_local` would enter autograd, at a multiple of
    the price, which counts where every tensor is looked at several times in a step."""
    return getattr(tensor, "_local_tensor", tensor)


def set_adam_step(adam: torch.optim.Optimizer, flats: list[torch.Tensor], num_steps: int) -> None:
    """Adam's bias correction goes on from `num_steps`: torch keeps it per tensor, the fused Adams of TE and apex per
    group."""
    for flat in flats:
        if isinstance(adam, torch.optim.AdamW):
            adam.state[flat]["step"] = torch.tensor(float(num_steps), dtype=torch.float32, device=flat.device)
    for group in adam.param_groups:
        if not isinstance(adam, torch.optim.AdamW):
            group["step"] = num_steps


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
    optimizer._get_norm_groups = lambda: [torch.zeros((), device=optimizer.device)]  # stage 3
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


def ddp_expect_gradients(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Tell torch DDP's reducer that the next backward brings the final gradients.

    DDP does that in its forward, which a pipeline has long passed when the last backward comes. (Read in torch 2.13:
    torch.distributed.pipelining does the same.)
    """
    ddp.reducer.prepare_for_backward([])


def fsdp2_units(root: torch.nn.Module) -> list[Any]:
    """What FSDP2 gathers and reduces at once in a fully sharded chunk, in the order of a backward: the last layer
    first, the root (embedding, final norm, head), whose own gradients come both first and last, at the end."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return [unit for module in reversed(modules) for unit in module._get_fsdp_state()._fsdp_param_groups]


def fsdp2_even_out(unit: Any) -> None:
    """Give the parameters of a unit that have no gradient yet zeros in the precision of the others' sums.

    FSDP2 (torch 2.13: `unsharded_zero_grad_data`) makes them in the parameter's, and then refuses to reduce both.
    """
    params = [p for p in unit.fsdp_params if p.reduce_dtype is not None and p.sharded_param.requires_grad]
    if any(param.unsharded_accumulated_grad is not None for param in params):
        for param in params:
            if param.unsharded_accumulated_grad is None:
                param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


class Fsdp2WeightGrads:
    """The weight gradients (W) of one fully sharded chunk whose backward is split.

    FSDP2 takes a unit's backward for over when its input's gradient is there, and reduces then. Its hooks do not see a
    W, so what they would do after it is done here, by what they call (torch 2.13; torch.distributed.pipelining calls
    the same after a stage's last W): `post_backward` of a unit, and `_root_post_backward_final_callback`.
    """

    def __init__(self, root: torch.nn.Module):
        self._root, self._units = root, fsdp2_units(root)
        self._left: list[Any] = []

    def begin(self, *, reduce: bool) -> None:
        """A W begins. reduce: all gradients that its units have by then are reduced."""
        self._reduces, self._left = reduce, list(self._units)
        self._of = {
            id(param._unsharded_param): (unit, param)
            for unit in self._units
            for param in unit.fsdp_params
            if hasattr(param, "_unsharded_param")
        }

    def add(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add `grad`, in the precision in which gradients are reduced; reduce the units before the weight's."""
        unit, param = self._of[id(weight)]
        while self._reduces and unit is not self._units[-1] and self._left[0] is not unit:
            self._reduce(self._left.pop(0))
        torch.autograd.backward(weight, grad)  # of a released weight FSDP2 keeps the shape
        param.accumulate_unsharded_grad_if_needed()
        param.to_accumulated_grad_if_needed()

    def finish(self) -> None:
        """Reduce the units that are left, on every rank in one order, and end this backward for torch."""
        if self._reduces:
            for unit in self._left:
                self._reduce(unit)
            self._root._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]

    @staticmethod
    def _reduce(unit: Any) -> None:
        fsdp2_even_out(unit)
        unit.post_backward()


def on_gradient(param: torch.nn.Parameter, call: Callable[[torch.nn.Parameter], None]) -> _OnGradient:
    """Call `call(param)` whenever autograd has added to `param.grad`. Returns the hook's handle."""
    return _OnGradient(param, call)


class _OnGradient:
    """Autograd visits every input of a function whose backward it runs, and (torch 2.13) runs the hooks behind the
    addition even where the function gave no gradient: a layer that computes its weight gradient later. The hook on the
    gradient itself tells, which then is None."""

    def __init__(self, param: torch.nn.Parameter, call: Callable[[torch.nn.Parameter], None]):
        self._call, self._came = call, False
        self._handles = (
            param.register_hook(self._comes),
            param.register_post_accumulate_grad_hook(self._added),
        )

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
    return torch._C._current_graph_task_id() != -1


def drop_unreduced(root: torch.nn.Module) -> None:
    """Forget the gradients that a fully sharded module has added up and not reduced (of backwards inside
    set_requires_gradient_sync(False), and of HSDP before its all-reduce). torch 2.13's FSDPModule has no method for it,
    and `zero_grad` knows of the reduced ones only."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


def first_element(param: torch.nn.Parameter) -> int:
    """Offset of this rank's shard in the flattened parameter, in elements; `param` is a DTensor cut by rows.

    torch.distributed.tensor has the shard's offset in a module that is not public (read in torch 2.13).
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return offset[0] * (param.numel() // max(param.shape[0], 1))


def megatron_plain_reduce_scatter() -> None:
    """Have Megatron's DDPs that are built next use torch's reduce-scatter.

    One that adds in rank order (megatron-core 0.19: reduce_scatter_with_fp32_accumulation) puts its own into a global
    of the module and leaves it there; another one without would then not wait for the sum.
    """
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor


def megatron_give_zeros(ddp) -> None:
    """Give Megatron's DDP a gradient, zeros, of each parameter that got none in the last backward: it sends a bucket
    when all of its parameters have one (megatron-core 0.19: `per_param_grad_ready_counts`), and else fails."""
    groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
    had = {param for group in groups for param in group.per_param_grad_ready_counts}
    missing = [param for param in ddp.module.parameters() if param.requires_grad and param not in had]
    if missing:
        torch.autograd.backward(missing, [torch.zeros_like(param) for param in missing])


def megatron_share(optimizer, param: torch.nn.Parameter) -> tuple[int, int]:
    """[start, stop) of the flattened parameter that this rank's distributed optimizer owns; empty if it owns none."""
    if param not in optimizer.model_param_gbuf_map:
        return 0, 0
    share = optimizer._get_model_param_range_map(param)["param"]
    return share.start, share.end


def megatron_state(optimizer, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Flat views {"param": master weight, "exp_avg", "exp_avg_sq"} of this rank's share; moments are made as zeros."""
    group, order = optimizer.model_param_group_index_map[param]
    return adam_views(optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][order])


def megatron_tensors(optimizer) -> dict[str, Iterable[torch.Tensor]]:
    """What Megatron's DDPs and distributed optimizer hold now, by kind (memory.py). FP32 masters are views of the
    parameters' buffer; 16-bit models have masters, and gradients for them, of their own."""
    buffers = [buffer for ddp in optimizer.model_chunks for buffer in ddp.buffers + ddp.expert_parallel_buffers]
    params = [param for ddp in optimizer.model_chunks for param in ddp.parameters()]
    masters = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    return {
        "parameters_whole": [*params, *(b.param_data for b in buffers if b.param_data is not None)],
        "gradients_whole": [b.grad_data for b in buffers] + [p.grad for p in params if p.grad is not None],
        "gradients_shard": [master.grad for master in masters if master.grad is not None],
        "optimizer": [*masters, *optimizer_tensors(optimizer.optimizer)],
    }


def _fsdp2_groups(roots) -> list:
    """The parameter groups of fully sharded modules, a root's own before those of the modules in it. torch 2.13 has no
    public name for what a module has gathered."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


def fsdp2_tensors(roots) -> dict[str, Iterable[torch.Tensor]]:
    """What fully sharded modules hold now, by kind (memory.py), but for the optimizer's state."""
    groups = _fsdp2_groups(roots)
    params = [param for group in groups for param in group.fsdp_params]
    sharded = [param.sharded_param for param in params]
    partial = [g._partial_reduce_output for g in groups if g._partial_reduce_output is not None]
    return {
        "parameters_whole": [tensor for param in params for tensor in param.all_gather_outputs],
        "parameters_shard": [_own_tensor(param) for param in sharded],
        "gradients_whole": [grad for param in params for grad in _fsdp2_gradients(param)],
        "gradients_shard": [*(_own_tensor(p.grad) for p in sharded if p.grad is not None), *partial],
    }


def _fsdp2_gradients(param) -> list[torch.Tensor]:
    """Whole gradients of a parameter: what the last backward made, and the sum of those before."""
    grads = [getattr(getattr(param, "_unsharded_param", None), "grad", None), param.unsharded_accumulated_grad]
    return [grad for grad in grads if grad is not None]


def watch_fsdp2(roots, memory) -> None:
    """Have units note in `memory` (a HighWater) what all of them have gathered, when they gather, and their own and
    their root's whole gradients, when these are about to be reduced."""
    gathered: dict[int, int] = {}

    def watch(group, root) -> None:
        to_unsharded, to_sharded, post_backward = group._to_unsharded, group._to_sharded, group.post_backward

        def gather() -> None:
            gathered[id(group)] = sum(
                out.untyped_storage().nbytes() for p in group.fsdp_params for out in p.all_gather_outputs
            )
            memory.note("parameters_whole", sum(gathered.values()))
            to_unsharded()

        def release() -> None:
            gathered[id(group)] = 0
            to_sharded()
            memory.note("parameters_whole", sum(gathered.values()))

        def reduce(*args) -> None:
            if group.reduce_grads:
                params = {id(param): param for each in (group, root) for param in each.fsdp_params}
                grads = [grad for param in params.values() for grad in _fsdp2_gradients(param)]
                memory.note("gradients_whole", sum(grad.nbytes for grad in grads))
            post_backward(*args)

        group._to_unsharded, group._to_sharded, group.post_backward = gather, release, reduce

    for each in roots:
        groups = _fsdp2_groups([each])
        for group in groups:
            watch(group, groups[0])


def megatron_adopt(optimizer, num_steps: int) -> None:
    """Take what was written into the shares as the weights, gathered over the data-parallel ranks."""
    shares = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    set_adam_step(optimizer.optimizer, shares, num_steps)
    optimizer._copy_main_params_to_model_params()
    for ddp in optimizer.model_chunks:
        ddp.start_param_sync(force_sync=True)


_COLLECTIVES = {
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall": ("all_to_all", 0),
    "alltoall_base": ("all_to_all", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 0),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
"""Methods of torch's ProcessGroup, through which torch.distributed and deepspeed.comm pass: the collective's name and
the argument that holds the elements of all ranks."""


@contextlib.contextmanager
def watched_collectives(note: Callable[..., None]) -> Iterator[None]:
    """Inside, `note(collective, group, tensor, seconds, calls=1)` hears of each tensor that a collective over more than
    one rank is given; then, with calls=0, of the seconds that the host waited for it. torch has no public place where
    all of them pass (a dispatch mode sees every operator, and slows each one down)."""
    from torch.distributed import ProcessGroup, Work

    waited: dict[int, tuple] = {}
    names = [name for name in _COLLECTIVES if hasattr(ProcessGroup, name)]
    # What the class holds is bound to a group when it is looked up; what getattr returns is not any more.
    held = [(Work, "wait", vars(Work)["wait"]), *((ProcessGroup, name, vars(ProcessGroup)[name]) for name in names)]
    plain_wait = Work.wait

    def wait(work, *args, **kwargs):
        start = time.perf_counter()
        try:
            return plain_wait(work, *args, **kwargs)
        finally:
            if id(work) in waited:
                note(*waited.pop(id(work)), time.perf_counter() - start, calls=0)
            else:  # one handle for a batch of messages, as NCCL gives
                for key in [key for key, (_, group, _) in waited.items() if _gives_one_handle(group)]:
                    note(*waited.pop(key), 0.0, calls=0)

    try:
        Work.wait = wait  # type: ignore[method-assign, assignment]
        for name in names:
            setattr(ProcessGroup, name, _noting(getattr(ProcessGroup, name), *_COLLECTIVES[name], note, waited))
        yield
    finally:
        for owner, name, method in held:
            setattr(owner, name, method)


def _gives_one_handle(group) -> bool:
    """Whether a batch of messages of `group` has one handle for all of them, and none for each."""
    return torch.distributed.get_backend(group) == "nccl"


def _noting(method, collective: str, position: int, note, waited: dict[int, tuple]):
    def call(group, *args, **kwargs):
        if group.size() == 1:
            return method(group, *args, **kwargs)
        tensors = list(_flatten(args[position]))
        start = time.perf_counter()
        work = method(group, *args, **kwargs)
        for index, tensor in enumerate(tensors):
            note(collective, group, tensor, time.perf_counter() - start if index == 0 else 0.0)
        if work is not None and tensors:
            waited[id(work)] = collective, group, tensors[0]
        return work

    return call


def _flatten(tensors) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _flatten(each)
