"""Rules on stages, model chunks and the traffic between them. config/batch.py has the rules on micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject, them
from megaaccum.config.stage_layout import layout_problems, parse_layout
from megaaccum.errors import ScheduleError, either, indivisible, nearest_multiples
from megaaccum.schedule.registry import by_executor, entry

_UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout")


def schedule(subject: Subject) -> Iterator[str]:
    """The schedule fits the number of stages."""
    parallel = subject.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    name, chunks = subject.schedule, _key_of_chunks(subject)
    if vpp is not None and pp == 1:
        yield (
            f"virtual_pipeline_model_parallel_size {vpp} needs pipeline_model_parallel_size above 1: set"
            f" pipeline_model_parallel_size to 2 or more, or leave {chunks} out."
        )
    elif name == "none" and pp > 1:
        yield f"schedule none needs pipeline_model_parallel_size 1, not {pp}: leave schedule out."
    elif name != "none" and pp == 1:
        yield f"schedule {name} needs pipeline_model_parallel_size above 1: leave schedule out."
    elif name == "interleaved" and vpp is None:
        yield "schedule interleaved needs virtual_pipeline_model_parallel_size 2 or more: set it, or schedule to 1f1b."
    elif name == "1f1b" and vpp is not None:
        yield (
            f"schedule 1f1b has one model chunk per rank, but virtual_pipeline_model_parallel_size is {vpp}: set"
            f" schedule to interleaved, or leave {chunks} out."
        )
    elif by_executor(name):
        yield from _own_schedule(name, vpp or 1, chunks)


def _key_of_chunks(subject: Subject) -> str:
    """The key that gave the number of model chunks per rank."""
    keys = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", _UNEVEN[2])
    return next(iter(subject.given(*keys)), keys[0])


def _own_schedule(name: str, vpp: int, chunks: str) -> Iterator[str]:
    """A schedule of megaaccum's executor is known and has the requested number of chunks."""
    try:
        known = entry(name)
    except ScheduleError as error:
        yield f"schedule: {error}."
        return
    if known.chunks != vpp:
        yield (
            f"schedule {name} has {known.chunks} model chunk{'s' * (known.chunks != 1)} per rank, but"
            f" virtual_pipeline_model_parallel_size is {vpp}: leave {chunks} out, or set schedule to interleaved."
        )


def traced(subject: Subject) -> Iterator[str]:
    """Only megaaccum's executor records a timeline."""
    name = subject.schedule
    if subject.run.schedule_trace is not None and not by_executor(name):
        yield (
            f"schedule_trace {subject.run.schedule_trace} needs a schedule that megaaccum runs (gpipe, zb-h1, zbv,"
            f" dualpipev or a .csv table), but schedule {name} is run by Megatron-core: leave schedule_trace out, or"
            " set schedule to dualpipev."
        )


def own_executor(subject: Subject) -> Iterator[str]:
    """Transformer Engine's layers postpone weight gradients under a split backward; hooks of other backends would fire
    before those gradients exist."""
    name, backend = subject.schedule, subject.sharding.backend
    fp8 = subject.quantization.fp8_format
    layers = "transformer_impl transformer_engine" if fp8 is None else f"fp8_format {fp8}"
    is_te = fp8 is not None or subject.model.transformer_impl == "transformer_engine"
    if is_te and by_executor(name) and backend != "deepspeed":
        yield (
            f"schedule {name} with {layers} needs backend deepspeed, but backend is {backend}: set backend to"
            " deepspeed, or schedule to 1f1b or interleaved."
        )


