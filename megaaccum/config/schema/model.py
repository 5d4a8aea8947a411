"""Keys of the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaaccum.config.facts import Facts


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The GPT that is trained (megatron.core.models.gpt.GPTModel)."""

    num_layers: Annotated[int, Facts(required=True, at_least=1, at_most=10_000, core=True, fixed=True)] = 0
    """Transformer layers of the whole model. Required."""
    hidden_size: Annotated[int, Facts(required=True, at_least=1, at_most=1e6, core=True, fixed=True)] = 0
    """Width of the residual stream. Required."""
    num_attention_heads: Annotated[int, Facts(required=True, at_least=1, core=True, fixed=True)] = 0
    """Query heads of the whole model. Required."""
    seq_length: Annotated[int, Facts(required=True, at_least=1)] = 0
    """Tokens per sequence. Required."""
    ffn_hidden_size: Annotated[int | None, Facts(at_least=1, at_most=1e7, core=True, fixed=True)] = None
    """Width of the MLP; default 4 * hidden_size, with swiglu 2/3 of that rounded down to a multiple of 64,
    but at least 64."""
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
    rotary_base: Annotated[int, Facts(at_least=1, unseen=True)] = 10000
    """Base period of rotary embeddings."""
    rotary_percent: Annotated[float, Facts(above=0, at_most=1, unseen=True)] = 1.0
    """Share of a head's channels that is rotated."""
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], Facts(core=True, fixed=True)] = "LayerNorm"
    """Kind of every norm."""
    norm_epsilon: Annotated[float, Facts(above=0, core="layernorm_epsilon", unseen=True)] = 1e-5
    """Added to the variance in a norm."""
    swiglu: Annotated[bool, Facts(core="gated_linear_unit", fixed=True)] = False
    """Gated SiLU MLP instead of GELU."""
    quick_geglu: Annotated[bool, Facts(unseen=True)] = False
    """Gated MLP by x * sigmoid(1.702 x), as in GPT-OSS, whose clamp and offset are Megatron's
    activation_func_clamp_value and glu_linear_offset. Sets swiglu."""
    squared_relu: Annotated[bool, Facts(unseen=True)] = False
    """Squared ReLU MLP instead of GELU."""
    openai_gelu: Annotated[bool, Facts(unseen=True)] = False
    """GELU by tanh on every machine, as in GPT-2. Otherwise it is exact, but by tanh with bias_gelu_fusion on a GPU."""
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
    gradient_checkpointing: Annotated[bool, Facts(planned=True)] = False
    """Another way to ask for recompute_granularity full."""
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
    num_experts: Annotated[int | None, Facts(at_least=1, at_most=1e5, core="num_moe_experts", fixed=True)] = None
    """Routed experts per MoE layer; None is a dense model."""
    moe_layer_freq: Annotated[int | list[int], Facts(needs="num_experts", core=True)] = 1
    """An MoE layer every n layers, or a 0/1 list with one entry per layer."""
    moe_ffn_hidden_size: Annotated[int | None, Facts(at_least=1, at_most=1e7, needs="num_experts", core=True)] = None
    """Width of one expert; default ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True)] = None
    """Total width of the shared experts; None for none."""
    moe_router_topk: Annotated[int, Facts(at_least=1, needs="num_experts", core=True, unseen=True)] = 2
    """Experts per token."""
    moe_router_load_balancing_type: Annotated[str | list[str], Facts(core=True)] = "aux_loss"
    """aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none; or a list of several losses."""
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid"], Facts(core=True, unseen=True)] = "softmax"
    """Scores of the router."""
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, Facts(needs="num_experts", core=True)] = None
    """Precision in which the router computes; default that of the model. fp32 is steadier with many experts."""
    moe_router_num_groups: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True, unseen=True)] = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: Annotated[int | None, Facts(at_least=1, needs="num_experts", core=True, unseen=True)] = None
    """Groups that a token may use."""
    moe_router_topk_scaling_factor: Annotated[
        float | None, Facts(above=0, needs="num_experts", core=True, unseen=True)
    ] = None
    """Factor on the routing weights."""
    moe_router_enable_expert_bias: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Aux-loss-free balancing by a bias per expert."""
    moe_router_pre_softmax: Annotated[bool, Facts(needs="num_experts", core=True, unseen=True)] = False
    """Softmax before the top-k selection."""
    moe_aux_loss_coeff: Annotated[float | list[float], Facts(at_least=0, needs="num_experts", core=True)] = 0.0
    """Weight of the load-balancing loss, or a list with the weight of each."""
    moe_z_loss_coeff: Annotated[float | None, Facts(at_least=0, needs="num_experts", core=True)] = None
    """Weight of the router z-loss."""
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall", "flex"], Facts(core=True)] = "alltoall"
    """How tokens reach their experts."""
    moe_expert_capacity_factor: Annotated[float | None, Facts(needs="num_experts", core=True)] = None
    """An expert takes at most ceil(tokens * moe_router_topk / num_experts * this) of the tokens that a rank has of a
    micro-batch; the others are dropped. None drops none."""
    moe_pad_expert_input_to_capacity: Annotated[bool, Facts(needs="moe_expert_capacity_factor", core=True)] = False
    """Every expert takes exactly as many, tokens of weight zero among them: shapes then never change."""
    moe_token_drop_policy: Annotated[
        Literal["probs", "position"], Facts(needs="moe_expert_capacity_factor", core=True)
    ] = "probs"
    """Which tokens are dropped: those of the smallest routing weights, or any beyond the capacity."""
    moe_expected_imbalance: Annotated[float, Facts(at_least=1, needs="num_experts")] = 1.0
    """Tokens of the most loaded rank's experts over the mean, as the log reports them (expert_imbalance): the planner
    counts their memory and time."""
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
    mtp_num_layers: Annotated[int | None, Facts(at_least=1, at_most=1000, core=True)] = None
    """Multi-token-prediction layers; None for none."""
    mtp_loss_scaling_factor: Annotated[float, Facts(at_least=0, core=True)] = 0.1
    """Weight of the multi-token-prediction loss."""
    transformer_impl: Annotated[Literal["auto", "local", "transformer_engine"], Facts(planned=True)] = "auto"
    """Layer spec: Transformer Engine's if it is installed and there is a GPU (auto), or one by name."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Kernel of attention. Transformer Engine's layers take it as Megatron does; in local layers flash and fused are
    torch's own, unfused keeps all scores, and auto is fused on a GPU or under context parallelism."""
    masked_softmax_fusion: bool = True
    """With unfused attention: scale, mask and softmax in one kernel, if a GPU and apex are there."""
    bias_gelu_fusion: bool = True
    """Bias and GELU in one kernel, on a GPU."""
    bias_swiglu_fusion: bool = True
    """Bias and SwiGLU in one kernel, on a GPU."""
    bias_dropout_fusion: bool = True
    """Bias, dropout and residual addition in one kernel, on a GPU."""
    apply_rope_fusion: bool | None = None
    """Rotary embeddings in one kernel of Transformer Engine's. Default: with its layers (not in latent attention)."""
    cross_entropy_loss_fusion: Annotated[bool, Facts(core=True)] = False
    """The loss over the vocabulary with its intermediate results in one buffer; BF16 alone, to which its gradient is
    rounded."""
    gradient_accumulation_fusion: Annotated[bool, Facts(core=True)] = False
    """Weight gradients are added to the FP32 sum by their own matrix product, on a GPU with Transformer Engine or apex:
    backends deepspeed and megatron under Megatron's own schedules."""
    moe_permute_fusion: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Tokens are sorted to experts and back by Transformer Engine's kernels."""
    moe_router_fusion: Annotated[bool, Facts(needs="num_experts", core=True)] = False
    """Scores and top-k of the router in one kernel of Transformer Engine's."""
