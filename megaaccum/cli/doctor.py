"""`megaaccum doctor`: reports missing, incomplete and incompatible installations, and how to mend them.

Nothing is imported that could start CUDA: versions come from package metadata, GPUs from the driver's management
library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

import megaaccum
from megaaccum.distributed import preload
from megaaccum.errors import LaunchError
from megaaccum.platform.files import installed
from megaaccum.units import GIB, amount

State = Literal["ok", "note", "broken"]
Versions = Mapping[str, str | None]
"""Distribution name -> installed version, None when it is not installed."""

REQUIRED = {"torch": ((2, 10), None), "deepspeed": ((0, 19, 8), (0, 20)), "megatron-core": ((0, 19), (0, 20))}
"""Distribution -> (least version, first version that is too new or None), as in pyproject.toml."""
TRANSFORMER_ENGINE = "transformer-engine"
TRANSFORMER_ENGINE_TORCH = "transformer-engine-torch"
TRANSFORMER_ENGINE_BINARIES = ("transformer-engine-cu13", "transformer-engine-cu12")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` is empty when there is nothing to do; only `broken` fails the command."""

    name: str
    state: State
    value: str
    remedy: str = ""


def broken(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that fail the command."""
    return [finding for finding in findings if finding.state == "broken"]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cu130' -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Python itself: 3.12 or newer."""
    text = ".".join(map(str, version))
    if version < (3, 12):
        return Finding("python", "broken", text, "Use Python 3.12 or newer.")
    return Finding("python", "ok", text)


def check_space(name: str, free: int, total: int, *, where: str = "", least: int = 0, why: str = "") -> Finding:
    """Free bytes of memory or of a file system; a note, with the reason, below `least`."""
    text = f"{amount(free)} of {amount(total)} are free{where and f' in {where}'}"
    return Finding(name, "note", f"{text}: {why}") if free < least else Finding(name, "ok", text)


def check_limits(files: int, locked: int) -> Finding:
    """Limits of this user's processes: open files, bytes of locked memory; -1 for none."""
    shown = ["unlimited" if limit < 0 else text for limit, text in ((files, f"{files}"), (locked, amount(locked)))]
    text = f"{shown[0]} open files, {shown[1]} of locked memory"
    if 0 <= files < 4096:
        return Finding("limits", "note", f"{text}: ranks and data workers of a large run need more (ulimit -n 65536)")
    return Finding("limits", "ok", text)


def check_interfaces(names: Sequence[str], gloo: str | None, nccl: str | None) -> Finding:
    """Network interfaces, and those that the environment names for gloo and NCCL."""
    told = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    text = "; ".join([", ".join(names), *(f"{key}={value}" for key, value in told.items() if value)])
    if gloo and not set(gloo.split(",")) <= set(names):
        return Finding("interfaces", "broken", text, f"Set GLOO_SOCKET_IFNAME to one of {', '.join(names)}.")
    return Finding("interfaces", "ok", text)


def find_machine() -> list[Finding]:
    """Run the checks of memory, disk, shared memory, limits and network interfaces on this machine."""
    memory, here, shared = psutil.virtual_memory(), shutil.disk_usage("."), shutil.disk_usage("/dev/shm")
    data = "data workers and NCCL need it; a container gets it by --shm-size"
    return [
        check_space("memory", memory.available, memory.total),
        check_space(
            "disk", here.free, here.total, where=str(Path.cwd()), least=GIB, why="logs and checkpoints need it"
        ),
        check_space("shared memory", shared.free, shared.total, where="/dev/shm", least=GIB, why=data),
        check_limits(*(resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))),
        check_interfaces(
            [name for _, name in socket.if_nameindex()],
            *(os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")),
        ),
    ]


def check_required(versions: Versions) -> list[Finding]:
    """torch, DeepSpeed and Megatron-core, each in the range that pyproject.toml asks for."""
    findings = []
    for name, (least, below) in REQUIRED.items():
        wanted = f">={'.'.join(map(str, least))}" + (f",<{'.'.join(map(str, below))}" if below else "")
        found = versions.get(name)
        if found is not None and numbers(found) >= least and (below is None or numbers(found) < below):
            findings.append(Finding(name, "ok", found))
            continue
        wrong = "not installed" if found is None else f"{found}, but {wanted} is needed"
        findings.append(Finding(name, "broken", wrong, f"Install {name}{wanted} (make setup)."))
    return findings


def check_transformer_engine(versions: Versions) -> Finding:
    """Transformer Engine is three distributions of one version: Python, CUDA library, torch extension. All or none.

    With two of the three, importing Megatron-core fails with FileNotFoundError.
    """
    name = "Transformer Engine"
    binaries = [binary for binary in TRANSFORMER_ENGINE_BINARIES if versions.get(binary)]
    parts = {part: versions.get(part) for part in (TRANSFORMER_ENGINE, *binaries, TRANSFORMER_ENGINE_TORCH)}
    if not any(parts.values()):
        return Finding(name, "note", "not installed: Megatron's own layers are used, FP8 is not available")
    missing = [part for part, version in parts.items() if version is None]
    if not binaries:
        missing.append(" or ".join(TRANSFORMER_ENGINE_BINARIES))
    listed = ", ".join(f"{part} {version}" for part, version in parts.items() if version)
    remove = f"remove what is there (uv pip uninstall {' '.join(part for part, version in parts.items() if version)})"
    if missing:
        remedy = f"Install {' and '.join(missing)} of the same version (pip install 'megaaccum[te]'), or {remove}."
        return Finding(name, "broken", f"half installed: {listed}; missing {', '.join(missing)}", remedy)
    if len(binaries) > 1:
        return Finding(name, "broken", f"two CUDA libraries: {listed}", f"Keep the one of your CUDA, or {remove}.")
    if len(set(parts.values())) > 1:
        remedy = f"Install all three in one version (pip install 'megaaccum[te]'), or {remove}."
        return Finding(name, "broken", f"versions differ: {listed}", remedy)
    return Finding(name, "ok", str(versions[TRANSFORMER_ENGINE]))


def check_apex(version: str | None, summary: str | None, has_nvidia_module: bool) -> Finding:
    """NVIDIA's apex is built from source and holds apex.optimizers; the PyPI project of that name is something else."""
    if version is None:
        return Finding("apex", "note", "not installed: torch's fused AdamW is used")
    if has_nvidia_module:
        return Finding("apex", "ok", version)
    what = f"{version} is not NVIDIA's apex but an unrelated project" + (f" ({summary})" if summary else "")
    remedy = "Remove it (uv pip uninstall apex): Megatron-core takes it for NVIDIA's, which is built from source."
    return Finding("apex", "broken", what, remedy)


def find_apex() -> Finding:
    """Run check_apex on what is installed here, without importing it."""
    try:
        distribution = metadata.distribution("apex")
    except metadata.PackageNotFoundError:
        return check_apex(None, None, False)
    files = [str(file) for file in distribution.files or []]
    nvidia = any(file.startswith("apex/optimizers/fused_adam") for file in files)
    return check_apex(distribution.version, distribution.metadata["Summary"], nvidia)


def check_accelerator(count: int, names: Sequence[str], has_nccl: bool, has_gloo: bool) -> list[Finding]:
    """The device that computes, and the library by which its ranks talk."""
    gpus = f"{count} x {', '.join(sorted(set(names))) or 'CUDA'}"
    cpus = f"none: the CPU lane, {len(os.sched_getaffinity(0))} cores"
    findings = [Finding("accelerator", "ok", gpus if count else cpus)]
    for name, there, needed in (("NCCL", has_nccl, count > 0), ("gloo", has_gloo, count == 0)):
        if there:
            findings.append(Finding(name, "ok", "available"))
        else:
            remedy = f"Install a build of torch with {name}." if needed else ""
            findings.append(Finding(name, "broken" if needed else "note", "not in this build of torch", remedy))
    return findings


def find_accelerator() -> list[Finding]:
    """Run check_accelerator on this machine. Asks the driver's management library, so that no CUDA context starts."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        preload.import_torch()
    except LaunchError as error:
        cause = f"{type(error.__cause__).__name__}: {error.__cause__}"
        return [Finding("torch import", "broken", cause, "Install what it names, or a torch for this machine.")]
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    return check_accelerator(count, gpu_names() if count else [], dist.is_nccl_available(), dist.is_gloo_available())


def gpu_names() -> list[str]:
    """Names of the GPUs as nvidia-smi has them; empty without it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    answer = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def check_tools(which: Callable[[str], str | None]) -> list[Finding]:
    """The compiler and ninja, by which DeepSpeed builds those of its operators that a run asks for."""
    found = which(os.environ.get("CXX") or "c++") or which("g++")
    compiler = _tool("C++ compiler", found, "Install one (Debian, Ubuntu: apt-get install g++).")
    return [compiler, _tool("ninja", which("ninja"), "Install it (uv pip install ninja).")]


def _tool(name: str, path: str | None, remedy: str) -> Finding:
    if path is None:
        return Finding(name, "broken", "not found", remedy)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True)
    if answer.returncode != 0:
        return Finding(name, "broken", f"{path} does not run", remedy)
    return Finding(name, "ok", f"{answer.stdout.splitlines()[0]} ({path})")


