"""Running a script of unknown intent: in bubblewrap's namespaces, or, if the user trusts it, as it is.

The jail has no network, no capabilities, no terminal and no input. The system's programs are read-only, the home folder
is empty, and the project is a copy without hidden files. All that can be written is one file system in memory, which
leaves the jail as an archive of which regular files alone are read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from megaaccum.errors import ConfigError

RECORDS, TOOLS = Path("/megaaccum/records"), Path("/megaaccum/tools")
"""Folders in the jail."""

SECONDS = 10
"""The time limit of a script; one that starts training takes less."""
PROCESSES, MEMORY = 200, 2 << 30
"""Limits on a script's processes at one time, and on their memory together."""
WRITTEN, FILE = 256 << 20, 64 << 20
"""Bytes that a script can write in all (with the copy of its project), and to one file; what it leaves is one file."""
ENTRIES, COPIED, COPIED_FILE, BOUND = 20_000, 64 << 20, 1 << 20, 400
"""Limits on a project: files and folders; bytes that are copied in all and of one file; larger files, which are bound
read-only."""

_SYSTEM = "/usr /opt /bin /sbin /lib /lib32 /lib64".split()
_ETC = """alternatives bash.bashrc bashrc environment group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime
    nsswitch.conf os-release passwd profile profile.d""".split()
"""The part of /etc that programs need; keys lie there as well."""

_NAMESPACES = "--unshare-all --unshare-user --disable-userns --cap-drop ALL --new-session --die-with-parent".split()


def run(command: Sequence[str], top: Path, tools: Path, left: Path) -> str:
    """Run `command` in the jail, from the current folder. top: the script's project. tools: the programs that come
    first on its PATH. left: a new folder, the root of the files that it leaves. Returns the end of its output. Raises
    ConfigError if there is no jail, or the script or its project is beyond a limit."""
    namespaces = bwrap()
    with tempfile.TemporaryFile() as project, tempfile.TemporaryFile() as archive:
        mounts = [*_mounts(top), "--ro-bind", str(tools), str(TOOLS)]
        for name in _pack(top.resolve(), project):
            mounts += ["--ro-bind", str(top.resolve() / name), str(top / name)]
        has_git = "git" if (top / ".git").exists() else ""
        limits = ["prlimit", f"--nproc={PROCESSES}", f"--as={MEMORY}", f"--fsize={FILE}", "--core=0", "--"]
        inside = ["/bin/sh", "-c", shell("inside.sh"), "sh", str(top), os.getcwd(), has_git, *command]
        output = _watched([*namespaces, *mounts, *limits, *inside], _environment(TOOLS), project, archive)
        if archive.seek(0, os.SEEK_END) >= FILE:
            raise ConfigError(f"--record: the script left more than {FILE >> 20} MB.")
        archive.seek(0)
        _unpack(archive, left)
    return output


def run_trusted(command: Sequence[str], tools: Path) -> str:
    """Run `command` as it is, in a session of its own, with `tools` first on its PATH; no process outlives it. Returns
    the end of its output."""
    mark = {"MEGAACCUM_TOOLS": str(tools)}
    try:
        return _watched(list(command), _environment(tools) | mark, None, None)
    finally:
        survivors, end = [psutil.Process()], time.monotonic() + SECONDS
        while survivors and time.monotonic() < end:
            survivors = [
                each
                for each in psutil.process_iter(["environ"])
                if mark.items() <= (each.info["environ"] or {}).items()
            ]
            for survivor in survivors:
                with suppress(psutil.NoSuchProcess):
                    survivor.kill()


def shell(*names: str) -> str:
    """Shell programs beside this module, one after another."""
    return "".join((Path(__file__).parent / "shell" / name).read_text(encoding="utf-8") for name in names)


def _environment(tools: Path) -> dict[str, str]:
    path = f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {name: text for name, text in os.environ.items() if name not in ("BASH_ENV", "ENV")} | {"PATH": path}


