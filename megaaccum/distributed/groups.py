"""Process groups: built once from Megatron's own partition of the ranks, passed on by keyword, never looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.errors import ConfigError
from megaaccum.platform import cpu
from megaaccum.schedule.actions import stage_map

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed.device_mesh import DeviceMesh

    from megaaccum.config import Layout


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's place in every parallel dimension.

    `collection` is what Megatron's models and schedules take as `pg_collection`. Sizes are numbers of ranks.
    timeout_minutes: of groups that are made later.
    """

    layout: Layout
    collection: ProcessGroupCollection
    timeout_minutes: float

    @property
    def tp(self) -> dist.ProcessGroup:
        """Ranks that share each matrix."""
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        """Ranks of one pipeline."""
        return self.collection.pp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and different sequences."""
        return self.collection.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold the same dense parameters and different tokens: data parallel x context parallel."""
        return self.collection.dp_cp

    @property
    def embedding(self) -> dist.ProcessGroup | None:
        """First and last stage of this pipeline: the two copies of a tied embedding. None on the stages between, and in
        a V, where one rank holds both."""
        return None if self.layout.placement == "v" else self.collection.embd

    @cached_property
    def host(self) -> dist.ProcessGroup | None:
        """All ranks over gloo, for objects that should not pass through the GPU; None where the world is gloo's.
        Collective over the world when it is first asked for."""
        world = dist.group.WORLD
        return for_background(self.timeout_minutes) if world is not None and carries_by_nccl(world) else None

    def stage(self, chunk: int) -> int:
        """The stage, 0 to pp * vpp - 1 in model order, that this rank's chunk is."""
        return stage_map(self.layout.placement, pp=self.pp.size(), chunks=self.layout.vpp)[self.pp.rank()][chunk]

    def collection_of(self, chunk: int) -> ProcessGroupCollection:
        """The `pg_collection` with which Megatron's model builds this chunk.

        Megatron numbers the layers of chunk v on rank r as stage v * pp + r. In a V chunk 1 of rank r is stage
        2 * pp - 1 - r = pp + (pp - 1 - r), so it is built as if by rank pp - 1 - r; and no ranks share an embedding.
        """
        if self.layout.placement != "v":
            return self.collection
        collection = copy(self.collection)
        collection.pp = Seat(self.stage(chunk) % self.pp.size(), self.pp.size())  # type: ignore[assignment]
        collection.embd = None
        return collection

    @contextmanager
    def seated(self, chunk: int) -> Iterator[None]:
        """While this chunk is built: Megatron's prediction layers ask parallel_state, not the collection, where in the
        pipeline they are."""
        from megatron.core import parallel_state

        if self.layout.placement != "v":
            yield
            return
        parallel_state.set_pipeline_model_parallel_rank(self.stage(chunk) % self.pp.size())
        try:
            yield
        finally:
            parallel_state.set_pipeline_model_parallel_rank(None)


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a pipeline without the ranks: all that building a chunk asks of the pipeline's group."""

    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def build(layout: Layout, *, timeout_minutes: float) -> Groups:
    """Build all process groups of `layout` (collective over the world; torch.distributed has to be initialised).

    tp, cp, ep, dp and pp ranks are ordered as Megatron's default: tp innermost, pp outermost.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,  # type: ignore[arg-type]  # a timedelta takes a float as well
        create_gloo_process_groups=False,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return Groups(layout=layout, collection=collection, timeout_minutes=timeout_minutes)


def for_background(timeout_minutes: float) -> dist.ProcessGroup:
    """A group of all ranks for a thread that communicates while training does (collective over the world).

    Over gloo and the CPU on every machine: two threads must not share a group, and what such a thread sends lies in
    host memory.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))


def default_collection() -> ProcessGroupCollection:
    """The groups that Megatron's parallel_state holds, for callers that pass none (Megatron's own training scripts)."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


_LANES = [(kind, up) for kind in "FB" for up in (True, False)]
_MAX_CTAS = 4
"""Thread blocks of a lane's kernel, which holds as many multiprocessors while it waits; NCCL's default is up to 32."""


def carries_by_nccl(group: dist.ProcessGroup) -> bool:
    """Whether tensors of this rank's device cross `group` by NCCL, also where it has gloo for the host's
    (`cpu:gloo,cuda:nccl`)."""
    return group._get_backend(cpu.device()).name() == "nccl"


def _refuse_bound_device(pp: dist.ProcessGroup) -> None:
    for group in (pp, dist.group.WORLD):
        if group is not None and group.bound_device_id is not None:
            raise ConfigError(
                f"init_process_group was given device_id={group.bound_device_id}, and NCCL then has one stream for all"
                " messages of a group, so that a receive that is posted ahead holds up every send: leave device_id out"
            )


def _lane_groups(members: list[int], on_nccl: bool, timeout_minutes: float | None) -> list[dist.ProcessGroup]:
    """A group of these ranks for each lane; collective over the world. Groups are made for every pipeline in one order
    on all ranks: torch names a group that its members alone make after the number of groups that a rank is in, which
    differs between the stages of a pipeline (the first and the last share an embedding)."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, members)
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    mine = []
    for pipeline in sorted({tuple(each) for each in everyone}):
        made = [_lane_group(list(pipeline), on_nccl, timeout) for _ in _LANES]
        if list(pipeline) == members:
            mine = made
    return mine


