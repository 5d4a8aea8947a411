"""A hybrid model of Megatron's own builder on a CPU: Mamba, attention and MLP layers. Torch stands in for the kernels
of mamba_ssm, and Megatron's local modules for those of Transformer Engine; all else is Megatron's."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn import functional

SEQ, VOCAB, WIDTH = 12, 61, 32
PATTERN = "M*-M"
"""Mamba, attention, MLP, Mamba."""


def scan(zxbcdt, conv_weight, conv_bias, dt_bias, a, *, D, headdim, ngroups, **unused):
    """In place of mamba_ssm's mamba_split_conv1d_scan_combined: Mamba-2 (arXiv 2405.21060), one step after the other.
    zxbcdt: [batch, sequence, 2 * inner + 2 * groups * state + heads]. Returns [batch, sequence, inner]."""
    heads, inner = a.numel(), a.numel() * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], dim=-1)
    before = functional.pad(xbc.transpose(1, 2), (conv_weight.shape[1] - 1, 0))
    xbc = functional.conv1d(before, conv_weight[:, None], conv_bias, groups=conv_weight.shape[0]).transpose(1, 2)
    x, b, c = functional.silu(xbc).split([inner, ngroups * state, ngroups * state], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (each.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=2) for each in (b, c))
    dt = functional.softplus(dt + dt_bias)
    h, outputs = torch.zeros(*x.shape[:1], heads, headdim, state, dtype=x.dtype), []
    for t in range(x.shape[1]):
        h = h * (dt[:, t] * a).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((h * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return (torch.stack(outputs, dim=1).flatten(2) * functional.silu(z)).to(zxbcdt.dtype)


class Norm(nn.Module):
    """In place of mamba_ssm's gated RMSNorm, which Megatron calls without a gate."""

    def __init__(self, width, *, eps, group_size, dtype, **unused):
        super().__init__()
        self.weight, self.eps, self.group_size = nn.Parameter(torch.ones(width, dtype=dtype)), eps, group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def stack_spec():
    """Megatron's hybrid stack of local modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.mamba_split_conv1d_scan_combined, mamba_mixer.ExtendedRMSNorm = scan, Norm
    hybrid_block.TENorm = WrappedTorchNorm  # its last norm is in no spec
    mixer = ModuleSpec(
        module=mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        ),
        mlp_bda=get_bias_dropout_add,
    )
    submodules = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules)


def stage(number: int, stages: int) -> nn.Module:
    """A stage of the hybrid model, its weights by their names in the whole model."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megaaccum.distributed import groups
    from megaaccum.model import names

    model_parallel_cuda_manual_seed(1)
    each = len(PATTERN) // stages
    config = TransformerConfig(
        num_layers=each, hidden_size=WIDTH, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, use_cpu_initialization=True,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, add_bias_linear=False,
        pipeline_model_parallel_size=groups.default_collection().pp.size(), pipeline_dtype=torch.float32,
        tensor_model_parallel_size=(tp := groups.default_collection().tp.size()),
    )  # fmt: skip
    collection = groups.default_collection()
    alone = groups.default_collection()
    alone.pp = collection.tp if stages > 1 else collection.pp  # of one rank: the pattern is the stage's own
    model = HybridModel(
        config, stack_spec(), -(-VOCAB // tp) * tp, SEQ, pre_process=number == 0, post_process=number == stages - 1,
        hybrid_layer_pattern=PATTERN[number * each : (number + 1) * each], pg_collection=alone,
    )  # fmt: skip
    for layer in model.decoder.layers:
        layer.layer_number += number * each
    for name, param in names.named_parameters([model]):
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
        if param.dim() > 1:
            param.data.normal_(0.0, 0.2, generator=generator)
        elif name.endswith(("A_log", "dt_bias", "conv1d_bias")):
            param.data.uniform_(0.1, 1.0, generator=generator)
    return model


def forward_step(data_iterator, chunk):
    batch = next(data_iterator)
    positions = torch.arange(SEQ).expand_as(batch["tokens"])
    output = chunk(batch["tokens"], positions, None, labels=batch["labels"])

    def loss_func(losses):
        return (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum(), {}

    return output, loss_func
