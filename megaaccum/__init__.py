"""megaaccum: exact gradient accumulation on a Megatron-core pipeline over DeepSpeed ZeRO.

Importing this package imports neither torch nor DeepSpeed nor Megatron, and starts no CUDA and no process group.
"""

from megaaccum.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    MegaaccumError,
    RankDisagreement,
    StepError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "MegaaccumError",
    "RankDisagreement",
    "StepError",
    "__version__",
]
