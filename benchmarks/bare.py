"""A hand-written loop that runs one model on one Megatron schedule over one DeepSpeed ZeRO-3 engine.

No agreement between ranks, no token count, no verdict, no log, no learning-rate schedule: the least that makes the
same optimizer step, so that whatever megaaccum adds shows in the ratio. ZeRO-3's own hooks do not run under a
pipeline at all, so its reducer is driven through `megaaccum.upstream`, as by the backend.
"""

from __future__ import annotations

from contextlib import contextmanager

import deepspeed
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.distributed.groups import Groups, Mpu
from megaaccum.upstream import pytorch, zero


class BareLoop:
    """Steps of `chunks` (one per rank: no interleaving). config: what DeepSpeed is given."""

    def __init__(self, chunks, groups: Groups, config: dict, optimizer, *, num_tokens: int, clip_grad: float):
        self._chunks, self._groups = chunks, groups
        self._num_tokens, self._clip_grad = num_tokens, clip_grad
        self._p2p = P2PCommunicator(pp_group=groups.pp, config=chunks[0].config)
        self._schedule = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
        self._engine, *_ = deepspeed.initialize(
            model=torch.nn.ModuleList(chunks),
            optimizer=optimizer,
            config=config,
            mpu=Mpu(groups),
            dist_init_required=False,
        )
        self._zero = zero.Zero3(self._engine)
        self._last = False
        self._reduced: set[int] = set()
        for param in self._zero.params:
            pytorch.OnGradient(param, self._on_gradient)
        hooks = chunks[0].config
        hooks.no_sync_func, hooks.param_sync_func, hooks.grad_sync_func = self._no_sync, None, None
        hooks.grad_scale_func, hooks.finalize_model_grads_func = None, self._finalize

    def step(self, microbatches: list[dict[str, torch.Tensor]]) -> float:
        """One optimizer step; returns its mean loss on ranks of the last stage, nan elsewhere."""
        self._zero.gather(self._zero.params)
        self._zero.begin_reduction()
        self._reduced.clear()
        size, length = microbatches[0]["tokens"].shape
        losses = self._schedule(
            forward_step_func=self._forward,
            data_iterator=iter(microbatches),
            model=self._chunks,
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=False,
            p2p_communicator=self._p2p,
            pg_collection=self._groups.collection,
        )
        self._clip()
        self._engine.step()
        return self._mean(losses)

    def _clip(self) -> None:
        """By the norm over the world: without tensor parallelism and tied embeddings no two ranks hold the same."""
        shards = [shard for _, shard, _ in self._zero.shards()]
        square = torch.nn.utils.get_total_norm(shards) ** 2
        dist.all_reduce(square)
        coefficient = self._clip_grad / (float(square) ** 0.5 + 1e-6)
        if coefficient < 1.0:
            for shard in shards:
                shard.mul_(coefficient)

    @property
    def param_groups(self) -> list[dict]:
        return self._engine.optimizer.param_groups

    def _forward(self, data_iterator, chunk):
        batch = next(data_iterator)
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, lambda losses: self._loss(batch["loss_mask"], losses)

    def _loss(self, mask: torch.Tensor, losses: torch.Tensor):
        total = (losses.float() * mask).sum()
        scale = self._groups.dp_cp.size() / self._num_tokens
        return total * scale, torch.zeros((), dtype=torch.int), total.detach()

    @contextmanager
    def _no_sync(self):
        self._last = False
        yield
        self._last = True

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._last:
            self._reduce(param)

    def _finalize(self, models, num_tokens=None, **unused) -> None:
        for param in self._zero.params:
            if id(param) not in self._reduced:
                self._reduce(param)
        self._zero.finish_reduction()

    def _reduce(self, param: torch.nn.Parameter) -> None:
        self._reduced.add(id(param))
        self._zero.reduce(param)

    def _mean(self, losses: list[torch.Tensor]) -> float:
        if not losses:
            return float("nan")
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=self._groups.dp_cp)
        return float(total) / self._num_tokens
