"""Runs the cases of one GPU, many in a process, each with a time limit; one line of JSON per case.

    python -m tests.gpu.one env smoke sync adam       # subcommands, or names of cases (--list shows both)
    python -m tests.gpu.one --dry-run smoke           # the same code on a CPU, over gloo, with sizes for a CPU

Cases run in order of their value (tests.gpu.spec), so that a run which is cut short has the most to show. Lines are
appended as cases end to docs/benchmarks/gpu.jsonl, or to gpu.jsonl in the folder that OUT names (--out FILE; a dry run
writes to a file only if --out says so). A case whose last line there is of this commit and machine and is ok is not run
again (--again runs it). Exit code 1 if a case failed. Cases with as many ranks and the same environment share
processes, until one fails. Several ranks on one GPU: NCCL refuses two ranks of one GPU on one host, so each says it is
a host of its own (NCCL_HOSTID) and they talk over sockets: NCCL's streams, order and waits are real, its speed is not.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.gpu.spec import Spec, specs

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "gpu.jsonl"
"""Results that are committed; the variable OUT names another folder, where nothing but that folder outlasts a run."""
GRACE_SECONDS = 3.0
"""For the other ranks, after one has a result that is not ok."""
PACKAGES = ("torch", "megatron-core", "deepspeed", "transformer-engine", "megaaccum")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.one", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help="subcommands or names of cases; none is all")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--out", type=Path, help=f"file of results, appended to (default {OUT})")
    parser.add_argument("--again", action="store_true", help="also run what has passed at this commit")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds that no case may exceed")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    args = parser.parse_args(argv)
    chosen = choose(args.cases)
    if args.list:
        print("\n".join(f"{spec.name:<34}{spec.ranks} ranks, {spec.seconds} s" for spec in chosen))
        return 0
    start = way_to_start(dry=args.dry_run)
    where = conditions(dry=args.dry_run)
    folder = Path(os.environ.get("OUT") or OUT.parent)
    out = args.out or (None if args.dry_run else folder / OUT.name)
    # The committed file too: where only OUT outlasts a run, the lines of earlier runs come back in the tree.
    done = set() if args.again or out is None else passed(out, where) | passed(OUT, where)
    with Runner(start, dry=args.dry_run, limit=args.limit) as runner:
        results = [_reported(runner, spec, where, out) for spec in chosen if spec.name not in done]
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


def _reported(runner: Runner, spec: Spec, where: dict[str, Any], out: Path | None) -> dict[str, Any]:
    start = time.monotonic()
    found = runner.run(spec)
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


class Runner:
    """Runs cases, one at a time, on ranks that stay for the next case if it wants as many and the same environment.
    Ends its processes when left."""

    def __init__(self, start: str, *, dry: bool, limit: float = math.inf):
        self._start, self._dry, self._limit = start, dry, limit
        self._ranks: Ranks | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, spec: Spec) -> dict[str, Any]:
        """Rank 0's result, or the first that is not ok, or how the ranks ended. Ranks that raised or did not
        answer are replaced."""
        if self._ranks is None or self._ranks.kind != kind_of(spec):
            self._end()
            self._ranks = Ranks(spec, self._start, dry=self._dry)
        found, usable = self._ranks.run(spec, min(self._limit, spec.seconds * (4 if self._dry else 1)))
        if not found.get("ok"):
            found["output"] = self._ranks.output()
        if not usable:
            self._end()
        return found

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
        self._ranks = None


def kind_of(spec: Spec) -> tuple[int, dict[str, str], str]:
    """The number of processes and their environment: cases of one kind can share them. A name: of one that does not."""
    return spec.ranks, spec.environment, spec.name if spec.alone else ""


class Ranks:
    """The processes of one kind of case. start: `fork` of this one, which has imported the libraries, or `spawn` of
    interpreters."""

    def __init__(self, spec: Spec, start: str, *, dry: bool):
        self.kind = kind_of(spec)
        self._folder = tempfile.TemporaryDirectory(prefix="one-gpu-")
        self._logs = [Path(self._folder.name, f"{rank}.log") for rank in range(spec.ranks)]
        context: Any = multiprocessing.get_context(start)
        self._pipes, self._processes = [], []
        sys.stdout.flush()
        for rank, log in enumerate(self._logs):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, log, os.getpid()), kwargs={"dry": dry}, daemon=True)
            with patch.dict(os.environ, _environment(spec, rank, Path(self._folder.name))):
                process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, spec: Spec, seconds: float) -> tuple[dict[str, Any], bool]:
        """Rank 0's result if all are ok, else the first that is not, or that a rank ended, or that time is up; and
        whether the ranks can take another case."""
        end, results = time.monotonic() + seconds, dict[int, dict[str, Any]]()
        failed: dict[str, Any] | None = None
        for pipe in self._pipes:
            pipe.send(spec)
        while len(results) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready and failed is not None:
                return failed, False
            if not ready:
                self._note_stacks()
                return {"ok": False, "problem": f"not done in {seconds:g} s"}, False
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    return {"ok": False, "problem": f"rank {rank} ended with {self._processes[rank].exitcode}"}, False
                if not results[rank].get("ok") and failed is None:  # the others may be waiting for this rank
                    failed, end = results[rank], min(end, time.monotonic() + GRACE_SECONDS)
        return failed or results[0], "where" not in (failed or {})

    def _note_stacks(self) -> None:
        """Has each rank write the stacks of its threads into its output."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def output(self) -> list[str]:
        """The end of what each rank has written."""
        return [log.read_text()[-4000:] if log.exists() else "" for log in self._logs]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def way_to_start(*, dry: bool) -> str:
    """Import the libraries in this process, which ranks are then forked of: it takes 16 seconds on an H200's machine.
    Returns `fork`, or `spawn` where an import has started CUDA, which does not survive a fork."""
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megaaccum.distributed import preload

    preload.libraries()
    if dry:
        return "fork"
    sys.stdout.flush()
    child = multiprocessing.get_context("fork").Process(target=_use_the_gpu, daemon=True)
    child.start()
    child.join(60)
    return "fork" if child.exitcode == 0 else "spawn"


def _use_the_gpu() -> None:
    import torch

    torch.ones(1, device="cuda").sum().item()


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


def _serve(pipe: Any, log: Path, parent: int, *, dry: bool) -> None:
    """One rank: runs the cases that come through `pipe`, until the process that sends them is gone."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    join_ranks(dry=dry)
    while os.getppid() == parent:
        if pipe.poll(1.0):
            pipe.send(outcome(pipe.recv(), dry=dry))


def outcome(spec: Spec, *, dry: bool) -> dict[str, Any]:
    """The result of a case, after which this process is as it was before, as far as it can be."""
    import torch

    from megaaccum.distributed import groups

    try:
        with patch.dict(os.environ):
            return spec.load()(dry=dry)
    except Exception as error:  # whatever it is, the line of results shows it
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
    finally:
        groups.destroy()
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def join_ranks(*, dry: bool) -> None:
    """Meet the other ranks, on the GPU unless `dry`."""
    from megaaccum.distributed import preload
    from megaaccum.platform import cpu

    cpu.install()
    preload.libraries()
    import torch

    if dry:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    where: dict[str, Any] = {"init_method": os.environ["MEET_AT"], "rank": int(os.environ["RANK"])}
    torch.distributed.init_process_group(cpu.backend(), world_size=int(os.environ["WORLD_SIZE"]), **where)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
