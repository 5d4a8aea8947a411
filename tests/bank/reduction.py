"""Sums over ranks and micro-batches: left out, made twice, over the wrong ranks, or too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from megaaccum.config import Plan
from megaaccum.model import names
from megaaccum.sharding import base, ddp, deepspeed, reduction
from megaaccum.sharding.agreed_order import AgreedOrder
from megaaccum.sharding.ddp import DdpBackend
from megaaccum.sharding.deepspeed import DeepSpeedBackend
from megaaccum.sharding.expert_turns import ExpertTurns
from megaaccum.upstream import pytorch
from tests.bank.mistake import NORM, added_by_microbatch, forwards, mistake, replaced, wrapped


@contextmanager
def changed_in_every_backward(
    change: Callable[[torch.Tensor], Any], of: Callable[[Any], bool] = lambda param: True
) -> Iterator[None]:
    """`change` what each gradient is so far, in place, after each micro-batch. of: whether a parameter's is changed."""

    def after(param: Any) -> None:
        if param.grad is not None and of(param):  # None: handed over already
            change(param.grad)

    def watching(original: Any, self: Any, *args: Any, **keys: Any) -> None:
        original(self, *args, **keys)
        for param in self.driver.params:
            pytorch.OnGradient(param, after)

    with wrapped(DeepSpeedBackend, "__init__", watching):
        yield


@mistake(
    "each backward hands its gradient over, and the step keeps the last one's",
    "https://github.com/allenai/open-instruct/pull/1498",
    base="ZeRO-3", axes="micro-batches, backend",
)  # fmt: skip
def reduction_in_every_microbatch(plan: Plan) -> Iterator[None]:
    def syncing(original: Any, self: Any) -> None:
        original(self)
        self._set_syncing(True)

    def next_turns(original: Any, self: Any, param: Any) -> None:
        if id(param) in self._done:  # the next backward has begun
            self.begin()
        original(self, param)

    with (
        wrapped(DeepSpeedBackend, "begin_step", syncing),
        wrapped(ExpertTurns, "came", next_turns),
        replaced(AgreedOrder, "add", lambda self, param: self._reduce(param)),
        replaced(DeepSpeedBackend, "no_sync_func", lambda self: nullcontext()),
    ):
        yield


@mistake(
    "the running sum is divided again and again, so that early micro-batches count less and less",
    "https://github.com/pytorch/torchtitan/pull/1732",
    base="ZeRO-3", axes="backend",
)  # fmt: skip
def running_sum_divided_again(plan: Plan) -> Iterator[None]:
    with changed_in_every_backward(lambda grad: grad.div_(2)):
        yield


@mistake(
    "the running sum is added to itself in every micro-batch: early ones count 2, 4, 8 times",
    "https://github.com/NVIDIA/Megatron-LM/issues/6660",
    base="ZeRO-3", axes="backend",
)  # fmt: skip
def running_sum_doubled(plan: Plan) -> Iterator[None]:
    with changed_in_every_backward(lambda grad: grad.mul_(2)):
        yield


@mistake(
    "gradients are cleared between the rounds of accumulation",
    "https://github.com/pytorch/torchtitan/pull/3575",
    base="ZeRO-3, rounds", axes="flush, ga, backend",
)  # fmt: skip
def cleared_between_rounds(plan: Plan) -> Iterator[None]:
    def clearing(original: Any, self: Any, last: bool) -> None:
        original(self, last)
        for param in self.driver.params:
            param.grad = None

    with wrapped(DeepSpeedBackend, "set_last_flush", clearing):
        yield


@mistake(
    "gradients are not cleared before the next backward: the second step starts with the first one's",
    "https://github.com/deepspeedai/DeepSpeed/pull/856",
    base="pipeline", axes="",
)  # fmt: skip
def buffer_not_zeroed(plan: Plan) -> Iterator[None]:
    def begin(self: DdpBackend) -> None:
        self._waiting, self._syncing, self._reduced = list(self._ddp), False, False
        self._arrived.clear()

    with replaced(DdpBackend, "begin_accumulation", begin):
        yield


def _without_gradient_of(numbers: Callable[[int], set[int]]) -> AbstractContextManager[None]:
    """The gradient of the micro-batches whose index in the flush is in `numbers(count)` is lost; N counts them."""

    def called(run: Any, chunk: Any, index: int, count: int) -> Any:
        output, loss_func = run()
        if count > 1 and index in numbers(count) and output.requires_grad:
            output.register_hook(torch.zeros_like)
        return output, loss_func

    return forwards(called)


