"""`get_forward_backward_func`: what runs a schedule, as a drop-in for Megatron's function of that name."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed import groups
from megaaccum.distributed.agreement import gathered
from megaaccum.errors import ConfigError, raise_problems
from megaaccum.executor import wgrad
from megaaccum.executor.executor import Flush, FlushRecord
from megaaccum.executor.p2p import Mail, PipelineChannels, check_queues
from megaaccum.executor.passes import Call, FusedPass
from megaaccum.executor.timeline import measured_costs, write_trace
from megaaccum.platform import cpu
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.registry import build, by_executor
from megaaccum.schedule.simulate import simulate
from megaaccum.schedule.validate import Message, sends, sends_needed, validate, warm_up

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
    fused: FusedPass | None = None,
    own: bool = False,
    trace: str | None = None,
    allow_underfilled_pipeline: bool | None = None,
) -> Callable[..., list[Any]]:
    """The function that runs a flush, called as Megatron-core's `forward_backward_func` (keywords only).

    config: a Plan of megaaccum, or the name of a schedule (`megaaccum schedule --help` lists them, `none`, or a .csv
    file). `none`, `1f1b` and `interleaved` are run by Megatron-core's own functions, unless `own` is true; all others
    by a `ForwardBackward`. fused: runs a fused forward and backward; default: one after the other, so that
    the forward's output leaves as early as it can. trace: a file for the timeline of the second
    flush beside the planned one (schedules of a ForwardBackward; default: a Plan's `schedule_trace`).
    allow_underfilled_pipeline: accept flushes of fewer than 2 * pp micro-batches; default: a Plan's key of that name,
    else False. Flushes without a backward may have any number.

    Raises ScheduleError (a ConfigError) for a schedule that is not known. The number of pipeline ranks and of
    micro-batches is only known when the function is called, which then raises for those.
    """
    name, plan = (config, None) if isinstance(config, str) else (config.layout.schedule, config)
    if allow_underfilled_pipeline is None:
        allow_underfilled_pipeline = plan is not None and plan.config.batch.allow_underfilled_pipeline
    if name == "none" or not (own or by_executor(name)):
        from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

        # Only whether there are several ranks and several chunks matters to it.
        found: Callable[..., list[Any]] = megatrons(
            pp_size=1 if name == "none" else 2, vp_size=2 if name == "interleaved" else None
        )
        return found if allow_underfilled_pipeline or name == "none" else partial(_when_filled, found)
    return ForwardBackward(name, plan, fused, trace, allow_underfilled=allow_underfilled_pipeline)


def _when_filled(run: Callable[..., list[Any]], **arguments: Any) -> list[Any]:
    """A flush of Megatron's. Raises ConfigError if it does not fill the pipeline."""
    pp = (arguments.get("pg_collection") or groups.default_collection()).pp
    if problem := underfilled(pp.size(), arguments["num_microbatches"], arguments.get("forward_only")):
        raise ConfigError(problem)
    return run(**arguments)


def underfilled(pp: int, num_microbatches: int, forward_only: bool | None) -> str | None:
    """The text of the rule that a flush with a backward has at least 2 * pp micro-batches, or None if it does."""
    if pp == 1 or forward_only or num_microbatches >= 2 * pp:
        return None
    return (
        f"num_microbatches {num_microbatches} does not fill {pp} pipeline ranks: a flush needs at least 2 * {pp} ="
        f" {2 * pp} micro-batches; raise the global batch, or, to accept a longer bubble, set"
        " allow_underfilled_pipeline to true"
    )


class ForwardBackward:
    """Runs flushes of one schedule. Called on every rank of the pipeline with the arguments of Megatron's functions.

    `record` tells about this rank's last flush (None before it). The model is this rank's chunks in the order of the
    schedule: for a V, chunk 0 is stage `rank` and chunk 1 stage `2 * pp - 1 - rank`.
    """

    def __init__(
        self, name: str, plan: Plan | None, fused: FusedPass | None, trace: str | None, *, allow_underfilled: bool
    ):
        self.name, self._fused, self._trace, self._allow_underfilled = name, fused, trace, allow_underfilled
        self._group_size = self._timeout_minutes = None
        if plan is not None:
            self._group_size = plan.config.parallel.microbatch_group_size_per_vp_stage
            self._timeout_minutes = plan.config.parallel.distributed_timeout_minutes
            self._trace = trace or plan.config.run.schedule_trace
        self._flushes = 0
        self._has_run: set[bool] = set()
        """Whether flushes without (True) and with a backward have run."""
        self._channels: dict[int, PipelineChannels] = {}
        self._connected: set[tuple[int, int]] = set()
        self._proven: set[int] = set()
        self._needed: dict[tuple[int, bool], dict[tuple[str, Message], int]] = {}
        self._installed: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = weakref.WeakKeyDictionary()
        """Chunks whose layers put their weight gradients aside, and of these the layers that split their own
        backward."""
        self.record: FlushRecord | None = None
        self._begun: Flush | None = None

    def __call__(self, **arguments: Any) -> list[Any]:
        """One flush. Returns, on the rank of the last stage, what loss functions report per micro-batch, in order;
        elsewhere an empty list.

        arguments: Megatron's, and those of `Call` (executor/passes.py). Over NCCL the first flush makes groups for its
        messages and is collective over the world: all pipelines begin together. Raises ConfigError before the first
        message for what cannot be run, FlushError if a rank fails on the way.
        """
        flush = self._new_flush(Call(**arguments))
        flush.run()
        return self._end(flush)

    # --- a flush in parts ---

    def begin(self, **arguments: Any) -> None:
        """Make a flush ready. `warm_up` and `finish` then run it, or `drain` ends it."""
        assert self._begun is None, "a flush that was begun has to end before the next"
        self._begun = self._new_flush(Call(**arguments))

    def warm_up(self) -> None:
        """Run the forwards of the flush that was begun up to the rank's first backward. Raises FlushError."""
        assert self._begun is not None
        self._begun.run(warm_up(self._begun.schedule)[self._begun.rank])

    def finish(self) -> list[Any]:
        """Run what is left of the flush that was begun; returns and raises as a call does."""
        flush, self._begun = self._begun, None
        assert flush is not None
        flush.run()
        return self._end(flush)

    def drain(self) -> None:
        """End the flush that was begun, on every rank of the pipeline, without a gradient. Raises FlushError."""
        flush, self._begun = self._begun, None
        assert flush is not None
        flush.drain()

    def prepare(self, flush_sizes: Sequence[int], pp: torch.distributed.ProcessGroup, chunks: int) -> None:
        """Build and prove the schedule of every flush that a run takes, before the first. flush_sizes: micro-batches of
        each; chunks: of the model on this rank. Raises ScheduleError if one cannot run."""
        for num_microbatches in flush_sizes:
            schedule = self._schedule(pp.size(), num_microbatches, chunks)
            if groups.carries_by_nccl(pp):
                check_queues(schedule)

    def _new_flush(self, call: Call) -> Flush:
        """The flush of a call, with its receives posted ahead. Raises ConfigError for what cannot be run."""
        problems = [
            f"{key} is set, but with a schedule of megaaccum's own executor {why}: leave it out"
            for key, why in UNSUPPORTED.items()
            if getattr(call.config, key, None)
        ]
        if call.adjust_tensor_shapes_fn is not None:
            problems.append(f"adjust_tensor_shapes_fn: schedule {self.name} sends messages of one shape; leave it out")
        pp = call.pg_collection.pp
        too_few = underfilled(pp.size(), call.num_microbatches, call.forward_only)
        problems += [too_few] if too_few and not self._allow_underfilled else []
        raise_problems(problems)
        schedule = self._schedule(pp.size(), call.num_microbatches, len(call.chunks))
        for chunk in call.chunks:
            if chunk not in self._installed:
                self._installed[chunk] = wgrad.install(chunk)
        shapes = _message_shapes(call)
        blank = torch.empty(0, dtype=call.config.pipeline_dtype, device=cpu.device())
        channels = self._channels_of(pp, schedule)
        is_first = bool(call.forward_only) not in self._has_run
        size = schedule.num_microbatches, call.forward_only
        if size not in self._needed:
            self._needed[size] = sends_needed(schedule, pp.rank(), forward_only=call.forward_only)
        mail = Mail(
            schedule,
            channels.by_host if is_first and channels.by_host is not None else channels,
            lambda message: blank.new_empty(shapes[message[1]]),
            self._needed[size],
            forward_only=call.forward_only,
        )
        splitting = [layer for chunk in call.chunks for layer in self._installed[chunk]]
        return Flush(schedule, pp.rank(), call, mail, self._fused, splitting, shapes)

    def _end(self, flush: Flush) -> list[Any]:
        """Record the flush and hand it to Megatron's finalize_model_grads_func."""
        call = flush.call
        self.record = flush.record
        self._has_run.add(bool(call.forward_only))
        if call.forward_only:
            return call.reports
        self._flushes += 1
        if self._trace is not None and self._flushes == 2:
            _write_trace(self._trace, flush.record, call.pg_collection.pp)
        if call.config.finalize_model_grads_func is not None:
            tokens = flush.num_tokens if call.config.calculate_per_token_loss else None
            call.config.finalize_model_grads_func(
                call.chunks, tokens, pg_collection=call.pg_collection, force_all_reduce=call.force_all_reduce
            )
        return call.reports

    def _schedule(self, pp: int, num_microbatches: int, chunks: int) -> Schedule:
        """The schedule of this size, proven once."""
        wanted = chunks if self.name == "interleaved" else None
        schedule = build(
            self.name, pp=pp, num_microbatches=num_microbatches, chunks=wanted, group_size=self._group_size, short=True
        )
        if schedule.chunks != chunks:
            raise ConfigError(
                f"schedule {self.name} has {schedule.chunks} model chunks per rank, but the model is {chunks}: set"
                f" virtual_pipeline_model_parallel_size to {schedule.chunks} and build as many"
            )
        if num_microbatches not in self._proven:
            validate(schedule)
            self._proven.add(num_microbatches)
        return schedule

    def _channels_of(self, pp: torch.distributed.ProcessGroup, schedule: Schedule) -> PipelineChannels:
        if id(pp) not in self._channels:
            self._channels[id(pp)] = PipelineChannels(pp, timeout_minutes=self._timeout_minutes)
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
    measured = gathered([(start + offset, end + offset) for start, end in record.spans], pp)
    if torch.distributed.get_rank() == 0:
        planned = simulate(record.schedule, measured_costs(record.schedule, measured), early_send=True)
        write_trace(path, record.schedule, planned=planned.spans, measured=measured)


def _message_shapes(call: Call) -> list[tuple[int, int, int]]:
    """`message_shapes` of a call. Raises ConfigError."""
    given, length = call.seq_lengths, call.decoder_seq_length or call.seq_length
    if given is None and getattr(call.config, "variable_seq_lengths", False):
        raise ConfigError(
            "variable_seq_lengths: receives are posted before a message comes, so every stage has to know the lengths:"
            " give seq_lengths, one per micro-batch"
        )
    if given is not None and len(given) != call.num_microbatches:
        raise ConfigError(f"{len(given)} seq_lengths for {call.num_microbatches} micro-batches: give one for each")
    lengths = [length] * call.num_microbatches if given is None else given
    return message_shapes(call.config, call.pg_collection, call.micro_batch_size, lengths)


def message_shapes(
    config: Any, collection: Any, micro_batch_size: int, lengths: Sequence[int]
) -> list[tuple[int, int, int]]:
    """[sequence of this rank, micro-batch, hidden] of the messages between stages, as Megatron's get_tensor_shapes.
    lengths: tokens of a sequence in each micro-batch."""
    parts = collection.cp.size() * (collection.tp.size() if config.sequence_parallel else 1)
    return [(length // parts, micro_batch_size, config.hidden_size) for length in lengths]
