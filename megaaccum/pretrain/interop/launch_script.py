"""Recording a training script: it runs in a jail with recorders in place of launchers, and the command that it would
have started is read."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop import jail as jails


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
    left: Path | None = None
    """The root folder of the files that a script left in its jail."""

    def path(self, name: str) -> Path:
        """The path of a file that the flags name: the one that the script wrote if there is one."""
        path = self.folder / name
        if self.left and (written := self.left / os.path.relpath(os.path.normpath(path), "/")).exists():
            return written
        return path


MOST_RECORDS, LONGEST_RECORD = 1_000, 1 << 20
"""Limits on what is read of a script's commands."""

LAUNCHERS = [*"torchrun deepspeed ds python python3 accelerate msrun".split(), *(f"python3.{n}" for n in range(8, 16))]
"""Commands whose words are recorded."""

WRAPPERS = "srun sbatch mpirun mpiexec uv nohup numactl nsys singularity apptainer docker".split()
"""Commands that start another command, which is among their words."""

SILENT = "sleep wget curl pip pip3 conda nvidia-smi scontrol ssh scp rsync ds_ssh ray module ml".split()
"""Commands of the cluster or the network that succeed and do nothing."""


@contextmanager
def recorded(command: Sequence[str], *, jail: bool = True) -> Iterator[Launch]:
    """Run `command` (such as bash train.sh ARGS) with recorders, and yield the one training launch in it. The files
    that the script wrote exist until the context ends. jail: False runs the script as it is, with the recorders first
    on PATH. Raises ConfigError if the script does not end in ten seconds, starts no training or more than one, or no
    jail can be made."""
    script = _script_of(command)
    with tempfile.TemporaryDirectory(prefix="megaaccum-record-") as scratch:
        left, tools = Path(scratch, "left"), Path(scratch, "tools")
        records = left / jails.RECORDS.relative_to("/")
        records.mkdir(parents=True)
        _write_recorders(tools, jails.RECORDS if jail else records)
        start = ["/bin/sh", "-c", jails.shell("slurm.sh", "prepare.sh" if jail else "start.sh"), "sh", *command]
        output = jails.run(start, _top(script), tools, left) if jail else jails.run_trusted(start, tools)
        yield _the_launch(list(_read_records(records)), script, left if jail else None, output)


def _script_of(command: Sequence[str]) -> Path:
    """The script among the words of a command: the first that is a file and, if there is one, no program."""
    files = [word for word in command if Path(word).is_file()]
    if not files:
        raise ConfigError(f"--record: there is no script among {' '.join(command)}.")
    return Path(next((word for word in files if shutil.which(word) is None), files[0])).absolute()


def _write_recorders(folder: Path, records: Path) -> None:
    folder.mkdir()
    recorder = jails.shell("record.sh").replace("{records}", str(records))
    scripts = dict.fromkeys(LAUNCHERS, recorder) | dict.fromkeys(WRAPPERS, jails.shell("slurm.sh", "wrap.sh"))
    scripts |= dict.fromkeys(SILENT, "#!/bin/sh\n")
    for name, text in scripts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)


def _top(script: Path) -> Path:
    """The project of the script: its nearest parent folder with .git that does not hold the home folder, or its own."""
    return next(
        (each for each in script.parents if (each / ".git").exists() and not jails.is_home(each)), script.parent
    )


def _read_records(folder: Path) -> Iterator[list[str]]:
    """Yields the folder and the words of each command that a script would have started. The script may have forged
    them: regular files alone are read, not through links."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)[:MOST_RECORDS]:
        if entry.is_file(follow_symlinks=False):
            with open(entry.path, encoding="utf-8", errors="replace") as file:
                yield file.read(LONGEST_RECORD).rstrip("\0").split("\0")


# --- what was recorded ----------------------------------------------------------------------------------------------

_OF_TRAINING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--yaml-cfg", "--config"}
"""Flags any of which identifies a command as training, whatever the program's name."""


def _the_launch(records: list[list[str]], script: Path, left: Path | None, output: str) -> Launch:
    """The one launch of training among the records; its program is the first word that ends in .py."""
    distinct = {tuple(words): folder for folder, *words in records if _OF_TRAINING & {*map(_flag, words)}}
    if len(distinct) > 1:
        programs = "; ".join(" ".join(words[:8]) + " ..." for words in distinct)
        raise ConfigError(
            f"--record: {script.name} starts training {len(distinct)} times ({programs}): record a script with one."
        )
    if not distinct:
        others = f" It started {', '.join(sorted({' '.join(each[1:4]) for each in records}))}." if records else ""
        last = f" It ended with: {output.splitlines()[-1]}" if output else ""
        hidden = f" It sees the system's programs and {_top(script)}: data elsewhere and the home folder are hidden."
        told = f"{others}{last}{hidden if left else ''}"
        raise ConfigError(f"--record: {script.name} starts no training that could be recorded.{told}")
    ((words, folder),) = distinct.items()
    if (at := next((i for i, word in enumerate(words) if word.endswith(".py")), None)) is None:
        raise ConfigError(f"--record: {' '.join(words[:8])} ... names no Python program.")
    return Launch(words[at], [*words[at + 1 :]], script.name, Path(folder), world_size(words[:at]), left)


def _flag(word: str) -> str:
    """The flag of a word such as --num_layers=4, with dashes."""
    return word.split("=")[0].replace("_", "-")


def world_size(words: Sequence[str]) -> int | None:
    """Ranks that a launcher's own flags request, of an elastic range (--nnodes 2:4) the least; None if they leave it
    open."""
    found = re.findall(r"--?([\w-]+)[ =](\d{1,6})(?::\d{1,6})?(?= |$)", " ".join(words))
    numbers = {flag.replace("-", "_"): int(number) for flag, number in reversed(found)}
    local = numbers.get("nproc_per_node") or numbers.get("num_gpus")
    nodes = numbers.get("nnodes") or numbers.get("num_nodes") or 1
    return numbers.get("worker_num") or (local and local * nodes)  # worker_num: msrun's
