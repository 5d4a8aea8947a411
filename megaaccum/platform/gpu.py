"""Settings of a rank on a GPU before CUDA starts: its device, and CUDA's variables unless the user has set them."""

from __future__ import annotations

import os

import torch

from megaaccum.config import Plan
from megaaccum.platform import cpu

LOADING = "CUDA_MODULE_LOADING"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The allocator's variable before torch 2.9, which still counts."""


def prepare(plan: Plan) -> None:
    """Choose this rank's device and set the variables that CUDA and torch's allocator read when they start; nothing on
    a CPU.

    Queues: the executor posts receives ahead, which wait on the device (executor/p2p.py); 32 is the most that CUDA has.
    Megatron-core's own schedules keep the user's value, which is 1 in many of its scripts. To load a kernel at its
    first launch waits for the device, on all ranks in the first flush: all are loaded when CUDA starts. Segments that
    grow: gathers and reductions allocate other sizes than the forwards between them, and holes in fixed segments would
    stay.
    """
    if not cpu.has_accelerator():
        return
    for name, value in defaults(plan).items():
        os.environ.setdefault(name, value)
    # A launcher may show each rank its own GPU alone: that is device 0, whatever the rank's local number. DeepSpeed
    # reads the variable itself (deepspeed.initialize and zero.Init set the device again), so it is corrected too.
    device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(device)
    torch.cuda.set_device(device)


def defaults(plan: Plan) -> dict[str, str]:
    """Variables for this plan, used unless the environment has them."""
    chosen = {} if _OLD_ALLOCATOR in os.environ else {ALLOCATOR: "expandable_segments:True"}
    if plan.layout.splits_backward:
        chosen |= {QUEUES: "32", LOADING: "EAGER"}
    return chosen


def describe() -> str:
    """NCCL's version and the variables that decide whether and how fast messages cross; '' on a CPU."""
    if not cpu.has_accelerator():
        return ""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    libraries = sorted(name for name in os.environ if name.startswith("NCCL_"))
    names = [QUEUES, LOADING, ALLOCATOR, _OLD_ALLOCATOR, *libraries]
    return ", ".join([f"NCCL {version}", *(f"{name}={os.environ[name]}" for name in names if name in os.environ)])
