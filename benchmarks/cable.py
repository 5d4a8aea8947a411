"""Ranks on two hosts of one machine: two network namespaces, joined by a cable of limited bandwidth. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

HOSTS = {"megaaccum-bench-a": "10.213.78.1", "megaaccum-bench-b": "10.213.78.2"}
WIRE = "mb0"
"""The network interface on both hosts."""
PORT = "29533"


def why_not() -> str:
    """The requirement that this machine lacks, or an empty text."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "tc") if _find(tool) is None]
    return f"not installed: {', '.join(missing)} (iproute2)" if missing else ""


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def _run(tool: str, *words: str) -> None:
    done = subprocess.run([_find(tool) or tool, *words], timeout=20, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def cable(megabits: float) -> Iterator[None]:
    """Both hosts, joined by a cable of this many megabits per second in each direction."""
    one, other = HOSTS
    _delete()  # of a run that was killed
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", WIRE, "netns", one, "type", "veth", "peer", "name", WIRE, "netns", other)
        for host, address in HOSTS.items():
            _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", WIRE)
            _run("ip", "-n", host, "link", "set", WIRE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            limit = ("rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "400ms")
            _run("tc", "-n", host, "qdisc", "add", "dev", WIRE, "root", "tbf", *limit)
        yield
    finally:
        _delete()


def _delete() -> None:
    for host in HOSTS:
        subprocess.run([_find("ip") or "ip", "netns", "delete", host], check=False, timeout=20, capture_output=True)


def run_on_both(code: str, arguments: Sequence[str], ranks: int, timeout: float) -> str:
    """Run `python -c code arguments` as `ranks` ranks, the first half on the first host; returns rank 0's output.

    Raises RuntimeError with the end of a failed rank's output, or after `timeout` seconds.
    """
    hosts = [host for host in HOSTS for _ in range(ranks // len(HOSTS))]
    processes = [_start(code, arguments, rank, ranks, host) for rank, host in enumerate(hosts)]
    deadline, printed = time.monotonic() + timeout, ""
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}: {errors[-2000:]}")
            printed = printed or output
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the ranks were not done after {timeout:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    return printed


def _start(code: str, arguments: Sequence[str], rank: int, ranks: int, host: str) -> subprocess.Popen[str]:
    first = next(iter(HOSTS.values()))
    places = {"RANK": rank, "LOCAL_RANK": rank % (ranks // len(HOSTS)), "WORLD_SIZE": ranks}
    settings = {"MASTER_ADDR": first, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": WIRE, "OMP_NUM_THREADS": 1}
    environment = os.environ | {name: str(value) for name, value in (places | settings).items()}
    command = [_find("ip") or "ip", "netns", "exec", host, sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
