"""megaaccum: exact gradient accumulation on a Megatron-core pipeline over DeepSpeed ZeRO.

Importing this package imports neither torch nor DeepSpeed nor Megatron, and starts no CUDA and no process group.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megaaccum.errors import CheckpointError, ConfigError, MegaaccumError, RankDisagreement, ScheduleError, StepError

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` imports each name on first use
    from megaaccum import loop as megatron_loop
    from megaaccum.config.plan import Batch, Layout, Optimizer, Plan, Quantization, Run, Sharding, Step
    from megaaccum.distributed.start import build_groups
    from megaaccum.engine import Engine, initialize
    from megaaccum.executor.entry import get_forward_backward_func
    from megaaccum.lab.planner.chunk_costs import calibrate
    from megaaccum.lab.verification.user_model import verify
    from megaaccum.pretrain.model.hf_stages import hf_stages
    from megaaccum.step.result import StepResult

__version__ = "0.1.0"

__all__ = [
    "Batch", "CheckpointError", "ConfigError", "Engine", "Layout", "MegaaccumError", "Optimizer", "Plan",
    "Quantization", "RankDisagreement", "Run", "ScheduleError", "Sharding", "Step", "StepError", "StepResult",
    "__version__", "build_groups", "calibrate", "get_forward_backward_func", "hf_stages", "initialize", "megatron_loop",
    "verify",
]  # fmt: skip

_OF_A_PLAN = ("Batch", "Layout", "Optimizer", "Plan", "Quantization", "Run", "Sharding", "Step")
_PLAIN = {
    **dict.fromkeys(_OF_A_PLAN, "megaaccum.config.plan"),
    "verify": "megaaccum.lab.verification.user_model",
}
_OF_AN_ENGINE = {
    "Engine": "megaaccum.engine",
    "StepResult": "megaaccum.step.result",
    "build_groups": "megaaccum.distributed.start",
    "calibrate": "megaaccum.lab.planner.chunk_costs",
    "get_forward_backward_func": "megaaccum.executor.entry",
    "hf_stages": "megaaccum.pretrain.model.hf_stages",
    "initialize": "megaaccum.engine",
}


if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        """Import a public name on first use. An engine's names import torch, DeepSpeed and Megatron, preceded by CPU
        stand-ins on a machine without a GPU: import them before Megatron there."""
        if name == "megatron_loop":
            return importlib.import_module("megaaccum.loop")
        if name in _OF_AN_ENGINE:
            from megaaccum.distributed import preload

            preload.libraries()
        elif name not in _PLAIN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module((_OF_AN_ENGINE | _PLAIN)[name]), name)
