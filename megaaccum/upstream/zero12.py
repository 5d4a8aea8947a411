"""DeepSpeed's ZeRO-1 and ZeRO-2 under hooks of our own, for the reasons that zero.py gives (deepspeed 0.19.8).

DeepSpeed has no types: its engine and its optimizer are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megaaccum.upstream.adam import moments, set_adam_step, views
from megaaccum.upstream.zero import EXPERTS, ZeroDriver


class Zero12(ZeroDriver):
    """A ZeRO-1 or ZeRO-2 engine under hooks of our own; its parameters are whole on every rank.

    accumulate_in: precision in which gradients are added up.
    """

    def __init__(self, engine: Any, accumulate_in: torch.dtype):
        super().__init__(engine)
        self.masters = self.optimizer.single_partition_of_fp32_groups
        self.optimizer.gradient_accumulation_dtype = accumulate_in  # see zero1_config
        # DeepSpeed gives every engine one table, in which the next engine's experts have the same name.
        self.optimizer.expert_dp_process_group = dict(self.optimizer.expert_dp_process_group or {})
        self._group_of = {id(p): i for i, group in enumerate(self.optimizer.bit16_groups) for p in group}
        if accumulate_in != self.optimizer.dtype:
            # Stage 2 would round the FP32 sum of the micro-batches to 16 bit on its way into the bucket; stage 1 keeps
            # it in `grad_accum`, and stage 2 does the same when told to.
            self.optimizer.use_grad_accum_attribute = True
            for param in self.params:
                param.grad_accum = None  # type: ignore[attr-defined]

    # --- parameters: ZeRO-1 and -2 gather the new ones at the end of the optimizer's step ---

    def apart(self) -> list[torch.nn.Parameter]:
        """No parameters: all are whole on every rank."""
        return []

    def gather(self, params: list[torch.nn.Parameter]) -> None:
        """Nothing to do."""

    gather_ahead = release = gather

    # --- gradients ---

    def begin_reduction(self) -> None:
        self._drop_partitions()  # with FP32 sums DeepSpeed adds to those of an earlier reduction, as the backend does
        self.optimizer.setup_buckets()

    def finish_reduction(self) -> None:
        super().finish_reduction()
        self.optimizer.clear_backward_seen_flag()  # stage 1 keeps `grad_accum` until then, and with it the last bucket

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Hand `param.grad` to the bucket; a full bucket is reduced to its owner and averaged over the group. One of
        experts is a bucket of its own, as at stage 3: both kinds in one would wait for each other."""
        bucket = self.optimizer.ipg_buckets[self.optimizer.get_param_comm_dtype(param)]
        if bucket.params and bucket.has_moe_params == getattr(param, "allreduce", True):
            self.optimizer.reduce_ipg_grads(comm_dtype=self.optimizer.get_param_comm_dtype(param))
            if self.optimizer.contiguous_gradients and self.optimizer.overlap_comm:
                bucket.index = 1 - bucket.index
        if self.optimizer.use_grad_accum_attribute:
            self.optimizer._fill_param_grad_accum_attribute(param)
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, self._group_of[id(param)])

    def discard(self) -> None:
        """Drop this step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self._drop_partitions()

    def _drop_partitions(self) -> None:
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = self.optimizer.all_grad_tensors[group] = None

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(parameter, this rank's part of its reduced gradient as a flat view, offset of that part in elements). A rank
        owns a contiguous run of each parameter group, so most parameters are whole on one rank and absent on others."""
        for group, flat in enumerate(self.masters):
            if self._offloads:
                assert flat.grad is not None, "the epilogue has made it"
                for param, start, position, count in self._owned(group):
                    yield param, flat.grad.view(-1).narrow(0, position, count), start
            else:
                pieces = [p for p in self.optimizer.averaged_gradients[group] if not getattr(p, "_zero_padding", False)]
                for (param, start, *_), piece in zip(self._owned(group), pieces, strict=False):
                    yield param, piece.view(-1), start

    def _owned(self, group: int) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """(parameter, offset in it, offset in the group's partition, elements) of each parameter of a group of which
        this rank owns a part."""
        rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
        starts = self.optimizer.grad_start_offset[group][rank]
        positions = self.optimizer.grad_partition_insertion_offset[group][rank]
        for param in self.optimizer.params_in_partition[group]:
            key = self.optimizer.get_param_id(param)
            start, position = int(starts[key]), int(positions[key])
            yield param, start, position, min(param.numel() - start, self.masters[group].numel() - position)

    # --- partitions that are filled by hand, in place of DeepSpeed's own reduction ---

    def cuts(self, param: torch.nn.Parameter) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop): the parts of the flattened parameter that data-parallel ranks own."""
        group, key = self._group_of[id(param)], self.optimizer.get_param_id(param)
        for rank in self.optimizer.param_to_partition_ids[group][key]:
            start = int(self.optimizer.grad_start_offset[group][rank][key])
            position = int(self.optimizer.grad_partition_insertion_offset[group][rank][key])
            yield rank, start, min(param.numel(), start + self.optimizer.partition_size[group] - position)

    def begin_partitions(self) -> None:
        """Make this rank's partitions of the gradients, as zeros."""
        dtype = self.optimizer.gradient_accumulation_dtype
        self._partitions = [flat.new_zeros(flat.numel(), dtype=dtype) for flat in self.masters]

    def gradient_partition(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's part of the parameter in the partitions of the gradients, flat; empty if it owns none."""
        group, key = self._group_of[id(param)], self.optimizer.get_param_id(param)
        rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
        length = sum(stop - start for owner, start, stop in self.cuts(param) if owner == rank)
        position = self.optimizer.grad_partition_insertion_offset[group][rank].get(key, 0)
        return self._partitions[group].narrow(0, int(position), length)

    def give_partitions(self) -> None:
        """Give the optimizer the partitions as this step's gradient: a piece per parameter, with padding between."""
        for group, flat in enumerate(self._partitions):
            pieces: list[torch.Tensor] = []
            end = 0
            for *_, position, count in self._owned(group):
                pieces += [_padding(flat[end:position]), flat.narrow(0, position, count)]
                end = position + count
            self.optimizer.averaged_gradients[group] = [*pieces, _padding(flat[end:])]

    # --- state ---

    def state(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """Zero3.state of the trained parameters; frozen ones are whole on every rank."""
        for group, flat in enumerate(self.masters):
            for param, start, position, count in self._owned(group):
                kinds = moments(self.optimizer.optimizer, param)
                yield param, start, views(self.optimizer.optimizer, flat, kinds, position, count)

    def adopt_state(self, num_steps: int) -> None:
        """Make the contents of the views of `state` the weights after `num_steps` optimizer steps, gathered over the
        data-parallel ranks."""
        set_adam_step(self.optimizer.optimizer, self.masters, num_steps)
        self.optimizer.update_lp_params()

    def _held_parameters(self) -> dict[str, Iterable[torch.Tensor]]:
        return {"parameters_whole": [*self.optimizer.bit16_groups_flat, *self.params]}  # views of the flat groups

    def _held_buckets(self) -> list[torch.Tensor]:
        return [buffer for bucket in self.optimizer.ipg_buckets.values() for buffer in bucket.buffer]


def _padding(flat: torch.Tensor) -> torch.Tensor:
    """`flat`, marked as DeepSpeed marks what pads a partition."""
    flat._zero_padding = True  # type: ignore[attr-defined]
    return flat


def zero1_config(config: dict[str, Any], params_dtype: torch.dtype) -> dict[str, Any]:
    """`config` so that DeepSpeed builds its ZeRO optimizer at stage 1 too.

    With BF16 parameters and FP32 accumulation it would choose BF16_Optimizer, which has a second copy of the gradients
    and its own accumulation. It decides by this key alone; Zero12 sets the precision back right after.
    """
    if config["zero_optimization"]["stage"] == 1 and params_dtype is torch.bfloat16:
        return config | {"data_types": {**config.get("data_types", {}), "grad_accum_dtype": "bf16"}}
    return config


def separate_experts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have a ZeRO-1 or -2 engine of `model` cut and reduce experts over ranks of their own (`zero.set_expert_ranks`).

    DeepSpeed 0.19 flattens a whole parameter group over one process group, so experts get groups with its marks; and it
    reads the marks only if the model has a layer of its class MoE, which it otherwise asks for nothing.
    """
    from deepspeed.moe.layer import MoE

    class Mark(MoE):  # type: ignore[misc]  # DeepSpeed has no types
        """A layer of experts without any parameter."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.num_experts = 0

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Do nothing: the groups exist."""

    model.add_module(EXPERTS, Mark())
    split_groups(optimizer, lambda param: EXPERTS if not getattr(param, "allreduce", True) else None)
    for group in optimizer.param_groups:
        if not getattr(group["params"][0], "allreduce", True):
            group.update(moe=True, name=EXPERTS)


def split_groups(optimizer: torch.optim.Optimizer, key: Callable[[torch.nn.Parameter], object]) -> None:
    """Split each group of an optimizer by the `key` of its parameters; the parts have the group's options, and that of
    the parameters whose key is None comes first."""
    apart: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        members: dict[object, list[int]] = {None: []}
        for number, param in enumerate(group["params"]):
            members.setdefault(key(param), []).append(number)
        lists = [name for name in ("params", "param_names") if name in group]
        apart += [group | {name: [group[name][i] for i in part] for name in lists} for part in members.values() if part]
    optimizer.param_groups[:] = apart
