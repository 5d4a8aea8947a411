"""The backend for DeepSpeed ZeRO-1, -2 and -3, sync mode `resident`.

Parameters are gathered once per step and stay whole through the flush; gradients of all micro-batches are added up on
the rank, in `grad_accum_dtype`, and reduced once: bucket by bucket, inside each chunk's last backward. The forward and
backward go through the bare modules, never through `engine.forward` or `engine.backward`: both would divide
(ours is step/loss.py) and would count micro-batches that the pipeline has interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from megaaccum.config import Plan
from megaaccum.config.deepspeed_config import deepspeed_config
from megaaccum.distributed.groups import Groups, Mpu
from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.sharding import experts
from megaaccum.sharding.agreed_order import AgreedOrder
from megaaccum.sharding.base import AccumulatingBackend, GradShard, StatePiece, run_to_its_end
from megaaccum.sharding.cold_experts import ColdExperts
from megaaccum.sharding.fp32_sums import Fp32Sums, SumsOfKernels
from megaaccum.sharding.in_one_order import Zero3InOneOrder, Zero12InOneOrder
from megaaccum.upstream import adam, pytorch, zero, zero12


class DeepSpeedBackend(AccumulatingBackend):
    """Fills Megatron's five hooks for a DeepSpeed engine over all of this rank's chunks.

    optimizer: a torch optimizer over the chunks' parameters (unsharded); DeepSpeed replaces them by its partitions.
    Collective over the world. Raises what deepspeed.initialize raises.
    """

    streams = False
    """Whether the gradients of each micro-batch are reduced, not their sum (sync streaming)."""

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        super().__init__(plan, groups, chunks)
        if own_ranks := experts.of_chunks(chunks):
            zero.set_expert_ranks(own_ranks, groups.collection.ep, groups.expert_dp)
        separate_tied_copies(optimizer)
        self._cold = ColdExperts.from_plan(plan, chunks)
        self._updates = adam.UpdateCount(optimizer)
        self._accumulate_in = accumulate_in = names.DTYPES[plan.config.sharding.grad_accum_dtype]
        model = torch.nn.ModuleList(chunks)
        dtype = next(model.parameters()).dtype
        if own_ranks and plan.config.sharding.zero_stage != 3:
            zero12.separate_experts(model, optimizer)
        config = zero12.zero1_config(deepspeed_config(plan), dtype)
        if self.streams:
            # One parameter after the other comes to the device and is cut; deepspeed.initialize would bring all first.
            deepspeed.zero.Init(
                model, data_parallel_group=groups.dp_cp, config_dict_or_path=config, dtype=dtype, mpu=Mpu(groups)
            )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=Mpu(groups), dist_init_required=False
        )
        self.optimizer = self.engine.optimizer
        self._all_params = list(model.parameters())
        if self.sums.in_one_order and plan.layout.ep > 1:
            experts.multiply_apart(chunks)
        self.driver = self._driver(plan)
        self.copied = self.driver.copied()
        adam.check_calls(optimizer, len(self.driver.masters))
        self.reduction_divisor = 1 if plan.config.sharding.deterministic else groups.dp_cp.size()
        self._in_order = AgreedOrder(plan, groups, chunks, self.driver.params, self._hand_over)
        self._reducing = False
        self._splits = plan.layout.splits_backward
        self._hooks: list[Any] = []
        fused = bool(getattr(getattr(chunks[0], "config", None), "gradient_accumulation_fusion", False))
        if fused:
            self.sums = SumsOfKernels(self.driver.params)
        takes_each = self.sums.in_one_order or plan.config.sharding.cold_expert_offload
        looks_at_each = fused or takes_each or self.streams
        self._hears_each = looks_at_each or self._in_order.counts_uses
        self._hears_until_agreed = self._hears_each and not looks_at_each
        rounded = [param for param in self.driver.params if param.dtype != accumulate_in and not fused]
        for param in rounded:
            param.grad_dtype = accumulate_in  # autograd then adds the micro-batches in this precision
        self.fp32_sums = Fp32Sums(rounded if accumulate_in is torch.float32 and not takes_each else (), chunks)
        if self._hears_each:
            self._listen()

    def _driver(self, plan: Plan) -> zero.Zero3 | zero12.Zero12:
        """The driver that fits the engine's ZeRO stage and the order of sums."""
        if plan.config.sharding.deterministic:  # as with reproducible layout
            kind = Zero3InOneOrder if plan.config.sharding.zero_stage == 3 else Zero12InOneOrder
            return kind(self.engine, plan, self._groups, self.sums)
        if plan.config.sharding.zero_stage == 3:
            return zero.Zero3(self.engine)
        return zero12.Zero12(self.engine, names.DTYPES[plan.config.sharding.grad_accum_dtype])

    # --- Megatron's five hooks ---

    def param_sync_func(self, params: Iterable[torch.nn.Parameter]) -> None:
        """All-gather a chunk's parameters over the data-parallel ranks, those that are not whole yet."""
        self.driver.gather(list(params))

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        """A flush is over: gradients that come now are not final. After the last one, what it did not bring is reduced:
        another rank may be held up in its last backward until it is, while this one would agree on the next call."""
        self._set_syncing(False)
        if self._last_flush:
            self._in_order.end()

    # --- the step ---

    def begin_step(self) -> None:
        self.gather()
        self._cold.begin_step()
        super().begin_step()

    def begin_accumulation(self) -> None:
        self._set_syncing(False)
        self._reducing = False
        self._in_order.begin()
        self.sums.clear()
        self.at_owners.begin()
        for param in self.driver.params:
            param.grad = None
        self.fp32_sums.begin()

    def finish_reduction(self) -> None:
        self._cold.end_step()
        super().finish_reduction()

    def _reduce(self) -> None:
        self._in_order.end()
        if self._hears_until_agreed:
            self._hears_each = self._hears_until_agreed = False
            self._set_syncing(False)
        self.driver.finish_reduction()
        self.at_owners.finish()

    def gather(self) -> None:
        """All-gather every parameter of this rank's stages that is not whole (one collective per step at ZeRO-3)."""
        self.driver.gather(self._all_params)

    def gather_ahead(self) -> None:
        self.driver.gather_ahead(self._all_params)

    @contextmanager
    def whole(self) -> Iterator[None]:
        apart = self.driver.apart()
        self.driver.gather(apart)
        try:
            yield
        finally:
            self.driver.release(apart)

    def own_shards(self) -> Iterator[GradShard]:
        for param, grad, start in self.driver.shards():
            yield GradShard(self._names[id(param)], param, grad, start)

    def step(self) -> None:
        """DeepSpeed's step: the optimizer on this rank's partitions, then (ZeRO-1, -2) the gather of new weights."""
        run_to_its_end(self.engine.step, self.optimizer.optimizer)
        self._updates.done += 1

    def copy_gradients(self) -> Callable[[], None]:
        lists, give_back = dict(self.optimizer.averaged_gradients), super().copy_gradients()

        def give() -> None:
            self.optimizer.averaged_gradients.update(lists)  # which its step drops
            give_back()

        return give

    def discard(self) -> None:
        self.driver.discard()

    def own_state(self) -> Iterator[StatePiece]:
        for param, start, tensors in self.driver.state():
            yield StatePiece(self._names[id(param)], param, start, tensors)
        if not isinstance(self.driver, zero.Zero3):
            yield from self.frozen_state()

    def adopt_state(self, num_steps: int) -> None:
        self.driver.adopt_state(num_steps)
        self._updates.done = num_steps

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        held = self.driver.tensors()
        held["gradients_whole"] = [*held["gradients_whole"], *self.sums.tensors()]
        return held | {"host": [*held.get("host", ()), *self._cold.tensors()]}

    # --- gradients ---

    def _set_syncing(self, syncing: bool) -> None:
        """Have autograd call for a gradient only while it is final, and not for every parameter in every backward."""
        super()._set_syncing(syncing)
        if not self._hears_each and syncing != bool(self._hooks):
            if syncing:
                self._listen()
            else:
                while self._hooks:
                    self._hooks.pop().remove()

    def _listen(self) -> None:
        """Without a W, a last backward that gives a parameter no gradient ends it, too: a hook on its sum will do."""
        if self._hears_each or self._splits:
            self._hooks = [pytorch.OnGradient(p, pytorch.weakly(self._on_gradient)) for p in self.driver.params]
        else:
            came = pytorch.weakly(self._in_order.came)
            self._hooks = [p.register_post_accumulate_grad_hook(came) for p in self.driver.params]

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._in_order.counts_uses:
            self._in_order.uses[id(param)] += 1
        if self._cold.params:
            self._cold.offload(param)
        if not self.sums.accept(param) or not self._syncing:
            return
        comes_again = wgrad.is_splitting() and wgrad.is_put_off(param)  # an embedding whose matrix is the head's too
        if not comes_again:
            self._in_order.came(param)

    def _hand_over(self, param: torch.nn.Parameter) -> None:
        """Reduce a parameter's gradient, whose last part has come, or zeros if there is none."""
        if not self._reducing:
            self.driver.begin_reduction()
            self._reducing = True
        if id(param) in self._cold.params:
            self._cold.bring_back(param)
        self.sums.give_back(param)
        if param.grad is None:
            param.grad = torch.zeros(param.shape, dtype=self._accumulate_in, device=param.device)
        self._show(self._names[id(param)], param, param.grad)
        if self.at_owners.takes(param):
            self.at_owners.add(param, param.grad)
            param.grad = None
        else:
            self.driver.reduce(param)


def separate_tied_copies(optimizer: torch.optim.Optimizer) -> None:
    """Give each copy of a tied embedding a group of its own, with the options of the one it was in.

    DeepSpeed cuts the flat run of a group over ranks, and the optimizer updates a rank's part as one tensor. So the
    first and the last stage cut their copies alike, and a kernel that rounds the last elements of a tensor otherwise
    (torch's fused AdamW) does so with the same elements of both.
    """
    zero12.split_groups(optimizer, lambda param: id(param) if names.is_tied(param) else None)
