"""`get_forward_backward_func`: what runs a schedule, as a drop-in for Megatron's function of that name."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed import groups
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.executor.executor import Flush, FlushRecord
from megaaccum.executor.hooks import Hooks
from megaaccum.executor.p2p import Mail, check_queues
from megaaccum.executor.passes import Call, FusedPass, forward_then_backward
from megaaccum.executor.timeline import measured_costs, write_trace
from megaaccum.platform import cpu
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.build import build, by_executor
from megaaccum.schedule.overlap import warm_up
from megaaccum.schedule.simulate import simulate
from megaaccum.schedule.validate import sends, validate

if TYPE_CHECKING:
    from megaaccum.config import Plan

UNSUPPORTED = {
    "defer_embedding_wgrad_compute": "the schedule says when weight gradients are computed",
    "num_microbatches_with_partial_activation_checkpoints": "every micro-batch is recomputed alike",
    "fine_grained_activation_offloading": "activations stay on their rank",
    "hybrid_context_parallel": "every micro-batch is cut alike",
}
"""Keys of Megatron's configuration that the executor cannot honour, and why."""


def get_forward_backward_func(
    config: str | Plan,
    *,
    fused: FusedPass = forward_then_backward,
    own: bool = False,
    trace: str | None = None,
) -> Callable[..., list]:
    """The function that runs a flush, called as Megatron-core's `forward_backward_func` (keywords only).

    config: a Plan of megaaccum, or the name of a schedule (`megaaccum schedule --help` lists them, `none`, or a .csv
    file). `none`, `1f1b` and `interleaved` are run by Megatron-core's own functions, unless `own` is true; all others
    by a `ForwardBackward`. fused: what runs a fused forward and backward. trace: a file for the timeline of the second
    flush beside the planned one (schedules of a ForwardBackward; default: a Plan's `schedule_trace`).

    Raises ScheduleError (a ConfigError) for a schedule that is not known. The number of pipeline ranks and of
    micro-batches is only known when the function is called, which then raises for those.
    """
    name = config if isinstance(config, str) else config.layout.schedule
    if name == "none" or not (own or by_executor(name)):
        from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

        # Only whether there are several ranks and several chunks matters to it.
        return megatrons(pp_size=1 if name == "none" else 2, vp_size=2 if name == "interleaved" else None)
    group_size = timeout_minutes = None
    if not isinstance(config, str):
        group_size = config.config.parallel.microbatch_group_size_per_vp_stage
        timeout_minutes = config.config.parallel.distributed_timeout_minutes
        trace = trace or config.config.run.schedule_trace
    return ForwardBackward(name, fused=fused, group_size=group_size, trace=trace, timeout_minutes=timeout_minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenFlush:
    """A flush that has not ended, and what its end needs."""

    flush: Flush
    hooks: Hooks
    call: Call
    collection: Any
    force_all_reduce: bool | None


class ForwardBackward:
    """Runs flushes of one schedule. Called on every rank of the pipeline with the arguments of Megatron's functions.

    `record` tells about this rank's last flush (None before it). The model is this rank's chunks in the order of the
    schedule: for a V, chunk 0 is stage `rank` and chunk 1 stage `2 * pp - 1 - rank`.
    """

    def __init__(
        self,
        name: str,
        *,
        fused: FusedPass = forward_then_backward,
        group_size: int | None = None,
        trace: str | None = None,
        timeout_minutes: float | None = None,
    ):
        self._timeout_minutes = timeout_minutes
        self.name, self._fused, self._group_size, self._trace = name, fused, group_size, trace
        self._flushes = 0
        self._channels: dict[int, groups.PipelineChannels] = {}
        self._connected: set[tuple[int, int]] = set()
        self._proven: set[int] = set()
        self._installed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.record: FlushRecord | None = None
        self._open: _OpenFlush | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Iterator | Sequence[Iterator | None],
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        seq_lengths: Sequence[int] | None = None,
        begin_only: bool = False,
    ) -> list:
        """One flush of num_microbatches micro-batches. Returns, on the rank of the last stage, what loss functions
        report per micro-batch, in order; elsewhere an empty list.

        seq_lengths: tokens per sequence of each micro-batch, on every rank of the pipeline, with
        `variable_seq_lengths`. begin_only: make the flush ready and return; `warm_up` and `finish` then run it, or
        `drain` ends it. p2p_communicator is not used: messages go over channels of our own, so that receives can
        be posted ahead. Over NCCL the first flush makes groups for them and is collective over the world: all pipelines
        begin together. Raises ConfigError before the first message for what cannot be run, FlushError when a rank fails
        on the way.
        """
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        config = _config_of(chunks)
        collection = pg_collection or groups.default_collection()
        if adjust_tensor_shapes_fn is not None:
            raise ConfigError(
                f"adjust_tensor_shapes_fn: schedule {self.name} sends messages of one shape; leave it out"
            )
        schedule = self._schedule(collection.pp.size(), num_microbatches, len(chunks))
        rank = collection.pp.rank()
        for chunk in chunks:
            if chunk not in self._installed:
                wgrad.install(chunk)
                self._installed.add(chunk)
        lengths = _lengths(config, decoder_seq_length or seq_length, seq_lengths, num_microbatches)
        shapes = [_message_shape(config, collection, length, micro_batch_size) for length in lengths]
        call = Call(
            forward_step_func=forward_step_func,
            data_iterator=_per_chunk(data_iterator, len(chunks)),
            model=chunks,
            config=config,
            num_microbatches=num_microbatches,
            cp_group_size=collection.cp.size(),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            reports=[],
        )
        blank = torch.empty(0, dtype=config.pipeline_dtype, device=cpu.device())
        mail = Mail(
            schedule,
            self._channels_of(collection.pp, schedule),
            lambda message: blank.new_empty(shapes[message[1]]),
            forward_only=forward_only,
        )
        hooks = Hooks(schedule, rank, config, chunks)
        assert self._open is None, "a flush that was begun has to end before the next"
        self._open = _OpenFlush(
            flush=Flush(schedule, rank, call, mail, hooks, self._fused), hooks=hooks, call=call, collection=collection,
            force_all_reduce=force_all_reduce,
        )  # fmt: skip
        return [] if begin_only else self.finish()

    def warm_up(self) -> None:
        """Run the forwards of a flush that was begun up to the rank's first backward. Raises FlushError."""
        assert self._open is not None
        flush = self._open.flush
        flush.run(warm_up(flush.schedule)[flush.rank])

    def finish(self) -> list:
        """Run what is left of a flush that was begun; returns and raises as a call does."""
        opened, self._open = self._open, None
        assert opened is not None
        flush, call = opened.flush, opened.call
        _run(flush, opened.hooks, forward_only=call.forward_only)
        self.record = flush.record
        self._flushes += not call.forward_only
        if self._trace is not None and self._flushes == 2 and not call.forward_only:
            _write_trace(self._trace, flush.record, opened.collection.pp)
        if not call.forward_only and call.config.finalize_model_grads_func is not None:
            tokens = flush.num_tokens if call.config.calculate_per_token_loss else None
            call.config.finalize_model_grads_func(
                call.model, tokens, pg_collection=opened.collection, force_all_reduce=opened.force_all_reduce
            )
        return call.reports

    def drain(self) -> None:
        """End a flush that was begun, on every rank of the pipeline, without a gradient. Raises FlushError."""
        opened, self._open = self._open, None
        assert opened is not None
        opened.flush.drain()

    def prepare(self, flush_sizes: Sequence[int], pp: torch.distributed.ProcessGroup, chunks: int) -> None:
        """Build and prove the schedule of every flush that a run takes, before the first. flush_sizes: micro-batches of
        each; chunks: of the model on this rank. Raises ScheduleError where one cannot run."""
        for num_microbatches in flush_sizes:
            schedule = self._schedule(pp.size(), num_microbatches, chunks)
            if groups.carries_by_nccl(pp):
                check_queues(schedule)

    def _schedule(self, pp: int, num_microbatches: int, chunks: int) -> Schedule:
        """The schedule of this size, proven once."""
        wanted = chunks if self.name == "interleaved" else None
        schedule = build(
            self.name,
            pp=pp,
            num_microbatches=num_microbatches,
            chunks=wanted,
            group_size=self._group_size,
            short=True,
        )
        if schedule.chunks != chunks:
            raise ConfigError(
                f"schedule {self.name} has {schedule.chunks} model chunks per rank, and the model is {chunks}: set"
                f" virtual_pipeline_model_parallel_size to {schedule.chunks} and build as many"
            )
        if num_microbatches not in self._proven:
            validate(schedule)
            self._proven.add(num_microbatches)
        return schedule

    def _channels_of(self, pp: torch.distributed.ProcessGroup, schedule: Schedule) -> groups.PipelineChannels:
        if id(pp) not in self._channels:
            self._channels[id(pp)] = groups.PipelineChannels(pp, timeout_minutes=self._timeout_minutes)
        channels, once = self._channels[id(pp)], (id(pp), schedule.num_microbatches)
        if once not in self._connected:
            if channels.on_nccl:
                check_queues(schedule)
            channels.connect((at for rank in range(schedule.pp) for at in sends(schedule, rank)), cpu.device())
            self._connected.add(once)
        return channels


