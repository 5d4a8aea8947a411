"""Keys of sharding, precision and quantization."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaaccum.config.facts import Facts


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """The distribution of parameters, gradients and optimizer state over ranks, and their precision."""

    backend: Literal["deepspeed", "fsdp2", "ddp", "megatron"] = "deepspeed"
    """The library that shards and reduces: a DeepSpeed engine, torch's fully_shard, torch DistributedDataParallel, or
    Megatron's DistributedDataParallel with its distributed optimizer."""
    zero_stage: Annotated[Literal[1, 2, 3], Facts(needs="backend deepspeed", planned=True)] = 3
    """DeepSpeed ZeRO stage."""
    sync: Annotated[Literal["auto", "resident", "streaming"], Facts(planned=True)] = "auto"
    """resident: parameters gathered once per step, gradients reduced once per step. streaming (ZeRO-3, FSDP2): both
    layer by layer in every micro-batch, for stages that do not fit whole. auto: the one with the least bytes that fits
    (memory_gib); without a limit resident."""
    max_live_parameters: Annotated[int, Facts(at_least=0)] = 0
    """With sync streaming: parameters (elements per rank) that may stay gathered through a flush."""
    memory_gib: Annotated[float | None, Facts(above=0, at_most=1e6)] = None
    """Memory (GiB) of a rank's device for the predicted peak of a step: sync auto chooses by it, and a step that does
    not fit is refused at the start. Default: the free memory of the GPU; no limit on a CPU."""
    data_parallel_replicas: Annotated[int, Facts(at_least=1)] = 1
    """With backend fsdp2: groups of data-parallel ranks that each hold the whole sharded model (HSDP)."""
    deterministic: Annotated[bool, Facts(core="deterministic_mode")] = False
    """A run repeats to the bit: the ranks' gradients are added in rank order, and kernels are those that repeat (on a
    CPU, of one thread)."""
    reproducible: Literal["none", "layout"] = "none"
    """layout: loss, norm, gradient and weights are the same to the bit under every pp, vpp, dp, schedule, backend and
    sync mode with the same micro_batch_size: sums over micro-batches and ranks are made in one order. It includes
    deterministic. With sync resident each rank takes a run of the global batch's micro-batches, not every dp-th."""
    reproducible_tensor_blocks: Annotated[int | None, Facts(at_least=1, needs="reproducible layout")] = None
    """Blocks of columns and heads in which layers compute, with reproducible layout: a power of two. Every
    tensor_model_parallel_size that divides it has the same bits. Default: tensor_model_parallel_size."""
    reproducible_context_blocks: Annotated[int | None, Facts(at_least=1, needs="reproducible layout")] = None
    """Blocks of each sequence in which layers compute, with reproducible layout: a power of two. Every
    context_parallel_size that divides it has the same bits. Default: context_parallel_size."""
    reduce_bucket_size: Annotated[int, Facts(at_least=1, needs="backend deepspeed")] = 50_000_000
    """Elements reduced in one collective. A step's last is under no compute; DeepSpeed allocates as much in full."""
    offload_optimizer: Annotated[Literal["none", "cpu"], Facts(needs="backend deepspeed")] = "none"
    """The place of DeepSpeed's optimizer state and of its optimizer step."""
    cold_expert_offload: bool = False
    """Between micro-batches, keep the gradients of experts that few tokens reach in host memory (pinned, with a GPU);
    the result is the same. ZeRO-3 with sync resident."""
    cold_expert_tokens: Annotated[int, Facts(at_least=1, needs="cold_expert_offload")] = 1
    """An expert is cold if it got fewer tokens on this rank, over the last cold_expert_steps steps together."""
    cold_expert_steps: Annotated[int, Facts(at_least=1, needs="cold_expert_offload")] = 10
    """Optimizer steps over which its tokens are counted; no expert is cold in that many first steps of a start."""
    bf16: bool = False
    """BF16 parameters and activations, FP32 master weights."""
    fp16: bool = False
    """FP16 parameters and activations with loss scaling, FP32 master weights."""
    params_dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Another way to give it; fp64 only with the ddp and fsdp2 backends. Default: what bf16 / fp16 give, else bf16 if
    this machine's GPU has it and fp32 otherwise; fp32 for a model of your own (Plan.of)."""
    grad_accum_dtype: Annotated[Literal["fp32", "bf16"], Facts(needs="backend deepspeed")] = "fp32"
    """Precision in which gradients of micro-batches are added."""
    grad_reduce_dtype: Annotated[Literal["fp32", "bf16"], Facts(needs="backend deepspeed|fsdp2|megatron")] = "fp32"
    """Precision in which gradients cross ranks. bf16 with reproducible layout (ZeRO-3) rounds each partial sum."""
    optimizer_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of master weights and moments; bf16 rounds every update to 8 bits of mantissa, small ones to nothing
    (backend deepspeed at ZeRO-3, or fsdp2, with bf16)."""


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """FP8 in the matrix products of Transformer Engine's layers; weights, optimizer state and sums stay as they are."""

    fp8_format: Annotated[Literal["e4m3", "hybrid"] | None, Facts(core="fp8")] = None
    """FP8 numbers: e4m3 everywhere, or (hybrid) e4m3 forward and e5m2 for gradients. None is off."""
    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"], Facts(needs="fp8_format", core=True)
    ] = "delayed"
    """Scales from the history of a tensor's largest value, from the tensor itself, or per block (mxfp8: Blackwell)."""
    fp8_margin: Annotated[int, Facts(at_least=0, needs="fp8_recipe delayed", core=True)] = 0
    """Delayed scaling: a scale leaves this many powers of two free above the largest value."""
    fp8_amax_history_len: Annotated[int, Facts(at_least=1, needs="fp8_recipe delayed", core=True)] = 1
    """Delayed scaling: micro-batches of which the largest value is remembered."""
    fp8_amax_compute_algo: Annotated[Literal["most_recent", "max"], Facts(needs="fp8_recipe delayed", core=True)] = (
        "most_recent"
    )
    """Delayed scaling: which value of the history makes the scale."""
    first_last_layers_bf16: Annotated[bool, Facts(needs="fp8_format", core=True)] = False
    """Leave the first and the last layers in BF16 (not with delayed scaling)."""
    num_layers_at_start_in_bf16: Annotated[int, Facts(at_least=0, needs="first_last_layers_bf16", core=True)] = 1
    """How many first layers that are."""
    num_layers_at_end_in_bf16: Annotated[int, Facts(at_least=0, needs="first_last_layers_bf16", core=True)] = 1
    """How many last layers that are."""
