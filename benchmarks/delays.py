"""Pipelines whose stages only wait, for the runtimes that `benchmarks.schedules` compares. Runs on ranks.

Each function builds this rank's part and returns (run one flush, spans of its actions).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaaccum.executor.wgrad import defer
from megaaccum.schedule.exchange import Layer, together

if TYPE_CHECKING:
    from benchmarks.schedules import Setup
    from megaaccum import Engine

SEQ, BATCH, HIDDEN = 4, 1, 16
Spans = Callable[[], list[tuple[float, float]]]


def until(end: float) -> None:
    """Wait for `end` of time.perf_counter, no longer: the system wakes a sleeper about 0.1 ms late, which over the
    hundred passes of a flush would count as the runtime's."""
    time.sleep(max(0.0, end - time.perf_counter() - 0.0002))
    while time.perf_counter() < end:
        pass


class Processor:
    """Runs a rank's passes, one at a time: in the thread that launches them, which waits for each."""

    dtype = torch.float32

    def run(self, seconds: float, needs: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a pass of these seconds on `needs`. Returns `make()`, its result."""
        end = time.perf_counter() + seconds
        result = make()
        until(end)
        return result

    def synchronize(self) -> None:
        """Wait until all passes are done."""


class Device(Processor):
    """Runs them beside that thread, as a GPU does. To launch a pass takes no time; it begins when the one before it is
    done and what it needs is ready. Its result is sent as soon as it was launched: a message's content is the time at
    which it is ready, by a clock that all ranks of a machine share, in float64."""

    dtype = torch.float64

    def __init__(self) -> None:
        self._free_at = 0.0

    def run(self, seconds: float, needs: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ready_at = 0.0 if needs is None else needs.flatten()[0].item()  # not a message: below any time
        self._free_at = max(time.perf_counter(), self._free_at, ready_at) + seconds
        result = make()
        result.detach().fill_(self._free_at)
        return result

    def synchronize(self) -> None:
        until(self._free_at)


PROCESSORS = {"host": Processor, "device": Device}


class _Wait(torch.autograd.Function):
    """I in the backward; W is put off where the schedule splits the backward."""

    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stage = ctx.stage
        if stage.wait_for_weights:
            defer(stage.weight, stage.weight_grad)
        return stage.processor.run(stage.seconds[1], grad, grad.clone), None


class Stage(torch.nn.Module):
    """One chunk. seconds: of its forward, input gradient and weight gradient, what it does itself included; one number
    is for all three. layers: of experts, whose exchanges a fused pair hides: it is run as a schedule plan."""

    def __init__(
        self,
        seconds: float | tuple[float, float, float],
        processor: Processor | None = None,
        *,
        wait_for_weights: bool = True,
        layers: tuple[Layer, ...] = (),
    ):
        super().__init__()
        self.layers = layers
        self.seconds = seconds if isinstance(seconds, tuple) else (seconds,) * 3
        self.processor, self.wait_for_weights = processor or Processor(), wait_for_weights
        self._zero = torch.zeros(1, dtype=self.processor.dtype)
        self.weight = torch.nn.Parameter(self._zero.clone())
        self.decoder = SimpleNamespace(layers=[])  # Megatron-core asks for one in every pass
        self.received: torch.Tensor | None = None
        self.vp_stage: int | None = None
        self.name_in_model = ""

    def weight_grad(self) -> torch.Tensor:
        self.processor.run(self.seconds[2], None, self._zero.clone)
        return self._zero  # a step is clipped, and its verdict waited for, where the norm is large

    def set_input_tensor(self, tensors) -> None:
        self.received = tensors[0]

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.received if x is None else x
        if x is None:
            x = torch.zeros(SEQ, BATCH, HIDDEN, dtype=self.processor.dtype, requires_grad=True)
        return self.processor.run(self.seconds[0], x, lambda: _Wait.apply(x, self))

    def build_schedule_plan(self) -> _Plan:
        return _Plan(self)


class _Plan:
    """A chunk's forward, run as Megatron-core's schedule plans are: alone, or with another micro-batch's backward."""

    def __init__(self, stage: Stage):
        self.stage, self.received, self.event = stage, stage.received, torch.cuda.Event()

    @staticmethod
    def run(
        f: _Plan | None,
        b_schedule_plan: _Plan | None = None,
        b_grad: torch.Tensor | None = None,
        post_forward: Callable | None = None,
        post_backward: Callable | None = None,
    ) -> torch.Tensor | None:
        b = b_schedule_plan
        stage = f.stage if f is not None else b.stage  # type: ignore[union-attr]
        joint = together(*(() if each is None else each.stage.layers for each in (f, b)))
        needs = [each for each in (f and f.received, b_grad) if each is not None]
        latest = max(needs, key=lambda each: each.flatten()[0].item()) if needs else None
        result = stage.processor.run(
            joint.seconds,
            latest,  # type: ignore[arg-type]
            lambda: torch.zeros(SEQ, BATCH, HIDDEN, dtype=stage.processor.dtype),
        )
        if b is not None:
            defer(b.stage.weight, b.stage.weight_grad)
            post_backward(result.clone(), b.stage.vp_stage)  # type: ignore[misc]
        if f is None:
            return None
        output = result.requires_grad_()
        if post_forward is not None:
            post_forward(output, f.stage.vp_stage)
        return output


def megaaccum(setup: Setup) -> tuple[Callable[[], object], Spans]:
    """megaaccum's executor."""
    from megaaccum import get_forward_backward_func

    function, processor = get_forward_backward_func(setup.schedule, own=True), PROCESSORS[setup.stages]()
    flush = _megatron_call(function, setup, processor)

    def run() -> None:
        flush()
        processor.synchronize()

    return run, lambda: function.record.spans  # type: ignore[attr-defined]


class _Step:
    """The forward step of an engine: the weight of a micro-batch, 1, is known in advance."""

    def __call__(self, data_iterator, chunk):
        next(data_iterator)
        return chunk(), lambda y: (y.sum(), torch.ones(()), {})

    def weights(self, microbatches) -> list[float]:
        return [1.0] * len(microbatches)


def engine(setup: Setup, *, speculative_step: bool) -> Engine:
    """An engine over the stages of this rank, one pipeline over torch DDP. Its step waits for the device once all is
    launched, before it reads the norm, as `Tensor.tolist` would on a GPU."""
    from megaaccum import Plan, initialize

    plan = Plan.of(
        layout=dict(pp=setup.pp, schedule=setup.schedule), sharding=dict(backend="ddp"),
        batch=dict(micro_batch_size=BATCH, seq_length=SEQ, pp_microbatches=setup.num_microbatches),
        hidden_size=HIDDEN, step=dict(speculative_step=speculative_step), world_size=setup.pp,
    )  # fmt: skip
    processor = PROCESSORS[setup.stages]()
    chunks = [Stage(seconds, processor) for seconds in setup.chunk_seconds(dist.get_rank())]
    for chunk, stage in zip(chunks, plan.layout.stages(dist.get_rank()), strict=True):
        chunk.name_in_model = f"stages.{stage}."
    built = initialize(plan, chunks, forward_step_func=_Step(), optimizer=torch.optim.AdamW)
    reduce = built.backend.finish_reduction

    def finish_reduction() -> None:
        reduce()
        processor.synchronize()

    built.backend.finish_reduction = finish_reduction  # type: ignore[method-assign]
    return built


def megatron(setup: Setup) -> tuple[Callable[[], object], Spans]:
    """Megatron-core's own functions."""
    from megaaccum import get_forward_backward_func

    return _megatron_call(get_forward_backward_func(setup.schedule), setup, Processor()), list


def _megatron_call(function: Callable, setup: Setup, processor: Processor) -> Callable[[], object]:
    from megatron.core.enums import ModelType
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    overlaps = setup.schedule == "interleaved"  # Megatron's faster way, and at pp 2 its only right one
    config = ModelParallelConfig(
        pipeline_model_parallel_size=setup.pp, pipeline_dtype=processor.dtype, batch_p2p_sync=False,
        virtual_pipeline_model_parallel_size=setup.chunks if setup.chunks > 1 else None,
        overlap_p2p_comm=overlaps, batch_p2p_comm=not overlaps, deallocate_pipeline_outputs=True,
    )  # fmt: skip
    config.hidden_size, config.calculate_per_token_loss = HIDDEN, True
    config.overlap_moe_expert_parallel_comm = setup.hides_exchanges
    model = [
        Stage(seconds, processor, layers=layers)
        for seconds, layers in zip(
            setup.chunk_seconds(dist.get_rank()), setup.chunk_layers(dist.get_rank()), strict=True
        )
    ]
    for chunk, stage in enumerate(model):
        stage.config, stage.model_type = config, ModelType.encoder_or_decoder  # type: ignore[assignment]
        stage.vp_stage = chunk if setup.chunks > 1 else None
    groups = _groups()
    communicator = P2PCommunicator(groups.pp, config)

    def step(data_iterator, chunk, return_schedule_plan=False):
        output = chunk.build_schedule_plan() if return_schedule_plan else chunk()
        return output, lambda y: (y.sum(), torch.tensor(1, dtype=torch.int), torch.zeros(()))

    return lambda: function(
        forward_step_func=step, data_iterator=[None] * setup.chunks, model=model,
        num_microbatches=setup.num_microbatches, seq_length=SEQ, micro_batch_size=BATCH, forward_only=False,
        p2p_communicator=communicator, pg_collection=groups,
    )  # fmt: skip


def _groups():
    """Every rank in one pipeline, alone in every other group."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.pp = dist.group.WORLD
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups.tp = groups.cp = groups.dp = groups.dp_cp = groups.tp_dp_cp = mine
    groups.embd = groups.pos_embd = None
    return groups


def torch_pipelining(setup: Setup) -> tuple[Callable[[], object], Spans]:
    """The schedules of torch.distributed.pipelining, whose stages take W from a function of the stage's."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    from megaaccum.schedule.actions import stage_map

    kinds = {
        "1f1b": schedules.Schedule1F1B, "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV,
    }  # fmt: skip
    rank, placement = dist.get_rank(), "v" if setup.schedule in ("zbv", "dualpipev") else "loop"
    numbers = stage_map(placement, pp=setup.pp, chunks=setup.chunks)[rank]  # type: ignore[arg-type]
    example = torch.zeros(BATCH, SEQ, HIDDEN, requires_grad=True)  # else torch sends no gradients
    stages = [_torch_stage(pipelining, setup, number, example) for number in numbers]
    function = kinds[setup.schedule](
        stages if setup.chunks > 1 else stages[0],  # type: ignore[arg-type]
        n_microbatches=setup.num_microbatches,
        loss_fn=lambda output, target: output.sum(),
    )
    whole = torch.zeros(BATCH * setup.num_microbatches, SEQ, HIDDEN, requires_grad=True)
    first, last = 0 in numbers, setup.pp * setup.chunks - 1 in numbers

    def run() -> None:
        losses: list[torch.Tensor] = []
        function.step(*([whole] if first else []), **({"target": whole.detach(), "losses": losses} if last else {}))

    return run, list


def _torch_stage(pipelining, setup: Setup, number: int, example: torch.Tensor):
    module = Stage(setup.seconds / setup.chunks, wait_for_weights=False)

    def put_off() -> Callable[[], object]:
        return module.weight_grad

    return pipelining.PipelineStage(
        module, number, setup.pp * setup.chunks, torch.device("cpu"), input_args=example, output_args=example,
        dw_builder=put_off,
    )  # fmt: skip


RUNNERS = {"megaaccum": megaaccum, "megatron": megatron, "torch": torch_pipelining}
