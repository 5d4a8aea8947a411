"""Megatron's own training loop on a CPU: its parser, model builder, DDP, distributed optimizer, datasets, train_step.

The reference of `megatron_train.py`. What runs is `megatron.training` of megatron-core 0.19.2; the patches below take
the place of a GPU and of Transformer Engine's layers, and mend two of its mistakes, each named where it is mended.
The weights are megaaccum's, drawn by name with the distributions that Megatron's configuration gives.
pretrain_gpt.py, which is not in the wheel, is the providers and `forward_step` here.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def train(argv: list[str], num_steps: int) -> list[dict[str, float]]:
    """Train on this rank. Returns {loss, grad_norm, lr} of each step; the loss is nan but on the last stage."""
    from megaaccum.platform import cpu

    _stand_in_for_a_gpu()
    with cpu.cuda_type_names():
        return _train(_start(argv), num_steps)


def _train(args: Any, num_steps: int) -> list[dict[str, float]]:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import training

    model, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, partial(_model, args)
    )
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    iterators, steps = [_data(args) for _ in model], []
    for iteration in range(num_steps):
        lr = optimizer.param_groups[0]["lr"]
        losses, skipped, *_, grad_norm, _, _ = training.train_step(
            forward_step,
            iterators if len(model) > 1 else iterators[0],
            model,
            optimizer,
            scheduler,
            config,
            get_forward_backward_func(),
            iteration,
        )
        assert not skipped
        steps.append({"loss": float(losses.get("lm loss", "nan")), "grad_norm": float(grad_norm), "lr": lr})
    return steps


def _start(argv: list[str]) -> Any:
    """Megatron's arguments, globals, process groups and seeds."""
    from megatron.training import arguments, global_vars, initialize

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with patch.object(sys, "argv", ["pretrain_gpt.py", *argv]):
        args = arguments.parse_args()
    arguments.validate_args(args)
    global_vars.set_global_variables(args)
    with patch.object(torch.cuda, "device_count", lambda: 1):  # else it makes no process groups
        initialize.initialize_megatron(allow_no_cuda=True)
    return args


def _stand_in_for_a_gpu() -> None:
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import arguments, initialize

    from megaaccum.pretrain.model.local_norm import Norm

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    arguments.get_device_arch_version = lambda: 9  # type: ignore[attr-defined]
    initialize._compile_dependencies = lambda: None
    # Megatron's wrapper of the torch norms refuses sequence parallelism and weights around 1.
    WrappedTorchNorm.__new__ = Norm.__new__  # type: ignore[method-assign]
    plain = DotProductAttention.__init__

    def with_widths(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        """Latent attention's values are of another width than its queries."""
        plain(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = with_widths  # type: ignore[method-assign]
    rotate = multi_latent_attention.apply_rotary_pos_emb

    def with_shared_keys(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """All heads share the rotated keys, whose gradient Megatron does not sum over tp (Megatron-LM#1699)."""
        return rotate(copy_to_tensor_model_parallel_region(t) if t.shape[-2] == 1 else t, *args, **kwargs)

    multi_latent_attention.apply_rotary_pos_emb = with_shared_keys


def _model(args: Any, pre_process: bool, post_process: bool, pg_collection: Any, vp_stage: int | None = None, **_: Any):
    """pretrain_gpt.py's model provider, by Megatron's builder."""
    from megatron.core.models import backends
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.attention import FusedAttention

    if args.context_parallel_size > 1:  # Megatron's own attention takes a whole sequence
        backends.DotProductAttention = FusedAttention  # type: ignore[misc]
    config = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor  # which the conversion of 0.19 drops
    model = GPTModelBuilder(config).build_model(pg_collection, pre_process, post_process, vp_stage)
    drawn = {name: param.detach().std().item() for name, param in model.named_parameters() if param.numel() > 999}
    gpt.initialize(model, SimpleNamespace(tp=pg_collection.tp, expert_tp=pg_collection.expt_tp), seed=args.seed)  # type: ignore[arg-type]
    for name, std in drawn.items():
        ours = model.get_parameter(name).detach().std().item()
        assert abs(ours - std) <= 0.15 * std, f"{name}: Megatron draws weights of width {std:.4g}, megaaccum {ours:.4g}"
    return model


def _data(args: Any):
    """pretrain_gpt.py's training samples, by Megatron's datasets, sampler and loader."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_tokenizer
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,
    )
    samples = [args.train_iters * args.global_batch_size, 0, 0]
    train = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()[0]
    return RerunDataIterator(iter(build_pretraining_data_loader(train, 0)))


def forward_step(data_iterator: Any, model: torch.nn.Module):
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = get_batch_on_this_cp_rank(next(data_iterator), False, mpu.get_context_parallel_group())
    mask = batch["loss_mask"]
    inputs = batch["tokens"], batch["position_ids"], batch.get("attention_mask")
    losses = model(*inputs, labels=batch["labels"], loss_mask=mask)
    return losses, partial(_loss, mask)


def _loss(mask: torch.Tensor, losses: torch.Tensor):
    total, num_tokens = (losses.view(-1).float() * mask.view(-1)).sum(), mask.sum().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach().clone(), num_tokens.float()])}
