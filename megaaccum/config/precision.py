"""The default precision of a run: BF16 if the GPU has it, else FP32."""

from __future__ import annotations

import ctypes
import os
from typing import Literal

from megaaccum.config.load import given
from megaaccum.config.schema import Config

KEYS = frozenset({"bf16", "fp16", "params_dtype"})
"""Keys that give the precision."""
FIRST_WITH_BF16 = 8
"""CUDA compute capability (Ampere)."""


def is_given(config: Config) -> bool:
    """Whether the configuration gives a precision."""
    return any(given(config, key) for key in KEYS)


def default() -> tuple[Literal["bf16", "fp32"], str]:
    """The default precision on this machine, and the reason for it."""
    if (capability := compute_capability()) is None:
        return "fp32", "no precision is given, and this machine has no NVIDIA GPU"
    name = ".".join(map(str, capability))
    if capability[0] < FIRST_WITH_BF16:
        return "fp32", f"no precision is given, and a GPU of compute capability {name} has no BF16"
    return "bf16", f"no precision is given, and this machine's GPU has BF16 (compute capability {name})"


def compute_capability() -> tuple[int, int] | None:
    """CUDA's compute capability of this machine's first GPU; None if there is none or all are hidden. Uses
    NVML, so that no command imports torch or starts CUDA for it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():  # every function gives 0 where all is well
        return None
    try:
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return None
        return major.value, minor.value
    finally:
        nvml.nvmlShutdown()
