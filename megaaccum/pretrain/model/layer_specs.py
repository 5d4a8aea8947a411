"""Specs of a chunk's layers: Transformer Engine's, or Megatron's local ones with norms and attention of our own.

Megatron's specs have no types; those of the two kinds of blocks are named all the same.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megaaccum.model.attention import LocalAttention
from megaaccum.pretrain.model.attention import FusedAttention, LatentAttention
from megaaccum.pretrain.model.layers import Layers
from megaaccum.pretrain.model.local_norm import Norm


def decoder_spec(
    config: TransformerConfig, made_of: Layers, vp_stage: int | None, *, pp_rank: int
) -> TransformerBlockSubmodules:
    """Specs of the decoder's layers in chunk `vp_stage` of pipeline rank `pp_rank`."""
    if config.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage, pp_rank)
    spec = get_gpt_decoder_block_spec(
        config,
        not made_of.local,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    return _with_own_modules(spec, made_of, latent=config.multi_latent_attention)


def prediction_spec(
    config: TransformerConfig, made_of: Layers, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Spec of the multi-token-prediction layers of this chunk, or None if it has none. They are like the decoder's
    last layer, which may be on another stage."""
    last = get_gpt_decoder_layer_specs(
        config, not made_of.local, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )[-1]
    spec = get_gpt_mtp_block_spec(config, last, not made_of.local, vp_stage=vp_stage)
    return None if spec is None else _with_own_modules(spec, made_of, latent=config.multi_latent_attention)


def _with_own_modules[Block: (TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)](
    spec: Block, made_of: Layers, *, latent: bool
) -> Block:
    if not made_of.local:
        return spec
    local = LatentAttention if latent else LocalAttention
    spec = replaced(spec, DotProductAttention, FusedAttention if made_of.fused_attention else local)
    return replaced(spec, WrappedTorchNorm, Norm)


def replaced[Block: (TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)](
    spec: Block, theirs: type, ours: type
) -> Block:
    """`spec` (a block of local layers, or of prediction layers) with `ours` wherever it names the module `theirs`."""

    def replace(submodules: Any) -> None:
        for name, value in vars(submodules).items():
            if value is theirs:
                setattr(submodules, name, ours)
            elif getattr(value, "submodules", None) is not None:
                replace(value.submodules)

    replace(spec)
    for layer in spec.layer_specs or []:
        replace(layer.submodules)
    return spec