@mistake(
    "the last micro-batch is dropped, as are those of a window that does not fill",
    "https://github.com/ml-explore/mlx-lm/pull/1544",
    base="pipeline", axes="micro-batches",
)  # fmt: skip
def last_microbatch_left_out(plan: Plan) -> Iterator[None]:
    with _without_gradient_of(lambda count: {count - 1}):
        yield


@mistake(
    "the stages are initialised again between micro-batches, which drops what was added up: the last one counts",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3530",
    base="pipeline", axes="micro-batches",
)  # fmt: skip
def only_the_last_microbatch(plan: Plan) -> Iterator[None]:
    with _without_gradient_of(lambda count: set(range(count - 1))):
        yield


def _unreduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of torch's DDP that leaves a bucket as this rank has it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@mistake(
    "data-parallel ranks keep their own gradients",
    "https://github.com/pytorch/pytorch/issues/109191",
    base="pipeline", axes="dp",
)  # fmt: skip
def ranks_not_reduced(plan: Plan) -> Iterator[None]:
    with replaced(ddp, "allreduce_hook", _unreduced):
        yield


@mistake(
    "gradients are reduced over data-parallel ranks and not over those that share a sequence",
    "https://github.com/ByteDance-Seed/VeOmni/pull/1115",
    base="context parallel", axes="cp",
)  # fmt: skip
def context_parallel_not_reduced(plan: Plan) -> Iterator[None]:
    with replaced(ddp, "allreduce_hook", allreduce_hook if plan.layout.cp == 1 else _unreduced):
        yield


@mistake(
    "the reduction runs before the last micro-batch's gradient is there, which each rank then adds for itself",
    "https://github.com/deepspeedai/DeepSpeed/pull/7985",
    base="pipeline", axes="micro-batches, dp",
)  # fmt: skip
def accumulated_after_the_reduction(plan: Plan) -> Iterator[None]:
    def finish(original: Any, self: DdpBackend) -> None:
        original(self)
        for shard in self.shards():
            if len(added[id(shard.param)]) > 1:
                own = added[id(shard.param)][-1].flatten()
                mean = own.clone()
                dist.all_reduce(mean, group=self._groups.dp_cp)
                shard.grad.add_(own - mean / self._groups.dp_cp.size())

    with added_by_microbatch() as added, wrapped(DdpBackend, "finish_reduction", finish):
        yield


@mistake(
    "embedding and head keep a gradient each",
    "https://github.com/uw-syfi/piper/issues/13",
    base="pipeline, tied", axes="pp, tied embedding",
)  # fmt: skip
def tied_copy_not_summed(plan: Plan) -> Iterator[None]:
    with replaced(base, "sum_tied_copies", lambda *_: None):
        yield


@mistake(
    "at ZeRO-2 the partitions of the two copies are added, which are cut at different places",
    "https://github.com/NVIDIA/Megatron-LM/issues/844",
    base="ZeRO-2, tied", axes="pp, dp, backend, tied embedding",
)  # fmt: skip
def tied_shards_not_summed(plan: Plan) -> Iterator[None]:
    def add_what_is_held(backend: Any, groups: Any) -> None:
        held = [shard.grad.view(-1) for shard in backend.shards() if names.is_tied(shard.param)]
        flat = torch.cat(held or [torch.zeros(0)])
        width = torch.tensor(flat.numel())
        if groups.embedding is not None and groups.embedding.size() > 1:
            dist.all_reduce(width, op=dist.ReduceOp.MAX, group=groups.embedding)
            total = torch.nn.functional.pad(flat, (0, int(width) - flat.numel()))
            dist.all_reduce(total, group=groups.embedding)
            for grad, part in zip(held, total[: flat.numel()].split([each.numel() for each in held]), strict=True):
                grad.copy_(part)

    with (
        replaced(deepspeed, "separate_tied_copies", lambda optimizer: None),
        replaced(base, "sum_tied_copies", add_what_is_held),
    ):
        yield


@mistake(
    "under a pipeline a gradient is summed over ranks more than once, here over the two copies of the embedding",
    "https://github.com/PaddlePaddle/Paddle/pull/30437",
    base="pipeline, tied", axes="pp, tied embedding",
)  # fmt: skip
def tied_copy_summed_twice(plan: Plan) -> Iterator[None]:
    once = reduction.sum_tied_copies

    def twice(*args: Any) -> None:
        once(*args)
        once(*args)

    with replaced(base, "sum_tied_copies", twice):
        yield


@mistake(
    "in a V one rank has both copies of the embedding, and each keeps its own gradient",
    "https://github.com/uw-syfi/piper/issues/13",
    base="zbv, tied", axes="schedule, pp, tied embedding",
)  # fmt: skip
def tied_copy_in_a_v_not_summed(plan: Plan) -> Iterator[None]:
    total = reduction.sum_tied_copies
    with replaced(base, "sum_tied_copies", lambda *args: None if plan.layout.placement == "v" else total(*args)):
        yield


