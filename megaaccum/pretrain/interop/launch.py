"""A launch: the command line that would start training, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """Where a recorded script's files are: (folder as the script saw it, folder that holds what it wrote there)."""

    def path(self, name: str) -> Path:
        """Where a file that the flags name is: what the script wrote, else the file of that name."""
        path = self.folder / name
        for seen, holds in self.written:
            if path.is_relative_to(seen) and (holds / path.relative_to(seen)).exists():
                return holds / path.relative_to(seen)
        return path
