"""Process groups: built once from Megatron's own partition of the ranks, passed on by keyword, never looked up.

A pipeline's lanes on NCCL are made of these ranks too, by `PipelineChannels` (executor/p2p.py).

Megatron's collection of groups has no types, so each property names that of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from megaaccum.config import RankLayout
from megaaccum.distributed.agreement import numbers_of_all
from megaaccum.platform import cpu
from megaaccum.upstream import megatron, pytorch


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's process group in every parallel dimension.

    collection: the `pg_collection` argument of Megatron's models and schedules. timeout_minutes: of groups that are
    made later. held: what Megatron's parallel_state holds with these groups; default: what it holds now.
    """

    layout: RankLayout
    collection: ProcessGroupCollection
    timeout_minutes: float
    held: Mapping[str, Any] = field(default_factory=megatron.held_groups, repr=False, compare=False)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Context in which Megatron's parallel_state holds these groups, as parts of its models ask it and not the
        collection. An engine's methods run in it, so engines of several layouts can live in one process. It is not in
        torch.inference_mode: no step could use the tensors that were made there."""
        before, grads = megatron.held_groups(), torch.is_grad_enabled()
        megatron.hold_groups(self.held)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grads):
                yield
        finally:
            megatron.hold_groups(before)

    def iterated[Item](self, items: Iterator[Item]) -> Iterator[Item]:
        """`items`, each made inside `current`; the code that takes them runs outside."""
        done = object()
        while True:
            with self.current():
                item = next(items, done)
            if item is done:
                return
            yield item  # type: ignore[misc]

    @property
    def tp(self) -> dist.ProcessGroup:
        """Ranks that share each matrix."""
        return cast("dist.ProcessGroup", self.collection.tp)

    @property
    def pp(self) -> dist.ProcessGroup:
        """Ranks of one pipeline."""
        return cast("dist.ProcessGroup", self.collection.pp)

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and different sequences."""
        return cast("dist.ProcessGroup", self.collection.dp)

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold the same dense parameters and different tokens: data parallel x context parallel."""
        return cast("dist.ProcessGroup", self.collection.dp_cp)

    @property
    def expert_tp(self) -> dist.ProcessGroup:
        """Ranks that share each matrix of an expert."""
        return cast("dist.ProcessGroup", self.collection.expt_tp)

    @property
    def expert_dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same experts: those of a stage, tp * cp * dp, without etp and ep."""
        return cast("dist.ProcessGroup", self.collection.expt_dp)

    @property
    def embedding(self) -> dist.ProcessGroup | None:
        """First and last stage of this pipeline: the two copies of a tied embedding. None on the stages between, and in
        a V, whose first rank holds both."""
        return None if self.layout.placement == "v" else self.collection.embd

    @cached_property
    def host(self) -> dist.ProcessGroup | None:
        """All ranks over gloo, for objects that should not pass through the GPU; None if the world is gloo's.
        Collective over the world when it is first read."""
        world = dist.group.WORLD
        return for_background(self.timeout_minutes) if world is not None and carries_by_nccl(world) else None

    def stage(self, chunk: int) -> int:
        """Stage, 0 to pp * vpp - 1 in model order, of this rank's chunk."""
        # pp is outermost in Layout's order of ranks, whatever order Megatron's groups have here.
        return self.layout.stages(self.pp.rank() * (self.layout.world_size // self.layout.pp))[chunk]

    def collection_of(self, chunk: int) -> ProcessGroupCollection:
        """The `pg_collection` with which Megatron's model builds this chunk.

        Megatron numbers the layers of chunk v on rank r as stage v * pp + r. In a V chunk 1 of rank r is stage
        2 * pp - 1 - r = pp + (pp - 1 - r), so it is built as if by rank pp - 1 - r; and no ranks share an embedding.
        Chunk 0 keeps the group itself: Megatron's loop sums the losses of routers over that of its first chunk.
        """
        if self.layout.placement != "v":
            return self.collection
        collection = copy(self.collection)
        if chunk > 0:
            collection.pp = Seat(self.stage(chunk) % self.pp.size(), self.pp.size())
        collection.embd = None
        return collection

    @contextmanager
    def seated(self, chunk: int) -> Iterator[None]:
        """Context in which to build this chunk: Megatron's prediction layers ask parallel_state, not the collection,
        for their rank in the pipeline."""
        in_a_v = self.layout.placement == "v"
        parallel_state.set_pipeline_model_parallel_rank(self.stage(chunk) % self.pp.size() if in_a_v else None)
        try:
            yield
        finally:
            parallel_state.set_pipeline_model_parallel_rank(None)


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank and size of a pipeline's group without the group: all that building a chunk asks of it."""

    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def build(layout: RankLayout, *, timeout_minutes: float) -> Groups:
    """Build all process groups of `layout` (collective over the world; torch.distributed has to be initialised).

    tp, cp, ep, dp and pp ranks are ordered as Megatron's default: tp innermost, pp outermost. Megatron's parallel_state
    then holds these; groups of another layout that it held stay usable in their `current`. A layout has the groups that
    were built for its sizes earlier: each holds threads, or a communicator, until the process ends.
    """
    if any(world is not dist.group.WORLD for world, *_ in _built):
        destroy()  # torch.distributed was left, and started again
    key = dist.group.WORLD, replace(layout, schedule="", placement="loop"), timeout_minutes
    if (built := _built.get(key)) is None:
        megatron.hold_groups({})
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,  # a timedelta takes a float too
            create_gloo_process_groups=False,
            # A product that is launched first would hold up an all-reduce in a queue of its own until its last block.
            high_priority_stream_groups=["tp"] if layout.tp > 1 and cpu.has_accelerator() else None,
        )
        built = _built[key] = Groups(layout=layout, collection=default_collection(), timeout_minutes=timeout_minutes)
    megatron.hold_groups(built.held)
    return built if built.layout == layout else replace(built, layout=layout)


_built: dict[tuple[dist.ProcessGroup | None, RankLayout, float], Groups] = {}
"""The groups that `build` made in this process, since `destroy`, by the world, the sizes of a layout and a timeout."""


def are_in_parallel_state() -> bool:
    """Whether `build` made the groups that Megatron's parallel_state holds."""
    group = parallel_state.get_model_parallel_group(check_initialized=False)
    return any(each.collection.mp is group for each in _built.values())


def for_background(timeout_minutes: float) -> dist.ProcessGroup:
    """A group of all ranks for a thread that communicates while training does (collective over the world).

    Over gloo and the CPU on every machine: two threads must not share a group, and such a thread sends from host
    memory.
    """
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes)))


