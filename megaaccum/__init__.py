"""megaaccum: exact gradient accumulation on a Megatron-core pipeline over DeepSpeed ZeRO.

Importing this package imports neither torch nor DeepSpeed nor Megatron, and starts no CUDA and no process group.
"""

import importlib
from typing import Any

from megaaccum.errors import (
    CheckpointError,
    ConfigError,
    MegaaccumError,
    RankDisagreement,
    ScheduleError,
    StepError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "MegaaccumError",
    "Plan",
    "RankDisagreement",
    "ScheduleError",
    "StepError",
    "StepResult",
    "__version__",
    "get_forward_backward_func",
    "initialize",
    "megatron_loop",
    "verify",
]

_WITH_TORCH = {
    "Engine": "megaaccum.engine",
    "StepResult": "megaaccum.step.result",
    "get_forward_backward_func": "megaaccum.executor.entry",
    "initialize": "megaaccum.engine",
}


def __getattr__(name: str) -> Any:
    """Names that need more than the standard library, imported when they are asked for. Those of an engine bring torch,
    DeepSpeed and Megatron, and on a machine without a GPU first their stand-ins: import them before Megatron there."""
    if name == "Plan":
        from megaaccum.config import Plan

        return Plan
    if name == "verify":
        from megaaccum.lab.verification import verify

        return verify
    if name == "megatron_loop":
        return importlib.import_module("megaaccum.loop")
    if name in _WITH_TORCH:
        from megaaccum.distributed import preload

        preload.libraries()
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
