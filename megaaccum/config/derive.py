"""Filling in the keys that were not written. Never fails: a rule reports values that are wrong."""

from __future__ import annotations

import os
from contextlib import suppress

from megaaccum.config import precision
from megaaccum.config.batch_ramp import parse_schedule
from megaaccum.config.schema import Config, ModelConfig, OptimizerConfig, ParallelConfig, ShardingConfig
from megaaccum.config.stage_layout import parse_layout
from megaaccum.errors import ConfigError, ScheduleError
from megaaccum.schedule.registry import by_executor, entry


def derive(config: Config, notes: list[str], *, own_model: bool = False) -> None:
    """Fill every None of `config` that other keys decide, in place. Batch sizes and vocab_size stay open.

    Appends to `notes` what is neither Megatron-LM's default nor obvious. own_model: see plan.resolve.
    """
    model = config.model
    _fill(model, num_query_groups=model.num_attention_heads, max_position_embeddings=model.seq_length)
    if model.num_attention_heads > 0:
        _fill(model, kv_channels=model.hidden_size // model.num_attention_heads)
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        config.megatron = YARN | config.megatron
    _derive_mlp(model)
    _derive_recompute(model)
    _derive_batch(config)
    if config.batch.static_graph and config.batch.batch_warmup_steps:
        notes.append(f"static_graph: batch_warmup_steps {config.batch.batch_warmup_steps} is set to 0.")
        config.batch.batch_warmup_steps = 0
    _derive_schedule(config, notes)
    _note_kernels(config, notes)
    if not own_model and not precision.is_given(config):
        config.sharding.params_dtype, why = precision.default()
        notes.append(f"params_dtype {config.sharding.params_dtype}: {why}.")
    _derive_precision(config.sharding)
    if config.sharding.reproducible == "layout":
        _fill(config.sharding, reproducible_tensor_blocks=config.parallel.tensor_model_parallel_size)
        _fill(config.sharding, reproducible_context_blocks=config.parallel.context_parallel_size)
    _derive_optimizer(config.optimizer, config.run.train_iters)
    _fill(config.run, save=os.path.join(config.run.output_dir, "checkpoints"))
    if config.data.sft:  # several conversations in a row, unless the user says otherwise
        config.data.reset_attention_mask |= "reset_attention_mask" not in config.origin
        config.data.reset_position_ids = True
    _fill(config.data, data_cache_path=os.path.join(config.run.output_dir, "data"))
    if config.sharding.sync == "auto":
        config.sharding.sync = "resident"


YARN: dict[str, object] = {
    "yarn_rotary_scaling_factor": 1.0, "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
}  # fmt: skip
"""YaRN's numbers, which Megatron's GPT reads off its configuration without declaring them, with the defaults of its
arguments."""


def _fill(section: object, **defaults: object) -> None:
    """Set the keys of a section that are None."""
    for name, default in defaults.items():
        if getattr(section, name) is None:
            setattr(section, name, default)


def _derive_mlp(model: ModelConfig) -> None:
    # A gated MLP has three matrices; 2/3 of the width keeps the parameters of two, as in Megatron-LM's arguments, which
    # do so for swiglu alone. These give a toy's MLP no width at all.
    gated = max(64, int(4 * model.hidden_size * 2 / 3) // 64 * 64)
    _fill(model, ffn_hidden_size=gated if model.swiglu and not model.quick_geglu else 4 * model.hidden_size)
    model.swiglu |= model.quick_geglu
    if model.num_experts is not None:
        _fill(model, moe_ffn_hidden_size=model.ffn_hidden_size)
    if model.add_bias_linear:
        # Megatron-LM keeps the two in step: biases everywhere include the QKV projection's.
        model.add_qkv_bias = True


def _derive_recompute(model: ModelConfig) -> None:
    if model.gradient_checkpointing:
        _fill(model, recompute_granularity="full")
    if model.recompute_granularity == "full":
        _fill(model, recompute_method="uniform", recompute_num_layers=1)
    elif model.recompute_granularity == "selective":
        _fill(model, recompute_modules=["core_attn"])


def _derive_batch(config: Config) -> None:
    """Derive the global batch from its number of tokens, or from the end of a schedule of batch sizes."""
    batch, seq_length = config.batch, config.model.seq_length
    if batch.global_batch_size is not None:
        return
    if batch.total_batch_size is not None and seq_length > 0:
        batch.global_batch_size = max(1, batch.total_batch_size // seq_length)  # batch_keys reports a remainder
        _same_origin(config, "total_batch_size")
    elif batch.step_batch_size_schedule is not None:
        with suppress(ConfigError):  # build_ramp reports it
            batch.global_batch_size = parse_schedule(batch.step_batch_size_schedule, seq_length)[-1][1]
            _same_origin(config, "step_batch_size_schedule")


def _same_origin(config: Config, key: str) -> None:
    """Give the global batch the origin of `key`."""
    if key in config.origin:
        config.origin["global_batch_size"] = config.origin[key]


def _derive_schedule(config: Config, notes: list[str]) -> None:
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    _derive_vpp(parallel, config.model.num_layers, notes)
    _derive_chunks(parallel)
    if parallel.schedule in (None, "auto"):  # resolve tries others for `auto`, and lab/planner/auto_schedule chooses
        many = parallel.virtual_pipeline_model_parallel_size is not None
        parallel.schedule = "interleaved" if many else "1f1b" if pp > 1 else "none"
    if interleaved := parallel.schedule == "interleaved":
        _fill(parallel, microbatch_group_size_per_vp_stage=pp)
    _fill(parallel, overlap_p2p_comm=interleaved and not parallel.batch_p2p_comm)
    _fill(parallel, batch_p2p_comm=not parallel.overlap_p2p_comm)
    _fill(parallel, expert_tensor_parallel_size=parallel.tensor_model_parallel_size)


def _note_kernels(config: Config, notes: list[str]) -> None:
    """Note what depends on the machine of the run, and what it costs on others."""
    model, parallel = config.model, config.parallel
    if model.moe_grouped_gemm and model.num_experts and model.transformer_impl == "auto":
        local = max(model.num_experts // max(parallel.expert_model_parallel_size, 1), 1)
        notes.append(
            f"moe_grouped_gemm: one product for a rank's {local} experts if Transformer Engine's layers run; otherwise"
            f" (no GPU, or it is not installed) {local} products one after the other, to the same result."
        )
    _note_dispatch(config, notes)
    if parallel.tensor_model_parallel_size > 1 and by_executor(parallel.schedule):
        notes.append(
            f"schedule {parallel.schedule} with tensor_model_parallel_size {parallel.tensor_model_parallel_size}: a"
            " backward that leaves its weight gradients for W has nothing to compute while tp ranks sum an input's"
            " gradient, so 2 of a layer's collectives per micro-batch are waited for, which 1f1b hides."
        )


def _note_dispatch(config: Config, notes: list[str]) -> None:
    """Note options of the experts' traffic without effect, or without effect on some machines."""
    model, fields = config.model, config.megatron
    if model.num_experts is None:
        return
    flex = model.moe_token_dispatcher_type == "flex"
    if idle := sorted(name for name in fields if name.startswith(_OF_FLEX) and not flex):
        notes.append(
            f"{', '.join(idle)}: no effect with moe_token_dispatcher_type {model.moe_token_dispatcher_type}, whose"
            " exchange is NCCL's; flex is the dispatcher that takes it."
        )
    if flex:
        notes.append(
            "moe_token_dispatcher_type flex: needs GPUs and a library of its own (DeepEP); `megaaccum train` refuses it"
            " if one is missing."
        )
    if fields.get("moe_shared_expert_overlap"):
        notes.append(
            "moe_shared_expert_overlap: shared experts are computed on a stream of their own under the all-to-all on a"
            " GPU, and after it on a CPU, to the same result."
            if model.moe_shared_expert_intermediate_size is not None
            else "moe_shared_expert_overlap: no effect, as moe_shared_expert_intermediate_size is not set."
        )


_OF_FLEX = ("moe_flex_dispatcher_", "moe_hybridep_", "moe_deepep_", "moe_ncclep_", "moe_permute_fusion_into_hybridep")


def _derive_vpp(parallel: ParallelConfig, num_layers: int, notes: list[str]) -> None:
    """Derive the model chunks per rank from the key that gives them; None means one chunk, like in Megatron."""
    pp = parallel.pipeline_model_parallel_size
    vpp, why = parallel.virtual_pipeline_model_parallel_size, ""
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if vpp is None and per_chunk and pp > 0 and num_layers % (pp * per_chunk) == 0:
        vpp = num_layers // (pp * per_chunk)
        why = f"num_layers {num_layers} / (pp {pp} * num_layers_per_virtual_pipeline_stage {per_chunk})"
    if vpp is None and parallel.pipeline_model_parallel_layout is not None and pp > 0:
        stages = 0
        with suppress(ValueError):
            stages = len(parse_layout(parallel.pipeline_model_parallel_layout))
        if stages and stages % pp == 0:
            vpp, why = stages // pp, f"{stages} stages of pipeline_model_parallel_layout / pp {pp}"
    if why and vpp != 1:
        notes.append(f"virtual_pipeline_model_parallel_size {vpp} = {why}.")
    parallel.virtual_pipeline_model_parallel_size = None if vpp == 1 else vpp


def _derive_chunks(parallel: ParallelConfig) -> None:
    """Derive vpp, if it is open, from a schedule with a fixed number of chunks."""
    asked = parallel.virtual_pipeline_model_parallel_size is not None or parallel.pipeline_model_parallel_size < 2
    if asked or parallel.schedule in (None, "auto", "none", "interleaved"):
        return
    with suppress(ScheduleError):
        chunks = entry(parallel.schedule).chunks
        parallel.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def _derive_precision(sharding: ShardingConfig) -> None:
    sharding.deterministic = sharding.deterministic or sharding.reproducible == "layout"
    if sharding.params_dtype is None:
        sharding.params_dtype = "bf16" if sharding.bf16 else "fp16" if sharding.fp16 else "fp32"
    elif not sharding.bf16 and not sharding.fp16:
        sharding.bf16 = sharding.params_dtype == "bf16"
        sharding.fp16 = sharding.params_dtype == "fp16"


def _derive_optimizer(optimizer: OptimizerConfig, train_iters: int) -> None:
    if optimizer.lr_decay_samples is None:
        _fill(optimizer, lr_decay_iters=train_iters)
    # A fraction stays a fraction: Megatron-LM multiplies it by samples and may end the warm-up inside a step.
    if optimizer.lr_warmup_fraction is None and optimizer.lr_warmup_samples is None:
        _fill(optimizer, lr_warmup_iters=0)
    if optimizer.weight_decay_incr_style == "constant":
        _fill(optimizer, start_weight_decay=optimizer.weight_decay, end_weight_decay=optimizer.weight_decay)