default_collection = ProcessGroupCollection.use_mpu_process_groups
"""The groups that Megatron's parallel_state holds, for callers that pass none (Megatron's own training scripts)."""


def share_reports(reports: Sequence[Any], pp: dist.ProcessGroup, source: int) -> list[Any]:
    """The reports of loss functions that rank `source` of a pipeline has, on all its ranks, tensors on their devices.
    Collective over the pipeline."""
    sent = [pytorch.on_device([*reports], torch.device("cpu"))]
    dist.broadcast_object_list(sent, group=pp, group_src=source)
    return cast("list[Any]", pytorch.on_device(sent[0], cpu.device()))


def carries_by_nccl(group: dist.ProcessGroup) -> bool:
    """Whether tensors of this rank's device cross `group` by NCCL, even if it has gloo for the host's
    (`cpu:gloo,cuda:nccl`)."""
    return bool(group._get_backend(cpu.device()).name() == "nccl")


def destroy() -> None:
    """Forget the groups of this process, so that others can be built (tests, a changed layout). Also Megatron's tables
    of side losses, which hold these groups and a row for each layer of the first model."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    parallel_state.destroy_model_parallel()
    _built.clear()
    replica_mesh.cache_clear()
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()


class Mpu:
    """The `mpu` argument of deepspeed.initialize.

    DeepSpeed reduces gradients, partitions parameters and averages over the data-parallel group. The model-parallel
    group, tp x pp, is that of its norm and overflow verdict, which megaaccum takes in its place (upstream/zero).
    """

    def __init__(self, groups: Groups):
        named = dict(data=groups.dp_cp, model=groups.collection.mp, tensor_model=groups.tp, pipeline_model=groups.pp)
        for name, group in named.items():
            setattr(self, f"get_{name}_parallel_group", lambda group=group: group)
            setattr(self, f"get_{name}_parallel_rank", group.rank)
            setattr(self, f"get_{name}_parallel_world_size", group.size)


def all_like(members: list[int]) -> list[list[int]]:
    """The members of every group of which some rank is in one, given this rank's, sorted. Two integers of each rank
    cross: lists of a thousand members from each of 16,384 ranks would be 17 million integers on every rank. Collective
    over the world."""
    found: dict[int, dict[int, int]] = {}
    firsts, places = numbers_of_all([members[0], members.index(dist.get_rank())])
    for rank, (first, place) in enumerate(zip(firsts, places, strict=True)):
        found.setdefault(first, {})[place] = rank
    return sorted([each[place] for place in sorted(each)] for each in found.values())


@cache  # an engine built again has the same: groups stay until the process ends
def replica_mesh(among: dist.ProcessGroup, replicas: int, timeout_minutes: float) -> DeviceMesh:
    """Device mesh of the ranks `among` which the same parameters are cut, for torch's fully_shard: one dimension, or
    (replica, shard) with more than one replica.

    Consecutive ranks share a replica, so that its traffic stays inside a node if it fits. Collective over the world.
    """
    device = cpu.device().type
    ranks = dist.get_process_group_ranks(among)
    if replicas == 1:
        return DeviceMesh.from_group(among, device, mesh_dim_names=("shard",))
    mine: dict[str, dist.ProcessGroup] = {}
    for row in all_like(ranks):
        grid = torch.tensor(row).view(replicas, -1)
        for name, lines in (("replica", grid.T.tolist()), ("shard", grid.tolist())):
            for line in lines:
                # Collective over the world: every rank makes every group, in this order.
                group = dist.new_group(line, timeout=timedelta(minutes=timeout_minutes))
                if isinstance(group, dist.ProcessGroup):  # this rank is in it
                    mine[name] = group
    grid = torch.tensor(ranks, dtype=torch.int).view(replicas, -1)
    return DeviceMesh.from_group(
        [mine["replica"], mine["shard"]], device, mesh=grid, mesh_dim_names=("replica", "shard")
    )
