"""Joining the other ranks of a run, on this rank's device: torch.distributed, and the process groups of a plan."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megaaccum.config import Plan, slurm
from megaaccum.distributed import groups
from megaaccum.distributed.agreement import check_agreement, raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError, LaunchError
from megaaccum.platform import cpu, determinism, gpu
from megaaccum.schedule.registry import is_shared, set_shared_table

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def start_together(plan: Plan) -> None:
    """Start torch.distributed, and check that all ranks have the same plan, cut and table of a schedule. From then on
    every rank uses rank 0's table, whatever happens to the files. Collective over the world.

    Raises LaunchError if the ranks cannot meet, RankDisagreement on every rank if plans or tables differ.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"a plan is made by Plan.of(...) or Plan.load(FILE), but a {type(plan).__name__} was given")
    start_process_group(plan)
    check_agreement(plan.digest(), details=plan.facts)
    table = plan.layout.schedule
    if table.endswith(".csv") and not is_shared(table):
        texts = [raise_on_all_ranks(Path(table).read_text)]
        torch.distributed.broadcast_object_list(texts)
        raise_on_all_ranks(set_shared_table, table, texts[0])


def start_process_group(plan: Plan) -> None:
    """Start torch.distributed from the launcher's environment, without one as a world of one rank. Does nothing if it
    is started. The CPU lane's stand-ins have to be installed before Megatron is imported.

    Raises LaunchError if the ranks cannot meet, ConfigError if torch makes tensors elsewhere than in host memory.
    """
    if (default := torch.get_default_device()).type != "cpu":
        raise ConfigError(
            f"torch's default device is {default}, where host memory's tensors would be made too: call"
            " torch.set_default_device('cpu') first, and build the model under `with torch.device('cuda'):`"
        )
    if not cpu.has_accelerator():
        _outlast_gloo()
    if torch.distributed.is_initialized():
        return
    slurm.adopt()
    if "RANK" not in os.environ:
        os.environ.update(_ALONE)
    gpu.prepare(plan)
    if not cpu.has_accelerator() and plan.config.run.num_threads:
        torch.set_num_threads(plan.config.run.num_threads)
    determinism.apply(plan)
    timeout = timedelta(minutes=plan.config.parallel.distributed_timeout_minutes)
    _await_name(os.environ.get("MASTER_ADDR", "localhost"), timeout.total_seconds())
    try:
        torch.distributed.init_process_group(cpu.backend(), timeout=timeout)
    except torch.distributed.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"the ranks cannot meet at {address} (MASTER_ADDR:MASTER_PORT): {str(error).splitlines()[0]}. If the "
            "port is in use, give the launcher another --master_port"
        ) from error


def _await_name(address: str, seconds: float) -> None:
    """Wait until this host knows the name of rank 0's, which a cluster may tell only when that has started. torch would
    write its own frames at each try. Raises LaunchError after `seconds`."""
    begun = time.monotonic()
    for attempt in itertools.count():
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            text = f"MASTER_ADDR is {address}, which this host cannot resolve ({error.strerror})"
        if time.monotonic() - begun > seconds:
            raise LaunchError(f"{text}: set it to the name or the address of rank 0's host")
        if attempt == 0:
            print(f"megaaccum: {text}: trying for {seconds:g} s", file=sys.stderr, flush=True)
        time.sleep(1)


def build_groups(plan: Plan) -> Groups:
    """Build the process groups of a plan, for chunks that are made before their engine. Megatron's parallel_state then
    holds them. Starts torch.distributed as `initialize` does. Collective over the world."""
    start_together(plan)
    return groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)


def groups_of(plan: Plan, given: Groups | ProcessGroupCollection | None) -> Groups:
    """The groups that a user gave; None: those that a user made in `parallel_state`, else those of the plan. Collective
    over the world. Raises ConfigError on every rank for a collection that lacks some."""
    if isinstance(given, Groups):
        return given
    if given is None and (groups.are_in_parallel_state() or not parallel_state.model_parallel_is_initialized()):
        return build_groups(plan)
    return raise_on_all_ranks(_checked, plan, groups.default_collection() if given is None else given)


def _checked(plan: Plan, collection: ProcessGroupCollection) -> Groups:
    if missing := [name for name in ("tp", "pp", "dp", "cp", "dp_cp", "mp") if not hasattr(collection, name)]:
        raise ConfigError(f"the process group collection lacks {', '.join(missing)}: give it every group of the layout")
    minutes = plan.config.parallel.distributed_timeout_minutes
    return Groups(layout=plan.layout, collection=collection, timeout_minutes=minutes)


@functools.cache
def _outlast_gloo() -> None:
    """Let this process wait a moment when its program ends. gloo's threads drop the tensors of a finished operation a
    little after it is done, for which they need the interpreter: one that is ending already makes them abort the
    process ("terminate called without an active exception", torch 2.13)."""
    atexit.register(time.sleep, 0.25)


def end_process_group() -> None:
    """Leave torch.distributed when all ranks have come here."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
