"""megaaccum: exact gradient accumulation on a Megatron-core pipeline over DeepSpeed ZeRO.

Importing this package imports neither torch nor DeepSpeed nor Megatron, and starts no CUDA and no process group.
"""

from typing import Any

from megaaccum.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FlushError,
    LaunchError,
    MegaaccumError,
    RankDisagreement,
    ScheduleError,
    StepError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FlushError",
    "LaunchError",
    "MegaaccumError",
    "RankDisagreement",
    "ScheduleError",
    "StepError",
    "__version__",
    "get_forward_backward_func",
]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: it needs torch and Megatron.
    if name == "get_forward_backward_func":
        from megaaccum.schedule.entry import get_forward_backward_func

        return get_forward_backward_func
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
