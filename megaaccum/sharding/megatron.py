"""The backend for Megatron's own DistributedDataParallel with its distributed optimizer (ZeRO-1 in its terms).

Gradients are added up in Megatron's contiguous buffers (`main_grad`) and reduce-scattered once per step, bucket by
bucket in each chunk's last backward; each rank steps its share and gathers the new weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import Adam, DistributedOptimizer, HybridDeviceOptimizer

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.optim import owners
from megaaccum.platform import cpu
from megaaccum.sharding import experts
from megaaccum.sharding.agreed_order import AgreedOrder
from megaaccum.sharding.base import AccumulatingBackend, GradShard, StatePiece, run_to_its_end
from megaaccum.sharding.in_one_order import ReduceScatter, others_like
from megaaccum.sharding.sum_tree import order_of
from megaaccum.upstream import adam, emerging, megatron, pytorch


class MegatronBackend(AccumulatingBackend):
    """Fills Megatron's five hooks for one Megatron DDP per chunk; the schedules call the bare chunks. Its reduction is
    a sum where the loss is per token, as its configuration says here.

    optimizer: a torch optimizer over the chunks' parameters, whose groups Megatron fills with this rank's shares.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        is_lion = emerging.is_lion(optimizer)
        has_moments = set(adam.kept_by(optimizer).tensors) == {"exp_avg", "exp_avg_sq"}  # amsgrad has a third
        is_adam = has_moments and isinstance(optimizer, Adam | torch.optim.AdamW | HybridDeviceOptimizer)
        if not is_lion and not is_adam:
            raise ConfigError(
                f"backend megatron shards the two moments of Adam, or Lion's, not the state of this"
                f" {type(optimizer).__name__}: use torch.optim.AdamW, or set backend to deepspeed, fsdp2 or ddp"
            )
        super().__init__(plan, groups, chunks)
        at_owners = owners.at_owners(plan.config, plan.batch.num_microbatches)
        megatron.reduce_scatter(self._reduce_to_owners if at_owners else None)
        self._ddp = [self._wrap(plan, groups, chunk, first=chunk is chunks[0]) for chunk in chunks]
        settings = OptimizerConfig(
            optimizer="lion" if is_lion else "adam",
            bf16=plan.config.sharding.bf16,
            fp16=False,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        with cpu.cuda_type_names():
            self.optimizer = DistributedOptimizer(
                optimizer,
                settings,
                grad_scaler=None,
                init_state_fn=adam.begin_state if is_lion else None,
                model_chunks=self._ddp,
                # Each buffer knows the ranks over which it is cut, those of experts too.
                per_model_buffers={i: ddp.buffers + ddp.expert_parallel_buffers for i, ddp in enumerate(self._ddp)},
                data_parallel_group=groups.dp_cp,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        megatron.detach_masters(self.optimizer)
        self.copied = [(param, param, 0) for param in self._trained() if param.element_size() == 2]
        order = order_of(plan, groups.dp_cp)
        if self.sums.in_one_order and order is not None:
            # After the optimizer, which sets it too.
            megatron.reduce_scatter(ReduceScatter(order, self._others))
            for param in self._trained():
                param.grad_dtype = torch.float32
                # Before Megatron's DDP looks, which adds the sum of all.
                pytorch.OnGradient(param, pytorch.weakly(self.sums.accept))
        self._bucket = {id(param): group for ddp in self._ddp for group, param in megatron.bucketed(ddp)}
        """The bucket group of each parameter."""
        self._missing: Counter[Any] = Counter()
        """How many parameters of a bucket group have a gradient to come."""
        self._splits = plan.layout.splits_backward
        in_buckets = [param for param in self._trained() if id(param) in self._bucket]
        self._in_order = AgreedOrder(plan, groups, chunks, in_buckets, self.complete)
        for ddp in self._ddp:
            megatron.before_reduce(ddp, self._show_main_grad)
            megatron.when_added(ddp, self._added)
        megatron.reduce_scatter()

    @staticmethod
    def _wrap(plan: Plan, groups: Groups, chunk: torch.nn.Module, *, first: bool) -> DistributedDataParallel:
        sharding = plan.config.sharding
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=sharding.grad_reduce_dtype == "fp32",
            overlap_grad_reduce=sharding.reproducible == "none",
            use_distributed_optimizer=True,
            # An all-to-all and a sum in rank order.
            reduce_scatter_with_fp32_accumulation=sharding.deterministic,
            bucket_size=sharding.reduce_bucket_size,
        )
        bucketed = first and groups.pp.rank() == 0  # elsewhere Megatron's reduction is not on the critical path
        layout = DistributedOptimizer.compute_full_param_layout(
            [param for param in chunk.parameters() if param.requires_grad],
            settings.bucket_size if bucketed else None,
            groups.dp_cp.size(),
            settings,
            groups.expert_dp.size() if experts.of_chunks([chunk]) else None,
        )
        return DistributedDataParallel(
            chunk.config,
            settings,
            chunk,
            # All of a chunk in one collective; one in rank order takes one bucket, and a tied embedding has its own.
            disable_bucketing=not bucketed and not sharding.deterministic,
            pg_collection=groups.collection,
            full_param_layout=layout,
        )

    # --- gradients ---

    def add_weight_grad(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add a gradient that a W has computed to Megatron's buffer: autograd, which calls the hooks on a weight, would
        copy it first."""
        if self.sums.in_one_order or pytorch.num_hooks(weight):
            pytorch.add_by_autograd(weight, grad)
        else:
            weight.main_grad.add_(grad)  # type: ignore[attr-defined]
        self._came(weight)

    def _added(self, param: torch.nn.Parameter) -> None:
        """Megatron has added a gradient to its buffer. That of a matrix under a split backward is `add_weight_grad`'s:
        another part of it may have come in I."""
        if not (self._splits and wgrad.is_put_off(param)):
            self._came(param)

    def _came(self, param: torch.nn.Parameter) -> None:
        if self._syncing and id(param) in self._bucket:
            self._in_order.came(param)

    def complete(self, param: torch.nn.Parameter) -> None:
        """Send the parameter's bucket when it is the last of it whose gradient is complete. Megatron's own count would
        wait for ever for one that gets no gradient, and under a split backward count as many of a matrix as come after
        a norm's last one."""
        group = self._bucket[id(param)]
        self._missing[group] -= 1
        if not self._missing[group] and group.ddp_config.overlap_grad_reduce:
            group.start_grad_sync()

    def _reduce_to_owners(
        self, output: torch.Tensor, flat: torch.Tensor, *, group: dist.ProcessGroup, **unused: Any
    ) -> None:
        """Send each matrix of a bucket to its owner, and each part of the rest to the rank in whose share it lies."""
        sums, share = self.at_owners, output.numel()
        for param in megatron.params_of(self._ddp, flat):
            grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
            if sums.takes(param):
                sums.add(param, grad)
                continue
            start = grad.storage_offset() - flat.storage_offset()
            for rank in range(start // share, -(-(start + grad.numel()) // share)):
                part = flat[max(start, rank * share) : min(start + grad.numel(), (rank + 1) * share)]
                sums.add_part(group, rank, part, part.copy_)
        sums.send()

    def _others(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's other partial sums of a bucket, laid out as Megatron has laid out the first."""
        params = megatron.params_of(self._ddp, flat)
        return others_like(flat, params, [param.main_grad for param in params], self.sums)  # type: ignore[attr-defined]

    def _show_main_grad(self, param: torch.nn.Parameter) -> None:
        self._show(self._names[id(param)], param, param.main_grad)  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        """Finish the reduction that a last backward began, or make all of it now."""
        if self._reduced:
            return
        for param in self._trained() if self.sums.in_one_order else ():
            self.sums.give_back(param)
            if param.grad is not None:
                param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
                param.grad = None
        self._in_order.end()
        for ddp in self._ddp:
            ddp.finish_grad_sync()  # of the others too, if reductions do not begin in the backward
        self.at_owners.finish()
        self._reduced = True

    # --- the step ---

    def begin_accumulation(self) -> None:
        self._reduced = self._syncing = False
        self.sums.clear()
        self.at_owners.begin()
        self._in_order.begin()
        self._missing = Counter(self._bucket.values())
        for ddp in self._ddp:
            ddp.zero_grad_buffer()
            ddp.zero_grad()  # of a backward of the user's own: Megatron would add it to the buffer

    def own_shards(self) -> Iterator[GradShard]:
        """This rank's run of each parameter that it owns a part of."""
        for name, param in names.named_parameters(self._chunks):
            start, stop = megatron.share(self.optimizer, param)
            if stop > start:
                yield GradShard(name, param, param.main_grad.view(-1)[start:stop], start)  # type: ignore[attr-defined]

    def step(self) -> None:
        """Megatron's step: the optimizer on this rank's shares, then the gather of new weights."""
        run_to_its_end(self.optimizer.step, self.optimizer.optimizer)

    def discard(self) -> None:
        """Nothing to do: the next step empties the buffers."""

    def own_state(self) -> Iterator[StatePiece]:
        for name, param in names.named_parameters(self._chunks):
            start, stop = megatron.share(self.optimizer, param)
            if stop > start:
                yield StatePiece(name, param, start, megatron.state(self.optimizer, param))
        yield from self.frozen_state()

    def adopt_state(self, num_steps: int) -> None:
        megatron.adopt(self.optimizer, num_steps)

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        held = megatron.tensors(self.optimizer)
        return held | {"gradients_whole": [*held["gradients_whole"], *self.sums.tensors()]}

    def _trained(self) -> list[torch.nn.Parameter]:
        return [param for ddp in self._ddp for param in ddp.module.parameters() if param.requires_grad]
