"""Pipelines: what one stage sends another, and when weight gradients are computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from megaaccum.config import Plan
from megaaccum.executor.executor import Flush
from megaaccum.executor.wgrad import WeightGrads
from megaaccum.pretrain.model import gpt
from megaaccum.step import evaluation
from megaaccum.step.microbatches import Microbatches
from megaaccum.step.seeds import SampleSeeds
from megaaccum.step.train_step import TrainStep
from megaaccum.upstream import pytorch
from tests.bank import models
from tests.bank.mistake import mistake, replaced, wrapped

MATRIX = r"decoder\.layers\.0\.self_attention\.linear_proj\.weight"
"""The first matrix whose gradient a split backward puts off."""


@mistake(
    "at pp 2 the next and the previous rank are one, and batched messages swap activations and gradients",
    "https://github.com/NVIDIA/Megatron-LM/issues/750",
    base="interleaved", axes="schedule, pp", parameter=r".+",
)  # fmt: skip
def batched_messages_at_two_stages(plan: Plan) -> Iterator[None]:
    flush = TrainStep.flush

    def batched(self: Any, *args: Any, **keys: Any) -> None:
        for chunk in self.chunks:
            if plan.layout.schedule == "interleaved":
                chunk.config.overlap_p2p_comm, chunk.config.batch_p2p_comm = False, True
        flush(self, *args, **keys)

    with replaced(TrainStep, "flush", batched):
        yield


@mistake(
    "the last stage reads the labels of another micro-batch than the first stage its tokens",
    "https://github.com/deepspeedai/DeepSpeed/issues/5729",
    base="pipeline", axes="pp",
)  # fmt: skip
def labels_of_another_microbatch(plan: Plan) -> Iterator[None]:
    def iterators(original: Any, self: Microbatches, chunks: int) -> list[Any]:
        if plan.layout.pp == 1:
            return original(self, chunks)  # type: ignore[no-any-return]
        data: Any = self.data
        turned = [*data[1:], data[0]]
        mixed = [each | {"labels": other["labels"]} for each, other in zip(data, turned, strict=True)]
        return [iter(mixed) for _ in range(chunks)]

    with wrapped(Microbatches, "iterators", iterators):
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

    with wrapped(Flush, "weight_grad", without):
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
        for weight, compute, source in again:
            self.add(weight, compute, source)
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

    with wrapped(Flush, "weight_grad", shifted):
        yield


@mistake(
    "the weight gradients of a step's last micro-batch come a step late, when its weights are others",
    "https://arxiv.org/abs/1806.03377",
    base="zb-h1", axes="schedule, pp", parameter=MATRIX,
)  # fmt: skip
def weight_gradient_a_step_late(plan: Plan) -> Iterator[None]:
    late: dict[int, WeightGrads] = {}
    last = plan.batch.num_microbatches - 1

    def delayed(original: Any, self: Flush, action: Any) -> None:
        at = action.chunk, action.microbatch
        if action.microbatch == last:
            late[action.chunk], self._owed[at] = self._owed[at], late.get(action.chunk, WeightGrads())
        original(self, action)

    with wrapped(Flush, "weight_grad", delayed):
        yield


@mistake(
    "a stage passes the gradient of one micro-batch on twice, and that of the next never",
    "https://github.com/pytorch/pytorch/issues/139404",
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

    with wrapped(Flush, "pass_on", stale):
        yield


@mistake(
    "a stage's input is another micro-batch's, as where receives share a buffer; here one activation is sent twice",
    "https://github.com/NVIDIA/Megatron-LM/pull/5876",
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

    with wrapped(Flush, "pass_on", stale):
        yield


@mistake(
    "what was asked to stay wider is cast to BF16 on its way, here where it crosses a stage's border",
    "https://github.com/NVIDIA/Megatron-LM/pull/3504",
    base="zbv", axes="schedule, pp",
)  # fmt: skip
def borders_in_bf16(plan: Plan) -> Iterator[None]:
    def rounded(original: Any, self: Flush, kind: str, stage: int, microbatch: int, tensor: Any, *, to: int) -> None:
        original(self, kind, stage, microbatch, tensor.bfloat16().to(tensor.dtype), to=to)

    with wrapped(Flush, "pass_on", rounded):
        yield


@mistake(
    "the second chunk of a V has the layers that it would have in a loop: those of stage pp + rank",
    "https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/75",
    base="zbv", axes="schedule, pp",
)  # fmt: skip
def another_stage_in_a_v(plan: Plan) -> Iterator[None]:
    build = gpt.build_chunk

    def numbered(plan: Plan, groups: Any, config: Any, vocab_size: int, chunk: int) -> Any:
        built = build(plan, groups, config, vocab_size, chunk)
        if plan.layout.placement == "v" and chunk == 1:
            each = len(built.decoder.layers)
            for number, layer in enumerate(built.decoder.layers, start=1):
                layer.layer_number = (plan.layout.pp + groups.pp.rank()) * each + number
        return built

    with replaced(gpt, "build_chunk", numbered):
        yield


@mistake(
    "activations are recomputed with other dropout: the random state of the first forward is not restored",
    "https://github.com/allenai/OLMo-core/pull/828",
    base="recompute, dropout", axes="recompute",
)  # fmt: skip
def recomputed_with_other_dropout(plan: Plan) -> Iterator[None]:
    def seed(original: Any, self: SampleSeeds, layer: str, stream: str) -> None:
        if not pytorch.in_backward():
            original(self, layer, stream)

    with replaced(random, "_set_all_rng_states", lambda *states: None), wrapped(SampleSeeds, "seed_at", seed):
        yield


@mistake(
    "a history of largest values moves on for modules that did not run: one chunk's forward empties a row of others'",
    "https://github.com/NVIDIA/TransformerEngine/pull/825",
    base="own, quantized", axes="schedule, pp", parameter=r"embedding\.weight",
)  # fmt: skip
def amax_of_a_chunk_lost(plan: Plan) -> Iterator[None]:
    stages: list[models.Stage] = []

    def built(original: Any, self: models.Stage, *args: Any) -> None:
        original(self, *args)
        stages.append(self)

    def end(original: Any, self: models.Stage) -> None:
        for stage in stages:
            original(stage)

    with wrapped(models.Stage, "__init__", built), wrapped(models.Stage, "end_forward", end):
        yield


@mistake(
    "the largest values of an evaluation stay in the history that the next step's scale comes from",
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/quantization.py",
    base="own, quantized", axes="", parameter=r"embedding\.weight",
)  # fmt: skip
def amax_of_an_evaluation_kept(plan: Plan) -> Iterator[None]:
    def train(original: Any, self: TrainStep, microbatches: Any, **keys: Any) -> Any:
        evaluation.evaluate(self, microbatches)
        return original(self, microbatches, **keys)

    def end(original: Any, self: models.Stage) -> None:
        if torch.is_grad_enabled():
            original(self)

    with wrapped(TrainStep, "train", train), wrapped(models.Stage, "end_forward", end):
        yield
