"""Recording a training script: it runs in a jail with recorders in place of launchers, and the command that it would
have started is read.

The jail is a user, mount, network and process namespace (util-linux `unshare`): the system is read-only, the script's
project is under an overlay that takes its writes, everything else is in a root folder of its own; there is no network
and no input, and the script ends after ten seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megaaccum.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """The training program's command line, without the launcher."""

    program: str
    """The training program, as the launch names it."""
    argv: Sequence[str]
    """Its arguments."""
    script: str
    """The script that launches it, for error texts."""
    folder: Path
    """Folder in which it is launched."""
    world_size: int | None = None
    """Ranks, where the launcher says how many."""
    written: tuple[tuple[Path, Path], ...] = ()
    """Folders of a recorded script's files: (folder as the script saw it, folder that holds what it wrote there)."""

    def path(self, name: str) -> Path:
        """The path of a file that the flags name: the one that the script wrote if there is one."""
        path = self.folder / name
        for seen, holds in self.written:
            if path.is_relative_to(seen) and (holds / path.relative_to(seen)).exists():
                return holds / path.relative_to(seen)
        return path


SECONDS = 10
"""The time limit of a script; one that starts training takes less."""

LAUNCHERS = ("torchrun", "deepspeed", "ds", "python", "python3", "accelerate", "msrun")
"""Commands whose words are recorded."""

WRAPPERS = (
    "srun", "sbatch", "mpirun", "mpiexec", "uv", "nohup", "numactl", "nsys", "singularity", "apptainer", "docker",
)  # fmt: skip
"""Commands that start another command, which is among their words."""

SILENT = (
    "sleep", "wget", "curl", "pip", "pip3", "conda", "nvidia-smi", "scontrol", "ssh", "scp", "rsync", "ds_ssh", "ray",
    "module", "ml",
)  # fmt: skip
"""Commands of the cluster or the network that succeed and do nothing."""

_RECORDER = """#!/bin/sh
case "$1" in -c|-V|--version|-) if [ -x /usr/bin/python3 ]; then
    errors=$(mktemp)
    /usr/bin/python3 "$@" 2> "$errors"
    status=$?
    cat "$errors" >&2
    grep -q ModuleNotFoundError "$errors" && exit 0  # a module that training has, such as torch
    exit $status
fi ;; esac
out=$(mktemp "$MEGAACCUM_RECORD/$(date +%s%N).XXXXXX")
{ printf '%s\\0' "$PWD" "${0##*/}" "$@"; } > "$out"
"""

_PREPARED = r"""
mkdir -p "$HOME"
for name in .bashrc .bash_profile .profile; do [ -e "$HOME/$name" ] || : > "$HOME/$name"; done
tools=${PATH%%:*}
for name in $(ls "$tools"); do set -- "BASH_FUNC_$name%%=() { $tools/$name \"\$@\"; }" "$@"; done
exec env "$@"
"""
"""Shell code that runs a command in the jail. Scripts source files of the home folder, which is hidden, and
/etc/profile, which sets another PATH: the tools are functions of bash too."""

_WRAPPER = """#!/bin/sh
PATH=${0%/*}:$PATH
while [ $# -gt 0 ]; do
    case "$1" in
        -*) shift; continue ;;
        *.sh|*.sbatch|*.slurm) [ -f "$1" ] && exec bash "$@" ;;
    esac
    case "${1##*/}" in
        bash|sh|env|python|python3|torchrun|deepspeed|ds|accelerate|numactl|nohup|nsys|uv) exec "$@" ;;
    esac
    shift
done
case "${0##*/}" in sbatch|srun) exec bash -s ;; esac
"""

_JAIL = r"""
set -e
for each in /usr /etc /opt; do
    [ -d $each ] || continue
    mkdir -p "$ROOT$each"
    mount --bind $each "$ROOT$each"
    mount -o remount,bind,ro,nosuid "$ROOT$each"
done
for each in /bin /sbin /lib /lib32 /lib64; do
    if [ -L $each ]; then ln -s "$(readlink $each)" "$ROOT$each"
    elif [ -d $each ]; then
        mkdir "$ROOT$each"
        mount --bind $each "$ROOT$each"
        mount -o remount,bind,ro "$ROOT$each"
    fi
done
mkdir -p "$ROOT/proc" "$ROOT/dev" "$ROOT/tmp" "$ROOT$TOP" "$ROOT$FOLDER"
mount -t overlay overlay -o "lowerdir=$TOP,upperdir=$WRITTEN,workdir=$WORK" "$ROOT$TOP"
mount -t proc proc "$ROOT/proc"
for each in null zero full random urandom; do : > "$ROOT/dev/$each"; mount --bind /dev/$each "$ROOT/dev/$each"; done
ln -s /proc/self/fd "$ROOT/dev/fd"
ulimit -f 131072
ulimit -v 4194304
exec chroot "$ROOT" /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "$FOLDER" "$@"
"""


_Places = tuple[tuple[Path, Path], ...]
"""The type of Launch.written."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A command that the script would have started."""

    folder: str
    words: list[str]