def _write_trace(path: str, record: FlushRecord, pp: torch.distributed.ProcessGroup) -> None:
    """Write what the ranks of the pipeline did beside what the simulator plans with their durations. Collective over
    pp; global rank 0 writes. Ranks of different hosts are put on one time line by the hosts' clocks."""
    offset = time.time() - time.perf_counter()
    mine = [(start + offset, end + offset) for start, end in record.spans]
    measured: list = [None] * pp.size()
    torch.distributed.all_gather_object(measured, mine, group=pp)
    if torch.distributed.get_rank() == 0:
        planned = simulate(record.schedule, measured_costs(record.schedule, measured), early_send=True)
        write_trace(path, record.schedule, planned=planned.spans, measured=measured)


def _run(flush: Flush, hooks: Hooks, *, forward_only: bool) -> None:
    if forward_only:
        flush.run()
        return
    hooks.begin()
    try:
        flush.run()
    finally:
        hooks.end()


def _config_of(chunks: Sequence[torch.nn.Module]) -> Any:
    """Megatron's configuration of the chunks. Raises ConfigError for keys that the executor cannot honour."""
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    problems = [
        f"{key} is set, and with a schedule of megaaccum's own executor {why}: leave it out"
        for key, why in UNSUPPORTED.items()
        if getattr(config, key, None)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _lengths(config: Any, seq_length: int, given: Sequence[int] | None, num_microbatches: int) -> Sequence[int]:
    """Tokens per sequence of each micro-batch. Raises ConfigError."""
    if given is None and getattr(config, "variable_seq_lengths", False):
        raise ConfigError(
            "variable_seq_lengths: receives are posted before a message comes, so every stage has to know the lengths:"
            " give seq_lengths, one per micro-batch"
        )
    if given is not None and len(given) != num_microbatches:
        raise ConfigError(f"{len(given)} seq_lengths for {num_microbatches} micro-batches: give one for each")
    return [seq_length] * num_microbatches if given is None else given


def _message_shape(config: Any, collection: Any, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
    """[sequence of this rank, micro-batch, hidden], as Megatron's get_tensor_shapes."""
    parts = collection.cp.size() * (collection.tp.size() if config.sequence_parallel else 1)
    return seq_length // parts, micro_batch_size, config.hidden_size


def _per_chunk(data_iterator: Any, chunks: int) -> Sequence[Iterator | None]:
    iterators = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
    if len(iterators) != chunks:
        raise ConfigError(f"{len(iterators)} data iterators for {chunks} model chunks: give a list with one per chunk")
    return iterators
