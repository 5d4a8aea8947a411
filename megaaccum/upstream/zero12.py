"""DeepSpeed's ZeRO-1 and ZeRO-2 under hooks of our own, for the reasons that zero.py gives (deepspeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from megaaccum.upstream.adam import optimizer_tensors, set_adam_step, views
from megaaccum.upstream.zero import Zero3, leave_verdict_to_us, remove_hooks, wait_for_copies


class Zero12:
    """As Zero3, for ZeRO-1 and ZeRO-2, whose parameters are whole on every rank."""

    def __init__(self, engine, accumulate_in: torch.dtype):
        self.optimizer = engine.optimizer
        self.params = [param for param in engine.module.parameters() if param.requires_grad]
        self._handed_over: set[int] = set()
        self.optimizer.gradient_accumulation_dtype = accumulate_in  # see zero1_config
        self._group_of = {id(p): i for i, group in enumerate(self.optimizer.bit16_groups) for p in group}
        remove_hooks(self.optimizer)
        leave_verdict_to_us(self.optimizer)
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

    def gather_ahead(self, params: list[torch.nn.Parameter]) -> None:
        """Nothing to do."""

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
        wait_for_copies(self.optimizer.cpu_offload)

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


def keep_gradient_lists(parts: Zero3 | Zero12) -> Callable[[], None]:
    """Keep which tensors are the step's gradients; what is returned gives them to the optimizer again after its step,
    which lets go of them."""
    optimizer, kept = parts.optimizer, dict(parts.optimizer.averaged_gradients)
    return lambda: optimizer.averaged_gradients.update(kept)


def zero1_config(config: dict, params_dtype: torch.dtype) -> dict:
    """`config` so that DeepSpeed builds its ZeRO optimizer at stage 1 too.

    With BF16 parameters and FP32 accumulation it would take BF16_Optimizer, which keeps a second copy of the gradients
    and its own accumulation. It decides by this key alone; Zero12 sets the precision back right after.
    """
    if config["zero_optimization"]["stage"] == 1 and params_dtype is torch.bfloat16:  # type: ignore[index]
        return config | {"data_types": {**config.get("data_types", {}), "grad_accum_dtype": "bf16"}}
    return config


def driver_of(engine, accumulate_in: torch.dtype) -> Zero3 | Zero12:
    """The driver that fits the engine's ZeRO stage. accumulate_in: precision in which gradients are added up."""
    return Zero3(engine) if engine.zero_optimization_stage() == 3 else Zero12(engine, accumulate_in)