@contextmanager
def recorded(command: Sequence[str], *, jail: bool = True) -> Iterator[Launch]:
    """Run `command` (such as bash train.sh ARGS) with recorders, and yield the one training launch in it. The files
    that the script wrote exist until the context ends. jail: False runs the script as it is, with the recorders first
    on PATH. Raises ConfigError if the script does not end in ten seconds, starts no training or more than one, or no
    jail can be made."""
    script = _script_of(command)
    top = _top(script)
    with tempfile.TemporaryDirectory(prefix="megaaccum-record-") as scratch:
        root, written, work = (Path(scratch, name) for name in ("root", "written", "work"))
        written.mkdir()
        work.mkdir()
        records = root / "megaaccum-record"
        records.mkdir(parents=True)
        tools = root / "megaaccum-tools"
        _write_recorders(tools)
        if jail:
            places = {"ROOT": str(root), "TOP": str(top), "WRITTEN": str(written), "WORK": str(work)}
            output = _run(
                _in_jail(["/bin/sh", "-c", _PREPARED, "sh", *command]),
                places,
                tools="/megaaccum-tools",
                records="/megaaccum-record",
            )
            shown: _Places = ((top, written), (Path("/"), root))
        else:
            output = _run(list(command), {}, tools=str(tools), records=str(records))
            shown = ()
        yield _the_launch(_read_records(records), script, shown, output)


def _script_of(command: Sequence[str]) -> Path:
    """The script among the words of a command: the first that is a file."""
    if not command:
        raise ConfigError("--record needs the command that starts training after --, as in --record -- bash train.sh.")
    for word in command:
        if Path(word).is_file() and shutil.which(word) is None:
            return Path(word).absolute()
    found = next((Path(word).absolute() for word in command if Path(word).is_file()), None)
    if found is None:
        raise ConfigError(f"--record: there is no script among {' '.join(command)}.")
    return found


def _write_recorders(folder: Path) -> None:
    folder.mkdir()
    scripts = dict.fromkeys(LAUNCHERS, _RECORDER) | dict.fromkeys(WRAPPERS, _WRAPPER)
    scripts |= dict.fromkeys(SILENT, "#!/bin/sh\n")
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _top(script: Path) -> Path:
    """The project of the script: its nearest parent folder with .git, or its own folder."""
    top = next((each for each in script.parents if (each / ".git").exists()), script.parent)
    return script.parent if top == Path(top.anchor) else top


def _in_jail(command: Sequence[str]) -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None:
        raise ConfigError(_NO_JAIL.format(reason="there is no `unshare` (util-linux)"))
    words = [unshare, "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    probe = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        raise ConfigError(_NO_JAIL.format(reason=probe.stderr.strip() or "unshare failed"))
    return [*words, "/bin/sh", "-c", _JAIL, "sh", *command]


_NO_JAIL = (
    "--record runs the script in namespaces of its own, but this machine provides none: {reason}. Pass"
    " --record-without-jail to run it as it is, with recorders in place of the launchers: all else in it takes effect."
)


def _run(words: list[str], places: dict[str, str], *, tools: str, records: str) -> str:
    """Run the script without input. Returns the end of its output."""
    path = f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = os.environ | {"PATH": path, "MEGAACCUM_RECORD": records, "FOLDER": os.getcwd()} | places
    environment.pop("BASH_ENV", None)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--record: the script did not end in {SECONDS} seconds: it waits or loops where no cluster is."
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        return output.read().decode(errors="replace").strip()


def _read_records(folder: Path) -> list[_Record]:
    found = []
    for path in sorted(folder.iterdir()):
        cwd, *words = path.read_text(encoding="utf-8", errors="replace").rstrip("\0").split("\0")
        found.append(_Record(cwd, words))
    return found


# --- what was recorded ----------------------------------------------------------------------------------------------

_OF_TRAINING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--yaml-cfg", "--config"}
"""Flags any of which identifies a command as training, whatever the program's name."""


def _the_launch(records: list[_Record], script: Path, shown: _Places, output: str) -> Launch:
    launches = [record for record in records if _OF_TRAINING & set(map(_flag, record.words))]
    distinct = {tuple(record.words): record for record in launches}
    if len(distinct) == 1:
        return _as_launch(next(iter(distinct.values())), script, shown)
    if distinct:
        programs = "; ".join(" ".join(record.words[:8]) + " ..." for record in distinct.values())
        raise ConfigError(
            f"--record: {script.name} starts training {len(distinct)} times ({programs}): record a script with one."
        )
    others = f" It started {', '.join(sorted({' '.join(r.words[:3]) for r in records}))}." if records else ""
    last = f" It ended with: {output.splitlines()[-1]}" if output else ""
    hidden = f" It sees the system's programs and {_top(script)}: data elsewhere and the home folder are hidden."
    told = f"{others}{last}{hidden if shown else ''}"
    raise ConfigError(f"--record: {script.name} starts no training that could be recorded.{told}")


def _flag(word: str) -> str:
    """The flag of a word such as --num_layers=4, with dashes."""
    return word.split("=")[0].replace("_", "-")


def _as_launch(record: _Record, script: Path, shown: _Places) -> Launch:
    """The launch of a recorded command: the program is the first word that ends in .py."""
    words = record.words
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise ConfigError(f"--record: {' '.join(words[:8])} ... names no Python program.")
    return Launch(words[at], words[at + 1 :], script.name, Path(record.folder), world_size(words[:at]), shown)


def world_size(words: Sequence[str]) -> int | None:
    """Ranks that a launcher's own flags request; None if they leave it open."""
    text = " ".join(words).replace("=", " ")

    def number(*names: str) -> int | None:
        match = re.search(rf"--?(?:{'|'.join(names)}) (\d+)(?: |$)", text)
        return int(match[1]) if match else None

    if total := number("worker_num"):  # msrun
        return total
    local = number("nproc[_-]per[_-]node", "num_gpus", "num-gpus")
    nodes = number("nnodes", "num_nodes", "num-nodes")
    return local * (nodes or 1) if local else None
