"""Layer implementations that this machine can run for a configuration's model, and what others are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from megaaccum.config import Plan
from megaaccum.config.rules.model import cannot_pack
from megaaccum.errors import raise_problems
from megaaccum.platform import cpu
from megaaccum.pretrain.model import layers, recompute_gradients
from megaaccum.pretrain.model.layers import Layers


def layer_kind(plan: Plan) -> Layers:
    """Kind of the layers of which this machine builds the model."""
    on_gpu = cpu.has_accelerator()
    has_te = on_gpu and has_transformer_engine()
    return layers.choose(plan.config, has_te=has_te, on_gpu=on_gpu, splits=plan.layout.splits_backward)


def has_transformer_engine() -> bool:
    """Whether Megatron-core found Transformer Engine when it was imported."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def has_fused_softmax() -> bool:
    """Whether apex's kernels are installed, which Megatron-core's fused softmax imports when it is used (0.19:
    FusedScaleMaskSoftmax.is_kernel_available)."""
    names = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")
    return all(importlib.util.find_spec(name) is not None for name in names)


def check_machine(plan: Plan) -> None:
    """Raise ConfigError, naming each problem, if this machine cannot compute the model as configured. Megatron itself
    would fail while the model is built or first run."""
    raise_problems([*_fp8(plan), *(_without_te if layer_kind(plan).local else _with_te)(plan), *_dispatcher(plan)])


def _fp8(plan: Plan) -> Iterator[str]:
    keys = plan.config.quantization
    if keys.fp8_format is None:
        return
    capability = torch.cuda.get_device_capability() if cpu.has_accelerator() else None
    if problem := device_problem(keys.fp8_recipe, capability, torch.version.cuda):
        yield problem
    elif layer_kind(plan).local:
        yield (
            f"fp8_format {keys.fp8_format} needs Transformer Engine, which is not installed (`megaaccum doctor` lists"
            " what is): install it (pip install 'megaaccum[te]'), or leave fp8_format out."
        )


def device_problem(recipe: str, capability: tuple[int, int] | None, cuda: str | None) -> str | None:
    """Why this machine's GPU cannot compute in FP8 with `recipe`, or None.

    capability: the GPU's compute capability, None without a GPU. cuda: version that torch was built with. The numbers
    are those of transformer_engine.pytorch.quantization (2.20): check_fp8_support and the like.
    """
    if capability is None:
        return "FP8 needs a GPU, but none was found: leave fp8_format out here; bf16 computes on a CPU too."
    name = f"this GPU has compute capability {capability[0]}.{capability[1]}"
    if recipe == "mxfp8" and not (10, 0) <= capability < (12, 0):
        return (
            f"fp8_recipe mxfp8 has one scale per 32 numbers, which only Blackwell's tensor cores (10.x) apply, but"
            f" {name}: set fp8_recipe to {'blockwise' if capability >= (9, 0) else 'delayed'}."
        )
    toolkit = tuple(int(part) for part in (cuda or "0.0").split(".")[:2])
    if recipe == "blockwise" and (capability < (9, 0) or toolkit < (12, 9)):
        return (
            f"fp8_recipe blockwise needs compute capability 9.0 (Hopper) and CUDA 12.9, but {name} with CUDA {cuda}:"
            " set fp8_recipe to tensorwise or delayed."
        )
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 (Ada, Hopper or newer), but {name}: leave fp8_format out."
    return None


def _with_te(plan: Plan) -> Iterator[str]:
    if has_transformer_engine():
        yield from cannot_pack(plan.config)
    else:
        yield (
            "transformer_impl is transformer_engine, which needs a GPU and Transformer Engine, but one is missing here"
            " (`megaaccum doctor` says which): set transformer_impl to auto."
        )


def _without_te(plan: Plan) -> Iterator[str]:
    """Problems of Megatron-core 0.19's own layers."""
    model, cp = plan.config.model, plan.layout.cp
    why = "no GPU, or no Transformer Engine: `megaaccum doctor` says which"
    if model.transformer_impl == "auto" and (dtype := plan.config.sharding.params_dtype) in ("fp32", "fp64"):
        why = f"params_dtype is {dtype}, or {why}"
    here = f"layers here are Megatron's local ones ({why})"
    for name in ("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion"):
        if getattr(model, name):
            yield f"{name} is a kernel of Transformer Engine's layers, but {here}. Leave it out."
    if kernels := {"hybrid_layer_pattern", "experimental_attention_variant"} & plan.config.megatron.keys():
        yield f"{', '.join(sorted(kernels))} needs a GPU with Transformer Engine's layers, but {here}."
    if (whole := layers.of_whole_scores(plan.config)) and (cp > 1 or layer_kind(plan).fused_attention):
        key, at = ("context_parallel_size", cp) if cp > 1 else ("attention_backend", model.attention_backend)
        yield f"{key} {at} with {', '.join(whole)} needs Transformer Engine, but {here}. Leave {key} out."
    recomputed = recompute_gradients.WITHOUT_OUTPUT & set(model.recompute_modules or ())
    if model.recompute_granularity == "selective" and recomputed:
        yield (
            f"recompute_modules names {', '.join(sorted(recomputed))}, which needs Transformer Engine's layers, but"
            f" {here}. Leave it out: core_attn and mlp are recomputed by any layers."
        )


def _dispatcher(plan: Plan) -> Iterator[str]:
    """The problem of the flex dispatcher, which is another library, for GPUs."""
    if plan.config.model.moe_token_dispatcher_type != "flex":
        return
    backend = plan.config.megatron.get("moe_flex_dispatcher_backend")
    needed = "transformer_engine" if backend == "ncclep" else "deep_ep"
    if not cpu.has_accelerator() or importlib.util.find_spec(needed) is None:
        yield f"moe_token_dispatcher_type flex needs GPUs and the module {needed}; one is missing: set it to alltoall."
