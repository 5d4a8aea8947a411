"""The Megatron GPT of a run: its TransformerConfig, this rank's chunks, and weights that do not depend on the layout.

Megatron's configurations, builders and models have no types: `Any`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from megaaccum.config import Plan
from megaaccum.config.keys import all_keys, keys_that_need, value
from megaaccum.config.rules import moe
from megaaccum.distributed import rng
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError
from megaaccum.model import names
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.platform import cpu, determinism
from megaaccum.pretrain.model import layer_specs, recompute_gradients
from megaaccum.pretrain.model.layers import Layers
from megaaccum.pretrain.model.machine import check_machine, has_fused_softmax, layer_kind
from megaaccum.upstream import megatron
from megaaccum.upstream.megatron_training import GPTModelBuilder, GPTModelConfig, HybridModelBuilder, HybridModelConfig


def transformer_config(plan: Plan) -> TransformerConfig:
    """Megatron's configuration of this model and layout. Raises ConfigError with Megatron's reason if it refuses."""
    model, layout = plan.config.model, plan.layout
    dtype = names.DTYPES[plan.config.sharding.params_dtype or "fp32"]
    on_gpu, made_of = cpu.has_accelerator(), layer_kind(plan)
    keys = _core_keys(plan) | dict(
        activation_func=_activation(plan),
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # step/loss.py divides, and nothing else: this tells Megatron's schedules not to.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=not on_gpu or _is_cut_before_it_moves(plan),
        perform_initialization=False,
        # It would wait for the whole device after each exchange, the reduction's stream among it. torch from 2.2 on
        # orders batched messages without it (it was for pytorch#82450).
        batch_p2p_sync=False,
        persist_layer_norm=on_gpu and not made_of.local,
        # Megatron puts it into the environment, for Transformer Engine.
        attention_backend=AttnBackend.auto if made_of.local else AttnBackend[model.attention_backend],
        attention_softmax_in_fp32=dtype is not torch.float64,
    )
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    if model.multi_latent_attention:
        # Megatron-core's default here is YaRN stretched by 40, whatever position_embedding_type says.
        keys |= {"multi_latent_attention": True, "rope_type": "rope", "rotary_base": model.rotary_base}
    known = {field.name for field in fields(kind)}
    assert keys.keys() <= known, f"not keys of megatron-core's {kind.__name__}: {sorted(keys.keys() - known)}"
    keys |= _fusions(plan, made_of, on_gpu)
    keys |= {name: each for name, each in plan.config.megatron.items() if name in known}
    # Of a global loss, Megatron divides a rank's probabilities by the tokens of all ranks, and the mean over ranks by
    # dp once more.
    weights = [weight * (layout.dp if kind == "global_aux_loss" else 1) for kind, weight in moe.balancing_losses(model)]
    keys["moe_aux_loss_coeff"] = weights if isinstance(model.moe_aux_loss_coeff, list) else weights[0]
    try:
        # Without a rank, queries are not compressed, as with Megatron-LM's flags; Megatron-core's default is 512.
        built = kind(**{name: value for name, value in keys.items() if value is not None or name == "q_lora_rank"})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses this model: {error}") from error
    # Transformer Engine's layers then leave weight gradients for later. Set after Megatron's check, which knows only
    # its own schedules (it wants overlap_moe_expert_parallel_comm).
    built.delay_wgrad_compute = made_of.delays_wgrad
    for name, each in plan.config.megatron.items():
        if name.startswith("yarn_"):
            setattr(built, name, each)  # GPTModel reads them off the configuration, which does not declare them
    return built


def _activation(plan: Plan) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation function of the MLP, of its gate if it has one."""
    model = plan.config.model
    if model.squared_relu:
        return cast("Callable[[torch.Tensor], torch.Tensor]", squared_relu)
    if model.openai_gelu:
        return partial(functional.gelu, approximate="tanh")
    if model.quick_geglu:
        return cast("Callable[[torch.Tensor], torch.Tensor]", quick_gelu)
    return functional.silu if model.swiglu else functional.gelu


