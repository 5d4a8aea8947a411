"""Texts: files and JSON that anyone may have written, read within limits, and the tables of this package."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml


def read_text(path: str | os.PathLike[str], *, most: int = 64 << 20) -> str:
    """The text of a file that anyone may have written. Raises OSError if it is longer than `most` characters or neither
    a regular file nor a pipe of the shell, such as /dev/fd/63, and ValueError if it is not UTF-8."""
    with open(path, encoding="utf-8", opener=regular_file) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most >> 20} MB", os.fspath(path))
    return text


def open_new(path: Path) -> BinaryIO:
    """A new file at `path`, in place of any entry of that name, which is removed and, if it is a link, not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: a reader, even after a crash, finds the old file or the new one
    whole. What a full disk has cut short is removed. Raises OSError."""
    aside = path.with_name(path.name + ".new")
    try:
        with open_new(aside) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file as `replace_text` does; the folder is made if it is not there. Links are followed, and a pipe or a
    device, such as /dev/stdout, is written directly. Raises OSError."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).exists() and not target.is_file():
        Path(path).write_text(text, encoding="utf-8")
    else:
        replace_text(target, text)


def regular_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file without waiting for a writer; a handle, as `open` takes from an opener. Raises OSError if it is
    neither a regular file nor a pipe of the shell."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind) and not (stat.S_ISFIFO(kind) and os.fspath(path).startswith("/dev/")):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    os.set_blocking(handle, True)
    return handle


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The content of a JSON text. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def packaged_yaml(package: str, name: str) -> Any:
    """The content of a YAML file in a package of ours."""
    # Not by importlib.resources: its import is a twentieth of all that `check` imports.
    text = Path(__file__).parents[1].joinpath(*package.split("."), name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
