"""`deterministic: true`: kernels and libraries that compute the same sums in every run. The order in which ranks are
added is the backend's (sharding/reduction.py)."""

from __future__ import annotations

import os
from typing import Any

from megaaccum.config import Plan
from megaaccum.errors import ConfigError
from megaaccum.platform import cpu

REPEATABLE: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Environment variables with the values that make sums repeat, the first of which is the default: of cuBLAS (its
manual, "Results reproducibility"), of NCCL's sums over tp, and of Transformer Engine's attention. Megatron-LM's
--deterministic-mode requires the same."""


def apply(plan: Plan) -> None:
    """Make this process repeat to the bit, if the configuration asks for it. Call it before the first kernel and the
    first process group; twice is once.

    On a CPU one thread computes: kernels split their sums by the number of threads. Raises ConfigError if the
    environment contradicts.
    """
    if not plan.config.sharding.deterministic:
        return
    import torch

    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic  # its stub lacks the property
    settings.fill_uninitialized_memory = False
    if not cpu.has_accelerator():
        torch.set_num_threads(1)
        return
    for name, values in REPEATABLE.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise ConfigError(
                f"deterministic is true, but the environment has {name}={os.environ[name]}, which does not repeat:"
                f" unset it, set it to {values[0]}, or deterministic to false"
            )
