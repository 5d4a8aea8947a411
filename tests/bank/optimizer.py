"""The update: what decays, at which rate, with which counters, and what a skipped step leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaaccum.config import Plan
from megaaccum.optim import lr_schedule
from megaaccum.optim.loss_scaler import LossScaler
from megaaccum.optim.lr_schedule import LrSchedule
from megaaccum.sharding.ddp import DdpBackend
from megaaccum.sharding.deepspeed import DeepSpeedBackend
from megaaccum.step.recovery import Recovery
from megaaccum.step.transaction import Transaction
from tests.bank.mistake import FIRST, NORM, added_by_microbatch, mistake, replaced, wrapped


@mistake(
    "norms and biases decay too",
    "https://github.com/ServiceNow/Fast-LLM/issues/542",
    base="pipeline", axes="weight decay", parameter=NORM,
)  # fmt: skip
def norms_decay(plan: Plan) -> Iterator[None]:
    with replaced(lr_schedule, "never_decays", lambda name, param: False):
        yield


@mistake(
    "nothing decays",
    "https://github.com/meta-llama/llama-cookbook/issues/191",
    base="pipeline", axes="weight decay", parameter=FIRST,
)  # fmt: skip
def nothing_decays(plan: Plan) -> Iterator[None]:
    with replaced(lr_schedule, "never_decays", lambda name, param: True):
        yield


@mistake(
    "weight decay enters the gradient, where Adam rescales it, instead of the update",
    "https://arxiv.org/abs/1711.05101",
    base="pipeline", axes="weight decay", parameter=FIRST,
)  # fmt: skip
def decay_in_the_gradient(plan: Plan) -> Iterator[None]:
    with replaced(torch.optim, "AdamW", torch.optim.Adam):
        yield


@mistake(
    "Adam's count moves on more than once per step, as one does that every format of a group moves",
    "https://github.com/deepspeedai/DeepSpeed/pull/8471",
    base="pipeline", axes="", parameter=r".+",
)  # fmt: skip
def count_moves_twice(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: DdpBackend) -> None:
        original(self)
        for state in self.optimizer.state.values():
            state["step"] += 1

    with wrapped(DdpBackend, "step", step):
        yield


@mistake(
    "the learning rate moves on with every micro-batch",
    "https://github.com/huggingface/accelerate/pull/999",
    base="pipeline", axes="micro-batches", parameter=r".+",
)  # fmt: skip
def rate_moves_by_microbatch(plan: Plan) -> Iterator[None]:
    count = plan.batch.num_microbatches

    def often(original: Any, self: LrSchedule, num_samples: int) -> None:
        for _ in range(count):
            original(self, num_samples)

    with wrapped(LrSchedule, "step", often):
        yield


@mistake(
    "the learning rate moves on once per data-parallel rank",
    "https://github.com/huggingface/transformers/pull/24088",
    base="pipeline", axes="dp", parameter=r".+",
)  # fmt: skip
def rate_moves_by_rank(plan: Plan) -> Iterator[None]:
    def often(original: Any, self: LrSchedule, num_samples: int) -> None:
        for _ in range(plan.layout.dp):
            original(self, num_samples)

    with wrapped(LrSchedule, "step", often):
        yield


@mistake(
    "the learning rate does not move",
    "https://github.com/tumurzakov/AnimateDiff/issues/11",
    base="pipeline", axes="", parameter=r".+",
)  # fmt: skip
def rate_does_not_move(plan: Plan) -> Iterator[None]:
    with replaced(LrSchedule, "step", lambda self, num_samples: None):
        yield


@mistake(
    "the learning rate moves on with a step that was skipped",
    "https://github.com/huggingface/accelerate/issues/4242",
    base="FP16", axes="overflow", parameter=r".*",
)  # fmt: skip
def rate_moves_on_a_skip(plan: Plan) -> Iterator[None]:
    def commit(original: Any, self: Transaction, *args: Any) -> Any:
        done = original(self, *args)
        if done.skipped and self._lr_schedule is not None:
            self._lr_schedule.step(self.batch.global_batch_size)
        return done

    with wrapped(Transaction, "commit", commit):
        yield


@mistake(
    "the loss scale stays where it was after an overflow",
    "https://docs.pytorch.org/docs/stable/amp.html",
    base="FP16", axes="loss scale, overflow", parameter="",
)  # fmt: skip
def scale_not_halved(plan: Plan) -> Iterator[None]:
    with replaced(LossScaler, "update", lambda self, overflow: None):
        yield


@mistake(
    "the loss scale is halved after every step",
    "https://docs.pytorch.org/docs/stable/amp.html",
    base="FP16, no overflow", axes="loss scale", parameter="",
)  # fmt: skip
def scale_halved_every_step(plan: Plan) -> Iterator[None]:
    with wrapped(LossScaler, "update", lambda original, self, overflow: original(self, True)):
        yield


@mistake(
    "a gradient that is not finite is set to 0 and the optimizer steps, where it should skip: weights decay",
    "https://arxiv.org/abs/1710.03740",
    base="FP16", axes="overflow", parameter=FIRST,
)  # fmt: skip
def zeros_instead_of_a_skip(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: Recovery, *args: Any, **keys: Any) -> Any:
        verdict = original(self, *args, **keys)
        return replace(verdict, skip=False) if verdict.overflow else verdict

    def update(original: Any, self: DeepSpeedBackend) -> None:
        for shard in self.shards():
            shard.grad.nan_to_num_(0.0, 0.0, 0.0)
        original(self)

    with wrapped(Recovery, "judge", step), wrapped(DeepSpeedBackend, "step", update):
        yield


@mistake(
    "the optimizer steps twice per step, the second time on the same gradient",
    "https://github.com/mzolfaghari/ECO-pytorch/pull/1",
    base="pipeline", axes="", parameter=r".+",
)  # fmt: skip
def two_updates(plan: Plan) -> Iterator[None]:
    def twice(original: Any, self: DdpBackend) -> None:
        original(self)
        original(self)

    with wrapped(DdpBackend, "step", twice):
        yield


@mistake(
    "the optimizer steps on each micro-batch's gradient, of whose sum Adam's step, and Muon's, is no sum",
    "https://github.com/deepspeedai/DeepSpeed/issues/8443",
    base="pipeline", axes="micro-batches", parameter=FIRST,
)  # fmt: skip
def optimizer_by_microbatch(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: DdpBackend) -> None:
        for index in range(plan.batch.num_microbatches):
            for shard in self.shards():
                shard.grad.copy_(added[id(shard.param)][index].flatten())
                dist.all_reduce(shard.grad, group=self._groups.dp_cp)
                shard.grad.div_(self._groups.dp_cp.size())
            original(self)

    with added_by_microbatch() as added, wrapped(DdpBackend, "step", step):
        yield


@mistake(
    "what is frozen decays: its gradient is zero in place of none",
    "https://github.com/huggingface/diffusers/issues/1009",
    base="own, frozen", axes="weight decay", parameter=r"embedding\.weight",
)  # fmt: skip
def frozen_parameter_decays(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: DdpBackend) -> None:
        original(self)
        (group, *_) = self.param_groups
        for param in (param for chunk in self._chunks for param in chunk.parameters()):
            if not param.requires_grad:
                param.data.mul_(1 - group["lr"] * group["weight_decay"])

    with wrapped(DdpBackend, "step", step):
        yield


@mistake(
    "one pipeline stage does not hear of another's overflow: it steps, and the others skip",
    "https://github.com/deepspeedai/DeepSpeed/issues/994",
    base="FP16", axes="pp, loss scale, overflow", parameter=FIRST,
)  # fmt: skip
def one_stage_does_not_skip(plan: Plan) -> Iterator[None]:
    def judge(original: Any, self: Recovery, *args: Any, **keys: Any) -> Any:
        verdict = original(self, *args, **keys)
        return replace(verdict, skip=False) if verdict.overflow and is_first() else verdict

    def update(original: Any, self: DeepSpeedBackend) -> None:
        for shard in self.shards():
            shard.grad.nan_to_num_(0.0, 0.0, 0.0)
        original(self)

    def is_first() -> bool:
        return plan.layout.pp > 1 and parallel_state.is_pipeline_first_stage(ignore_virtual=True)

    with wrapped(Recovery, "judge", judge), wrapped(DeepSpeedBackend, "step", update):
        yield


@mistake(
    "one data-parallel rank skips the step that the others take",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
    base="pipeline", axes="dp", parameter=r".+",
)  # fmt: skip
def one_rank_skips(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: DdpBackend) -> None:
        if plan.layout.dp == 1 or self._groups.dp_cp.rank() == 0:
            original(self)

    with wrapped(DdpBackend, "step", step):
        yield


@mistake(
    "the weights that a forward reads are those of before the update, whose gather has not arrived",
    "https://github.com/NVIDIA/Megatron-LM/issues/950",
    base="ZeRO-2, tied", axes="backend", parameter=FIRST,
)  # fmt: skip
def stale_weights(plan: Plan) -> Iterator[None]:
    def step(original: Any, self: DeepSpeedBackend) -> None:
        before = [param.detach().clone() for param in self.driver.params]
        original(self)
        for param, old in zip(self.driver.params, before, strict=True):
            param.data.copy_(old)

    with wrapped(DeepSpeedBackend, "step", step):
        yield
