"""Private names of DeepSpeed, Megatron-core, torch and Transformer Engine: a module each, used nowhere else.

Written against deepspeed 0.19.8, megatron-core 0.19.2, torch 2.13 and transformer-engine 2.20.2. Each function states
why no public name serves. `check()` looks the names up, so that another version fails at start with a list
instead of in the middle of a step.
"""

from __future__ import annotations

from megaaccum.upstream import fsdp2, megatron, megatron_training, pytorch, te, zero


def check() -> list[str]:
    """Names that these versions of the libraries lack, as sentences; empty when all is well."""
    problems = zero.check() + megatron.check() + megatron_training.check() + fsdp2.check() + pytorch.check()
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:  # not installed, or hidden by the CPU lane
        return problems
    return problems + te.check()