def check_private_names() -> Finding:
    """The private names of DeepSpeed and Megatron-core that megaaccum uses are there (imports both: ten seconds)."""
    name = "private names"
    try:
        preload.libraries()
        from megaaccum import upstream

        problems = upstream.check()
    except Exception as error:  # whatever an import of a broken installation raises, the report has to go on
        return Finding(
            name, "broken", f"{type(error).__name__}: {error}", "Mend what is broken above, then run make setup."
        )
    if problems:
        return Finding(name, "broken", "; ".join(problems), "Install the versions of constraints.txt (make setup).")
    return Finding(name, "ok", "all that megaaccum uses of DeepSpeed and Megatron-core is there")


def examine() -> list[Finding]:
    """The findings on this machine and this Python environment, in the order in which they are shown. What is imported
    for them leaves CUDA uninitialised."""
    preload.prepare()
    names = (*REQUIRED, TRANSFORMER_ENGINE, *TRANSFORMER_ENGINE_BINARIES, TRANSFORMER_ENGINE_TORCH)
    versions = {name: installed(name) for name in names}
    findings = [Finding("megaaccum", "ok", megaaccum.__version__), check_python(), *check_required(versions)]
    findings += [check_transformer_engine(versions), find_apex(), *check_tools(shutil.which), *find_machine()]
    if versions["torch"] is not None:
        findings += find_accelerator()
    return findings if broken(findings) else [*findings, check_private_names()]


def show(findings: Sequence[Finding]) -> None:
    """Prints the findings as a table, remedies below it."""
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "note": "[dim]note[/]", "broken": "[red]broken[/]"}
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(finding.name, marks[finding.state], finding.value)
    console = Console(highlight=False)
    console.print(f"megaaccum on {platform.system()} {platform.machine()}")
    console.print(table)
    for finding in broken(findings):
        console.print(f"[red]{finding.name}[/]: {finding.value}. {finding.remedy}", soft_wrap=True)
    if not broken(findings):
        console.print("Nothing is broken.")


def main(argv: Sequence[str]) -> int:
    """Prints the report (--json: as JSON); returns 1 when something that is needed is broken, else 0."""
    parser = argparse.ArgumentParser(prog="megaaccum doctor", description="What is installed, and what is wrong.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)
    findings = examine()
    if arguments.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "broken": len(broken(findings))}, indent=2))
    else:
        show(findings)
    return 1 if broken(findings) else 0
