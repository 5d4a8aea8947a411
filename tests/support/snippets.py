"""The Python blocks of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

TOGETHER = [
    ("README.md",),
    ("docs/start/your-model.md", "docs/guides/checkpoints.md"),
    ("docs/guides/schedules.md",),
    ("docs/migrating/deepspeed.md",),
    ("docs/migrating/huggingface.md",),
    ("docs/migrating/megatron-loop.md",),
]
"""Pages whose blocks are run, in order; those of one line share their names."""

ON_THEIR_OWN = ("docs/concepts/found.md",)
"""Pages whose blocks another test runs, each in a process of its own."""

NOT_RUN = "<!-- not run -->"
"""The line before a block that is compiled only: what a reader has before, or would have to fill in."""


@dataclass(frozen=True)
class Block:
    """source: of a fenced block of Python. line: where it starts in its page. runs: whether a test may execute it."""

    source: str
    line: int
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        Block(
            source=each[1],
            line=text.count("\n", 0, each.start()) + 2,
            runs=not text[: each.start()].rstrip().endswith(NOT_RUN),
        )
        for each in found
    ]
