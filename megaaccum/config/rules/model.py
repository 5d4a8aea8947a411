"""Rules on the model's shape (megatron.core's TransformerConfig and megatron.training's validate_args check alike)."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject
from megaaccum.config.schema import Config, ShardingConfig
from megaaccum.errors import either, indivisible, nearest_divisors, nearest_multiples
from megaaccum.schedule.registry import by_executor

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""The modules that selective recompute may name (megatron-core 0.19, GPT)."""


def heads(subject: Subject) -> Iterator[str]:
    """Heads share the hidden size, and queries share the key/value heads, evenly."""
    model = subject.model
    count, groups = model.num_attention_heads, model.num_query_groups
    if not subject.given("kv_channels") and not model.multi_latent_attention:
        width = model.hidden_size
        yield from indivisible("hidden_size", width, {"num_attention_heads": count}, more=", or give kv_channels")
    yield from indivisible("num_attention_heads", count, {"num_query_groups": groups or 0}, change="factor")


def positions(subject: Subject) -> Iterator[str]:
    """A learned position table must have a row for every token."""
    model = subject.model
    rows = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and rows and 0 < rows < model.seq_length:
        yield (
            f"max_position_embeddings {rows} is less than seq_length {model.seq_length}: set it to"
            f" {model.seq_length} or more, or position_embedding_type to rope."
        )


def kinds_of_layers(subject: Subject) -> Iterator[str]:
    """A window has two ends, and each layer is one with it or without, as with rotary positions."""
    layers, window = subject.model.num_layers, subject.megatron.get("window_size")
    ends = [*window] if isinstance(window, list | tuple) else [window]
    # Megatron's local layers take -1 for no token at all, and have a token attend to those after it.
    first = next((end for end in ends[:1] if type(end) is int and end >= 0), 128)
    if window is not None and ([type(end) for end in ends] != [int, int] or ends != [first, 0]):
        yield (
            f"window_size {', '.join(map(str, ends))} is not two numbers, the tokens before a token that it attends to"
            f" and 0: set it to {first},0 (in a file [{first}, 0]), or leave it out to attend to all before."
        )
    for name, least in (("window_attn_skip_freq", 1), ("no_rope_freq", 0)):
        freq = subject.megatron.get(name)
        if isinstance(freq, list) and len(freq) != layers:
            yield f"{name} lists {len(freq)} layers, but num_layers is {layers}: give one entry per layer."
        elif isinstance(freq, int) and (freq < least or (least == 0 < freq and layers % freq)):
            legal = either(nearest_divisors(freq, layers))
            yield f"{name} {freq} does not repeat over num_layers {layers}: set it to {legal}."


def activation(subject: Subject) -> Iterator[str]:
    """An MLP has one activation function."""
    if len(given := [key for key in ("swiglu", "squared_relu", "openai_gelu") if getattr(subject.model, key)]) > 1:
        yield f"{' and '.join(given)} are both true: an MLP has one activation; leave one of them out."


def rotation(subject: Subject) -> Iterator[str]:
    """Channels are rotated in pairs."""
    model = subject.model
    name = "qk_pos_emb_head_dim" if model.multi_latent_attention else "kv_channels"
    all_of_them = model.rotary_percent == 1 and model.position_embedding_type in ("rope", "yarn")
    if (model.multi_latent_attention or all_of_them) and (channels := getattr(model, name) or 0) % 2:
        legal = either(nearest_multiples(channels, 2))
        yield f"{name} {channels} must be even, as channels are rotated in pairs: set it to {legal}."


def latent_attention(subject: Subject) -> Iterator[str]:
    """Multi-latent attention has its own heads and its own rotary part."""
    model = subject.model
    if not model.multi_latent_attention:
        return
    if model.num_query_groups != model.num_attention_heads:
        yield (
            f"num_query_groups {model.num_query_groups} has no meaning with multi_latent_attention, whose heads share"
            " a latent instead: leave num_query_groups out."
        )
    if model.qk_layernorm and model.q_lora_rank is None:
        yield "qk_layernorm norms latents, and queries without q_lora_rank have none: set it, or qk_layernorm to false."


def document_mask(subject: Subject) -> Iterator[str]:
    """Transformer Engine's attention ignores masks under Megatron-core, but takes the documents of a packed row
    (transformer-engine 2.20: DotProductAttention)."""
    if subject.model.transformer_impl == "transformer_engine":
        yield from cannot_pack(subject)


