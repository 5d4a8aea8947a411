"""The FLOPs formula against Megatron's own count and the papers' closed forms; the table of devices."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

import pytest

from megaaccum.config.schema import Config, ModelConfig, ParallelConfig
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.pretrain.metrics.flops import PEAKS, peak_flops, step_flops, uncounted

VOCAB, SEQUENCES = 1000, 8


def resolved(**keys) -> Config:
    """A config with what `resolve` would have derived."""
    dense = dict(num_layers=6, hidden_size=384, num_attention_heads=6, seq_length=256)
    model = ModelConfig(**(dense | keys))
    model.ffn_hidden_size = model.ffn_hidden_size or 4 * model.hidden_size
    model.num_query_groups = model.num_query_groups or model.num_attention_heads
    model.kv_channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    return Config(model=model, parallel=ParallelConfig(tensor_model_parallel_size=2))


def megatron_flops(config: Config) -> float:
    """Megatron's own count for the same model."""
    from megatron.training import training

    model = config.model
    args = Namespace(**{f.name: getattr(model, f.name) for f in fields(model)})
    args.group_query_attention = model.num_query_groups != model.num_attention_heads
    args.padded_vocab_size = padded_vocab_size(config, VOCAB)
    args.moe_latent_size = args.experimental_attention_variant = args.hybrid_layer_pattern = None
    args.attention_output_gate = args.is_hybrid_model = False
    args.mamba_state_dim, args.mamba_head_dim, args.mamba_num_groups, args.mamba_num_heads = 128, 64, 8, None
    for part in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim"):
        setattr(args, f"linear_{part}", None)
    vars(args).update(config.megatron)
    return training.num_floating_point_operations(args, SEQUENCES)


MODELS = {
    "dense": {},
    "gqa": dict(num_query_groups=2),
    "wide heads": dict(kv_channels=128),
    "swiglu": dict(swiglu=True, ffn_hidden_size=1024),
    "moe": dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512),
    "moe every second layer": dict(num_experts=8, moe_layer_freq=2, swiglu=True),
    "moe by list, shared expert": dict(
        num_experts=8, moe_layer_freq=[0, 1, 1, 0, 1, 1], moe_shared_expert_intermediate_size=512, moe_router_topk=4
    ),
    "mla": dict(multi_latent_attention=True),
    "mla with a query latent, mtp": dict(
        multi_latent_attention=True, q_lora_rank=64, kv_lora_rank=48, v_head_dim=96, mtp_num_layers=2, num_experts=4
    ),
    "mtp after a dense layer": dict(mtp_num_layers=1, num_experts=4, moe_layer_freq=[1, 1, 1, 1, 1, 0]),
}


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_equals_megatrons_count(keys):
    config = resolved(**keys)
    assert step_flops(config, SEQUENCES, vocab_size=VOCAB) == pytest.approx(megatron_flops(config), rel=1e-14)


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"attention_output_gate": True}, {}),
        ({"moe_latent_size": 128}, dict(num_experts=8, moe_ffn_hidden_size=512)),
        ({"hybrid_layer_pattern": "M-M*M-", "is_hybrid_model": True}, {}),
    ],
    ids=str,
)
def test_a_model_with_other_layers_has_no_count(fields, keys):
    config = resolved(**keys)
    assert not uncounted(config)
    config.megatron = fields
    assert uncounted(config) == [next(iter(fields))]
    assert step_flops(config, SEQUENCES, vocab_size=VOCAB) != pytest.approx(megatron_flops(config), rel=0.03)


def test_equals_the_papers_closed_form():
    """arXiv 2104.04473: 96 B s l h^2 (1 + s/6h + V/16lh) with recompute; here 3 passes of 4, half the scores."""
    config = resolved()
    B, s, layers, h, V = 8, 256, 6, 384, 1024
    assert step_flops(config, SEQUENCES, vocab_size=VOCAB) == pytest.approx(
        72 * B * s * layers * h**2 * (1 + s / (12 * h) + V / (12 * layers * h)), rel=1e-14
    )


def test_six_flops_per_parameter_and_token():
    """PaLM's rule of thumb, exact for the matrices: 6 N per token plus the scores."""
    config = resolved(num_query_groups=2, swiglu=True, ffn_hidden_size=1024)
    h, query, key_value, ffn = 384, 384, 2 * 128, 1024
    matrices = 6 * (h * (query + key_value) + query * h + 3 * h * ffn) + h * padded_vocab_size(config, VOCAB)
    scores = 6 * 2 * query * config.model.seq_length / 2
    assert (
        step_flops(config, SEQUENCES, vocab_size=VOCAB) == 6 * (matrices + scores) * SEQUENCES * config.model.seq_length
    )


def test_an_idle_expert_costs_nothing_and_a_busy_one_does():
    keys = dict(num_experts=8, moe_ffn_hidden_size=512)
    one = step_flops(resolved(**keys), SEQUENCES, vocab_size=VOCAB)
    assert step_flops(resolved(**keys | dict(num_experts=64)), SEQUENCES, vocab_size=VOCAB) == one
    assert step_flops(resolved(**keys | dict(moe_router_topk=4)), SEQUENCES, vocab_size=VOCAB) > one


def test_recompute_does_not_count():
    assert step_flops(resolved(recompute_granularity="full"), SEQUENCES, vocab_size=VOCAB) == step_flops(
        resolved(), SEQUENCES, vocab_size=VOCAB
    )


def test_the_vocabulary_is_padded_per_tensor_parallel_rank():
    config = resolved()
    assert padded_vocab_size(config, 1025) == 1280
    config.parallel.tensor_model_parallel_size = 1
    assert padded_vocab_size(config, 1025) == 1152
    assert padded_vocab_size(config, 1024) == 1024


def test_an_unresolved_config_is_our_mistake():
    config = resolved()
    config.model.ffn_hidden_size = None
    with pytest.raises(AssertionError, match="not resolved"):
        step_flops(config, SEQUENCES, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_of_a_named_device(name, teraflops):
    assert peak_flops(name, "bf16") == pytest.approx(teraflops * 1e12, rel=1e-12)
    assert peak_flops(name, "fp16") == peak_flops(name, "bf16")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (None, "bf16"),
        ("NVIDIA A10", "bf16"),
        ("NVIDIA GeForce RTX 4090", "bf16"),
        ("NVIDIA H100", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H100 80GB HBM3", "fp32"),
        ("NVIDIA H100 80GB HBM3", "fp64"),
    ],
)
def test_no_peak_where_none_is_known(name, dtype):
    assert peak_flops(name, dtype) is None


def test_a_narrower_name_is_not_shadowed_by_a_wider_one():
    for index, (words, _) in enumerate(PEAKS):
        assert not any(earlier <= words for earlier, _ in PEAKS[:index])
