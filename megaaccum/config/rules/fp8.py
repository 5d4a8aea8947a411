"""Rules on FP8. The machine's GPU is checked when the model is built."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megaaccum.config.keys import value
from megaaccum.config.rules.subject import Subject, them
from megaaccum.errors import either, nearest_multiples

ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""The unit of the sides of an FP8 matrix product, by recipe (Transformer Engine 2.20: get_align_size_for_quantization,
assert_dim_for_fp8_exec)."""


def fp8_layers(subject: Subject) -> Iterator[str]:
    """FP8 needs Transformer Engine's layers."""
    if subject.quantization.fp8_format and subject.model.transformer_impl == "local":
        yield (
            f"fp8_format {subject.quantization.fp8_format} needs Transformer Engine's layers, but transformer_impl is"
            " local: set transformer_impl to auto, or leave fp8_format out."
        )


def fp8_precision(subject: Subject) -> Iterator[str]:
    """FP8 quantizes BF16 and updates FP32 masters: an update of 8 or 16 bits alone would mostly round to nothing."""
    sharding, name = subject.sharding, f"fp8_format {subject.quantization.fp8_format}"
    if subject.quantization.fp8_format is None:
        return
    if sharding.params_dtype != "bf16":
        yield (
            f"{name} quantizes BF16 activations and weights, but params_dtype is {sharding.params_dtype}: set"
            f" {subject.to_bf16}, or leave fp8_format out."
        )
    if sharding.grad_accum_dtype != "fp32":
        yield (
            f"{name} with grad_accum_dtype {sharding.grad_accum_dtype}: gradients of FP8 products are added in FP32."
            " Set grad_accum_dtype to fp32."
        )
    if sharding.backend not in ("deepspeed", "megatron"):
        why = "has not been checked with it" if sharding.backend == "ddp" else "quantizes weights in every forward"
        yield (
            f"{name} needs FP32 masters and weights that stay whole through a step, and backend {sharding.backend}"
            f" {why}: set backend to deepspeed."
        )


def fp8_weights(subject: Subject) -> Iterator[str]:
    """The FP8 copy of a weight is made at a step's first micro-batch and kept to its last."""
    if subject.quantization.fp8_format and subject.sharding.sync == "streaming":
        yield (
            f"fp8_format {subject.quantization.fp8_format} keeps FP8 copies of all weights of a stage through a step,"
            " which sync streaming lets go of layer by layer: set sync to resident, or leave fp8_format out."
        )


def bf16_ends(subject: Subject) -> Iterator[str]:
    """Layers in BF16 leave FP8 inside a micro-batch, which delayed scaling takes for its end. Megatron-core counts them
    within one stage."""
    keys = subject.quantization
    if not keys.first_last_layers_bf16:
        return
    if keys.fp8_format and keys.fp8_recipe == "delayed":
        yield (
            "first_last_layers_bf16 cannot be used with fp8_recipe delayed, whose history ends where FP8 ends: set"
            " fp8_recipe to tensorwise, or leave first_last_layers_bf16 out."
        )
    most = subject.model.num_layers // max(subject.parallel.pipeline_model_parallel_size, 1)
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(keys, name) > most > 0:
            yield (
                f"{name} {getattr(keys, name)} is more than the {most} layers of a pipeline rank (num_layers"
                f" {subject.model.num_layers} / pp {subject.parallel.pipeline_model_parallel_size}): set it to at most"
                f" {most}."
            )


def fp8_recompute(subject: Subject) -> Iterator[str]:
    """Delayed scaling keeps the scales of whole recomputed layers, not of parts (Megatron-core refuses these)."""
    keys, modules = subject.quantization, set(subject.model.recompute_modules or ())
    parts = sorted({"moe_act", "layernorm"} & modules)
    if keys.fp8_format and keys.fp8_recipe == "delayed" and parts:
        yield (
            f"recompute_modules names {', '.join(parts)}, which fp8_recipe delayed cannot compute again: leave"
            f" {them(parts)} out, or set fp8_recipe to tensorwise."
        )


def fp8_shapes(subject: Subject) -> Iterator[str]:
    """Every matrix on a rank has sides that are multiples of the FP8 block."""
    if subject.quantization.fp8_format is None or _unsettled(subject):
        return
    recipe, units, wrong = subject.quantization.fp8_recipe, dict[str, int](), dict[str, tuple[int, int]]()
    block = ALIGNMENT[recipe]
    for name, times, over in _sides(subject):
        units[name] = math.lcm(units.get(name, 1), block * over // math.gcd(block * over, times))
        if value(subject, name) * times % (block * over):
            wrong.setdefault(name, (times, over))
    for name, (times, over) in wrong.items():
        size = value(subject, name)
        product = f" * {times}" if times > 1 else ""
        yield (
            f"{name} {size}{product}{f' / {over} ranks' if over > 1 else ''} = {size * times / over:g} is a side of a"
            f" matrix, but FP8 products (fp8_recipe {recipe}) need multiples of {block}: set {name} to"
            f" {either(nearest_multiples(size, units[name]))}."
        )


def _sides(subject: Subject) -> Iterator[tuple[str, int, int]]:
    """(key, factor, ranks) of every side of a matrix on a rank: the key's value * factor / ranks."""
    model, parallel = subject.model, subject.parallel
    tp = parallel.tensor_model_parallel_size
    split = parallel.context_parallel_size * (tp if parallel.sequence_parallel else 1)
    yield "hidden_size", 1, 1
    yield "seq_length", subject.batch.micro_batch_size or 1, split
    if model.num_experts is None or model.moe_layer_freq != 1:
        yield "ffn_hidden_size", 1, tp
    if model.num_experts is not None:
        yield "moe_ffn_hidden_size", 1, parallel.expert_tensor_parallel_size or tp
    if not model.multi_latent_attention:
        yield "kv_channels", model.num_attention_heads, tp
        yield "kv_channels", model.num_attention_heads + 2 * (model.num_query_groups or 0), tp


def _unsettled(subject: Subject) -> bool:
    """Whether a size is missing or not positive, which another rule reports."""
    model, parallel = subject.model, subject.parallel
    sizes = (model.hidden_size, model.seq_length, model.num_attention_heads, model.ffn_hidden_size or 0)
    return min(*sizes, parallel.tensor_model_parallel_size, parallel.context_parallel_size) < 1
