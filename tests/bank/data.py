"""Samples, labels and initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megaaccum.config import Plan
from megaaccum.model import names
from megaaccum.pretrain.model import gpt
from megaaccum.pretrain.model.gpt_forward import GptForwardStep
from megaaccum.step.train_step import TrainStep
from tests.bank.mistake import FIRST, mistake, replaced, wrapped


@mistake(
    "every data-parallel rank reads the same samples",
    "https://github.com/Shark-NLP/DiffuSeq/pull/39",
    base="pipeline", axes="dp",
)  # fmt: skip
def ranks_read_the_same(plan: Plan) -> Iterator[None]:
    def train(original: Any, self: TrainStep, microbatches: Any, **keys: Any) -> Any:
        everyone: list[Any] = [None] * self.groups.dp.size()
        torch.distributed.all_gather_object(everyone, microbatches, group=self.groups.dp)
        return original(self, everyone[0], **keys)

    with wrapped(TrainStep, "train", train):
        yield


@mistake(
    "every micro-batch of a step is the first one",
    "https://github.com/baaivision/URSA/issues/10",
    base="pipeline", axes="micro-batches",
)  # fmt: skip
def microbatches_are_the_same(plan: Plan) -> Iterator[None]:
    def train(original: Any, self: TrainStep, microbatches: Any, **keys: Any) -> Any:
        return original(self, [microbatches[0]] * len(microbatches), **keys)

    with wrapped(TrainStep, "train", train):
        yield


@mistake(
    "ranks shuffle by seeds of their own, so that some samples come twice in a step and others never",
    "https://github.com/sandyresearch/parcae/issues/10",
    base="pipeline", axes="dp",
)  # fmt: skip
def ranks_overlap(plan: Plan) -> Iterator[None]:
    def train(original: Any, self: TrainStep, microbatches: Any, **keys: Any) -> Any:
        everyone: list[Any] = [None] * self.groups.dp.size()
        torch.distributed.all_gather_object(everyone, microbatches, group=self.groups.dp)
        return original(self, [everyone[0][0], *microbatches[1:]], **keys)

    with wrapped(TrainStep, "train", train):
        yield


@mistake(
    "labels are shifted by the data and by the loss: the token after the next is predicted",
    "https://github.com/huggingface/transformers/issues/47394",
    base="pipeline", axes="",
)  # fmt: skip
def labels_shifted_twice(plan: Plan) -> Iterator[None]:
    def train(original: Any, self: TrainStep, microbatches: Any, **keys: Any) -> Any:
        shifted = [each | {"labels": each["labels"].roll(-1, dims=1)} for each in microbatches]
        return original(self, shifted, **keys)

    with wrapped(TrainStep, "train", train):
        yield


@mistake(
    "the loss reads no mask, though N counts unmasked tokens alone",
    "https://github.com/PaddlePaddle/PaddleNLP/pull/5339",
    base="pipeline", axes="unequal weights",
)  # fmt: skip
def mask_not_read(plan: Plan) -> Iterator[None]:
    loss = GptForwardStep.loss

    def unmasked(self: Any, mask: torch.Tensor, tokens: float, output: torch.Tensor) -> Any:
        _, weight, reports = loss(self, mask, tokens, output)
        total, _, _ = loss(self, torch.ones_like(mask), tokens, output)
        return total, weight, reports

    with replaced(GptForwardStep, "loss", unmasked):
        yield


@mistake(
    "data-parallel ranks start with different weights",
    "https://github.com/facebookresearch/detectron2/issues/4438",
    base="FSDP2", axes="dp, backend", parameter=FIRST,
)  # fmt: skip
def ranks_start_apart(plan: Plan) -> Iterator[None]:
    draw = gpt.initialize

    def own(chunk: Any, groups: Any, *, seed: int) -> None:
        draw(chunk, groups, seed=seed + groups.dp.rank())

    with replaced(gpt, "initialize", own):
        yield


@mistake(
    "a gated matrix is cut as one: a tp rank has the gate of the first half and no other's up",
    "https://github.com/NVIDIA/Megatron-LM/issues/360",
    base="tensor parallel, gated", axes="tp", parameter=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight",
)  # fmt: skip
def gate_cut_as_one(plan: Plan) -> Iterator[None]:
    def one_part(full: torch.Tensor, param: Any, groups: Any) -> torch.Tensor:
        if not names.is_sharded_over_tp(param):
            return full
        return full.chunk(groups.tp.size(), param.partition_dim)[groups.tp.rank()]

    with replaced(gpt, "tp_part", one_part):
        yield


@mistake(
    "stages draw their weights from seeds of their own: the model changes with the pipeline",
    "https://github.com/pytorch/pytorch/issues/139304",
    base="pipeline", axes="pp", parameter=r"decoder\.layers\.2\..+",
)  # fmt: skip
def weights_by_stage(plan: Plan) -> Iterator[None]:
    draw = gpt.initialize

    def own(chunk: Any, groups: Any, *, seed: int) -> None:
        draw(chunk, groups, seed=seed + groups.pp.rank())

    with replaced(gpt, "initialize", own):
        yield


@mistake(
    "every rank draws the same dropout",
    "https://github.com/goodfire-ai/spd/pull/412",
    base="pipeline", axes="dp", parameter="",
)  # fmt: skip
def dropout_equal_on_all_ranks(plan: Plan) -> Iterator[None]:
    def same(groups: Any, *, seed: int) -> None:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

    with replaced(gpt, "seed_dropout", same):
        yield