def _fusions(plan: Plan, made_of: Layers, on_gpu: bool) -> dict[str, object]:
    """Megatron's keys of fused kernels, if this machine and these layers have them. A key that
    was set and that cannot be honoured is refused by `check_machine`."""
    model = plan.config.model
    other = model.squared_relu or model.openai_gelu
    activation = model.bias_swiglu_fusion if model.swiglu else model.bias_gelu_fusion and not other
    rope = model.position_embedding_type == "rope" and not model.multi_latent_attention
    dense_quick = model.quick_geglu and not (model.num_experts and model.moe_layer_freq == 1)
    return dict(
        # Megatron's fused GELU is one of a bias; its fused SwiGLU takes none as well; its quick one is for experts.
        bias_activation_fusion=on_gpu and activation and (model.swiglu or model.add_bias_linear) and not dense_quick,
        # Transformer Engine's grouped experts refuse it with biases of their own.
        bias_dropout_fusion=on_gpu
        and model.bias_dropout_fusion
        and not (model.moe_grouped_gemm and model.add_bias_linear),
        # Its kernel for causal attention reads no mask.
        masked_softmax_fusion=on_gpu
        and model.masked_softmax_fusion
        and not plan.config.data.reset_attention_mask
        and has_fused_softmax(),
        apply_rope_fusion=rope and on_gpu and not made_of.local
        if model.apply_rope_fusion is None
        else model.apply_rope_fusion,
    )


def _core_keys(plan: Plan) -> dict[str, object]:
    """Megatron's name and the value of every key that a TransformerConfig has (`Facts.core`)."""
    model, quantization = plan.config.model, plan.config.quantization
    left_out = set() if model.multi_latent_attention else set(keys_that_need("multi_latent_attention"))
    if quantization.fp8_format is None:
        left_out |= {field.name for field in fields(quantization)}
    return {
        core_name: value(plan.config, name)
        for name, key in all_keys().items()
        if (core_name := key.facts.core_name(name)) and name not in left_out
    }


def build_chunks(plan: Plan, groups: Groups, *, vocab_size: int) -> list[GPTModel]:
    """This rank's model chunks in order (one, or vpp of them), on its device, with weights that depend on
    `seed` and a parameter's global name alone: the same model under every layout.

    vocab_size: tokens of the vocabulary before padding. Raises ConfigError if this machine cannot compute the
    configuration.
    """
    check_machine(plan)
    determinism.apply(plan)
    seed_dropout(groups, seed=plan.config.run.seed)
    config = transformer_config(plan)
    chunks = [build_chunk(plan, groups, config, vocab_size, v) for v in range(plan.layout.vpp)]
    packs = plan.config.data.reset_attention_mask and not layer_kind(plan).local
    for chunk in chunks:
        # The rows of a micro-batch are one row for Transformer Engine's core of attention, which reads no mask, but
        # takes each document as a sequence of its own.
        chunk.packs_rows = packs
        if not _is_cut_before_it_moves(plan):
            chunk.to(cpu.device())
        for buffer in chunk.buffers():
            buffer.data = buffer.data.to(cpu.device())
        for param in chunk.parameters():
            param.data = param.data.to(config.params_dtype)  # torch's norms are built in FP32
        initialize(chunk, groups, seed=plan.config.run.seed)
        recompute_gradients.prepare(chunk)
        for name, module in chunk.named_modules():
            if megatron.is_parallel_linear(module):
                megatron.set_linear_forward(module, megatron.linear_forward)
                if module.bias is not None and re.search(r"local_experts\.\d+\.linear_fc2$", name):
                    module.register_forward_hook(_apart)
        if config.params_dtype is torch.float64:
            chunk.compute_language_model_loss = partial(_cross_entropy_in_float64, groups.tp)
    return chunks


