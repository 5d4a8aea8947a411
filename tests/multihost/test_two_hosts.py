"""Two hosts on one machine: two network namespaces, joined by a cable, with an SSH server in each.

    deepspeed --hostfile HOSTS launch/pretrain_gpt.py ...     (pdsh starts the ranks of both)

Needs root, and ip, pdsh and sshd. The hosts share file systems, as hosts of a cluster do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.multiproc.test_launchers import BIN, ROOT, SCRIPT
from tests.support import whole_runs
from tests.support.whole_runs import config_file, losses, make_data

pytestmark = pytest.mark.multihost

TOOLS = ("ip", "pdsh", "sshd", "ssh", "ssh-keygen")
HOSTS = {"megaaccum-a": "10.213.77.1", "megaaccum-b": "10.213.77.2"}
CABLE = "ma0"
"""Name of the network interface on both hosts."""


def why_not() -> str:
    """The requirement that this machine lacks, or an empty text."""
    if os.geteuid() != 0:
        return "two hosts are network namespaces, which root alone can make: run it as root"
    missing = [tool for tool in TOOLS if find(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 pdsh openssh-server"
    return ""


def find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20, capture_output=True)


@contextmanager
def cable() -> Iterator[None]:
    """Two namespaces with an address each, joined by a pair of virtual interfaces."""
    ip = find("ip") or "ip"
    try:
        for host in HOSTS:
            run(ip, "netns", "add", host)
        one, other = HOSTS
        run(ip, "link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other)
        for host, address in HOSTS.items():
            run(ip, "-n", host, "addr", "add", f"{address}/24", "dev", CABLE)
            run(ip, "-n", host, "link", "set", CABLE, "up")
            run(ip, "-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run([ip, "netns", "delete", host], check=False, timeout=20, capture_output=True)


@contextmanager
def ssh_server(host: str, folder: Path) -> Iterator[None]:
    """An SSH server of one host that lets in the owner of the key in `folder`."""
    settings = folder / f"{host}.sshd"
    settings.write_text(
        f"ListenAddress {HOSTS[host]}\nHostKey {folder / 'key'}\nAuthorizedKeysFile {folder / 'key.pub'}\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own demand
    command = [find("ip") or "ip", "netns", "exec", host, find("sshd") or "sshd", "-D", "-e", "-f", str(settings)]
    with (folder / f"{host}.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def two_hosts(folder: Path) -> Iterator[dict[str, str]]:
    """The variables by which pdsh and DeepSpeed find their way between two hosts that are up."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    ssh = f"-i {folder / 'key'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    # DeepSpeed passes on only what is in this file: without it, gloo would take the loopback interface of each host.
    (folder / "deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={CABLE}\nDS_ACCELERATOR=cpu\nCUDA_VISIBLE_DEVICES=\n")
    with ExitStack() as stack:
        stack.enter_context(cable())
        for host in HOSTS:
            stack.enter_context(ssh_server(host, folder))
        for address in HOSTS.values():
            answers(["ssh", *ssh.split(), address, "true"])
        yield {"PDSH_SSH_ARGS_APPEND": ssh, "DS_ENV_FILE": str(folder / "deepspeed_env")}


def answers(command: list[str]) -> None:
    """Wait until `command` works on the first host, at most 20 seconds."""
    deadline, inside = time.monotonic() + 20, [find("ip") or "ip", "netns", "exec", next(iter(HOSTS)), *command]
    while (ended := subprocess.run(inside, capture_output=True, text=True, timeout=20, check=False)).returncode:
        assert time.monotonic() < deadline, ended.stderr
        time.sleep(0.1)


def start(folder: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`deepspeed --hostfile` on the first host, with one rank on each."""
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in HOSTS.values()))
    host, address = next(iter(HOSTS.items()))
    command = [find("ip") or "ip", "netns", "exec", host, str(BIN / "deepspeed"), "--hostfile", str(hostfile)]
    command += ["--no_ssh_check", "--master_addr", address, SCRIPT, "--config", str(config_file(folder)), *arguments]
    environment = os.environ | variables | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return whole_runs.run_bounded(command, environment, timeout=300)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_hosts_train_what_one_does(tmp_path):
    """One stage of the pipeline on each. To the last bit: the same sums as on one host, over another wire."""
    make_data(tmp_path)
    ended = whole_runs.train(tmp_path, save_interval=2)
    assert ended.code == 0, ended.output
    expected = losses(tmp_path)
    output = tmp_path / "both"
    with two_hosts(tmp_path) as variables:
        both = start(tmp_path, variables, "--output_dir", str(output / "run"))
        refused = start(tmp_path, variables, "--pipeline_model_parallel_size", "3")
    assert both.returncode == 0, both.stdout
    assert losses(output) == expected
    assert "Traceback" not in both.stdout
    assert refused.returncode != 0, refused.stdout
    said = [line for line in refused.stdout.splitlines() if "megaaccum: " in line]
    assert [line.split(" is not")[0] for line in sorted(said)] == [
        f"{address}: megaaccum: error: world size 2" for address in HOSTS.values()
    ]
