"""Rules on when a step counts: loss scale, values that are not finite, the guard of the norm."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.keys import names_where
from megaaccum.config.rules.subject import Subject
from megaaccum.config.schema import Config
from megaaccum.schedule.registry import by_executor


def one_loss_scale(subject: Subject) -> Iterator[str]:
    """A fixed loss scale does not move; a dynamic one starts at its floor or above."""
    step = subject.step
    dynamic = [name for name in names_where(lambda facts: facts.needs == "fp16") if name != "loss_scale"]
    if step.loss_scale is not None and (names := subject.given(*dynamic)):
        yield f"loss_scale {step.loss_scale:g} is fixed, but {', '.join(names)} move it: leave one or the other out."
    if step.loss_scale is None and 0 < step.initial_loss_scale < step.min_loss_scale:
        yield (
            f"initial_loss_scale {step.initial_loss_scale:g} is less than min_loss_scale {step.min_loss_scale:g}: set"
            f" initial_loss_scale to at least {step.min_loss_scale:g}."
        )


_CONTRARY: dict[str, tuple[str, ...]] = dict.fromkeys(("init_from", "no_load"), ("finetune", "reset_iteration"))
_CONTRARY["use_checkpoint_opt_param_scheduler"] = ("override_opt_param_scheduler",)


def one_beginning(subject: Subject) -> Iterator[str]:
    """A run begins with the weights of one place, and one schedule holds."""
    for name, contrary in _CONTRARY.items():
        if getattr(subject.run, name) and (others := [each for each in contrary if getattr(subject.run, each)]):
            yield f"{name} and {others[0]} say two things of how the run begins: leave one of them out."


def overflow_is_seen(subject: Subject) -> Iterator[str]:
    """Overflows move the loss scale of FP16, so they must neither go unseen nor end the run."""
    policy = subject.step.nonfinite
    if subject.sharding.fp16 and policy not in ("skip", "zero"):
        yield (
            f"nonfinite {policy} with fp16: the loss scale is found by steps that overflow and are skipped. Set"
            " nonfinite to zero or skip, which differ at its floor alone."
        )


def exact_without_microbatches(subject: Subject) -> Iterator[str]:
    """A micro-batch of weight zero still passes the router, which may count its tokens over the step."""
    step, model = subject.step, subject.model
    names = [f"nonfinite {step.nonfinite}"] if step.nonfinite == "drop_microbatch" else []
    names += ["short_batch pad"] if step.short_batch == "pad" else []
    is_global = "global_aux_loss" in model.moe_router_load_balancing_type
    counting = ["moe_router_load_balancing_type global_aux_loss"] * is_global
    counting += ["moe_router_enable_expert_bias true"] * model.moe_router_enable_expert_bias
    for key in counting if names and model.num_experts else ():
        yield (
            f"{' and '.join(names)} with {key}: tokens of weight zero would count in its statistics. Set nonfinite to"
            " skip and short_batch to error, or balance by moe_router_load_balancing_type aux_loss."
        )


def static_graph(subject: Subject) -> Iterator[str]:
    """A static graph has one count and one shape for the whole run; `derive` sets batch_warmup_steps to 0."""
    batch, step, model = subject.batch, subject.step, subject.model
    if not batch.static_graph:
        return
    changing = {
        "rampup_batch_size": (batch.rampup_batch_size is not None, "leave it out"),
        "step_batch_size_schedule": (batch.step_batch_size_schedule is not None, "leave it out"),
        "variable_seq_lengths true": (batch.variable_seq_lengths, "set it to false and pad to seq_length"),
        "reset_attention_mask true": (subject.data.reset_attention_mask, "set it to false"),
        f"short_batch {step.short_batch}": (step.short_batch != "error", "set it to error"),
        f"nonfinite {step.nonfinite}": (step.nonfinite == "drop_microbatch", "set it to skip or zero"),
        f"num_experts {model.num_experts} without a capacity": (
            model.num_experts is not None and not model.moe_pad_expert_input_to_capacity,
            "set moe_expert_capacity_factor, and moe_pad_expert_input_to_capacity to true",
        ),
    }
    for name, (changes, remedy) in changing.items():
        if changes:
            yield f"static_graph true has one count and one shape in every step, which {name} changes: {remedy}."


def is_random(config: Config) -> bool:
    """Whether a forward draws random numbers."""
    model = config.model
    return bool(model.attention_dropout or model.hidden_dropout or config.megatron.get("moe_input_jitter_eps"))


def start_can_be_verified(subject: Subject) -> Iterator[str]:
    """Two splits of the same samples have one gradient only if no micro-batch depends on those before it."""
    for name, why in _splits_differ(subject).items() if subject.run.verify_at_start else ():
        yield (
            f"verify_at_start compares two splits of one step, but {name} makes them differ: {why}; or set"
            " verify_at_start to false."
        )


def verifies_start(config: Config, *, on_gpu: bool) -> bool:
    """Whether a run compares two splits of its first step."""
    asked = config.run.verify_at_start
    return asked if asked is not None else on_gpu and not _splits_differ(config)


def _splits_differ(subject: Config) -> dict[str, str]:
    """Keys that give two splits of the same samples different gradients, and the reason of each."""
    model, run = subject.model, subject.run
    depends = {
        f"fp8_format {subject.quantization.fp8_format}": (
            subject.quantization.fp8_format is not None,
            "its rounding hides what it looks for",
        ),
        "rng megatron with dropout or moe_input_jitter_eps": (
            run.rng == "megatron" and is_random(subject),
            "another split draws other numbers: set rng to sample, or both to 0",
        ),
        "moe_router_load_balancing_type global_aux_loss": (
            bool(model.num_experts) and "global_aux_loss" in model.moe_router_load_balancing_type,
            "it counts what a rank has seen so far: set it to aux_loss",
        ),
    }
    return {name: why for name, (does, why) in depends.items() if does}


def watchdog_is_first(subject: Subject) -> Iterator[str]:
    """A step that hangs ends with every rank's stack, before NCCL aborts the process."""
    limit, collective = subject.run.step_timeout_seconds, subject.parallel.distributed_timeout_minutes * 60
    if limit >= collective > 0:
        yield (
            f"step_timeout_seconds {limit:g} is not below distributed_timeout_minutes * 60 = {collective:g}, by which a"
            " collective that hangs ends the run without a report: lower step_timeout_seconds, or set"
            f" distributed_timeout_minutes to more than {limit / 60:g}."
        )


