"""The boundary for torch's fully_shard (FSDP2), with HSDP, policies `resident` and `streaming`.

resident: parameters are gathered once per step and gradients reduced in each chunk's last backward. streaming: layers
are gathered for every forward and backward, and gradients reduce-scattered in every backward. With replicas (HSDP) the
sum over replicas waits for the last backward under both. Parameters keep whatever precision they have, float64 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaaccum import groups as process_groups
from megaaccum import model, private
from megaaccum.boundary.base import GradShard, StatePiece
from megaaccum.boundary.reduction import InRankOrderScatter, sum_over_tp, sum_tied_copies
from megaaccum.memory import HighWater

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.groups import Groups


class Fsdp2Boundary:
    """Fills Megatron's five hooks for one fully sharded module per chunk; each layer is a unit, what is left another.

    optimizer: a torch optimizer over the chunks' parameters; its groups are given the shards in place of them.
    """

    grad_sync_func: Callable | None = None
    loss_scale = 1.0
    before_reduce: Callable[[str, torch.Tensor], None] | None = None

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        self.memory = HighWater()
        optimizer.register_step_pre_hook(lambda *_: self.memory.look(self.tensors()))
        sharding = plan.config.sharding
        self._groups, self._chunks, self._optimizer = groups, chunks, optimizer
        self._streaming = sharding.sync == "streaming"
        self._last_flush = True
        self._waiting: list[FSDPModule] = []
        self.reduction_divisor = groups.dp_cp.size()
        names = {id(param): name for name, param in model.named_parameters(chunks)}  # type: ignore[arg-type]
        marks = {name: vars(param).copy() for name, param in model.named_parameters(chunks)}  # type: ignore[arg-type]
        mesh = process_groups.replica_mesh(groups, sharding.data_parallel_replicas)
        self.replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
        for chunk in chunks:
            self._shard(chunk, mesh, plan)
        self._parameters = dict(model.named_parameters(chunks))  # type: ignore[arg-type]
        for name, param in self._parameters.items():
            vars(param).update(marks[name])
        private.watch_fsdp2(self._roots, self.memory)
        for group in optimizer.param_groups:
            group["params"] = [self._parameters[names[id(param)]] for param in group["params"]]

    def _shard(self, chunk: torch.nn.Module, mesh, plan: Plan) -> None:
        """Masters are FP32 (float64 stays); the forward sees the precision of the model, sums are made in
        grad_reduce_dtype."""
        sharding = plan.config.sharding
        compute = next(chunk.parameters()).dtype
        if compute in (torch.bfloat16, torch.float16):
            chunk.float()
        policy = MixedPrecisionPolicy(
            param_dtype=compute if compute in (torch.bfloat16, torch.float16) else None,
            reduce_dtype=None if compute is torch.float64 else model.DTYPES[sharding.grad_reduce_dtype],
            cast_forward_inputs=False,
        )
        kept = dict(mesh=mesh, mp_policy=policy, reshard_after_forward=self._streaming)
        for layer in chunk.decoder.layers:  # type: ignore[union-attr, operator]
            fully_shard(layer, **kept)  # type: ignore[call-overload]
        root = fully_shard(chunk, **kept)  # type: ignore[call-overload]
        root.set_reduce_scatter_unused_params(True)  # an expert without tokens on one rank has them on another
        if sharding.deterministic:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(InRankOrderScatter())  # type: ignore[arg-type]  # its base is private

    @property
    def _roots(self) -> list[FSDPModule]:
        return cast("list[FSDPModule]", self._chunks)

    # --- Megatron's five hooks ---

    def param_sync_func(self, params) -> None:
        """Nothing to do: a unit's first forward gathers it."""

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Gradients of the backwards inside are not summed over ranks (streaming: over replicas). Chunks leave it one
        by one, the last chunk first."""
        try:
            yield
        finally:
            if self._last_flush and self._waiting:
                self._expect_last_backward(self._waiting.pop())

    def grad_scale_func(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def finalize_model_grads_func(self, models, num_tokens=None, **unused) -> None:
        if not self._last_flush:
            return
        assert not self._waiting, "a chunk's last backward ran without the reduction"
        sum_over_tp(self, self._groups)
        sum_tied_copies(self, self._groups)

    # --- the step ---

    def begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._waiting = list(self._roots)
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(self._streaming)
            root.set_requires_gradient_sync(self._streaming)
            root.set_requires_all_reduce(False)

    def _expect_last_backward(self, root: FSDPModule) -> None:
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(True)

    def gather(self) -> None:
        """Nothing to do: a unit's first forward gathers it."""

    def set_last_flush(self, last: bool) -> None:
        self._last_flush = last

    def shards(self) -> Iterator[GradShard]:
        """Rows of each parameter: fully_shard cuts the first dimension."""
        for name, param in self._parameters.items():
            assert param.grad is not None, f"{name} has no gradient"
            yield GradShard(name, param, _local(param.grad).view(-1), private.first_element(param))

    def step(self) -> None:
        self._optimizer.step()

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[StatePiece]:
        for name, param in self._parameters.items():
            moments: dict[str, Any] = self._optimizer.state[param]
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in moments:
                    moments[moment] = torch.zeros_like(param)
            tensors = {"param": param, **{moment: moments[moment] for moment in ("exp_avg", "exp_avg_sq")}}
            views = {kind: _local(tensor.detach()).view(-1) for kind, tensor in tensors.items()}
            yield StatePiece(name, param, private.first_element(param), views)

    def adopt_state(self, num_steps: int) -> None:
        private.set_adam_step(self._optimizer, list(self._parameters.values()), num_steps)
        for root in self._roots:
            root.reshard()  # what an evaluation left gathered is of before

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        return private.fsdp2_tensors(self._roots) | {"optimizer": private.optimizer_tensors(self._optimizer)}

    @property
    def param_groups(self) -> list[dict]:
        return self._optimizer.param_groups


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
