"""Functions that a verification runs on ranks; the process that starts them imports neither DeepSpeed nor Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaaccum.config import Plan
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.records import Observed, Reference
from megaaccum.lab.verification.testing.ranks import run_ranks

SECONDS = 120.0
"""Limit for one start of ranks."""
SECONDS_ON_GPU = 600.0
"""The same where kernels are compiled in it."""


def references(case: Case, lanes: Sequence[Lane], steps: int, keep_parts: bool = False) -> list[Reference]:
    """Take the steps of one process in each precision, in a world of one rank."""
    from megaaccum.lab.verification.reference import reference_of

    _meet(case, case.one_process(lanes[0]))
    return [reference_of(case, lane, steps, keep_parts=keep_parts and lane == "fp64") for lane in lanes]


def observed(case: Case, steps: int, at_borders: bool = False) -> Observed:
    """Take this rank's steps of a layout."""
    from megaaccum.lab.verification.observe import observe

    _meet(case, case.plan())
    return observe(case, steps, at_borders=at_borders)


def start_and_observe(case: Case, steps: int, at_borders: bool = False) -> list[Observed]:
    """Start the ranks of a case on this machine and take its steps. Raises RanksFailed."""
    return run_ranks(observed, case.world_size, case, steps, at_borders, **start_of(case))


def start_of(case: Case) -> dict[str, Any]:
    """Arguments of `run_ranks` for the device of a case."""
    on_gpu = case.device == "gpu"
    return {"timeout": SECONDS_ON_GPU if on_gpu else SECONDS, "hide_gpus": not on_gpu}


def _meet(case: Case, plan: Plan) -> None:
    """Start torch.distributed as a run does, on GPUs where there are some; on the CPU the harness has done so."""
    if case.device == "gpu":
        from megaaccum.distributed.start import start_process_group

        start_process_group(plan)