def noise_scale(subject: Subject) -> Iterator[str]:
    """The squares of micro-batches' gradients add up over ranks if each rank has whole micro-batches of whole
    parameters, one gradient per backward."""
    window, parallel, model = subject.step.noise_scale_window, subject.parallel, subject.model
    if not window:
        return
    tp, cp, ep = (getattr(parallel, f"{axis}_parallel_size") for axis in ("tensor_model", "context", "expert_model"))
    pp, untied = parallel.pipeline_model_parallel_size, "untie_embeddings_and_output_weights"
    refused = {
        f"tensor_model_parallel_size {tp}": (tp > 1, "ranks have parts of a norm's gradient", "it to 1"),
        f"context_parallel_size {cp}": (cp > 1, "ranks have the gradients of pieces of sequences", "it to 1"),
        f"expert_model_parallel_size {ep}": (ep > 1, "experts mix the tokens of several ranks", "it to 1"),
        f"schedule {subject.schedule}": (
            by_executor(subject.schedule),
            "weight gradients come apart from their micro-batch", "it to 1f1b or interleaved",
        ),
        f"{untied} false with a pipeline": (
            pp > 1 and not getattr(model, untied), "a table's gradient is on two ranks",
            f"{untied} to true",
        ),
        f"mtp_num_layers {model.mtp_num_layers} with a pipeline": (
            pp > 1 and bool(model.mtp_num_layers), "the embedding's gradient is on two ranks",
            "pipeline_model_parallel_size to 1",
        ),
        "gradient_accumulation_fusion": (
            model.gradient_accumulation_fusion, "kernels add gradients up themselves", "it to false",
        ),
        "overlap_moe_expert_parallel_comm": (
            parallel.overlap_moe_expert_parallel_comm, "passes of two micro-batches run together", "it to false",
        ),
    }  # fmt: skip
    for what, (is_so, why, remedy) in refused.items():
        if is_so:
            yield f"noise_scale_window {window} does not support {what}: {why}. Set {remedy}, or the window to 0."


def speculative_step(subject: Subject) -> Iterator[str]:
    """A step may end before its verdict if the executor can stop at the first backward, and if all state that an update
    and a forward change is copied or recomputed."""
    if not subject.step.speculative_step:
        return
    key, off = "speculative_step true", "or speculative_step to false"
    name, batch, sharding, model = subject.schedule, subject.batch, subject.sharding, subject.model
    if not by_executor(name):
        runs = "there is no pipeline" if name == "none" else "Megatron-core runs it, and its ranks end together"
        yield f"{key} gains nothing with schedule {name}: {runs}. Set schedule to zbv with a pipeline, {off}."
    refused = {
        "sync streaming": (
            sharding.sync == "streaming", "the next step's gradients would meet this one's", "sync to resident",
        ),
        "reproducible layout": (
            sharding.reproducible == "layout", "its exact norm is a collective that waits", "reproducible to none",
        ),
        f"offload_optimizer {sharding.offload_optimizer}": (
            sharding.offload_optimizer != "none", "its state lies in host memory", "offload_optimizer to none",
        ),
        "cold_expert_offload": (
            sharding.cold_expert_offload, "its gradients lie elsewhere", "cold_expert_offload to false",
        ),
        f"fp8_format {subject.quantization.fp8_format}": (
            subject.quantization.fp8_format is not None, "forwards move its scales", "fp8_format to none",
        ),
        "moe_router_enable_expert_bias": (
            model.moe_router_enable_expert_bias, "forwards count the tokens of experts", "it to false",
        ),
        "moe_router_load_balancing_type global_aux_loss": (
            model.num_experts is not None and "global_aux_loss" in model.moe_router_load_balancing_type,
            "forwards count the tokens of experts", "it to aux_loss",
        ),
        "variable_seq_lengths": (
            batch.variable_seq_lengths, "the ranks of a pipeline exchange the lengths first", "it to false",
        ),
        "flush per_round": (batch.flush == "per_round", "a step has several flushes", "flush to merged"),
    }  # fmt: skip
    for what, (is_so, why, remedy) in refused.items():
        if is_so:
            yield f"{key} does not support {what}: {why}. Set {remedy}, {off}."
