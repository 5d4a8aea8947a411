"""Preparation of a process before its first line of training: tools on PATH, quiet logs, imported libraries."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

from megaaccum.errors import LaunchError
from megaaccum.platform import quiet
from megaaccum.platform.replacing import without_collections

LIBRARIES = (
    "torch",
    "torch._dynamo",  # by the first optimizer or wrapper of a rank, 0.4 s on each
    "deepspeed",
    "deepspeed.comm.torch",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by deepspeed.initialize, beside torch's compiler
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.datasets.gpt_dataset",
)
"""Modules that every rank imports; importing them takes five to ten seconds on an ordinary core."""


def prepare() -> None:
    """Call before torch is imported. Puts the tools of this Python environment on PATH and keeps known noise back.

    DeepSpeed compiles its shared-memory operator by a command named `ninja`, which lies beside the Python that runs
    megaaccum; that folder is on PATH only if the environment was activated.
    """
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    if folder not in path:
        os.environ["PATH"] = os.pathsep.join([folder, *filter(None, path)])
    quiet.install()


def import_torch() -> None:
    """Import torch. Raises LaunchError with the reason if that fails: its wheels load libraries of the system."""
    # torch then counts GPUs without starting CUDA, which reads its variables (platform/gpu.py) only when it starts.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        importlib.import_module("torch")
    except Exception as error:
        raise LaunchError(
            f"torch cannot be imported ({type(error).__name__}: {error}): install what it names, or a torch for this"
            " machine (make setup); `megaaccum doctor` shows what is there"
        ) from error


def libraries(*more: str) -> None:
    """Import LIBRARIES and `more` modules in this process, after the CPU lane's stand-ins. Starts no CUDA and no thread
    of ours. Raises LaunchError if their versions lack what megaaccum uses."""
    prepare()
    with without_collections():
        import_torch()
        from megaaccum.platform import cpu

        with cpu.without_compiler():
            cpu.install()  # before DeepSpeed and Megatron, which look for a GPU when they, or upstream/, are imported
            from megaaccum.upstream import pytorch, zero

            for name in (*LIBRARIES, *more):
                importlib.import_module(name)
        check_versions()
    pytorch.compile_nothing_of("megaaccum", "deepspeed")  # once for all forks
    zero.tame_deepspeed()  # before the first deepspeed.init_distributed, which would compile it
    pytorch.tame_gloo()
    freeze_objects()


def check_versions() -> None:
    """Raise LaunchError with the names that the installed libraries lack; warn of a torch that no test has run with."""
    from megaaccum import upstream

    tested = f"megaaccum was tested with {', '.join(map(' '.join, upstream.TESTED.items()))}"
    if missing := upstream.required():
        where = importlib.import_module("megatron.core").__path__[0]  # which may be a checkout on PYTHONPATH
        text = f"the libraries (Megatron-core in {where}) lack names that megaaccum uses: {'; '.join(missing)}"
        raise LaunchError(f"{text}. {tested}: install those (constraints.txt); `megaaccum doctor` shows yours")
    newest, torch = (tuple(map(int, each.split(".")[:2])) for each in (upstream.TESTED["torch"], version("torch")))
    if torch > newest and os.environ.get("RANK", "0") == "0":
        warnings.warn(f"{tested}; torch {version('torch')} is newer", stacklevel=2)


def freeze_objects() -> None:
    """Exempt all present objects, a million of the libraries', from garbage collection. DeepSpeed collects at each
    start: that need not visit them then, nor a forked rank copy their memory for it."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton's bindings (3.9) list what is left when the interpreter ends, in 40 lines