def bwrap() -> list[str]:
    """The words that make the jail's namespaces. Raises ConfigError if this machine has no bubblewrap or refuses it."""
    path, reason = shutil.which("bwrap"), "is not installed"
    if path is not None:
        words = [path, *_NAMESPACES]
        probe = subprocess.run([*words, "--ro-bind", "/", "/", "true"], capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return words
        reason = f"is refused here ({' '.join(probe.stderr.split()) or 'no reason given'})"
    raise ConfigError(
        f"--record runs the script in a jail by bwrap, which {reason}: install the package bubblewrap (0.8 or newer),"
        " or pass --trust-script to run the script as it is, with recorders in place of the launchers."
    )


def _mounts(top: Path) -> list[str]:
    """The jail's file systems. Its root is in memory; home or the project are too if they are below a system folder."""
    memory = ["--size", str(WRITTEN), "--tmpfs"]
    words = [*memory, "/"]
    for each in _SYSTEM:
        words += ["--symlink", os.readlink(each), each] if os.path.islink(each) else ["--ro-bind-try", each, each]
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    # As root, files of /proc/sys and of /dev/shm could be written without any capability.
    words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for folder in (Path.home(), top):
        words += [*(memory if folder.parts[1:2] in (("usr",), ("opt",)) else ["--dir"]), str(folder)]
    return [*words, "--dir", "/tmp", "--dir", os.getcwd(), "--dir", str(RECORDS)]


def is_home(folder: Path) -> bool:
    """Whether a folder is the home folder or holds it."""
    return Path.home().resolve().is_relative_to(folder.resolve())


def _pack(top: Path, archive: IO[bytes]) -> list[str]:
    """Write the project to an archive: no hidden file but .env, of a home folder no other folder, no special file.
    Returns the names of files that are too large. Raises ConfigError if there is too much of them."""
    words = ["find", ".", *(["-maxdepth", "1"] if is_home(top) else []), "-name", ".?*", "!", "-name", ".env", "-prune"]
    words += ["-o", "-readable", "-printf", r"%y %s %p\0"]
    found = os.fsdecode(subprocess.run(words, cwd=top, capture_output=True, check=False).stdout)
    sizes, large = {}, []
    for kind, size, name in (line.split(" ", 2) for line in found.split("\0")[:-1]):
        if kind == "f" and int(size) > COPIED_FILE:
            large.append(name)
        elif kind in "fdl":
            sizes[name] = int(size)
    if len(sizes) > ENTRIES or sum(sizes.values()) > COPIED or len(large) > BOUND:
        raise ConfigError(
            f"--record copies the script's project, but {top} holds more than {ENTRIES} files, {COPIED >> 20} MB in"
            f" files up to {COPIED_FILE >> 20} MB, or {BOUND} larger ones: give the script a folder of its own, or pass"
            " --trust-script to run it as it is."
        )
    words = ["tar", "-c", "-f", "-", "--no-recursion", "--ignore-failed-read", "--null", "-T", "-"]
    names = os.fsencode("\0".join(sizes))
    subprocess.run(words, cwd=top, input=names, stdout=archive, stderr=subprocess.DEVNULL, check=False)
    archive.seek(0)
    return large


def _unpack(archive: IO[bytes], left: Path) -> None:
    """Write the regular files of an archive, which a script may have made, below `left`, and nothing else."""
    try:
        with tarfile.open(fileobj=archive, mode="r|") as packed:  # a stream never goes back, so that it ends
            for number, info in enumerate(packed):
                if number > 2 * ENTRIES:
                    raise ValueError(f"there are more than {2 * ENTRIES} files")
                if info.isreg() and not info.issparse():
                    packed.extract(info, left, set_attrs=False, filter="data")
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"--record: what the script left cannot be read: {error}.") from None


def _watched(words: list[str], environment: dict[str, str], source: IO[bytes] | None, target: IO[bytes] | None) -> str:
    """Run a command in a session of its own, within the limits, and end it and its group. Returns the end of its
    output: of standard error alone if standard output goes to `target`."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=source or subprocess.DEVNULL, stdout=target or output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
        end, beyond = time.monotonic() + SECONDS, ""
        try:
            while process.poll() is None and not beyond:
                if time.monotonic() > end:
                    beyond = f"did not end in {SECONDS} seconds: it waits or loops where no cluster is"
                sizes = list(_resident(process.pid))
                if len(sizes) > PROCESSES or sum(sizes) > MEMORY:
                    beyond = f"started more than {PROCESSES} processes, or they took more than {MEMORY >> 30} GB"
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if beyond:
            raise ConfigError(f"--record: the script {beyond}.")
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        return output.read().decode(errors="replace").strip()


def _resident(pid: int) -> Iterator[int]:
    """The resident bytes of each process below `pid`."""
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            yield each.memory_info().rss