def cannot_pack(config: Config) -> Iterator[str]:
    """The reasons why the rows of a micro-batch cannot be packed into one, which keeps Transformer Engine's attention
    inside documents; none without reset_attention_mask."""
    model, rows = config.model, config.batch.micro_batch_size
    if not config.data.reset_attention_mask:
        return
    cuts_rows = config.parallel.sequence_parallel and rows != 1 and model.num_experts is not None
    variants = sorted({"hybrid_layer_pattern", "experimental_attention_variant"} & config.megatron.keys())
    problems = {
        "mtp_num_layers": (model.mtp_num_layers, "stops predicting at the end of a document there"),
        "v_head_dim": (
            model.multi_latent_attention and model.v_head_dim > model.qk_head_dim + model.qk_pos_emb_head_dim,
            f"{model.v_head_dim} is above qk_head_dim + qk_pos_emb_head_dim, to which megatron-core 0.19 cuts values",
        ),
        "variable_seq_lengths": (config.batch.variable_seq_lengths, "sends lengths of rows between stages"),
        "moe_router_load_balancing_type seq_aux_loss": (
            cuts_rows and "seq_aux_loss" in model.moe_router_load_balancing_type,
            f"balances each row, and sequence_parallel gives each rank a part of all {rows}",
        ),
        **dict.fromkeys(variants, (True, "has layers that do not read where documents begin")),
    }
    for name, (given, why) in problems.items():
        if given:
            yield (
                "reset_attention_mask with Transformer Engine's layers packs the rows of a micro-batch into one, but"
                f" {name} {why}: leave {name.split()[0]} out, or set transformer_impl to local, or"
                " reset_attention_mask to false."
            )


def unfit_for_fusion(sharding: ShardingConfig, schedule: str) -> str | None:
    """Why a kernel may not add weight gradients to the FP32 sum on its own, or None if it may."""
    others = {
        f"backend is {sharding.backend}": sharding.backend not in ("deepspeed", "megatron"),
        f"schedule is {schedule}": by_executor(schedule),
        f"sync is {sharding.sync}": sharding.sync == "streaming",
        f"reproducible is {sharding.reproducible}": sharding.reproducible != "none",
        "cold_expert_offload is true": sharding.cold_expert_offload,
        f"grad_accum_dtype is {sharding.grad_accum_dtype}": sharding.grad_accum_dtype != "fp32",
    }
    if not (found := [what for what, is_so in others.items() if is_so]):
        return None
    return (
        "gradient_accumulation_fusion adds weight gradients to one FP32 sum for all micro-batches, which backends"
        " deepspeed and megatron have under 1f1b or interleaved, with sync resident, reproducible none, and"
        f" grad_accum_dtype fp32 ({', '.join(found)})"
    )


def kernels(subject: Subject) -> Iterator[str]:
    """A fused kernel exists for this model and backend."""
    model, sharding = subject.model, subject.sharding
    if model.gradient_accumulation_fusion and (problem := unfit_for_fusion(sharding, subject.schedule)):
        yield (
            f"{problem}: leave it out. Without it each weight gradient is written in {sharding.params_dtype} and added"
            " by a kernel of its own: 12 bytes per parameter and micro-batch, not 8."
        )
    if model.cross_entropy_loss_fusion and sharding.params_dtype != "bf16":
        yield (
            "cross_entropy_loss_fusion rounds the gradient of logits to BF16 (megatron-core 0.19: fused_cross_entropy),"
            f" but params_dtype is {sharding.params_dtype}: leave it out, or set {subject.to_bf16}."
        )
    if model.apply_rope_fusion and (model.position_embedding_type != "rope" or model.multi_latent_attention):
        yield (
            "apply_rope_fusion rotates heads of plain attention, but this model has"
            f" {'multi_latent_attention' if model.multi_latent_attention else 'no rope'}: leave it out."
        )
    fusions = ("apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    te_only = [name for name in fusions if getattr(model, name)]
    if te_only and model.transformer_impl == "local":
        yield f"{', '.join(te_only)} needs Transformer Engine's layers, but transformer_impl is local: leave it out."


def recompute(subject: Subject) -> Iterator[str]:
    """Full recompute takes layers, selective recompute takes modules."""
    if subject.model.gradient_checkpointing and subject.model.recompute_granularity == "selective":
        yield "gradient_checkpointing asks for recompute_granularity full, which is set to selective: leave one out."
    granularity = subject.model.recompute_granularity
    foreign = {"full": ("recompute_modules",), "selective": ("recompute_method", "recompute_num_layers")}
    for name in subject.given(*foreign[granularity]) if granularity else ():
        yield (
            f"{name} has no effect with recompute_granularity {granularity}: leave it out, or set recompute_granularity"
            f" to {'selective' if granularity == 'full' else 'full'}."
        )


def recompute_modules(subject: Subject) -> Iterator[str]:
    """Selective recompute names modules of this model."""
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
    if model.mtp_num_layers and model.recompute_method == "uniform" and (model.recompute_num_layers or 1) > 1:
        yield (
            f"recompute_num_layers {model.recompute_num_layers} with mtp_num_layers {model.mtp_num_layers}:"
            " Megatron-core recomputes prediction layers one by one, and fails in the first forward otherwise. Set"
            " recompute_num_layers to 1, or recompute_method to block."
        )
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield "mtp_num_layers needs position_embedding_type rope or none, not learned_absolute: set it to rope."