def _cross_entropy_in_float64(
    tp: torch.distributed.ProcessGroup, labels: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Per-token losses [batch, sequence] of labels of that shape and logits [sequence, batch, vocabulary / tp].

    Megatron's own cross entropy works in FP32 whatever it is given (megatron-core 0.19:
    VocabParallelCrossEntropy.calculate_logits_max).
    """
    whole = gather_from_tensor_model_parallel_region(logits, tp)
    return functional.cross_entropy(whole.permute(1, 2, 0), labels, reduction="none")


def _apart(module: torch.nn.Module, args: Any, made: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """The output of an expert in memory of its own: Megatron-core 0.19 adds the bias in place, which autograd refuses
    for what its functions of tensor parallelism return."""
    return made[0].clone(), made[1]


def _is_cut_before_it_moves(plan: Plan) -> bool:
    """Whether a stage is built in host memory: its backend moves it to the device in parts, and shards each at once."""
    return plan.config.sharding.sync == "streaming"


def seed_dropout(groups: Groups, *, seed: int) -> None:
    """Seed dropout differently on every stage and data-parallel rank, and alike on the ranks of a tp group where they
    must share it (Megatron's tracker keeps both kinds of random state)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    own = seed + 10_007 * groups.pp.rank() + 100_003 * groups.dp_cp.rank()
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)


def build_chunk(plan: Plan, groups: Groups, config: TransformerConfig, vocab_size: int, chunk: int) -> GPTModel:
    """This rank's chunk as Megatron's builder makes it, with Megatron's weights, which `build_chunks` replaces."""
    model, made_of = plan.config.model, layer_kind(plan)
    stage, last = groups.stage(chunk), plan.layout.pp * plan.layout.vpp - 1
    vp_stage = chunk if plan.layout.vpp > 1 else None
    pattern = plan.config.megatron.get("hybrid_layer_pattern")
    kind = GPTModelConfig if pattern is None else HybridModelConfig
    builder = GPTModelBuilder if pattern is None else HybridModelBuilder
    own_fields = {field.name for field in fields(kind)}
    with groups.seated(chunk):
        spec = layer_specs.decoder_spec(config, made_of, vp_stage, pp_rank=stage % plan.layout.pp)
        mtp = layer_specs.prediction_spec(config, made_of, vp_stage) if model.mtp_num_layers else None
        whole = kind(
            transformer=config,
            **({"transformer_layer_spec": spec} if pattern is None else {}),
            vocab_size=padded_vocab_size(plan.config, vocab_size),
            seq_length=model.max_position_embeddings or model.seq_length,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            rotary_base=model.rotary_base,
            **{name: each for name, each in plan.config.megatron.items() if name in own_fields},
        )
        with megatron.mtp_spec_of_builder(mtp):
            built = builder(whole).build_model(
                groups.collection_of(chunk), pre_process=stage == 0, post_process=stage == last, vp_stage=vp_stage
            )
    if mtp is not None and built.post_process and not built.pre_process and built.share_embeddings_and_output_weights:
        # A stage with prediction layers has a copy of the embedding and gives it to the head. Megatron-core 0.19 makes
        # a weight for the head all the same, which nothing reads, under what would be the same name.
        built.output_layer.weight = None
    if plan.config.sharding.reproducible == "layout":
        if built.pre_process and built.post_process:
            copy_for_head(built)
            copy_for_prediction(built)
        if built.mtp_process:
            sum_before_prediction(built)
    return built


def copy_for_head(chunk: GPTModel) -> None:
    """Give a tied head on the embedding's own stage a copy, as it has on another stage: the gradients of the two uses
    are then added in the same order, each over all micro-batches first."""
    if not chunk.share_embeddings_and_output_weights:
        return
    weight: Any = chunk.embedding.word_embeddings.weight
    weight.shared_embedding, weight.zero_out_wgrad = True, False
    chunk.output_layer.weight = _copy_of(weight)
    head = chunk.output_layer  # looked up in each forward: fully_shard puts another parameter there
    chunk.shared_embedding_or_output_weight = lambda: head.weight


