"""Rules on the model's shape (megatron.core's TransformerConfig and megatron.training's validate_args check alike)."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.keys import that_need
from megaaccum.config.rules.subject import Rule, Subject
from megaaccum.errors import either, nearest_divisors, nearest_multiples

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""What selective recompute may name, in megatron-core 0.19 for GPT."""


def heads(subject: Subject) -> Iterator[str]:
    """Heads share the hidden size, and queries share the key/value heads, evenly."""
    model = subject.model
    count, groups = model.num_attention_heads, model.num_query_groups
    if count < 1 or model.hidden_size < 1:
        return
    if not subject.given("kv_channels") and not model.multi_latent_attention and model.hidden_size % count:
        yield (
            f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {count}: set hidden_size to"
            f" {either(nearest_multiples(model.hidden_size, count))}, num_attention_heads to"
            f" {either(nearest_divisors(count, model.hidden_size))}, or give kv_channels."
        )
    if groups and groups > 0 and count % groups:
        yield (
            f"num_attention_heads {count} is not divisible by num_query_groups {groups}: set num_query_groups to"
            f" {either(nearest_divisors(groups, count))}."
        )


def positions(subject: Subject) -> Iterator[str]:
    """A learned position table must have a row for every token."""
    model = subject.model
    rows = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and rows and 0 < rows < model.seq_length:
        yield (
            f"max_position_embeddings {rows} is less than seq_length {model.seq_length}: set it to"
            f" {model.seq_length} or more, or position_embedding_type to rope."
        )


def activation(subject: Subject) -> Iterator[str]:
    """One activation function."""
    if subject.model.swiglu and subject.model.squared_relu:
        yield "swiglu and squared_relu are both true: an MLP has one activation; leave one of them out."


def latent_attention(subject: Subject) -> Iterator[str]:
    """Multi-latent attention brings its own heads and its own rotary part."""
    model = subject.model
    if not model.multi_latent_attention:
        return
    if model.num_query_groups != model.num_attention_heads:
        yield (
            f"num_query_groups {model.num_query_groups} has no meaning with multi_latent_attention, whose heads share"
            " a latent instead: leave num_query_groups out."
        )
    if model.qk_pos_emb_head_dim % 2:
        yield (
            f"qk_pos_emb_head_dim {model.qk_pos_emb_head_dim} must be even, as channels are rotated in pairs: set it"
            f" to {either(nearest_multiples(model.qk_pos_emb_head_dim, 2))}."
        )


def latent_attention_kernel(subject: Subject) -> Iterator[str]:
    """Megatron-core 0.19's own attention kernel does not take the latent heads' widths (it fails when it is built)."""
    if subject.model.multi_latent_attention and subject.model.transformer_impl == "local":
        yield (
            "multi_latent_attention needs Transformer Engine's attention, but transformer_impl is local: set"
            " transformer_impl to auto."
        )


def latent_keys(subject: Subject) -> Iterator[str]:
    """Keys of multi-latent attention do nothing without it."""
    names = subject.given(*that_need("multi_latent_attention"))
    if names and not subject.model.multi_latent_attention:
        yield f"{', '.join(names)} only count with multi_latent_attention: set it to true, or leave them out."


def recompute(subject: Subject) -> Iterator[str]:
    """Full recompute takes layers, selective recompute takes modules."""
    model, written = subject.model, subject.given(*that_need("recompute_granularity"))
    if model.recompute_granularity is None:
        if written:
            yield f"{', '.join(written)} needs recompute_granularity: set it to full or selective."
        return
    foreign = {"full": {"recompute_modules"}, "selective": {"recompute_method", "recompute_num_layers"}}
    for name in sorted(foreign[model.recompute_granularity] & set(written)):
        other = "selective" if model.recompute_granularity == "full" else "full"
        yield (
            f"{name} has no effect with recompute_granularity {model.recompute_granularity}: leave it out, or set"
            f" recompute_granularity to {other}."
        )


def recompute_modules(subject: Subject) -> Iterator[str]:
    """Selective recompute names modules that this model has."""
    model = subject.model
    if model.recompute_granularity != "selective":
        return
    modules = model.recompute_modules or []
    for name in modules:
        if name not in RECOMPUTE_MODULES:
            yield f"recompute_modules names {name!r}: it must be among {', '.join(RECOMPUTE_MODULES)}."
    if "layernorm" in modules and model.transformer_impl == "local":
        yield (
            "recompute_modules names layernorm, which needs Transformer Engine's layers, but transformer_impl is local:"
            " leave layernorm out, or set transformer_impl to auto."
        )
    if "moe_act" in modules and not model.moe_grouped_gemm:
        yield "recompute_modules names moe_act, which needs moe_grouped_gemm: set it to true, or leave moe_act out."
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield "recompute_modules names mla_up_proj, which needs multi_latent_attention: leave mla_up_proj out."
    if {"moe", "shared_experts"} & set(modules) and model.num_experts is None:
        yield "recompute_modules names experts (moe, shared_experts), but num_experts is not set: leave them out."


def prediction(subject: Subject) -> Iterator[str]:
    """Multi-token prediction shifts positions, which a learned table does not follow (Megatron-LM refuses it too)."""
    model = subject.model
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield "mtp_num_layers needs position_embedding_type rope or none, not learned_absolute: set it to rope."


RULES: tuple[Rule, ...] = (
    heads,
    positions,
    activation,
    latent_attention,
    latent_attention_kernel,
    latent_keys,
    recompute,
    recompute_modules,
    prediction,
)
