"""The configuration: one dataclass per subject, one field per key.

Names are Megatron-LM's where it has one. Keys are unique across the sections, so a YAML file may list them flat or
under their section's name. A field that is None after reading is derived in `resolve`, after every override.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megaaccum.config.facts import Facts


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The GPT that is trained (megatron.core.models.gpt.GPTModel)."""

    num_layers: Annotated[int, Facts(required=True, at_least=1, core=True, fixed=True)] = 0
    """Transformer layers of the whole model. Required."""
    hidden_size: Annotated[int, Facts(required=True, at_least=1, core=True, fixed=True)] = 0
    """Width of the residual stream. Required."""
    num_attention_heads: Annotated[int, Facts(required=True, at_least=1, core=True, fixed=True)] = 0
    """Query heads of the whole model. Required."""
    seq_length: Annotated[int, Facts(required=True, at_least=1)] = 0
    """Tokens per sequence. Required."""
    ffn_hidden_size: Annotated[int | None, Facts(at_least=1, core=True, fixed=True)] = None
    """Width of the MLP; default 4 * hidden_size, with swiglu 2/3 of that rounded down to a multiple of 64."""
    num_query_groups: Annotated[int | None, Facts(at_least=1, core=True, fixed=True)] = None
    """Key/value heads (grouped-query attention); default num_attention_heads."""
    kv_channels: Annotated[int | None, Facts(at_least=1, core=True)] = None
    """Channels of one head; default hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int | None, Facts(at_least=1)] = None
    """Rows of a learned position table; default seq_length."""
    position_embedding_type: Annotated[Literal["learned_absolute", "rope", "yarn", "none"], Facts(fixed=True)] = (
        "learned_absolute"
    )
    """How positions enter the model."""
    rotary_base: Annotated[int, Facts(at_least=1)] = 10000
    """Base period of rotary embeddings."""
    rotary_percent: Annotated[float, Facts(above=0, at_most=1)] = 1.0
    """Share of a head's channels that is rotated."""
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], Facts(core=True, fixed=True)] = "LayerNorm"
    """Kind of every norm."""
    norm_epsilon: Annotated[float, Facts(above=0, core="layernorm_epsilon")] = 1e-5
    """Added to the variance in a norm."""
    swiglu: Annotated[bool, Facts(core="gated_linear_unit", fixed=True)] = False
    """Gated SiLU MLP instead of GELU."""
    squared_relu: bool = False
    """Squared ReLU MLP instead of GELU."""
    add_bias_linear: Annotated[bool, Facts(core=True)] = True
    """Biases on linear layers (Megatron's flag: --disable-bias-linear)."""
    add_qkv_bias: Annotated[bool, Facts(core=True)] = False
    """A bias on the QKV projection alone."""
    qk_layernorm: Annotated[bool, Facts(core=True)] = False
    """Norms on queries and keys."""
    untie_embeddings_and_output_weights: Annotated[bool, Facts(fixed=True)] = False
    """Separate input embedding and output head."""
    attention_dropout: Annotated[float, Facts(at_least=0, below=1, core=True)] = 0.1
    """Dropout probability on attention weights."""
    hidden_dropout: Annotated[float, Facts(at_least=0, below=1, core=True)] = 0.1
    """Dropout probability on the residual stream."""
    init_method_std: Annotated[float, Facts(above=0, core=True)] = 0.02
    """Standard deviation of the initial weights."""
    vocab_size: Annotated[int | None, Facts(at_least=1)] = None
    """Rows of the vocabulary before padding; default: the tokenizer's."""
    make_vocab_size_divisible_by: Annotated[int, Facts(at_least=1)] = 128
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, Facts(core=True, planned=True)] = None
    """Recompute activations in the backward pass: whole layers, or the modules of recompute_modules."""
    recompute_method: Annotated[
        Literal["uniform", "block"] | None, Facts(needs="recompute_granularity", core=True, planned=True)
    ] = None
    """With full recompute: which layers. Default uniform."""
    recompute_num_layers: Annotated[
        int | None, Facts(at_least=1, needs="recompute_granularity", core=True, planned=True)
    ] = None
    """Layers per recomputed unit (uniform) or recomputed layers per chunk (block). Default 1 with full recompute."""
    recompute_modules: Annotated[list[str] | None, Facts(needs="recompute_granularity", core=True)] = None
    """With selective recompute: the modules; default Megatron's (core_attn)."""
    num_experts: Annotated[int | None, Facts(at_least=1, core="num_moe_experts", fixed=True)] = None
    """Routed experts per MoE layer; None is a dense model."""
    moe_layer_freq: Annotated[int | list[int], Facts(needs="num_experts", core=True)] = 1
    """An MoE layer every n layers, or a 0/1 list with one entry per layer."""
    moe_ffn_hidden_size: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True)] = None
    """Width of one expert; default ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True)] = None
    """Total width of the shared experts; None for none."""
    moe_router_topk: Annotated[int, Facts(at_least=1, needs="num_experts", core=True)] = 2
    """Experts per token."""
    moe_router_load_balancing_type: Annotated[str, Facts(core=True)] = "aux_loss"
    """aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none."""
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid"], Facts(core=True)] = "softmax"
    """Scores of the router."""
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, Facts(needs="num_experts", core=True)] = None
    """Precision in which the router computes; default that of the model. fp32 is steadier with many experts."""
    moe_router_num_groups: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True)] = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True)] = None
    """Groups that a token may use."""
    moe_router_topk_scaling_factor: Annotated[float | None, Facts(above=0, needs="num_experts", core=True)] = None
    """Factor on the routing weights."""
    moe_router_enable_expert_bias: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Aux-loss-free balancing by a bias per expert."""
    moe_router_pre_softmax: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Softmax before the top-k selection."""
    moe_aux_loss_coeff: Annotated[float, Facts(at_least=0, needs="num_experts", core=True)] = 0.0
    """Weight of the load-balancing loss."""
    moe_z_loss_coeff: Annotated[float | None, Facts(at_least=0, needs="num_experts", core=True)] = None
    """Weight of the router z-loss."""
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall", "flex"], Facts(core=True)] = "alltoall"
    """How tokens reach their experts."""
    moe_grouped_gemm: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """One grouped GEMM over a rank's experts."""
    multi_latent_attention: bool = False
    """DeepSeek's multi-latent attention."""
    q_lora_rank: Annotated[int | None, Facts(at_least=1, needs="multi_latent_attention", core=True)] = None
    """Rank of the query's low-rank projection (MLA)."""
    kv_lora_rank: Annotated[int, Facts(at_least=1, needs="multi_latent_attention", core=True)] = 32
    """Rank of the key/value low-rank projection (MLA)."""
    qk_head_dim: Annotated[int, Facts(at_least=1, needs="multi_latent_attention", core=True)] = 128
    """Unrotated channels of a query/key head (MLA)."""
    qk_pos_emb_head_dim: Annotated[int, Facts(at_least=1, needs="multi_latent_attention", core=True)] = 64
    """Rotated channels of a query/key head (MLA)."""
    v_head_dim: Annotated[int, Facts(at_least=1, needs="multi_latent_attention", core=True)] = 128
    """Channels of a value head (MLA)."""
    mtp_num_layers: Annotated[int | None, Facts(at_least=1, core=True)] = None
    """Multi-token-prediction layers; None for none."""
    mtp_loss_scaling_factor: Annotated[float, Facts(at_least=0, core=True)] = 0.1
    """Weight of the multi-token-prediction loss."""
    transformer_impl: Annotated[Literal["auto", "local", "transformer_engine"], Facts(planned=True)] = "auto"
    """Layer spec: Transformer Engine's where it is installed and a GPU is there (auto), or one by name."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Kernel of attention. Transformer Engine's layers take it as Megatron does; in local layers flash and fused are
    torch's own, unfused keeps all scores, and auto is fused on a GPU or under context parallelism."""
    masked_softmax_fusion: bool = True
    """With unfused attention: scale, mask and softmax in one kernel, where a GPU and apex have it."""
    bias_gelu_fusion: bool = True
    """Bias and GELU in one kernel, on a GPU."""
    bias_swiglu_fusion: bool = True
    """Bias and SwiGLU in one kernel, on a GPU."""
    bias_dropout_fusion: bool = True
    """Bias, dropout and residual addition in one kernel, on a GPU."""
    apply_rope_fusion: bool | None = None
    """Rotary embeddings in one kernel of Transformer Engine's. Default: with its layers (not in latent attention)."""
    cross_entropy_loss_fusion: Annotated[bool, Facts(core=True)] = False
    """The loss over the vocabulary with its intermediate results in one buffer."""
    gradient_accumulation_fusion: Annotated[bool, Facts(core=True)] = False
    """Weight gradients are added to the FP32 buffer by their own matrix product, on a GPU with Transformer Engine or
    apex: backend megatron under Megatron's own schedules."""
    moe_permute_fusion: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Tokens are sorted to experts and back by Transformer Engine's kernels."""
    moe_router_fusion: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Scores and top-k of the router in one kernel of Transformer Engine's."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How the model is cut over ranks. world = tp * cp * pp * dp."""

    tensor_model_parallel_size: Annotated[int, Facts(at_least=1, core=True, fixed=True, planned=True)] = 1
    """Ranks that share each matrix (tp)."""
    pipeline_model_parallel_size: Annotated[int, Facts(at_least=1, core=True, planned=True)] = 1
    """Pipeline stages' ranks (pp)."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Model chunks per rank (vpp) for the interleaved schedule; zbv and dualpipev set it to 2."""
    num_layers_per_virtual_pipeline_stage: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Another way to say vpp: layers per chunk."""
    context_parallel_size: Annotated[int, Facts(at_least=1, core=True, planned=True)] = 1
    """Ranks that share each sequence (cp)."""
    expert_model_parallel_size: Annotated[int, Facts(at_least=1, needs="num_experts", core=True, planned=True)] = 1
    """Ranks over which experts are spread (ep); a part of tp * cp * dp."""
    expert_tensor_parallel_size: Annotated[
        int | None, Facts(at_least=1, needs="num_experts", core=True, planned=True)
    ] = None
    """Tensor parallelism inside experts; default tensor_model_parallel_size."""
    sequence_parallel: Annotated[bool, Facts(core=True, planned=True)] = False
    """Split norms and dropout along the sequence over the tp ranks."""
    schedule: Annotated[
        Literal["auto", "none", "1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipev", "v-half", "v-min"] | str,
        Facts(planned=True),
    ] = "auto"
    """Pipeline schedule, or the path of a .csv table; auto: none at pp 1, interleaved when vpp is set, else 1f1b."""
    microbatch_group_size_per_vp_stage: Annotated[int | None, Facts(at_least=1, core=True, planned=True)] = None
    """Consecutive micro-batches of one chunk in the interleaved schedule; default pp."""
    overlap_p2p_comm: Annotated[bool | None, Facts(core=True, planned=True)] = None
    """Overlap stage-to-stage traffic with compute; default: on for the interleaved schedule, as Megatron-LM."""
    batch_p2p_comm: Annotated[bool | None, Facts(core=True, planned=True)] = None
    """Send and receive in one batched call. Default: the opposite of overlap_p2p_comm."""
    overlap_moe_expert_parallel_comm: Annotated[bool, Facts(core=True)] = False
    """Interleave a forward and a backward layer by layer, so that the experts' all-to-all of one runs under the compute
    of the other (Megatron's combined 1F1B): schedule none, interleaved, or one with fused pairs (dualpipev)."""
    decoder_first_pipeline_num_layers: Annotated[
        int | None, Facts(at_least=1, core="num_layers_in_first_pipeline_stage", planned=True)
    ] = None
    """Layers of the first stage when stages are uneven."""
    decoder_last_pipeline_num_layers: Annotated[
        int | None, Facts(at_least=1, core="num_layers_in_last_pipeline_stage", planned=True)
    ] = None
    """Layers of the last stage when stages are uneven."""
    pipeline_model_parallel_layout: Annotated[str | None, Facts(core=True, planned=True)] = None
    """Explicit layers per stage, in Megatron's notation (Et*3|(tt|)*29,m|L)."""
    distributed_timeout_minutes: Annotated[float, Facts(above=0)] = 10.0
    """A collective that waits longer than this ends the run."""


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The batch and how it is split. What is left None is derived; what is given twice must agree."""

    micro_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences in one pipeline micro-batch on one data-parallel rank."""
    global_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences per optimizer step over all ranks."""
    device_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences a data-parallel rank takes in per accumulation step (dbs)."""
    pp_microbatches: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Pipeline micro-batches that one device batch is cut into (also num_chunks)."""
    grad_accum_steps: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Device batches per optimizer step (ga)."""
    variable_seq_lengths: bool = False
    """Micro-batches may have different lengths, up to seq_length; with a pipeline, every stage knows them in
    advance."""
    allow_underfilled_pipeline: bool = False
    """Accept fewer than 2 * pp micro-batches per flush, and the bubble that they cost."""
    flush: Annotated[Literal["merged", "per_round"], Facts(planned=True)] = "merged"
    """One pipeline flush of ga * pp_microbatches micro-batches, or one flush per accumulation round."""
    loss_norm: Literal["token", "microbatch"] = "token"
    """Divide the loss by the step's unmasked tokens, or take the mean over micro-batches of their means."""


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """Who holds parameters, gradients and optimizer state, and in which precision."""

    backend: Literal["deepspeed", "fsdp2", "ddp", "megatron"] = "deepspeed"
    """What shards and reduces: a DeepSpeed engine, torch's fully_shard, torch DistributedDataParallel, or Megatron's
    with its distributed optimizer."""
    zero_stage: Annotated[Literal[1, 2, 3], Facts(planned=True)] = 3
    """DeepSpeed ZeRO stage."""
    sync: Annotated[Literal["auto", "resident", "streaming"], Facts(planned=True)] = "auto"
    """resident: parameters gathered once per step, gradients reduced once per step. streaming (ZeRO-3, FSDP2): both
    layer by layer in every micro-batch, for stages that do not fit whole. auto: the one with the least bytes that fits
    (memory_gib); without a limit resident."""
    max_live_parameters: Annotated[int, Facts(at_least=0)] = 0
    """With sync streaming: parameters (elements per rank) that may stay gathered through a flush."""
    memory_gib: Annotated[float | None, Facts(above=0)] = None
    """Memory (GiB) of a rank's device that a step has to fit into, by prediction: sync auto chooses by it, and what
    does not fit is refused at the start. Default: what is free on the GPU; no limit on a CPU."""
    data_parallel_replicas: Annotated[int, Facts(at_least=1)] = 1
    """With backend fsdp2: groups of data-parallel ranks that each hold the whole sharded model (HSDP)."""
    deterministic: Annotated[bool, Facts(core="deterministic_mode")] = False
    """A run repeats to the bit: the ranks' gradients are added in rank order on any backend, and kernels are those that
    repeat (on a CPU, of one thread)."""
    reduce_bucket_size: Annotated[int, Facts(at_least=1)] = 500_000_000
    """Elements reduced in one collective."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps optimizer state and runs the optimizer."""
    cold_expert_offload: bool = False
    """Between micro-batches, keep the gradients of experts that few tokens reach in host memory (pinned, with a GPU);
    the result is the same. ZeRO-3 with sync resident."""
    cold_expert_tokens: Annotated[int, Facts(at_least=1, needs="cold_expert_offload")] = 1
    """An expert is cold if fewer tokens came to it on this rank, over the last cold_expert_steps steps together."""
    cold_expert_steps: Annotated[int, Facts(at_least=1, needs="cold_expert_offload")] = 10
    """Optimizer steps over which its tokens are counted; no expert is cold in that many first steps of a start."""
    bf16: bool = False
    """BF16 parameters and activations, FP32 master weights."""
    fp16: bool = False
    """FP16 parameters and activations with loss scaling, FP32 master weights."""
    params_dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Another way to say it; fp64 only with the ddp and fsdp2 backends. Default fp32, or what bf16 / fp16 say."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients of micro-batches are added."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients cross ranks."""
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
    num_layers_at_start_in_bf16: Annotated[int, Facts(at_least=0, core=True)] = 1
    """How many first layers that are."""
    num_layers_at_end_in_bf16: Annotated[int, Facts(at_least=0, core=True)] = 1
    """How many last layers that are."""


@dataclass(kw_only=True, slots=True)
class StepConfig:
    """When a step counts: the loss scale of FP16, and what happens to a step that went wrong."""

    loss_scale: Annotated[float | None, Facts(above=0, needs="fp16")] = None
    """A fixed loss scale for FP16; default: a dynamic one, by the four keys below."""
    initial_loss_scale: Annotated[float, Facts(above=0, needs="fp16")] = 65536.0
    """Dynamic loss scale of the first step."""
    min_loss_scale: Annotated[float, Facts(above=0, needs="fp16")] = 1.0
    """Floor of the dynamic loss scale: a step that overflows there ends the run."""
    loss_scale_window: Annotated[int, Facts(at_least=1, needs="fp16")] = 2000
    """Steps in a row without an overflow after which the dynamic loss scale doubles."""
    hysteresis: Annotated[int, Facts(at_least=1, needs="fp16")] = 2
    """Overflows before the dynamic loss scale is halved; counted afresh when it doubles, as in Megatron."""
    nonfinite: Literal["skip", "zero", "drop_microbatch", "raise", "off"] = "skip"
    """A gradient that is not finite: skip the step, set it to 0, leave its micro-batch out, end the run, or none."""
    skipped_samples: Literal["consumed", "retried"] = "consumed"
    """Samples of a skipped step count as consumed, as in Megatron, or come again in the next step."""
    max_bad_steps_in_a_row: Annotated[int, Facts(at_least=0)] = 10
    """End the run after this many steps in a row that were not finite or that the guard skipped; 0 is no limit."""
    max_bad_steps: Annotated[int, Facts(at_least=0)] = 100
    """The same for all such steps of the run; 0 is no limit."""
    grad_norm_guard: Literal["off", "warn", "skip", "stop"] = "off"
    """What to do about a gradient norm far above its moving average."""
    grad_norm_guard_deviations: Annotated[float, Facts(above=0, needs="grad_norm_guard")] = 6.0
    """How far: in standard deviations of the norm, themselves a moving average."""
    grad_norm_guard_window: Annotated[int, Facts(at_least=1, needs="grad_norm_guard")] = 100
    """Steps over which the averages are taken; the guard is silent until there are that many."""
    short_batch: Literal["error", "pad", "drop"] = "error"
    """A rank with too few micro-batches: end the run, fill up with such of weight zero, or skip the step everywhere."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule (Megatron's OptimizerParamScheduler)."""

    lr: Annotated[float, Facts(required=True, above=0, lr_state="max_lr")] = 0.0
    """Peak learning rate. Required."""
    min_lr: Annotated[float, Facts(at_least=0, lr_state="min_lr")] = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: Annotated[float | None, Facts(above=0)] = None
    """Peak learning rate of the input embedding and the output head, where it differs from lr."""
    decoupled_min_lr: Annotated[float | None, Facts(at_least=0)] = None
    """Their learning rate at the end of the decay; default min_lr."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], Facts(lr_state="lr_decay_style")
    ] = "linear"
    """Shape of the decay."""
    lr_decay_iters: Annotated[int | None, Facts(at_least=1, lr_state="lr_decay_steps", in_samples=True)] = None
    """Steps until min_lr; default train_iters."""
    lr_warmup_iters: Annotated[int | None, Facts(at_least=0, lr_state="lr_warmup_steps", in_samples=True)] = None
    """Steps of linear warm-up."""
    lr_warmup_fraction: Annotated[float | None, Facts(at_least=0, below=1)] = None
    """Warm-up as a share of lr_decay_iters; instead of lr_warmup_iters."""
    lr_warmup_init: Annotated[float, Facts(at_least=0, lr_state="init_lr")] = 0.0
    """Learning rate at step 0."""
    lr_wsd_decay_iters: Annotated[
        int | None, Facts(at_least=1, needs="lr_decay_style WSD", lr_state="wsd_decay_steps", in_samples=True)
    ] = None
    """Steps of the final anneal of WSD."""
    lr_wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"],
        Facts(needs="lr_decay_style WSD", lr_state="lr_wsd_decay_style"),
    ] = "exponential"
    """Shape of the anneal of WSD."""
    weight_decay: Annotated[float, Facts(at_least=0)] = 0.01
    """Decoupled weight decay of matrices (biases and norms have none)."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay the norms of queries and keys too."""
    start_weight_decay: Annotated[float | None, Facts(at_least=0, lr_state="start_wd")] = None
    """Weight decay at step 0; default weight_decay."""
    end_weight_decay: Annotated[float | None, Facts(at_least=0, lr_state="end_wd")] = None
    """Weight decay at the last step; default weight_decay."""
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], Facts(lr_state="wd_incr_style")] = (
        "constant"
    )
    """How weight decay moves between the two."""
    adam_beta1: Annotated[float, Facts(at_least=0, below=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Facts(at_least=0, below=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Facts(above=0)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Facts(at_least=0)] = 1.0
    """Largest global L2 norm of the gradient; 0 is off."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where samples come from (megatron.core.datasets)."""

    data_path: Annotated[list[str], Facts(per_host=True)] = field(default_factory=lambda: ["embedded"])
    """Prefixes of .bin/.idx pairs, or weight prefix weight prefix ...; 'embedded' is the text in the package."""
    train_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for training alone; instead of data_path and split."""
    valid_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for validation alone."""
    test_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for testing alone."""
    split: str = "969,30,1"
    """Shares of train, valid, test in data_path."""
    mock_data: bool = False
    """Made-up samples (Megatron's MockGPTDataset) in place of data_path, to measure with."""
    tokenizer_type: str | None = None
    """Megatron's name of the kind of tokenizer; default: a Hugging Face tokenizers file."""
    vocab_file: Annotated[str | None, Facts(per_host=True)] = None
    """vocab.json of a GPT-2 tokenizer."""
    merge_file: Annotated[str | None, Facts(per_host=True)] = None
    """merges.txt of a GPT-2 tokenizer."""
    tokenizer_model: Annotated[str | None, Facts(per_host=True)] = None
    """A Hugging Face tokenizers file (tokenizer.json), or a folder with one; default: the one beside the dataset."""
    data_cache_path: Annotated[str | None, Facts(per_host=True)] = None
    """Folder for the index files that the dataset builds; default: a cache folder inside save or output_dir."""
    mmap_bin_files: Annotated[bool, Facts(per_host=True)] = True
    """Map the .bin files into memory rather than read them."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
    reset_position_ids: bool = False
    """Restart positions after an end-of-document token."""
    reset_attention_mask: bool = False
    """Keep attention inside documents."""
    num_workers: Annotated[int, Facts(at_least=0, per_host=True)] = 2
    """Micro-batches that are prepared ahead, off the critical path; 0 prepares them when they are asked for."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The run: how long, what is written, when it stops."""

    train_iters: Annotated[int, Facts(required=True, at_least=1, lr_state="wd_incr_steps", in_samples=True)] = 0
    """Optimizer steps of the whole run; the learning-rate schedule is laid out over them. Required."""
    max_steps: Annotated[int | None, Facts(at_least=1)] = None
    """Stop after this many steps of this start, whatever train_iters says (the schedule stays as it is)."""
    eval_interval: Annotated[int, Facts(at_least=0)] = 1000
    """Steps between evaluations; 0 is off."""
    eval_iters: Annotated[int, Facts(at_least=0)] = 100
    """Global batches per evaluation; 0 is off."""
    output_dir: Annotated[str, Facts(per_host=True)] = "runs/default"
    """Folder of logs, pictures and, unless save is set, checkpoints."""
    save: Annotated[str | None, Facts(per_host=True)] = None
    """Folder of checkpoints; default output_dir/checkpoints."""
    load: Annotated[str | None, Facts(per_host=True)] = None
    """Folder to resume from; default: save, when it holds a checkpoint."""
    exit_on_missing_checkpoint: bool = False
    """End the run where `load` holds no checkpoint, rather than start afresh."""
    save_interval: Annotated[int, Facts(at_least=0)] = 0
    """Steps between checkpoints; 0 leaves only the one of save_at_end."""
    save_at_end: bool = True
    """A checkpoint when the run ends or gets a signal to stop."""
    keep_last: Annotated[int, Facts(at_least=0)] = 2
    """Checkpoints kept; 0 keeps all."""
    async_save: bool = False
    """Write checkpoints in the background."""
    save_retain_interval: Annotated[int | None, Facts(at_least=1)] = None
    """Checkpoints at multiples of these steps are kept for good, whatever keep_last says."""
    exit_interval: Annotated[int | None, Facts(at_least=1)] = None
    """End this start when the step is a multiple of it, after a checkpoint."""
    exit_duration_in_mins: Annotated[float | None, Facts(above=0)] = None
    """End this start after this many minutes, after a checkpoint."""
    finetune: bool = False
    """Take the weights alone from `load`, and begin at step 0."""
    reset_iteration: bool = False
    """Take weights and optimizer state from `load`, and begin at step 0."""
    no_load_optim: bool = False
    """Leave optimizer state and learning-rate schedule of the checkpoint out."""
    override_opt_param_scheduler: bool = False
    """The schedule of this configuration holds where the checkpoint's differs."""
    use_checkpoint_opt_param_scheduler: bool = False
    """The schedule of the checkpoint holds where this configuration's differs."""
    no_load: bool = False
    """Start afresh even if a checkpoint is there."""
    seed: Annotated[int, Facts(at_least=0)] = 1234
    """Seed of weights, dropout and sample order."""
    schedule_trace: Annotated[str | None, Facts(per_host=True)] = None
    """Write the second flush, as run and as planned, to this file in Chrome's trace format (megaaccum's schedules)."""
    log_interval: Annotated[int, Facts(at_least=1)] = 10
    """Steps between progress lines."""
    tensorboard_dir: Annotated[str | None, Facts(per_host=True)] = None
    """Write TensorBoard events here."""
    wandb_project: Annotated[str | None, Facts(per_host=True)] = None
    """Write to this Weights & Biases project."""
    csv_dir: Annotated[str | None, Facts(per_host=True)] = None
    """Write CSV metrics here."""
    step_timeout_seconds: Annotated[float, Facts(at_least=0)] = 0.0
    """A step that takes longer ends the run with every rank's stack; 0 is off."""
    num_threads: Annotated[int | None, Facts(at_least=1, per_host=True)] = None
    """CPU threads per rank in the CPU lane; default: cores / local ranks."""
    nproc_per_node: Annotated[int | None, Facts(at_least=1, planned=True, per_host=True)] = None
    """Local ranks that `megaaccum train` starts; default: the GPUs, or tp * cp * pp on a machine without."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything a run needs. Build one with `megaaccum.config.load`, not by hand."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    deepspeed: dict[str, object] = field(default_factory=dict)
    """The user's own DeepSpeed JSON; its batch, precision and clipping must agree with the keys above."""
    megatron: dict[str, object] = field(default_factory=dict)
    """Fields of Megatron's model configuration that are no keys, written under `model:` or as Megatron's flags."""
    origin: dict[str, str] = field(default_factory=dict)
    """Who wrote each key that somebody wrote: a file's name or 'command line'. `load` fills it; not a key."""
    notes: list[str] = field(default_factory=list)
    """What `load` set aside because the command line says otherwise. Not a key."""
