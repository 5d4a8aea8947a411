"""Private names of DeepSpeed, Megatron-core, torch and Transformer Engine: a module each, used nowhere else.

Written against the versions in TESTED. Each function states why no public name serves. Every start looks the names up,
so that another version fails there with a list instead of in the middle of a step.
"""

from __future__ import annotations

from functools import cache

from megaaccum.upstream import emerging, fsdp2, megatron, megatron_training, te
from megaaccum.upstream.lookup import missing

TESTED = {"deepspeed": "0.19.8", "megatron-core": "0.19.2", "torch": "2.15.0", "transformer-engine": "2.20.2"}


def check() -> list[str]:
    """Names that these versions of the libraries lack, as sentences; empty when all is well."""
    return required() + fsdp2.check() + (missing("emerging") if emerging.is_installed() else [])


@cache  # once for all forks, and for all names of megaaccum that a program imports
def required() -> list[str]:
    """`check()` of what every run uses: `backend: fsdp2`, which needs a newer torch than the rest, looks its names up
    itself."""
    problems = missing("zero") + megatron.check() + megatron_training.check() + missing("pytorch")
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:  # not installed, or hidden by the CPU lane
        return problems
    return problems + te.check()
