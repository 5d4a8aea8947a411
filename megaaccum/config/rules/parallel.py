"""Rules on the layout of ranks and the cut of matrices."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject
from megaaccum.errors import either, equation, indivisible, nearest, nearest_divisors, nearest_multiples


def world_factors(subject: Subject) -> Iterator[str]:
    """world = tp * cp * pp * dp, all whole."""
    parallel, world = subject.parallel, subject.world_size
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    if min(tp, cp, pp, world) >= 1 and world % (tp * cp * pp):
        sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "pipeline_model_parallel_size": pp}
        yield (
            f"world size {world} is not divisible by {equation(sizes)}: run on"
            f" {either(nearest_multiples(world, tp * cp * pp))} ranks, or change one of the three."
        )


def tensor_parallel(subject: Subject) -> Iterator[str]:
    """Tensor parallelism gives every rank whole heads and equal slices of the MLP."""
    model, tp = subject.model, subject.parallel.tensor_model_parallel_size
    for name, value in (("num_attention_heads", model.num_attention_heads), ("ffn_hidden_size", model.ffn_hidden_size)):
        yield from indivisible(name, value or 0, {"tensor_model_parallel_size": tp})


def query_groups(subject: Subject) -> Iterator[str]:
    """Megatron spreads key/value heads over tp ranks or repeats them: one count divides the other."""
    model, tp = subject.model, subject.parallel.tensor_model_parallel_size
    groups, heads = model.num_query_groups, model.num_attention_heads
    # Where it was not written, it is the number of heads, which `tensor_parallel` checks.
    if not subject.given("num_query_groups") or not groups or min(groups, tp) < 1:
        return
    if groups % tp and tp % groups:
        legal = nearest(groups, lambda g: (g % tp == 0 or tp % g == 0) and heads % g == 0, highest=heads)
        of_groups = f"num_query_groups to {either(legal)}, or " if legal else ""
        yield (
            f"num_query_groups {groups} neither divides nor is divided by tensor_model_parallel_size {tp}: set"
            f" {of_groups}tensor_model_parallel_size to {either(nearest_divisors(tp, groups))}."
        )


def sequence_parallel(subject: Subject) -> Iterator[str]:
    """Sequence parallelism needs tp ranks; without them Megatron-LM turns it off silently."""
    tp, cp = subject.parallel.tensor_model_parallel_size, subject.parallel.context_parallel_size
    length = subject.model.seq_length
    if not subject.parallel.sequence_parallel:
        if tp > 1 and subject.megatron.get("experimental_attention_variant") == "gated_delta_net":
            yield (
                f"gated_delta_net with tensor_model_parallel_size {tp} needs sequence_parallel, under which alone"
                " megatron-core 0.19 sums the gradient of its norm over tp ranks: set it to true."
            )
        return
    if tp == 1:
        yield (
            "sequence_parallel needs tensor_model_parallel_size above 1, over whose ranks it splits the sequence"
            " (Megatron-LM would switch it off silently): set sequence_parallel to false."
        )
    else:
        sizes = {"tensor_model_parallel_size": tp} | ({"context_parallel_size": cp} if cp != 1 else {})
        yield from indivisible("seq_length", length, sizes, change="value", more=", or sequence_parallel to false")


def context_parallel(subject: Subject) -> Iterator[str]:
    """Context parallelism gives each rank one piece from the front and one from the back, which balances the work."""
    cp, length = subject.parallel.context_parallel_size, subject.model.seq_length
    if cp <= 1:
        return
    yield from indivisible("seq_length", length, {"": 2, "context_parallel_size": cp}, change="value")
    if subject.model.attention_backend == "unfused":
        yield (
            f"context_parallel_size {cp} needs fused attention, but attention_backend is unfused: set it to auto, or"
            " context_parallel_size to 1."
        )
    if subject.data.reset_attention_mask:
        yield (
            f"reset_attention_mask with context_parallel_size {cp}: each rank sees pieces of a document, for which"
            " there is no mask. Set reset_attention_mask to false, or context_parallel_size to 1."
        )
