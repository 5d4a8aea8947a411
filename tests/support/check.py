"""The text that `megaaccum check` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megaaccum.cli import check
from megaaccum.cli.arguments import Source


def run(path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), **options: Any) -> str:
    """The plan of a file and a command line. options: of `check.describe`."""
    with Source(None if path is None else str(path), list(overrides)).load() as loaded:
        return check.describe(loaded, **options)