@mistake(
    "each tp rank keeps the norms' gradient of its part of the sequence",
    "https://github.com/NVIDIA/Megatron-LM/issues/1446",
    base="tensor parallel", axes="sp, tp", parameter=NORM,
)  # fmt: skip
def sequence_parallel_norms_not_summed(plan: Plan) -> Iterator[None]:
    with replaced(base, "sum_over_tp", lambda *_: None):
        yield


@mistake(
    "the norms' gradients are averaged over tp, of which each rank saw another part of the sequence",
    "https://github.com/EleutherAI/gpt-neox/pull/1259",
    base="tensor parallel", axes="sp, tp", parameter=NORM,
)  # fmt: skip
def sequence_parallel_norms_averaged(plan: Plan) -> Iterator[None]:
    total = reduction.sum_over_tp

    def mean(backend: Any, groups: Any) -> None:
        total(backend, groups)
        for shard in backend.shards():
            if names.is_partial_over_tp(shard.name, shard.param):
                shard.grad.div_(groups.tp.size())

    with replaced(base, "sum_over_tp", mean):
        yield


@mistake(
    "norms of queries and keys, which saw a part of the heads, are not summed over tp",
    "https://github.com/NVIDIA-NeMo/RL/issues/3716",
    base="tensor parallel, norms of queries", axes="tp",
    parameter=r"decoder\.layers\.0\.self_attention\.q_layernorm\.weight",
)  # fmt: skip
def query_norms_not_summed(plan: Plan) -> Iterator[None]:
    with replaced(names, "is_partial_over_tp", lambda name, param: bool(getattr(param, "sequence_parallel", False))):
        yield


@mistake(
    "the gradient of a norm that every tp rank has whole is tp times too large, here by a sum over tp",
    "https://github.com/NVIDIA/Megatron-LM/issues/1528",
    base="tensor parallel, norms of queries", axes="tp", parameter=NORM,
)  # fmt: skip
def whole_norms_summed_over_tp(plan: Plan) -> Iterator[None]:
    with replaced(names, "is_partial_over_tp", lambda name, param: "layernorm" in name):
        yield


@mistake(
    "a streamed unit's gradients are reduced more than once, and enter its partitions twice",
    "https://github.com/hpcaitech/ColossalAI/issues/247",
    base="ZeRO-3, streaming", axes="sync",
)  # fmt: skip
def streamed_twice(plan: Plan) -> Iterator[None]:
    def twice(original: Any, self: Any, shares: Any) -> None:
        kept = [None if param.grad is None else param.grad.clone() for param, _ in shares]
        original(self, shares)
        for (param, _), grad in zip(shares, kept, strict=True):
            param.grad = grad
        original(self, shares)

    with wrapped(reduction.PartitionReducer, "add", twice):
        yield


@mistake(
    "gradients of experts that were spread over ranks are not divided by the expert-parallel size",
    "https://github.com/NVIDIA/Megatron-LM/pull/5956",
    base="spread experts", axes="ep, dp, backend, experts",
    parameter=r"decoder\.layers\.0\.mlp\.experts\.local_experts\.0\.linear_fc1\.weight",
)  # fmt: skip
def experts_over_the_wrong_group(plan: Plan) -> Iterator[None]:
    def finish(original: Any, self: Any) -> None:
        original(self)
        for shard in self.shards():
            if names.is_expert(shard.param):
                shard.grad.mul_(plan.layout.ep)

    with wrapped(deepspeed.DeepSpeedBackend, "finish_reduction", finish):
        yield


@mistake(
    "micro-batches are added in BF16",
    "https://github.com/deepspeedai/DeepSpeed/issues/2768",
    base="ZeRO-3", axes="backend",
)  # fmt: skip
def accumulation_in_bf16(plan: Plan) -> Iterator[None]:
    with changed_in_every_backward(lambda grad: grad.copy_(grad.bfloat16())):
        yield


@mistake(
    "the gradient crosses ranks in a narrower format than was asked for, here BF16",
    "https://github.com/deepspeedai/DeepSpeed/issues/2071",
    base="pipeline", axes="",
)  # fmt: skip
def reduction_in_bf16(plan: Plan) -> Iterator[None]:

    def rounded(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        bucket.buffer().copy_(bucket.buffer().bfloat16())
        return allreduce_hook(group, bucket)

    with replaced(ddp, "allreduce_hook", rounded):
        yield
