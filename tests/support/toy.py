"""A pipeline of toy chunks that note what is done to them. Every function here runs inside ranks."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from unittest.mock import patch

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megaaccum.platform import cpu
from megaaccum.platform.replacing import replaced
from tests.support import configs

SEQ, BATCH, HIDDEN = 3, 2, 4


@dataclass
class Notes:
    """Events of one rank, in order: (kind, chunk, micro-batch); and the most activations that were alive at a time."""

    order: list = field(default_factory=list)
    live: int = 0
    peak: int = 0

    def born(self, tensor: torch.Tensor) -> None:
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._died)

    def _died(self) -> None:
        self.live -= 1


class _Noted(torch.autograd.Function):
    """The identity; notes its passes, and saves a tensor whose life is the activation's."""

    @staticmethod
    def forward(ctx, x, notes, chunk, microbatch):
        ctx.at = notes, chunk, microbatch
        notes.order.append(("F", chunk, microbatch))
        if x.requires_grad:
            ctx.activation = x.clone()
            notes.born(ctx.activation)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        notes, chunk, microbatch = ctx.at
        notes.order.append(("B", chunk, microbatch))
        return grad, None, None, None


class Toy(torch.nn.Module):
    """One chunk: y = x * weight + bias, elementwise, so that the whole pipeline is a product."""

    def __init__(self, config, notes: Notes, chunk: int, stage: int):
        super().__init__()
        self.config, self.notes, self.chunk, self.stage, self.vp_stage = config, notes, chunk, stage, None
        self.weight = torch.nn.Parameter(torch.full((HIDDEN,), 1.0 + stage / 10, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.full((HIDDEN,), stage / 7, dtype=torch.float64))
        self.received, self.model_type = None, ModelType.encoder_or_decoder

    def set_input_tensor(self, tensors):
        self.received = tensors[0]

    def forward(self, microbatch: int):
        x = source(microbatch) if self.received is None else self.received
        x = _Noted.apply(x * self.weight, self.notes, self.chunk, microbatch)
        return x + self.bias


def source(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.rand(SEQ, BATCH, HIDDEN, dtype=torch.float64, generator=generator)


def forward_step(data_iterator, chunk):
    """A forward_step_func of Megatron's kind; the loss is a sum of squares."""
    output = chunk(next(data_iterator))
    return output, lambda y: ((y**2).sum(), torch.tensor(1, dtype=torch.int), (y.detach() ** 2).sum().clone())


def pipeline(name: str, *, chunks: int, placement: str, **keys):
    """(config, toy chunks of this rank, notes, groups) on a pipeline over all ranks."""
    from megaaccum.schedule.actions import stage_map

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    config = ModelParallelConfig(
        pipeline_model_parallel_size=world, pipeline_dtype=torch.float64, params_dtype=torch.float64,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, deallocate_pipeline_outputs=True,
         batch_p2p_sync=False, batch_p2p_comm=name != "interleaved",
        overlap_p2p_comm=name == "interleaved",
    )  # fmt: skip
    config.hidden_size, config.calculate_per_token_loss = HIDDEN, True
    for key, value in keys.items():
        setattr(config, key, value)
    notes, stages = Notes(), stage_map(placement, pp=world, chunks=chunks)[rank]
    model = [Toy(config, notes, chunk, stage) for chunk, stage in enumerate(stages)]
    for chunk, toy in enumerate(model):
        toy.vp_stage = chunk if chunks > 1 else None
    return config, model, notes, collection()


def collection() -> ProcessGroupCollection:
    """Every rank in one pipeline, alone in every other group."""
    groups = ProcessGroupCollection()
    groups.pp = torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    mine = alone[torch.distributed.get_rank()]
    groups.tp = groups.cp = groups.dp = groups.dp_cp = groups.tp_dp_cp = mine
    groups.embd = groups.pos_embd = None
    return groups


def run(function, model, groups, m: int, step=forward_step, **keys):
    """Call a forward_backward_func as a training script does."""
    return function(
        forward_step_func=step, data_iterator=[iter(range(m)) for _ in model], model=model, num_microbatches=m,
        seq_length=SEQ, micro_batch_size=BATCH, p2p_communicator=P2PCommunicator(groups.pp, model[0].config),
        pg_collection=groups, **{"forward_only": False} | keys,
    )  # fmt: skip


def reference(num_stages: int, m: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """{stage: gradients of (weight, bias)} of one process."""
    toys = [Toy(None, Notes(), 0, stage) for stage in range(num_stages)]
    for microbatch in range(m):
        x = source(microbatch)
        for toy in toys:
            x = x * toy.weight + toy.bias
        (x**2).sum().backward()
    return {toy.stage: (toy.weight.grad, toy.bias.grad) for toy in toys}


def worst_error(model, num_stages: int, m: int) -> float:
    """Largest relative error of a gradient on this rank."""
    exact = reference(num_stages, m)
    pairs = [(toy.weight.grad, exact[toy.stage][0]) for toy in model]
    pairs += [(toy.bias.grad, exact[toy.stage][1]) for toy in model]
    return max(float((mine - true).norm() / true.norm()) for mine, true in pairs)


# --- what tests run on ranks -----------------------------------------------------------------------------------------


def traced_by_megatron(name: str, m: int, chunks: int) -> tuple[list, float]:
    """(order of passes, worst error) of Megatron's own function."""
    from megaaccum import get_forward_backward_func

    config, model, notes, groups = pipeline(name, chunks=chunks, placement="loop")
    run(get_forward_backward_func(name, allow_underfilled_pipeline=True), model, groups, m)
    return notes.order, worst_error(model, chunks * config.pipeline_model_parallel_size, m)


@dataclass
class Ran:
    """Record of a flush of the executor on one rank."""

    order: list
    error: float
    peak: int
    live: int
    record: tuple[int, int]
    reports: list[float]
    fused: int


def take_own_lanes(function, pp) -> None:
    """Give the executor the lanes that it has over NCCL, over gloo."""
    from megaaccum.executor.p2p import PipelineChannels

    function._channels[id(pp)] = PipelineChannels(pp, separate=True)


def executed(name: str, m: int, chunks: int, placement: str, separate: bool = False) -> Ran:
    """Two flushes of `name` by megaaccum's executor, gradients of the second alone. separate: in lanes of their own."""
    from megaaccum import get_forward_backward_func

    _, model, notes, groups = pipeline(name, chunks=chunks, placement=placement)
    fused = []

    def run_fused(forward, backward):
        fused.append(1)
        forward()
        backward()

    function = get_forward_backward_func(name, own=True, fused=run_fused, allow_underfilled_pipeline=True)
    if separate:
        take_own_lanes(function, groups.pp)
    run(function, model, groups, m)
    for toy in model:
        toy.weight.grad = toy.bias.grad = None
    notes.order.clear()
    fused.clear()
    notes.peak = 0
    reports = run(function, model, groups, m)
    return Ran(
        order=list(notes.order), error=worst_error(model, chunks * torch.distributed.get_world_size(), m),
        peak=notes.peak, live=notes.live, record=(function.record.peak_in_flight, function.record.peak_deferred),
        reports=[float(each) for each in reports], fused=len(fused),
    )  # fmt: skip


def ways(name: str, m: int, chunks: int, placement: str) -> list[tuple[set[str], float]]:
    """Classes of the channels that carried what this rank sent, and the gradient's error, for each of two flushes in
    lanes of their own, as on NCCL; then the same of two without a backward, whose error is 0."""
    from megaaccum import get_forward_backward_func
    from megaaccum.executor import p2p

    _, model, _, groups = pipeline(name, chunks=chunks, placement=placement)
    function = get_forward_backward_func(name, own=True)
    take_own_lanes(function, groups.pp)
    found = []
    for forward_only in (False, False, True, True):
        carried, send = set[str](), p2p.PipelineChannels.send

        def noted(channels, *args, carried=carried, send=send):
            carried.add(type(channels).__name__)
            return send(channels, *args)

        function._channels_of(groups.pp, function._schedule(groups.pp.size(), m, chunks))  # connects, in its own lanes
        with patch.object(p2p.PipelineChannels, "send", noted):
            run(function, model, groups, m, forward_only=forward_only)
        found.append((carried, 0.0 if forward_only else worst_error(model, chunks * groups.pp.size(), m)))
        for toy in model:
            toy.weight.grad = toy.bias.grad = None
    return found


def lanes_of_a_layout(pp: int, dp: int) -> list[float]:
    """The numbers that each rank receives over the executor's lanes, between the groups that training builds: from its
    neighbours in the pipeline, 10 * the sender's pipeline rank + the lane's number."""
    from megaaccum.distributed import groups as our_groups
    from megaaccum.executor.p2p import PipelineChannels

    at = configs.plan(pp * dp, pipeline_model_parallel_size=pp, schedule="gpipe").layout
    built = our_groups.build(at, timeout_minutes=1)
    channels = PipelineChannels(built.pp, separate=True, timeout_minutes=1)
    pairs = [(source, source + step) for step in (1, -1) for source in range(pp) if 0 <= source + step < pp]
    device = cpu.device()
    channels.connect([(*pair, kind) for pair in pairs for kind in "FB"], device)
    works, received = [], []
    for source, target in pairs:
        for lane, kind in enumerate("FB"):
            if channels.rank == source:
                works.append(channels.send(torch.tensor([10.0 * source + lane], device=device), target, kind))
            elif channels.rank == target:
                received.append(torch.zeros(1, device=device))
                works.append(channels.receive(received[-1], source, kind))
    for work in works:
        work.wait()
    return [float(each) for each in received]


def hooks_of(name: str, m: int, chunks: int, placement: str, with_grad_sync: bool) -> list:
    """Hooks and gradients in the order in which they came: ("sync", chunk), ("grad", chunk, inside no_sync) ..."""
    from megaaccum import get_forward_backward_func

    events: list = []
    inside = []

    @contextlib.contextmanager
    def no_sync():
        inside.append(1)
        yield
        inside.pop()

    config, model, _, groups = pipeline(name, chunks=chunks, placement=placement, no_sync_func=no_sync)
    config.param_sync_func = [
        lambda params, c=c: events.append(("gather", c, len(list(params)))) for c in range(chunks)
    ]
    config.finalize_model_grads_func = lambda models, tokens, **unused: events.append(("finalize", int(tokens)))
    if with_grad_sync:
        config.grad_sync_func = [lambda params, c=c: events.append(("reduce", c, bool(inside))) for c in range(chunks)]
    for toy in model:
        for which, param in toy.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, c=toy.chunk, w=which: events.append(("grad", c, w, bool(inside)))
            )
    run(get_forward_backward_func(name, own=True, allow_underfilled_pipeline=True), model, groups, m)
    events.append(("inside at the end", bool(inside)))
    return events


def failing(name: str, m: int, chunks: int, placement: str, timeout: float, rounds: bool = False) -> str:
    """The message with which each rank ends when rank 1 raises in its forward of micro-batch 3 of chunk 0, or rounds
    its output. It lives on, so that the others end by the timeout of the process group, in seconds. Its thread that
    waits for sends does not."""
    from megaaccum import get_forward_backward_func
    from megaaccum.errors import FlushError
    from megaaccum.executor import p2p

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    _, model, _, groups = pipeline(name, chunks=chunks, placement=placement)

    def step(data_iterator, chunk):
        microbatch = next(data_iterator)
        wrong = torch.distributed.get_rank() == 1 and chunk.chunk == 0 and microbatch == 3
        if wrong and not rounds:
            raise ValueError("bad sample")
        output, loss = forward_step(iter([microbatch]), chunk)
        return output.bfloat16() if wrong else output, loss

    text = "nothing failed"
    try:
        with replaced(p2p, SMALL=0):  # so that each send is waited for
            run(get_forward_backward_func(name, own=True, allow_underfilled_pipeline=True), model, groups, m, step=step)
    except FlushError as error:
        text = str(error)
    if torch.distributed.get_rank() == 1:
        time.sleep(2 * timeout)
        assert "megaaccum-sends" not in (thread.name for thread in threading.enumerate())
    return text


def refused(what: str) -> str:
    """The message with which a call is refused before anything is sent."""
    from megaaccum import get_forward_backward_func
    from megaaccum.errors import ConfigError

    keys: dict = {"variable_seq_lengths": True} if what == "shapes" else {}
    _, model, _, groups = pipeline("zbv", chunks=2, placement="v", **keys)
    arguments: dict = {"adjust_tensor_shapes_fn": print} if what == "adjust" else {}
    if what == "iterators":
        arguments["data_iterator"] = [iter(range(8))]
    try:
        function = get_forward_backward_func("zbv", allow_underfilled_pipeline=True)
        m = 8
        model = model[:1] if what == "chunks" else model
        call = dict(
            forward_step_func=forward_step, data_iterator=[iter(range(m)) for _ in model], model=model,
            num_microbatches=m, seq_length=SEQ, micro_batch_size=BATCH, pg_collection=groups,
        )  # fmt: skip
        function(**call | arguments)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def of_views(name: str, m: int, chunks: int, placement: str) -> float:
    """Worst error of stages whose output is a view."""
    from megaaccum import get_forward_backward_func

    def step(data_iterator, chunk):
        output, loss = forward_step(data_iterator, chunk)
        return output.view(SEQ, BATCH, HIDDEN), loss

    _, model, _, groups = pipeline(name, chunks=chunks, placement=placement)
    run(get_forward_backward_func(name, own=True, allow_underfilled_pipeline=True), model, groups, m, step=step)
    return worst_error(model, chunks * torch.distributed.get_world_size(), m)


def departures(name: str, m: int, experts: int | None) -> list[str]:
    """`send` when a message leaves, `calc` when Megatron-core's own work after a forward begins, in order."""
    from unittest import mock

    from megaaccum import get_forward_backward_func
    from megaaccum.executor import passes
    from megaaccum.executor.p2p import Mail

    events: list[str] = []
    send, calc = Mail.send, passes.schedules.forward_step_calc_loss

    def noted(event, function):
        return lambda *args, **keys: (events.append(event), function(*args, **keys))[1]

    _, model, _, groups = pipeline(name, chunks=1, placement="loop")
    model[0].config.num_moe_experts = experts
    with (
        mock.patch.object(Mail, "send", noted("send", send)),
        mock.patch.object(passes.schedules, "forward_step_calc_loss", noted("calc", calc)),
    ):
        run(get_forward_backward_func(name, own=True, allow_underfilled_pipeline=True), model, groups, m)
    return events


def traced(path: str, m: int) -> None:
    """Three flushes of dualpipev, of which the second is written to `path`."""
    from megaaccum import get_forward_backward_func

    _, model, _, groups = pipeline("dualpipev", chunks=2, placement="v")
    function = get_forward_backward_func("dualpipev", trace=path, allow_underfilled_pipeline=True)
    for _ in range(3):
        run(function, model, groups, m)
