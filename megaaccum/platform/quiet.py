"""Filters of libraries' messages that a user of megaaccum cannot act on: each one by name, with the reason.

A message that is not listed here is shown. Nothing is kept back when MEGAACCUM_VERBOSE=1.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# fmt: off
WARNINGS: tuple[tuple[str, type[Warning], str, str], ...] = (
    (r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to",
     UserWarning, r"megatron\.(core|training)\.",
     "Megatron's fallbacks are the layers that megaaccum chose; `megaaccum doctor` says what could be installed."),
    (r"Only transformer-engine>=1\.7\.0 supports MoE experts, but your version is 0\.0\.0",
     UserWarning, r"megatron\.core\.extensions\.transformer_engine_spec_provider",
     "Version 0.0.0 is no Transformer Engine at all: Megatron's layer specs are built once when they are imported."),
    (r"invalid escape sequence", SyntaxWarning, r".*megatron", "A docstring of Megatron-core 0.19."),
    (r"full scope is deprecated", UserWarning, r"megatron\.core\.transformer\.transformer_config",
     "Megatron-core 0.19 warns of its own default; CUDA graphs are off."),
    (r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
     FutureWarning, r"torch\.distributed", "DeepSpeed 0.19 and Megatron-core 0.19 call it; the pinned torch has it."),
    (r"The following imports from `dynamic_context\.py` will be removed",
     DeprecationWarning, r"megatron\.core\.inference", "Megatron-core imports its own deprecated module."),
    (r"`torch\.jit\.script(_method)?` is deprecated", DeprecationWarning, r"torch\.jit",
     "Megatron-core and DeepSpeed script their fused functions when they are imported."),
    (r"FSDP2-wrapped module .* returned a view tensor", UserWarning, r"torch\.distributed\.fsdp",
     "Megatron's schedules do not change a chunk's output in place, which is what it warns of."),
    (r"This process .* is multi-threaded, use of fork\(\) may lead to deadlocks",
     DeprecationWarning, r"megaaccum\.pretrain\.launch",
     "The other threads at that point are the idle ones of a BLAS library, which handles forks itself."),
)
"""(message, category, module, reason): regular expressions as in warnings.filterwarnings."""

LOG_LINES: tuple[tuple[str, str, str], ...] = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found", "The CPU lane needs none."),
    ("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other accelerator",
     "`megaaccum train` says itself on what it computes."),
    ("DeepSpeed", "**** You are using ZeRO with an untested optimizer",
     "Muon is a class of megaaccum's; its updates under ZeRO are compared with one process (docs/guides/muon.md)."),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED",
     "GPTModel is what megaaccum is written against; Megatron-core 0.19 has it."),
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context",
     "In the CPU lane the CPU's random state is the one that dropout draws from."),
)
"""(logger, start of the message, reason)."""
# fmt: on


def install() -> None:
    """Keep back the listed messages. Call it before torch, DeepSpeed and Megatron are imported; twice is once."""
    if os.environ.get("MEGAACCUM_VERBOSE") == "1":
        return
    for message, category, module, _ in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for name, start, _ in LOG_LINES:
        logging.getLogger(name).addFilter(_StartsWith(start))


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Context that restores the program's root logger, whatever a library that is imported inside does to it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@dataclass(frozen=True)
class _StartsWith:
    """Drops the log lines that start with `start`. addFilter adds an equal filter once."""

    start: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)
