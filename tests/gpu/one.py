"""Runs the cases of one GPU: each in processes of its own with a time limit, one line of JSON per case.

    python -m tests.gpu.one env smoke sync adam       # subcommands, or names of cases (--list shows both)
    python -m tests.gpu.one --dry-run smoke           # the same code on a CPU, over gloo, with sizes for a CPU

Lines are appended as cases end to docs/benchmarks/gpu.jsonl, or to gpu.jsonl in the folder that OUT names (--out FILE;
a dry run writes to a file only if --out says so). A case whose last line is of this commit and machine and is ok is not
run again (--again runs it). Exit code 1 if a case failed. Several ranks on one GPU: NCCL refuses two ranks of one GPU
on one host, so each says it is a host of its own (NCCL_HOSTID) and they talk over sockets: NCCL's streams, order and
waits are real, its speed is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.context
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.spec import Spec, specs

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "gpu.jsonl"
"""Results that are committed; the variable OUT names another folder, where nothing but that folder outlasts a run."""
PACKAGES = ("torch", "megatron-core", "deepspeed", "transformer-engine", "megaaccum")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.one", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help="subcommands or names of cases; none is all")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--out", type=Path, help=f"file of results, appended to (default {OUT})")
    parser.add_argument("--again", action="store_true", help="also run what has passed at this commit")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank_of:
        return _rank(args.rank_of, dry=args.dry_run, result=args.out)
    chosen = choose(args.cases)
    if args.list:
        print("\n".join(f"{spec.name:<34}{spec.ranks} ranks, {spec.seconds} s" for spec in chosen))
        return 0
    if args.dry_run:
        _prepare_forks()
    where = conditions(dry=args.dry_run)
    folder = Path(os.environ.get("OUT") or OUT.parent)
    out = args.out or (None if args.dry_run else folder / OUT.name)
    done = set() if args.again or out is None else passed(out, where)
    results = [_reported(spec, where, out, dry=args.dry_run) for spec in chosen if spec.name not in done]
    print(f"{sum(each['ok'] for each in results)} of {len(results)} ok, {len(chosen) - len(results)} passed before")
    return 0 if all(each["ok"] for each in results) else 1


def choose(names: Sequence[str]) -> list[Spec]:
    """Cases by name or by subcommand, in order; all without names. Raises SystemExit for a name that is none."""
    every = specs()
    if unknown := [name for name in names if not any(name in (each.name, each.group) for each in every)]:
        raise SystemExit(f"no case or subcommand {', '.join(unknown)}; subcommands: "
                         f"{', '.join(dict.fromkeys(each.group for each in every))}")  # fmt: skip
    return [each for each in every if not names or each.name in names or each.group in names]


# --- results ---------------------------------------------------------------------------------------------------------


def conditions(*, dry: bool) -> dict[str, Any]:
    """Machine, versions and commit, without which a figure means nothing."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = "" if dry else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        gpu = ""
    return {
        "commit": os.environ.get("COMMIT") or git.stdout.strip() or "unknown",
        "machine": gpu or f"no GPU ({platform.machine()})",
        "dry_run": dry,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def passed(out: Path, where: dict[str, Any]) -> set[str]:
    """Cases whose last line in `out` is ok and of the same commit, machine and kind of run."""
    last = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        last[json.loads(line)["case"]] = json.loads(line)
    same = ("commit", "machine", "dry_run")
    return {name for name, line in last.items() if line["ok"] and all(line[key] == where[key] for key in same)}


def _reported(spec: Spec, where: dict[str, Any], out: Path | None, *, dry: bool) -> dict[str, Any]:
    start = time.monotonic()
    found = run(spec, dry=dry)
    line = {"case": spec.name, "ok": bool(found.pop("ok", False)), "seconds": round(time.monotonic() - start, 1)}
    line |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "ranks": spec.ranks} | where | {"result": found}
    print(
        f"{'ok    ' if line['ok'] else 'FAILED'} {spec.name} ({line['seconds']} s) {json.dumps(found)[:400]}",
        flush=True,
    )
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


