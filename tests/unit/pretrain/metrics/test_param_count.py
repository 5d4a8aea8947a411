"""The closed form of the parameter count against Megatron's own model, built on the meta device."""

from __future__ import annotations

import pytest

from megaaccum.config import Config, resolve
from megaaccum.pretrain.metrics.layer_shapes import expert_layers
from megaaccum.pretrain.metrics.param_count import count_parameters

BASE = dict(num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32)
VOCAB_SIZE = 250
SHAPES = {
    "gpt": dict(),
    "untied_rope": dict(untie_embeddings_and_output_weights=True, position_embedding_type="rope"),
    "llama": dict(
        num_query_groups=2,
        swiglu=True,
        ffn_hidden_size=176,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
    ),
    "qk_norms": dict(qk_layernorm=True, kv_channels=32),
    "qkv_bias": dict(add_bias_linear=False, add_qkv_bias=True, squared_relu=True),
    "experts": dict(
        num_experts=4, moe_layer_freq=2, moe_ffn_hidden_size=96, add_bias_linear=False, position_embedding_type="rope"
    ),
    "shared_experts": dict(
        num_experts=4,
        moe_layer_freq=[0, 1, 1],
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48,
        swiglu=True,
        add_bias_linear=False,
    ),
    "latent_attention": dict(
        multi_latent_attention=True,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        qk_layernorm=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
    ),
    "latent_without_query_rank": dict(
        multi_latent_attention=True,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        position_embedding_type="rope",
        add_bias_linear=False,
    ),
    "prediction": dict(mtp_num_layers=1, position_embedding_type="rope"),
    "experts_with_biases": dict(num_experts=4, swiglu=True, quick_geglu=True, position_embedding_type="rope"),
}


def config_of(**model: object) -> Config:
    config = Config()
    for name, value in (BASE | model).items():
        setattr(config.model, name, value)
    config.run.train_iters, config.optimizer.lr, config.batch.micro_batch_size = 1, 1e-3, 1
    return resolve(config, world_size=1).config


@pytest.fixture(scope="module")
def groups():
    """A world of one rank, which Megatron's model wants even on the meta device."""
    import torch.distributed as dist

    from megaaccum.platform import cpu

    cpu.install()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", SHAPES)
def test_count_equals_megatrons_model(shape: str, groups: None) -> None:
    config = config_of(**SHAPES[shape])
    model = _megatron_model(config)
    assert count_parameters(config, VOCAB_SIZE).total == sum(p.numel() for p in model.parameters())


def _megatron_model(config: Config):
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megaaccum.model.sizes import padded_vocab_size

    model = config.model
    settings = _transformer_config(config)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    if model.multi_latent_attention:
        # Megatron's local attention kernel does not construct under MLA; it has no parameters to count.
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    mtp = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False) if model.mtp_num_layers else None
    with torch.device("meta"):
        return GPTModel(
            settings,
            spec,
            vocab_size=padded_vocab_size(config, VOCAB_SIZE),
            max_sequence_length=model.max_position_embeddings,
            position_embedding_type=model.position_embedding_type,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            mtp_block_spec=mtp,
        )


def _transformer_config(config: Config):
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = config.model
    same = [
        "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels",
        "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "moe_layer_freq", "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size", "mtp_num_layers", "multi_latent_attention",
    ]  # fmt: skip
    settings = {name: getattr(model, name) for name in same} | dict(
        gated_linear_unit=model.swiglu,
        num_moe_experts=model.num_experts,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    if model.squared_relu or model.swiglu:
        settings["activation_func"] = torch.nn.functional.silu
    if not model.multi_latent_attention:
        return TransformerConfig(**{k: v for k, v in settings.items() if v is not None})
    latent = ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
    return MLATransformerConfig(
        **{k: v for k, v in settings.items() if v is not None},
        **{name: getattr(model, name) for name in latent},
        rope_type="rope",
    )


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit() -> None:
    count = count_parameters(config_of(**SHAPES["experts"]), VOCAB_SIZE)
    one_expert = 2 * 64 * 96
    idle_layers, idle_experts = 2, 4 - 2
    assert count.total - count.active == idle_layers * idle_experts * one_expert


def test_a_dense_models_active_parameters_are_all() -> None:
    count = count_parameters(config_of(), VOCAB_SIZE)
    assert count.active == count.total


def test_layers_with_experts() -> None:
    assert expert_layers(config_of(num_experts=4, moe_layer_freq=2).model) == [True, False, True]
    assert expert_layers(config_of(num_experts=4, moe_layer_freq=[0, 0, 1]).model) == [False, False, True]
    assert expert_layers(config_of().model) == [False] * 3


def test_gpt3_has_175_billion() -> None:
    """arXiv 2005.14165, table 2.1: 96 layers of width 12288 with a vocabulary of 50257 and 2048 positions."""
    shape = dict(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
    assert round(count_parameters(config_of(**shape), 50257).total / 1e9) == 175
