"""The call of a pipeline schedule: its arguments, and who observes its passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaaccum.executor.entry import ForwardBackward, message_shapes
from megaaccum.step.forward_step import ForwardStep
from megaaccum.upstream import megatron

if TYPE_CHECKING:
    from megaaccum.step.microbatches import Microbatches, OpenStep
    from megaaccum.step.train_step import TrainStep


def flush_arguments(
    steps: TrainStep, opened: OpenStep, batch: Microbatches, *, forward_only: bool = False
) -> dict[str, Any]:
    """The arguments of a forward_backward_func that runs one flush over `batch`."""
    megatron.mend_schedules()
    interleaves = steps.plan.config.parallel.overlap_moe_expert_parallel_comm and steps.probe is None
    for chunk in steps.chunks:
        chunk.config.overlap_moe_expert_parallel_comm = interleaves  # type: ignore[union-attr]
    observers: list[object] = [steps.observer.trace, steps.fp8, steps.backend.sums, *steps.backend.observers]
    for each in steps.backend.observers:
        each.begin_flush(batch.forward_step_func)
    steps.backend.sums.begin_flush(batch.first, batch.first + len(batch))
    if steps.seeds.may_be_needed(batch.forward_step_func):
        observers.append(steps.seeds)
    steps.side_losses.begin_flush(batch)
    if steps.side_losses.are_there:
        observers.append(steps.side_losses)
    if steps.probe is not None:
        observers.append(steps.probe)
    if not forward_only:
        steps.observer.last_microbatch = batch.first + len(batch) - 1
        observers += [steps.observer, steps.changing_buffers]
    more: dict[str, Any] = {}
    if isinstance(steps.schedule, ForwardBackward):  # Megatron's own schedules send the shapes ahead
        more = {"backend": steps.backend, "defer_weight_grads": steps.probe is None, "seq_lengths": batch.lengths}
    shape, whole = _sent_shape(steps), steps.backend.gathered_parameters
    return {
        "forward_step_func": ForwardStep(
            batch, opened.divisor, opened.tally, steps.chunks, observers, *_sent(steps, batch, shape), gathered=whole
        ),
        "data_iterator": batch.iterators(len(steps.chunks)),
        "model": steps.chunks,
        "num_microbatches": len(batch),
        "forward_only": forward_only,
        "p2p_communicator": steps.p2p,
        "pg_collection": steps.groups.collection,
        **shape,
        **more,
    }


def _sent(
    steps: TrainStep, batch: Microbatches, shape: dict[str, int]
) -> tuple[list[tuple[int, int, int]], int | None]:
    """The shape of each micro-batch's messages, none in a pipeline of one rank; the chunk of the last stage, if this
    rank has it."""
    groups = steps.groups
    if groups.pp.size() == 1:
        return [], None
    lengths = batch.lengths or [shape["seq_length"]] * len(batch)
    shapes = message_shapes(steps.chunks[0].config, groups.collection, shape["micro_batch_size"], lengths)
    numbers = range(len(steps.chunks))
    return shapes, next((n for n in numbers if groups.stage(n) == groups.layout.num_stages - 1), None)


def _sent_shape(steps: TrainStep) -> dict[str, int]:
    """micro_batch_size and seq_length of the messages between stages, arguments of Megatron's schedules."""
    rows, length = steps.batch.micro_batch_size, steps.batch.seq_length
    if getattr(steps.chunks[0], "packs_rows", False):  # all chunks of a pipeline do, or none
        rows, length = 1, rows * length
    return {"micro_batch_size": rows, "seq_length": length}
