"""Rules on the backend, its sync mode, and the order of its sums."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.batch_ramp import KEYS as RAMP_KEYS
from megaaccum.config.rules.subject import Subject
from megaaccum.errors import either, nearest_divisors, nearest_multiples


def streaming(subject: Subject) -> Iterator[str]:
    """Streaming gathers layers whose parameters are sharded: at ZeRO-3 and in FSDP2."""
    sharding = subject.sharding
    if sharding.sync != "streaming":
        return
    if sharding.backend in ("ddp", "megatron"):
        yield (
            f"sync streaming gathers parameters layer by layer, but with backend {sharding.backend} every rank holds"
            " them whole: set backend to deepspeed or fsdp2, or sync to resident."
        )
    elif sharding.backend == "deepspeed" and sharding.zero_stage != 3:
        yield (
            f"sync streaming gathers parameters layer by layer, but at zero_stage {sharding.zero_stage} every rank"
            " holds them whole: set zero_stage to 3, or sync to resident."
        )


def live_parameters(subject: Subject) -> Iterator[str]:
    """Only streaming of the DeepSpeed backend keeps some parameters gathered and not others."""
    sharding = subject.sharding
    if sharding.max_live_parameters and not (sharding.sync == "streaming" and sharding.backend == "deepspeed"):
        yield (
            f"max_live_parameters {sharding.max_live_parameters} limits what sync streaming of backend deepspeed keeps"
            f" gathered, but sync is {sharding.sync} and backend is {sharding.backend}: set sync to streaming, or leave"
            " max_live_parameters out."
        )


def deterministic(subject: Subject) -> Iterator[str]:
    """At ZeRO-1 and -2 sums in rank order are made on the device, in the precision in which gradients are added up."""
    sharding = subject.sharding
    if not sharding.deterministic or sharding.backend != "deepspeed" or sharding.zero_stage == 3:
        return
    for name, plain in {"offload_optimizer": "none", "grad_reduce_dtype": sharding.grad_accum_dtype}.items():
        if (value := getattr(sharding, name)) != plain and sharding.reproducible == "none":
            yield (
                f"deterministic with {name} {value} needs zero_stage 3, but zero_stage is {sharding.zero_stage}: set"
                f" {name} to {plain}, or zero_stage to 3."
            )


def reproducible(subject: Subject) -> Iterator[str]:
    """Some settings make bits depend on the layout, each for its own reason."""
    sharding, parallel, model = subject.sharding, subject.parallel, subject.model
    if sharding.reproducible != "layout":
        return
    ep, dispatcher = parallel.expert_model_parallel_size, model.moe_token_dispatcher_type
    optimizer = subject.optimizer.optimizer
    spread = f"expert_model_parallel_size {ep} with"
    ramped = subject.given(*RAMP_KEYS)
    refused = {
        f"{spread} moe_token_dispatcher_type {dispatcher}: only alltoall brings each copy of a token back to its own"
        " rank, which adds them in the order of experts": ep > 1 and dispatcher != "alltoall",
        f"{spread} transformer_impl transformer_engine: its grouped products multiply the tokens of several ranks at"
        " once": ep > 1 and model.transformer_impl == "transformer_engine",
        f"{spread} add_bias_linear: the gradient of an expert's bias is one sum over the tokens of several ranks": (
            ep > 1 and model.add_bias_linear and not subject.own_model
        ),
        f"{spread} sync streaming: it adds up the gradients of an expert's ranks before they are released": (
            ep > 1 and sharding.sync == "streaming"
        ),
        f"{spread} optimizer {optimizer}: it was not compared": ep > 1 and optimizer in ("muon", "soap"),
        "overlap_moe_expert_parallel_comm: a parameter's gradient then comes in several pieces of a layer's backward": (
            parallel.overlap_moe_expert_parallel_comm
        ),
        "moe_router_load_balancing_type global_aux_loss: it counts what a rank has seen so far": (
            model.num_experts is not None and "global_aux_loss" in model.moe_router_load_balancing_type
        ),
        f"num_experts {model.num_experts} with backend {sharding.backend}: only deepspeed knows in which order experts"
        " that some micro-batches skip are added": model.num_experts is not None and sharding.backend != "deepspeed",
        f"mtp_num_layers {model.mtp_num_layers} with tied embeddings: their uses are added in another order with each"
        " number of stages": bool(model.mtp_num_layers) and not model.untie_embeddings_and_output_weights,
        "fp16: its loss scale follows what overflows on the way": sharding.fp16,
        f"fp8_format {subject.quantization.fp8_format}: its scales follow the micro-batches that a rank has seen": (
            subject.quantization.fp8_format is not None
        ),
        f"grad_accum_dtype {sharding.grad_accum_dtype}: sums are FP32": sharding.grad_accum_dtype != "fp32",
        f"grad_reduce_dtype {sharding.grad_reduce_dtype} elsewhere than in backend deepspeed at zero_stage 3: it rounds"
        " what a rank has, which depends on the number of ranks": sharding.grad_reduce_dtype != "fp32"
        and not (sharding.backend == "deepspeed" and sharding.zero_stage == 3),
        "optimizer_dtype bf16 with backend fsdp2, whose shards of gradients it rounds too": sharding.backend == "fsdp2"
        and sharding.optimizer_dtype == "bf16",
        f"data_parallel_replicas {sharding.data_parallel_replicas}: replicas add up their own sums": (
            sharding.data_parallel_replicas > 1
        ),
        f"offload_optimizer cpu at zero_stage {sharding.zero_stage}: its gradients lie elsewhere": (
            sharding.offload_optimizer == "cpu" and sharding.zero_stage != 3
        ),
        "cold_expert_offload: it adds gradients elsewhere": sharding.cold_expert_offload,
        f"{' and '.join(ramped)} and sync resident: a rank's run of micro-batches ends elsewhere in each step": (
            bool(ramped) and sharding.sync == "resident"
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            yield f"reproducible layout does not support {what}. Change that, or remove reproducible."


def blocks(subject: Subject) -> Iterator[str]:
    """Blocks are alike and divide over tp and cp, which cut nothing else."""
    sharding, parallel, model = subject.sharding, subject.parallel, subject.model
    columns, sequences = sharding.reproducible_tensor_blocks or 1, sharding.reproducible_context_blocks or 1
    te, optimizer = model.transformer_impl == "transformer_engine", subject.optimizer.optimizer
    etp, capacity = parallel.expert_tensor_parallel_size, model.moe_expert_capacity_factor
    widths = (
        ("tensor", "num_query_groups", model.num_query_groups or 0, columns),
        ("tensor", "ffn_hidden_size", model.ffn_hidden_size or 0, 32 * columns),
        ("tensor", "moe_ffn_hidden_size", model.moe_ffn_hidden_size or 0, 32 * columns),
        ("tensor", "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size or 0, 32 * columns),
        ("tensor", "make_vocab_size_divisible_by", model.make_vocab_size_divisible_by, 32),
        ("context", "seq_length", model.seq_length or 0, 2 * sequences),
    )
    refused = {
        "sequence_parallel: ranks then have other parts of a sequence, and norms sum over them": (
            parallel.sequence_parallel
        ),
        f"expert_tensor_parallel_size {etp}: the ranks that share a dense matrix have the same tokens, so they share"
        " an expert's too": etp != parallel.tensor_model_parallel_size and model.num_experts is not None,
        "moe_shared_expert_overlap: their own calls sum over ranks": "moe_shared_expert_overlap" in subject.megatron,
        "multi_latent_attention: all heads share its keys' rotated part": model.multi_latent_attention,
        "qk_layernorm: its gradient is a sum over heads": model.qk_layernorm,
        f"mtp_num_layers {model.mtp_num_layers}: prediction layers are not cut into blocks": bool(model.mtp_num_layers),
        "softmax_type: its offsets belong to heads": "softmax_type" in subject.megatron,
        "rng megatron: every rank then draws from a state of its own": subject.run.rng == "megatron",
        f"optimizer {optimizer}: its matrices have not been compared there": optimizer in ("muon", "soap"),
        "recompute_modules core_attn: it restores the random state of one block": (
            model.recompute_granularity == "selective" and "core_attn" in (model.recompute_modules or ())
        ),
        "transformer_impl transformer_engine: its kernels, flash attention and rings of ranks among them, choose the"
        " order of sums by the size of a rank's part": te,
    }
    of_sequences = {
        "sync streaming: it adds up a micro-batch's blocks before they are released": sharding.sync == "streaming",
        "attention_backend unfused: it has one causal mask, for whole sequences": model.attention_backend == "unfused",
        "loss_norm microbatch: it divides a part's loss before the parts are added": (
            subject.batch.loss_norm == "microbatch"
        ),
        f"moe_expert_capacity_factor {capacity}: it is a share of a rank's tokens": capacity is not None,
        "moe_router_load_balancing_type sinkhorn: it balances a whole part of a sequence": (
            "sinkhorn" in model.moe_router_load_balancing_type and model.num_experts is not None
        ),
        "moe_input_jitter_eps: routers draw for a whole part of a sequence": "moe_input_jitter_eps" in subject.megatron,
        "recompute_modules moe: a router then runs again without the counts of the sequence": (
            model.recompute_granularity == "selective" and "moe" in (model.recompute_modules or ())
        ),
        "reset_attention_mask: documents end elsewhere than blocks": subject.data.reset_attention_mask,
        "a model of your own: its layers are not known": subject.own_model,
        "backend ddp and fewer cp ranks: torch's DDP takes one gradient of a parameter in a backward": (
            sharding.backend == "ddp" and sequences > parallel.context_parallel_size
        ),
    }
    for axis, size, count, also in (
        ("tensor", "tensor_model_parallel_size", columns, {}),
        ("context", "context_parallel_size", sequences, of_sequences),
    ):
        key, ranks = f"reproducible_{axis}_blocks", getattr(parallel, size)
        if sharding.reproducible != "layout" or ranks < 1 or count == 1 == ranks:
            continue
        if count % ranks or count & (count - 1):
            yield (
                f"{key} {count} has to be a power of two that {size} {ranks} divides: set {size} to"
                f" {1 << ranks.bit_length() - 1}, and {key} to that or twice as much."
            )
            continue
        for cuts, name, width, multiple in widths:
            if cuts == axis and width % multiple:
                yield (
                    f"{name} {width} has to be a multiple of {multiple} with {key} {count}: set it to"
                    f" {either(nearest_multiples(width, multiple))}, or {key} to less."
                )
        for what in (what for what, is_so in (refused | also).items() if is_so):
            yield (
                f"reproducible layout with {key} {count} does not support {what}. Change that, or set {size} and {key}"
                " to 1."
            )


def streaming_alone(subject: Subject) -> Iterator[str]:
    """Backend fsdp2 sums in one order only if there is something to reduce."""
    sharding, parallel = subject.sharding, subject.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if sharding.reproducible != "layout" or subject.world_size != model_ranks:
        return
    if sharding.backend == "fsdp2" and sharding.sync == "streaming":
        yield (
            "reproducible layout: with one data-parallel rank, backend fsdp2 reduces nothing, and sync streaming adds"
            " micro-batches in the order of their backwards: set sync to resident."
        )


def replicas(subject: Subject) -> Iterator[str]:
    """HSDP needs fully_shard, and replicas of one size."""
    count, backend, parallel = subject.sharding.data_parallel_replicas, subject.sharding.backend, subject.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    dp, rest = divmod(subject.world_size, max(model_ranks, 1))
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    of_experts = dp * parallel.tensor_model_parallel_size // max(ep * etp, 1)
    if count > 1 and backend != "fsdp2":
        yield (
            f"data_parallel_replicas {count} needs backend fsdp2, but backend is {backend}: set backend to fsdp2,"
            " or leave data_parallel_replicas out."
        )
    elif count > 1 and dp and not rest and dp % count:
        yield (
            f"data_parallel_replicas {count} does not divide the {dp} ranks of dp * cp: set it to"
            f" {either(nearest_divisors(count, dp))}."
        )
    elif count > 1 and of_experts > 0 and of_experts % count:
        yield (
            f"data_parallel_replicas {count} does not divide the {of_experts} ranks that hold the same experts (tp * cp"
            f" * dp / (expert_tensor_parallel_size {etp} * expert_model_parallel_size {ep})): set it to"
            f" {either(nearest_divisors(count, of_experts))}."
        )


def expert_groups(subject: Subject) -> Iterator[str]:
    """Experts are whole, or cut over ranks of one tensor-parallel group. (Wider cuts were not tested.)"""
    tp, etp = subject.parallel.tensor_model_parallel_size, subject.parallel.expert_tensor_parallel_size
    if etp and tp % etp:
        yield (
            f"expert_tensor_parallel_size {etp} does not divide tensor_model_parallel_size {tp}: set it to"
            f" {either(nearest_divisors(etp, tp))}."
        )


def cold_experts(subject: Subject) -> Iterator[str]:
    """Gradients of experts can be moved while they wait, whole, for the end of the flush: in the DeepSpeed backend at
    ZeRO-3."""
    sharding, key, off = subject.sharding, "cold_expert_offload", "or cold_expert_offload to false"
    if not sharding.cold_expert_offload:
        return
    if subject.model.num_experts is None:
        yield f"{key} needs experts, but num_experts is not given: set num_experts, {off}."
    if sharding.backend != "deepspeed":
        yield f"{key} needs backend deepspeed, but backend is {sharding.backend}: set it to deepspeed, {off}."
    elif sharding.zero_stage != 3:
        yield f"{key} needs zero_stage 3, but zero_stage is {sharding.zero_stage}: set it to 3, {off}."
    if sharding.sync == "streaming":
        yield (
            f"{key} moves gradients that wait for the end of the flush, but with sync streaming none does: set sync to"
            f" resident, {off}."
        )


def scaled_loss(subject: Subject) -> Iterator[str]:
    """Megatron's optimizer keeps a loss scale of its own for FP16."""
    if subject.sharding.fp16 and subject.sharding.backend == "megatron":
        yield "fp16 needs another backend than megatron: set backend to deepspeed, or bf16 instead of fp16 to true."
