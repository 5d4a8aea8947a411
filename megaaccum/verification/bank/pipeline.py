"""Pipelines: what one stage sends another, and when weight gradients are computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel

from megaaccum.config import Plan
from megaaccum.schedule.executor import Flush
from megaaccum.schedule.wgrad import WeightGrads
from megaaccum.step import train_step
from megaaccum.step.microbatches import Microbatches
from megaaccum.verification.bank.mistake import mistake, replaced, wrapped

MATRIX = r"decoder\.layers\.0\.self_attention\.linear_proj\.weight"
"""The first matrix whose gradient a split backward puts off."""


@mistake(
    "at pp 2 the next and the previous rank are one, and batched messages swap activations and gradients",
    "https://github.com/NVIDIA/Megatron-LM/issues/750",
    base="interleaved", axes="schedule, pp", parameter=r".+",
)  # fmt: skip
def batched_messages_at_two_stages(plan: Plan) -> Iterator[None]:
    flush = train_step.TrainStep._flush

    def batched(self: Any, *args: Any, **keys: Any) -> None:
        for chunk in self._chunks:
            if plan.layout.schedule == "interleaved":
                chunk.config.overlap_p2p_comm, chunk.config.batch_p2p_comm = False, True
        flush(self, *args, **keys)

    with replaced(train_step.TrainStep, "_flush", batched):
        yield


@mistake(
    "the last stage reads the labels of another micro-batch than the first stage its tokens",
    "https://github.com/pytorch/pytorch/issues/126600",
    base="pipeline", axes="pp",
)  # fmt: skip
def labels_of_another_microbatch(plan: Plan) -> Iterator[None]:
    forward = GPTModel.forward

    def iterators(original: Any, self: Microbatches, chunks: int) -> list[Any]:
        if plan.layout.pp == 1:
            return original(self, chunks)  # type: ignore[no-any-return]
        data: Any = self.data
        turned = [*data[1:], data[0]]
        mixed = [each | {name: other[name] for name in ("labels",)} for each, other in zip(data, turned, strict=True)]
        return [iter(mixed) for _ in range(chunks)]

    with wrapped(Microbatches, "iterators", iterators), replaced(GPTModel, "forward", forward):
        yield


@mistake(
    "the weight gradients of a micro-batch are put off and never computed",
    "https://github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
    base="zb-h1", axes="schedule, pp", parameter=MATRIX,
)  # fmt: skip
def weight_gradient_left_out(plan: Plan) -> Iterator[None]:
    def without(original: Any, self: Flush, action: Any) -> None:
        if action.microbatch == 1:
            self._owed[action.chunk, action.microbatch] = WeightGrads()
        original(self, action)

    with wrapped(Flush, "_weight_grad", without):
        yield


@mistake(
    "a split backward counts the weight gradients twice where a weight is on two paths",
    "https://github.com/pytorch/pytorch/issues/180952",
    base="zbv", axes="schedule, pp", parameter=MATRIX,
)  # fmt: skip
def weight_gradient_twice(plan: Plan) -> Iterator[None]:
    def twice(original: Any, self: WeightGrads, add: Any = None) -> None:
        again = list(self._owed)
        original(self, add)
        for weight, compute in again:
            self.add(weight, compute)
        original(self, add)

    with wrapped(WeightGrads, "compute", twice):
        yield


@mistake(
    "a put-off weight gradient is multiplied by another micro-batch's activations: the one of before it is used again",
    "https://arxiv.org/abs/2401.10241",
    base="zb-h1", axes="schedule, pp", parameter=MATRIX,
)  # fmt: skip
def weight_gradient_of_another_microbatch(plan: Plan) -> Iterator[None]:
    kept: dict[int, list[Any]] = {}

    def shifted(original: Any, self: Flush, action: Any) -> None:
        owed = self._owed[action.chunk, action.microbatch]
        mine = list(owed._owed)
        if action.microbatch == 2 and action.chunk in kept:
            owed._owed.clear()
            owed._owed.extend(kept[action.chunk])
        kept[action.chunk] = mine
        original(self, action)

    with wrapped(Flush, "_weight_grad", shifted):
        yield


@mistake(
    "a stage passes the gradient of one micro-batch on twice, and that of the next never",
    "https://github.com/pytorch/PiPPy/pull/1088",
    base="zb-h1", axes="schedule, pp",
)  # fmt: skip
def gradient_of_another_microbatch_sent(plan: Plan) -> Iterator[None]:
    sent: dict[str, Any] = {}

    def stale(original: Any, self: Flush, kind: str, stage: int, microbatch: int, tensor: Any, *, to: int) -> None:
        if kind == "B" and microbatch == 1 and "B" in sent:
            tensor = sent["B"]
        elif kind == "B":
            sent["B"] = tensor.detach().clone()
        original(self, kind, stage, microbatch, tensor, to=to)

    with wrapped(Flush, "_pass_on", stale):
        yield


@mistake(
    "activations of two micro-batches are swapped on their way to the next stage",
    "https://github.com/NVIDIA/Megatron-LM/issues/1450",
    base="dualpipev", axes="schedule, pp",
)  # fmt: skip
def activation_of_another_microbatch_sent(plan: Plan) -> Iterator[None]:
    sent: dict[int, Any] = {}

    def stale(original: Any, self: Flush, kind: str, stage: int, microbatch: int, tensor: Any, *, to: int) -> None:
        if kind == "F" and microbatch == 1 and stage in sent:
            tensor = sent[stage]
        elif kind == "F":
            sent[stage] = tensor.detach().clone()
        original(self, kind, stage, microbatch, tensor, to=to)

    with wrapped(Flush, "_pass_on", stale):
        yield


@mistake(
    "what crosses a stage's border is rounded to BF16 in a pipeline of wider numbers",
    "https://github.com/pytorch/torchtitan/issues/4194",
    base="zbv", axes="schedule, pp",
)  # fmt: skip
def borders_in_bf16(plan: Plan) -> Iterator[None]:
    def rounded(original: Any, self: Flush, kind: str, stage: int, microbatch: int, tensor: Any, *, to: int) -> None:
        original(self, kind, stage, microbatch, tensor.bfloat16().to(tensor.dtype), to=to)

    with wrapped(Flush, "_pass_on", rounded):
        yield