def _lane_group(ranks: list[int], on_nccl: bool, timeout: timedelta | None) -> Any:
    if not on_nccl:
        return dist.new_group(ranks, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    return dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=options)


def in_turn(channels: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Channels in an order in which neighbours connect side by side: pairs that begin with an even rank, then those
    that begin with an odd one. Rank by rank, each pair would wait for the one before it, through the whole pipeline."""
    return sorted(channels, key=lambda at: (min(at[:2]) % 2, min(at[:2]), max(at[:2]), at))


class PipelineChannels:
    """Point-to-point traffic within one pipeline, in four lanes: activations (F) and gradients (B), to higher and to
    lower ranks.

    gloo matches messages by tag, so one group carries all lanes. NCCL matches those of a pair of ranks by order alone
    and works them off one by one, so each lane has a group of its own there (`separate`; collective over the world).

    on_nccl: messages are NCCL's, whose receives are kernels that wait on the device. timeout_minutes: of the lanes'
    groups; None is torch's default. Raises ConfigError where torch would put all messages of a lane on one stream.
    """

    def __init__(self, pp: dist.ProcessGroup, *, separate: bool | None = None, timeout_minutes: float | None = None):
        self.rank = dist.get_rank(pp)
        self.on_nccl = carries_by_nccl(pp)
        if self.on_nccl:
            _refuse_bound_device(pp)
        self.members = dist.get_process_group_ranks(pp)
        self._connected: set[tuple[int, int, str]] = set()
        separate = self.on_nccl if separate is None else separate
        own = _lane_groups(self.members, self.on_nccl, timeout_minutes) if separate else [pp] * len(_LANES)
        # Tag 0 is that of messages without one, such as a step's micro-batches.
        self._lanes = {lane: (group, tag) for tag, (lane, group) in enumerate(zip(_LANES, own, strict=True), 1)}

    def connect(self, channels: Iterable[tuple[int, int, str]], device: torch.device) -> None:
        """Send one element over every channel (source, target, kind), each rank one after the other, in `in_turn`.

        NCCL connects two ranks at their first message, and both wait for it: ranks that post receives ahead, each on
        another lane first, would wait for each other. Collective over the pipeline, once per set of channels.
        """
        for source, target, kind in in_turn(set(channels) - self._connected):
            element = torch.zeros(1, device=device)
            if self.rank == source:
                self.send(element, target, kind).wait()
            elif self.rank == target:
                self.receive(element, source, kind).wait()
            self._connected.add((source, target, kind))

    def send(self, tensor: torch.Tensor, target: int, kind: str) -> dist.Work:
        """Begin to send `tensor` to rank `target` of the pipeline."""
        group, tag = self._lanes[kind, target > self.rank]
        return group.send([tensor], target, tag)

    def receive(self, buffer: torch.Tensor, source: int, kind: str) -> dist.Work:
        """Begin to receive into `buffer` from rank `source` of the pipeline."""
        group, tag = self._lanes[kind, source < self.rank]
        return group.recv([buffer], source, tag)


def destroy() -> None:
    """Forget the groups of this process, so that others can be built (tests, a changed layout), and Megatron's table of
    side losses, which knows these groups and has a row for each layer of the model that came first."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()


class Mpu:
    """The `mpu` argument of deepspeed.initialize.

    DeepSpeed reduces gradients, partitions parameters and averages over the data-parallel group. Its norm and its
    overflow verdict it reduces over the *model-parallel* group as well, so that has to be tp x pp: with the tensor
    group alone each pipeline stage clips by its own norm and skips on its own.
    """

    def __init__(self, groups: Groups):
        self._groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.dp_cp

    def get_data_parallel_rank(self) -> int:
        return self._groups.dp_cp.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._groups.dp_cp.size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.collection.mp

    def get_model_parallel_rank(self) -> int:
        return self._groups.collection.mp.rank()

    def get_model_parallel_world_size(self) -> int:
        return self._groups.collection.mp.size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp.rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp.size()

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._groups.tp, 0)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.pp

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.pp.rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.pp.size()


def replica_mesh(groups: Groups, replicas: int) -> DeviceMesh:
    """The ranks of dp x cp as torch's fully_shard takes them: one dimension, or (replica, shard) with more replicas.

    Consecutive ranks share a replica, so that its traffic stays inside a node where it fits. Collective over the world.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device = cpu.device().type
    ranks = dist.get_process_group_ranks(groups.dp_cp)
    if replicas == 1:
        return DeviceMesh.from_group(groups.dp_cp, device, mesh_dim_names=("shard",))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ranks)
    mine: dict[str, dist.ProcessGroup] = {}
    for row in sorted({tuple(each) for each in everyone}):
        grid = torch.tensor(row).view(replicas, -1)
        for name, lines in (("replica", grid.T.tolist()), ("shard", grid.tolist())):
            for line in lines:
                group = dist.new_group(line, timeout=timedelta(minutes=groups.timeout_minutes))
                if dist.get_rank() in line:
                    mine[name] = group
    grid = torch.tensor(ranks, dtype=torch.int).view(replicas, -1)
    return DeviceMesh.from_group(
        [mine["replica"], mine["shard"]], device, mesh=grid, mesh_dim_names=("replica", "shard")
    )
