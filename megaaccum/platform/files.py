"""Files and folders that have to exist, or to be on the disk, before a run continues."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: a reader, even after a crash, finds the old file or the new one
    whole."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def folder_problems(key: str, folder: str) -> list[str]:
    """Reasons why the folder that `key` names cannot be written; empty if it can. Makes the folder, and writes a byte
    to it, since a full disk still makes empty files."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"\0")
    except OSError as error:
        return [f"{key} {folder!r} cannot be written: {error.strerror or error}; set {key} to a folder that can"]
    return []