def expert_overlap(subject: Subject) -> Iterator[str]:
    """Megatron's schedule plans support some layers (megatron-core 0.19: TransformerConfig.__post_init__), and need a
    schedule in which a forward meets a backward."""
    parallel, model = subject.parallel, subject.model
    if not parallel.overlap_moe_expert_parallel_comm:
        return
    key, off = "overlap_moe_expert_parallel_comm", "or overlap_moe_expert_parallel_comm to false"
    if model.num_experts is None or parallel.expert_model_parallel_size == 1:
        yield (
            f"{key} hides the all-to-all of experts, but there is none (num_experts {model.num_experts},"
            f" expert_model_parallel_size {parallel.expert_model_parallel_size}): leave it out."
        )
    # A forward meets a backward in Megatron's loops, and in the pairs of a table.
    if subject.schedule not in ("none", "interleaved", "dualpipev") and not subject.schedule.endswith(".csv"):
        yield (
            f"{key} interleaves a forward with a backward, but schedule {subject.schedule} pairs none: set schedule to"
            f" dualpipev or interleaved, {off}."
        )
    if not (subject.sharding.bf16 or subject.sharding.fp16):
        yield f"{key} needs 16-bit parameters, as Megatron-core refuses it elsewhere: set {subject.to_bf16}, {off}."
    if subject.sharding.sync == "streaming":
        yield f"{key} runs layers in pieces, around which sync streaming cannot gather: set sync to resident, {off}."
    if subject.sharding.backend == "fsdp2":
        yield f"{key} runs layers in pieces, around which backend fsdp2 cannot gather: set backend to deepspeed, {off}."
    if subject.quantization.fp8_format is not None:
        yield f"{key} runs two chunks at once, but FP8 keeps one's histories at a time: leave fp8_format out, {off}."
    if model.moe_token_dispatcher_type == "allgather":
        yield f"{key} has no plan for moe_token_dispatcher_type allgather: set it to alltoall, {off}."
    if model.recompute_granularity == "full" or "moe" in (model.recompute_modules or ()):
        yield (
            f"{key} runs layers in pieces, which recompute_granularity full and recompute_modules moe would run whole:"
            f" set recompute_granularity to selective without moe, {off}."
        )
    if model.mtp_num_layers and subject.batch.loss_norm == "microbatch":
        yield (
            f"{key} with mtp_num_layers {model.mtp_num_layers} cannot weigh the prediction loss of each micro-batch by"
            f" its own tokens, as loss_norm microbatch does: set loss_norm to token, {off}."
        )


def chunk_count(subject: Subject) -> Iterator[str]:
    """Keys that give the number of model chunks per rank agree."""
    written = subject.written.parallel
    vpp, per_chunk = written.virtual_pipeline_model_parallel_size, written.num_layers_per_virtual_pipeline_stage
    pp, layers = written.pipeline_model_parallel_size, subject.model.num_layers
    if not per_chunk or per_chunk < 1 or min(pp, layers) < 1:
        return
    if uneven := subject.given(*_UNEVEN):
        yield (
            f"num_layers_per_virtual_pipeline_stage cannot be used with {', '.join(uneven)}: give"
            " virtual_pipeline_model_parallel_size instead."
        )
        return
    sizes = {"pipeline_model_parallel_size": pp, "num_layers_per_virtual_pipeline_stage": per_chunk}
    yield from indivisible("num_layers", layers, sizes)
    if vpp and vpp * per_chunk * pp != layers and layers % (per_chunk * pp) == 0:
        yield (
            f"num_layers_per_virtual_pipeline_stage {per_chunk} makes {layers // (pp * per_chunk)} chunks per rank, but"
            f" virtual_pipeline_model_parallel_size is {vpp}: leave one of them out."
        )