# --- processes -------------------------------------------------------------------------------------------------------


def run(spec: Spec, *, dry: bool) -> dict[str, Any]:
    """Run a case. Returns rank 0's result, or the first that is not ok, or how its processes ended. Ends only these."""
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        start = _forked if dry else _started
        processes = [start(spec, rank, Path(folder)) for rank in range(spec.ranks)]
        problem = _wait(processes, spec.seconds * (4 if dry else 1))
        results = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("*.json"))]
        found = next((each for each in results if not each.get("ok")), results[0] if results else {})
        found |= {"ok": False, "problem": problem} if problem else {}
        if not found.get("ok"):
            found["output"] = [Path(folder, f"{rank}.log").read_text()[-1500:] for rank in range(spec.ranks)]
        return found


def _started(spec: Spec, rank: int, folder: Path) -> subprocess.Popen:
    """A rank in an interpreter of its own."""
    env = os.environ | _environment(spec, rank, folder)
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(_command(spec, rank, folder), env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def _command(spec: Spec, rank: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.one", "--rank-of", spec.name, "--out", str(folder / f"{rank}.json")]


class _Fork(multiprocessing.context.ForkProcess):
    """A rank of a dry run: a fork of this process, which has imported the libraries once. Has Popen's names."""

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode


def _forked(spec: Spec, rank: int, folder: Path) -> _Fork:
    sys.stdout.flush()
    fork = _Fork(target=_in_fork, args=(spec, rank, folder))
    fork.start()
    return fork


def _in_fork(spec: Spec, rank: int, folder: Path) -> None:
    import torch

    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(_environment(spec, rank, folder))
    torch.set_num_threads(1)
    _rank(spec.name, dry=True, result=folder / f"{rank}.json")


def _prepare_forks() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megaaccum.distributed import preload

    preload.libraries()


def _environment(spec: Spec, rank: int, folder: Path) -> dict[str, str]:
    """A launcher's variables, the case's own, and for several ranks on one GPU those that make each a host to NCCL."""
    common = {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(spec.ranks), "MEET_AT": f"file://{folder / 'store'}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    hosts = {
        "NCCL_HOSTID": f"h{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
    }  # fmt: skip
    return common | spec.environment | (hosts if spec.ranks > 1 else {})


def _wait(processes: Sequence[subprocess.Popen | _Fork], seconds: float) -> str:
    """'' once all have ended well, else what went wrong first, with every process ended."""
    end, problem = time.monotonic() + seconds, ""
    while any(each.poll() is None for each in processes) and not problem:
        failed = [rank for rank, each in enumerate(processes) if each.poll() not in (None, 0)]
        problem = f"rank {failed[0]} ended with {processes[failed[0]].returncode}" if failed else ""
        problem = problem or (f"not done in {seconds} s" if time.monotonic() > end else "")
        time.sleep(0.05)
    for each in processes:
        if each.poll() is None:
            each.kill()
        each.wait()
    failed = [rank for rank, each in enumerate(processes) if each.returncode]
    return problem or (f"rank {failed[0]} ended with {processes[failed[0]].returncode}" if failed else "")


def _rank(name: str, *, dry: bool, result: Path) -> int:
    """One rank of a case, in a process of its own."""
    (spec,) = [each for each in specs() if each.name == name]
    _join(spec.ranks, dry=dry)
    try:
        found = spec.load()(dry=dry)
    except Exception as error:  # whatever it is, the line of results shows it
        found = {"ok": False, "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
    result.write_text(json.dumps(found))
    sys.stdout.flush()
    # Without leaving the process group: a rank that failed would wait there for the others.
    os._exit(0 if found.get("ok") else 1)


def _join(ranks: int, *, dry: bool) -> None:
    from megaaccum.distributed import preload
    from megaaccum.platform import cpu

    cpu.install()
    preload.libraries()
    import torch

    if not dry:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    where: dict[str, Any] = {"init_method": os.environ["MEET_AT"], "rank": int(os.environ["RANK"])}
    torch.distributed.init_process_group(cpu.backend(), world_size=ranks, **where)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
