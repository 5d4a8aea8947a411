"""Rules on precision, and on keys of DeepSpeed alone."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject


def one_precision(subject: Subject) -> Iterator[str]:
    """bf16, fp16 and params_dtype name one precision."""
    written = subject.written.sharding
    if written.bf16 and written.fp16:
        yield "bf16 and fp16 are both true: a run has one precision; leave one of them out."
    said = "bf16" if written.bf16 else "fp16" if written.fp16 else None
    if said and written.params_dtype not in (None, said):
        yield f"{said} is true, but params_dtype is {written.params_dtype}: leave one of them out."
    for name in ("bf16", "fp16"):
        if name in subject.written.origin and not getattr(written, name) and written.params_dtype == name:
            yield f"{name} is false, but params_dtype is {name}: leave one of them out."


def double_precision(subject: Subject) -> Iterator[str]:
    """DeepSpeed's engine and Megatron's optimizer take FP32, FP16 and BF16 parameters only."""
    if subject.sharding.params_dtype == "fp64" and subject.sharding.backend in ("deepspeed", "megatron"):
        yield (
            "params_dtype fp64 needs backend ddp or fsdp2, as a DeepSpeed engine and Megatron's optimizer take no"
            f" float64 parameters, but backend is {subject.sharding.backend}: set backend to ddp, or params_dtype to"
            " fp32."
        )
    if subject.sharding.params_dtype == "fp64" and subject.model.transformer_impl == "transformer_engine":
        yield (
            "Transformer Engine's layers take no fp64 parameters: set transformer_impl to auto or params_dtype to fp32."
        )


def low_precision_sums(subject: Subject) -> Iterator[str]:
    """Adding gradients in BF16 only makes sense for BF16 gradients."""
    sharding = subject.sharding
    if sharding.grad_accum_dtype == "bf16" and not sharding.bf16:
        yield (
            f"grad_accum_dtype bf16 would round gradients of {sharding.params_dtype} parameters while adding them: set"
            f" grad_accum_dtype to fp32, or {subject.to_bf16}."
        )


def low_precision_optimizer(subject: Subject) -> Iterator[str]:
    """BF16 master weights are the BF16 parameters, if the backend keeps none in FP32."""
    sharding = subject.sharding
    if sharding.optimizer_dtype != "bf16":
        return
    name, instead = "optimizer_dtype bf16", "or optimizer_dtype to fp32"
    if not sharding.bf16:
        yield f"{name} with {sharding.params_dtype} parameters: set {subject.to_bf16}, {instead}."
    if sharding.backend not in ("deepspeed", "fsdp2"):
        yield f"{name} needs backend deepspeed or fsdp2, not {sharding.backend}: set backend, {instead}."
    elif sharding.backend == "deepspeed" and sharding.zero_stage != 3:
        yield f"{name} needs zero_stage 3, but zero_stage is {sharding.zero_stage}: set it to 3, {instead}."
    if sharding.offload_optimizer != "none":
        yield f"an offloaded optimizer has FP32 state: set offload_optimizer to none, {instead}."


def deepspeed_block(subject: Subject) -> Iterator[str]:
    """DeepSpeed's own configuration is read by a DeepSpeed engine alone, as are keys that need backend deepspeed."""
    if subject.deepspeed and subject.sharding.backend != "deepspeed":
        yield "a deepspeed block needs backend deepspeed: leave the block out, or set backend to deepspeed."