def copy_for_prediction(chunk: GPTModel) -> None:
    """Give prediction layers on the embedding's own stage a copy of its word table, for the same reason."""
    if not chunk.mtp_process:
        return
    plain = chunk.embedding
    weight: Any = plain.word_embeddings.weight
    weight.shared_embedding = True
    twin = type(plain)(
        config=chunk.config, vocab_size=chunk.vocab_size, max_sequence_length=chunk.max_sequence_length,
        position_embedding_type=chunk.position_embedding_type,
        scatter_to_sequence_parallel=plain.scatter_to_sequence_parallel, tp_group=plain.tp_group,
    )  # fmt: skip
    twin.word_embeddings.weight = _copy_of(weight)
    chunk.mtp.embedding = twin
    chunk.mtp.register_forward_pre_hook(
        lambda mtp, args, given: (args, given | {"embedding": mtp.embedding}), with_kwargs=True
    )


def sum_before_prediction(chunk: GPTModel) -> None:
    """Have the gradient of a prediction layer's hidden states added up before it meets that of the head, as it is where
    the layer is recomputed: an RMS norm, several functions of torch's on a CPU, otherwise gives two terms of three."""
    for layer in chunk.mtp.layers:
        layer.hnorm.register_forward_pre_hook(lambda norm, args: (args[0].view_as(args[0]), *args[1:]))


def _copy_of(weight: torch.nn.Parameter) -> Any:
    """A copy of a tied weight, marked as one."""
    copy: Any = torch.nn.Parameter(weight.detach().clone())
    vars(copy).update(vars(weight))
    copy.shared = True
    return copy


# --- weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize(chunk: GPTModel, groups: Groups, *, seed: int) -> None:
    """Draw every weight matrix from a generator seeded by (seed, global name).

    Matrices are drawn whole in FP32 and sliced to this tp rank's part, so that the model is the same at every tp, pp
    and vpp. Distributions are Megatron's (`init_method`, and `output_layer_init_method` for the projections that end a
    residual branch); biases start at 0 and norms at 1 (at 0 where 1 is added to them). State-space parameters keep what
    their constructors gave them.
    """
    config = chunk.config
    names.mark_cut_offsets(chunk)
    for name, param in chunk.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if config.gated_linear_unit and "linear_fc1" in name:
            param.partition_stride = 2  # [gate; up], each cut over tp; megatron-core 0.19's grouped experts say 1
        if leaf in ("A_log", "D", "dt_bias") or "conv1d" in name:
            continue
        if param.dim() < 2 and leaf.endswith("weight") and "norm" in name:
            param.fill_(0.0 if config.layernorm_zero_centered_gamma else 1.0)
            continue
        if param.dim() < 2 and re.fullmatch(r"(layer_norm_)?bias\d*", leaf):
            param.fill_(0.0)
            continue
        unique = names.global_name(chunk, name)
        scaled = re.search(r"(linear_proj|linear_fc2)\.weight", name) is not None
        init = config.output_layer_init_method if scaled else config.init_method
        if unique.startswith("embedding.") or (config.use_mup and name.startswith("output_layer.")):
            init = config.embedding_init_method
        param.copy_(tp_part(_draw(param, groups, unique, init, seed), param, groups))


def _draw(
    param: torch.nn.Parameter, groups: Groups, name: str, init: Callable[[torch.Tensor], object], seed: int
) -> torch.Tensor:
    """The whole matrix `name` (FP32, all tp ranks' parts), the same on every rank that holds a part of it; on the
    device, wherever the parameter is, since another kind of device draws other numbers."""
    device = cpu.device()
    full = torch.empty(names.whole_shape(param, groups), dtype=torch.float32, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        rng.seed_generators(int.from_bytes(digest[:8], "little") >> 1)
        init(full)
    return full


def tp_part(full: torch.Tensor, param: Any, groups: Groups) -> torch.Tensor:
    """This tp rank's part of `full`. A gated linear_fc1 holds [gate; up], and each rank a part of both."""
    if not names.is_sharded_over_tp(param):
        return full
    axis, group = param.partition_dim, names.tp_group(param, groups)
    rank, size = group.rank(), group.size()
    return torch.cat([each.chunk(size, axis)[rank] for each in full.chunk(param.partition_stride, axis)], axis)
