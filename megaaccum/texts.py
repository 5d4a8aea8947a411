"""Texts: files and JSON that anyone may have written, read within limits, and the tables of this package."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml


def read_text(path: str | os.PathLike[str], *, most: int = 64 << 20) -> str:
    """The text of a file that anyone may have written. Raises OSError if it is longer than `most` characters or neither
    a regular file nor a pipe of the shell, such as /dev/fd/63, and ValueError if it is not UTF-8."""
    with open(path, encoding="utf-8", opener=regular_file) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most >> 20} MB", os.fspath(path))
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file; the folder is made if it is not there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


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
