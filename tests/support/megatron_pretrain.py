"""A user's pretrain_gpt.py, tiny: Megatron's `pretrain` on ranks, or this package's in its place."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

SEQ, VOCAB = 16, 60
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 6 --lr 1e-3 --eval-interval 3 --eval-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 4 --log-interval 1 "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo --use-cpu-initialization "
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion --pipeline-model-parallel-size 2 "
    "--num-workers 0 --no-check-for-nan-in-loss-and-grad --clip-grad 1.0 --split 1,1,1 "
)
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1 "
TP2 = "--tensor-model-parallel-size 2 "
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
)


@dataclass(frozen=True)
class Run:
    """One start of the program. ours: the import is changed; keys: what it is given beside Megatron's flags; provider:
    the model comes from a model_provider, not from a configuration."""

    flags: str = ""
    ours: bool = True
    keys: dict[str, Any] = field(default_factory=dict)
    provider: bool = False


class Tokens(torch.utils.data.Dataset):
    """Sequences that are made from their index; some tokens are masked."""

    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(1000 + self.first + index)
        tokens = torch.randint(0, VOCAB, (SEQ + 1,), generator=made)
        mask = (torch.arange(SEQ) < 4 + (self.first + index) % 12).float()
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": torch.arange(SEQ)}


def datasets(num_samples, vp_stage=None):
    return Tokens(0, 500), Tokens(1000, 500), Tokens(2000, 500)


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data_iterator, model):
    """The forward step of Megatron-LM's pretrain_gpt.py."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training.utils import is_first_or_last_pipeline_stage

    from tests.support.parity import on_device

    batch: dict = {}
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        batch = on_device(next(data_iterator))
    mask = batch.get("loss_mask")

    def loss_func(output):
        losses = (output.view(-1).float() * mask.view(-1)).sum()
        tokens = mask.sum().to(torch.int)
        return losses, tokens, {"lm loss": torch.cat([losses.clone().detach().view(1), tokens.view(1)])}

    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"), loss_mask=mask)
    return output, loss_func


def same_weights(chunks):
    """Weights by a parameter's name in the model, whatever stage it is on."""
    from megatron.core import parallel_state

    from megaaccum.pretrain.model import gpt

    groups: Any = SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
    )
    for chunk in chunks:
        gpt.initialize(chunk, groups, seed=7)
    return chunks


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """The model provider of Megatron-LM's model_provider.py."""
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    builder = GPTModelBuilder(gpt_config_from_args(get_args()))
    return same_weights([builder.build_model(pg_collection, pre_process, post_process, vp_stage)])[0]


def pretrained(runs: Sequence[Run]) -> list[list[str]]:
    """The lines that the last rank prints on iterations and evaluations of each run, without times; else nothing."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it with tensor parallelism
    from megatron.training.argument_utils import ArgumentGroupFactory

    # Each run has Megatron read its own source twice for the texts of `--help`: a third of a run's time.
    with patch.object(ArgumentGroupFactory, "_get_field_docstrings", return_value={}):
        return [_pretrained(run) for run in runs]


def _pretrained(run: Run) -> list[str]:
    from megaaccum.loop import pretrain as our_pretrain  # isort: skip  # the changed import
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import pretrain, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megaaccum.platform import cpu
    from megaaccum.pretrain.model.local_norm import Norm

    training.destroy_global_state()
    parallel_state.destroy_model_parallel()
    # With it Megatron 0.19 leaves the model in host memory, also beside a GPU.
    flags = FLAGS.replace("--use-cpu-initialization ", "") if cpu.has_accelerator() else FLAGS
    sys.argv = ["pretrain_gpt.py", *flags.split(), *run.flags.split()]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(same_weights)
    lines: list[str] = []
    start, more = (our_pretrain, {"keys": run.keys}) if run.ours else (pretrain, {})
    whole = pretrain_cfg_container_from_args(args, None if run.provider else model)
    provider = (model_provider,) if run.provider else ()
    with ExitStack() as stack:
        stack.enter_context(suppress(SystemExit))  # after --exit-interval
        stack.enter_context(patch.object(training, "print_rank_last", lines.append))
        # Megatron's wrapper of torch's norms refuses sequence parallelism, without which no experts train under tp.
        stack.enter_context(patch.object(WrappedTorchNorm, "__new__", Norm.__new__))
        if not run.ours:
            stack.enter_context(cpu.cuda_type_names())  # Megatron's clipping asks for it
        start(whole, datasets, ModelType.encoder_or_decoder, forward_step, *provider, **more)
    times = re.compile(r"^ *\[[^]]*\] *|elapsed time[^|]*\||throughput[^|]*\|")
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return [times.sub("", line) for line in lines if last and "loss" in line]


def numbers(lines: Sequence[str]) -> list[float]:
    """Losses and norms, as printed."""
    found = [re.findall(r"(?:loss|loss value|PPL|norm): *([0-9.E+-]+)", line) for line in lines]
    return [float(each) for line in found for each in line]


def scales(lines: Sequence[str]) -> list[float]:
    """Loss scales, as printed."""
    return [float(each) for line in lines for each in re.findall(r"loss scale: *([0-9.E+-]+)", line)]


def losses(lines: Sequence[str]) -> list[float]:
    """Losses of the steps, as printed."""
    return [float(each) for line in lines for each in re.findall(r"lm loss: *([0-9.E+-]+)", line)]
