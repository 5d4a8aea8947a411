"""Files and folders that have to exist, or to be on the disk, before a run continues; packages that are installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from megaaccum.texts import regular_file


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, to be read. Raises OSError also if it is a pipe or a device, on which a reader would wait."""
    return open(path, "rb", opener=regular_file)


def set_aside(path: Path) -> Path:
    """Rename `name.ext` to the first free of `name.1.ext`, `name.2.ext`, ...; returns the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return path.rename(aside)


def free_bytes(path: Path) -> int:
    """Free bytes for a file or folder that may not exist yet, as this host reports them; -1 if it does not."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return -1


def installed(name: str) -> str | None:
    """The version of an installed distribution; None if there is none of that name."""
    from importlib import metadata  # with email and csv, which most commands start without

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