def even_stages(subject: Subject) -> Iterator[str]:
    """Every chunk has the same number of layers, unless the layout is uneven."""
    pp, vpp = subject.parallel.pipeline_model_parallel_size, subject.parallel.virtual_pipeline_model_parallel_size or 1
    layers = subject.model.num_layers
    if subject.given(*_UNEVEN, "num_layers_per_virtual_pipeline_stage") or min(layers, pp, vpp) < 1:
        return
    sizes = {"pipeline_model_parallel_size": pp} | ({"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {})
    uneven = ", or give decoder_first_pipeline_num_layers or pipeline_model_parallel_layout"
    yield from indivisible("num_layers", layers, sizes, more=uneven)


def uneven_ends(subject: Subject) -> Iterator[str]:
    """Stages between an uneven first and last one share the other layers evenly, and so do their chunks."""
    parallel, layers = subject.parallel, subject.model.num_layers
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    ends = {name: value for name in _UNEVEN[:2] if (value := getattr(parallel, name)) is not None}
    if not ends or min(*ends.values(), pp, vpp, layers) < 1:
        return
    if parallel.pipeline_model_parallel_layout is not None:
        yield f"{', '.join(ends)} cannot be used with pipeline_model_parallel_layout: leave one of them out."
        return
    named = ", ".join(f"{name} {value}" for name, value in ends.items())
    for name, value in ends.items():
        yield from indivisible(name, value, {"virtual_pipeline_model_parallel_size": vpp}, change="value")
    middle, stages = layers - sum(ends.values()), pp - len(ends)
    if stages < 0 or (stages == 0) != (middle == 0) or middle < 0:
        between = f"leaves {middle} layers for {stages} stages between"
        yield f"num_layers {layers} less {named} {between}: leave {them([*ends])} out, or change num_layers."
    elif stages and middle % (stages * vpp):
        unit = f"{stages} stages" + (f" of {vpp} chunks" if vpp > 1 else "")
        yield (
            f"num_layers {layers} less {named} leaves {middle} layers, which do not divide over the {unit} between:"
            f" make it {either(nearest_multiples(middle, stages * vpp))} layers."
        )


def explicit_layout(subject: Subject) -> Iterator[str]:
    """A layout in Megatron's notation describes this model on these stages."""
    parallel, model, key = subject.parallel, subject.model, "pipeline_model_parallel_layout"
    text, pp = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    if text is None or pp < 1:
        return
    try:
        stages = parse_layout(text)
    except ValueError as error:
        yield f"{key} {text!r} cannot be read: {error}; the notation is Et*3|(tt|)*29,mL."
        return
    for problem in layout_problems(
        stages, num_layers=model.num_layers, mtp_num_layers=model.mtp_num_layers or 0, pp=pp
    ):
        yield f"{key} {text!r}: {problem}."
    vpp = parallel.virtual_pipeline_model_parallel_size or 1
    if len(stages) % pp == 0 and len(stages) != pp * vpp:
        yield (
            f"{key} {text!r} makes {len(stages) // pp} chunks per rank, but virtual_pipeline_model_parallel_size is"
            f" {vpp}: leave the latter out."
        )


def block_recompute(subject: Subject) -> Iterator[str]:
    """Recompute in blocks counts layers of one chunk."""
    model, parallel = subject.model, subject.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    if model.recompute_granularity != "full" or subject.given(*_UNEVEN) or min(pp, vpp) < 1:
        return
    per_chunk, asked = model.num_layers // (pp * vpp), model.recompute_num_layers or 1
    if per_chunk and asked > per_chunk:
        yield (
            f"recompute_num_layers {asked} is more than the {per_chunk} layers of a chunk (num_layers"
            f" {model.num_layers} / (pp {pp} * vpp {vpp})): set it to at most {per_chunk}."
        )


def traffic(subject: Subject) -> Iterator[str]:
    """Overlapped and batched stage-to-stage traffic exclude each other; only the interleaved schedule overlaps."""
    parallel = subject.parallel
    if parallel.overlap_p2p_comm and parallel.batch_p2p_comm:
        yield (
            "overlap_p2p_comm and batch_p2p_comm are both true, but Megatron-core does one or the other: set"
            " batch_p2p_comm to false."
        )
    elif parallel.overlap_p2p_comm and subject.schedule != "interleaved":
        yield (
            f"overlap_p2p_comm needs the interleaved schedule, but this one is {subject.schedule}: leave it out, or"
            " set virtual_pipeline_model_parallel_size."
        )


def interleaved_on_two_ranks(subject: Subject) -> Iterator[str]:
    """Batched messages swap on two pipeline ranks, where the next and the previous rank are the same.

    Megatron-core then returns wrong gradients without an error; megatron.training refuses it, as this rule does.
    """
    parallel = subject.parallel
    on_two = subject.schedule == "interleaved" and parallel.pipeline_model_parallel_size == 2
    if on_two and (parallel.batch_p2p_comm or not parallel.overlap_p2p_comm):
        yield (
            "the interleaved schedule at pipeline_model_parallel_size 2 gives wrong gradients unless overlap_p2p_comm"
            " is true and batch_p2p_comm is false (both neighbours of a rank are the same rank, and activations and"
            " gradients swap): leave both keys out, or set pipeline_model_parallel_size to 4."
        )
